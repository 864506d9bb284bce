"""Recorder: when each action of the last steps began and ended, at next to no cost.

Holds times in lists made beforehand, one slot an action, the last steps over the first. Communication ends beside
compute, so it is looked at after each action whether it has: its end is exact to one action. Times are nanoseconds of
the host's clock, since one moment that all workers of a machine share.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from burstpool.schedule.actions import Action

_EARLIEST_POLL = 8
"""Communications that are looked at after each action; those behind them began later."""


def clock_offset_ns() -> int:
    """What to add to `time.perf_counter_ns()` for a time that all processes of a machine agree on."""
    return time.time_ns() - time.perf_counter_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One step of one device."""

    step: int
    starts_ns: Sequence[int]
    """When each action began: its work, or, of communication, when it was started here."""
    stops_ns: Sequence[int]
    """When it ended; 0 where that was not seen."""


class Recorder:
    """Times of the last `num_steps` steps of one device."""

    def __init__(self, actions: Sequence[Action], *, num_steps: int) -> None:
        self.num_actions, self.num_steps = len(actions), num_steps
        self.starts = [[0] * len(actions) for _ in range(max(num_steps, 1))]
        self.stops = [[0] * len(actions) for _ in range(max(num_steps, 1))]
        self._steps = [-1] * max(num_steps, 1)
        self.busy_ns = 0
        """Computing, since the last look."""
        self._flying: list[tuple[dist.Work, list[int], int]] = []
        """Communication under way, and where its end is to be written."""

    def begin_step(self, step: int) -> tuple[list[int], list[int]]:
        """The lists that take the step's times."""
        row = step % len(self._steps)
        self._steps[row] = step
        self.stops[row][:] = [0] * self.num_actions
        return self.starts[row], self.stops[row]

    def watch(self, works: Iterable[dist.Work], stops: list[int], index: int) -> None:
        """The action ends when these do."""
        self._flying += [(work, stops, index) for work in works]

    def look(self, now_ns: int) -> None:
        """Writes down which communication has ended."""
        left = []
        for flying in self._flying[:_EARLIEST_POLL]:
            if flying[0].is_completed():
                flying[1][flying[2]] = now_ns
            else:
                left.append(flying)
        self._flying[:_EARLIEST_POLL] = left

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps = [-1] * len(self._steps)
        self._flying = []

    def recorded(self) -> list[RecordedStep]:
        """What is held, oldest first."""
        if self.num_steps == 0:
            return []
        rows = sorted((step, row) for row, step in enumerate(self._steps) if step >= 0)
        return [RecordedStep(step=s, starts_ns=list(self.starts[r]), stops_ns=list(self.stops[r])) for s, r in rows]
