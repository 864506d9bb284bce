"""What tests of gates and keepers need: a clock that stands still, and what a foreground's step allows."""

from burstpool.share.budget import Allowance


class Clock:
    """Stands in for `time`: it goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def time(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return 0.0  # the host waits all the time

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


def allowance(overlapped_s: float = 0.0, waiting_s: float = 0.0, *, alone: bool = False) -> Allowance:
    return Allowance(alone=alone, overlapped_s=overlapped_s, gaps_s=(), waiting_s=waiting_s, reducing_s=0.0)
