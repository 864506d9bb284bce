"""A simulated foreground and background under the controller: what the promises are checked with."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from burstpool.share.budget import Controller, Credit, StepTaken
from burstpool.share.step_log import StepLog, slowdowns


@dataclass(kw_only=True)
class Simulated:
    """How foreground and background behave; the controller sees none of it but the steps' times."""

    alone_s: Callable[[int], float] = lambda step: 0.01
    kinds: Sequence[float] = (1.0,)
    """Steps of several kinds that come in turns, each so many times `alone_s`."""
    noise: float = 0.01
    cost: Callable[[int], float] = lambda step: 0.5
    hiccups: float = 0.0
    """Share of the steps that take ten times as long, by themselves."""
    heavy: float = 0.0
    """Share of the shared steps in which the interference is ten times as much."""
    gap_s: float = 0.0
    """Real length of the gap; work beyond it stalls the foreground."""
    gap_cost: float = 0.01
    slice_s: float = 0.0
    """0 for work that can be cut anywhere."""
    is_away: Callable[[int], bool] = lambda step: False
    """Whether the background does not come to a step, whatever that allows."""
    seed: int = 0
    slowdowns: list[float] = field(default_factory=list)
    """Of each step over what steps take alone on average, at the time."""
    own: list[float] = field(default_factory=list)
    """The same without the background."""
    log: StepLog = field(default_factory=StepLog)
    work: list[float] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)

    def run(self, controller: Controller, steps: int) -> "Simulated":
        draw, overlap, gap = random.Random(self.seed), Credit(), Credit()
        for step in range(steps):
            allowance = controller.allowance
            overlapped_s = self._whole(overlap, allowance.overlapped_s, allowance.alone)
            in_gaps_s = self._whole(gap, sum(allowance.gaps_s), allowance.alone)
            if self.is_away(step):
                overlapped_s = in_gaps_s = 0.0
            alone_s = self.alone_s(step) * sum(self.kinds) / len(self.kinds)
            kind = self.kinds[step % len(self.kinds)] * len(self.kinds) / sum(self.kinds)
            added_s = self.cost(step) * overlapped_s * (10 if draw.random() < self.heavy else 1)
            added_s += self.gap_cost * in_gaps_s + max(in_gaps_s - self.gap_s, 0.0)
            own_s = kind * alone_s * max(draw.gauss(1, self.noise), 0.5)
            own_s *= 10 if self.hiccups and draw.random() < self.hiccups else 1
            time_s = own_s + added_s
            controller.observe(StepTaken(time_s=time_s, overlapped_s=overlapped_s, in_gaps_s=in_gaps_s))
            self.slowdowns.append(time_s / alone_s)
            self.work.append((overlapped_s + in_gaps_s) / alone_s)
            self.alone.append(allowance.alone)
            self.own.append(own_s / alone_s)
            self.log.times_s.append(time_s)
            self.log.alone.append(overlapped_s == 0 and in_gaps_s == 0)
        return self

    def _whole(self, credit: Credit, allowed_s: float, alone: bool) -> float:
        if alone or not self.slice_s:
            return allowed_s
        credit.add(allowed_s, piece_s=self.slice_s)
        work_s = 0.0
        while credit.covers(self.slice_s):
            credit.spend(self.slice_s)
            work_s += self.slice_s
        return work_s

    def mean(self, start: int = 0, stop: int | None = None) -> float:
        chosen = self.slowdowns[start:stop]
        return sum(chosen) / len(chosen)

    def p95(self, start: int = 0, stop: int | None = None) -> float:
        chosen = sorted(self.slowdowns[start:stop])
        return chosen[int(0.95 * (len(chosen) - 1))]

    def own_p95(self, start: int = 0, stop: int | None = None) -> float:
        chosen = sorted(self.own[start:stop])
        return chosen[int(0.95 * (len(chosen) - 1))]

    def reported(self) -> float:
        """The slowdown that a user is told, from the steps' times alone."""
        return float(slowdowns(self.log)["slowdown"])

    def mean_work(self, start: int = 0, stop: int | None = None) -> float:
        chosen = self.work[start:stop]
        return sum(chosen) / len(chosen)
