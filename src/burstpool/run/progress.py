"""Progress: what workers report while they train, and what becomes of it.

Each worker reports a few times a second what it did since; reporting every step would wake the watching process, and
cost a core, for nothing. `RunLog` joins the reports to the losses of whole steps. Takes and returns plain data.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burstpool.plan.plan import Plan
from burstpool.run.folder import StepLoss

_INTERVAL_S = 0.2
"""Between two reports of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsReport:
    """Some consecutive steps of one worker."""

    first_step: int
    losses: tuple[tuple[int, float], ...]
    """(step, the worker's part of its loss); on CUDA they come a step late."""
    times_s: tuple[float, ...]
    """What each step took."""
    busy_s: float | None
    """Time in which it computed; None where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How a run stands."""

    step: int
    """Steps that are done."""
    steps: int
    """At which it ends."""
    loss: float
    """Of the last step."""
    samples_per_s: float
    """Lately."""
    utilisation: float | None
    """Part of the time in which devices computed, lately, on average; None where that is not known."""


Observer = Callable[[Progress], None]
"""Is told now and then how a run stands."""


class Reporter:
    """Collects the steps of one worker and hands them over now and then."""

    def __init__(self, report: Callable[[Any], None], *, first_step: int) -> None:
        self._report = report
        self._first_step = first_step
        self._losses: list[tuple[int, float]] = []
        self._times_s: list[float] = []
        self._busy_s: float | None = None
        self._since = time.monotonic()

    def add(self, losses: Sequence[tuple[int, float]], time_s: float, busy_s: float | None) -> None:
        """One more step, and the losses that are known since the last."""
        self._losses += losses
        self._times_s.append(time_s)
        if busy_s is not None:
            self._busy_s = (self._busy_s or 0.0) + busy_s
        if time.monotonic() - self._since >= _INTERVAL_S:
            self.flush()

    def flush(self, losses: Sequence[tuple[int, float]] = ()) -> None:
        """Hands over what there is."""
        self._losses += losses
        if not self._losses and not self._times_s:
            return
        self._report(
            StepsReport(
                first_step=self._first_step,
                losses=tuple(self._losses),
                times_s=tuple(self._times_s),
                busy_s=self._busy_s,
            )
        )
        self._first_step += len(self._times_s)
        self._losses, self._times_s, self._busy_s = [], [], None
        self._since = time.monotonic()


@dataclass(slots=True, kw_only=True)
class _Step:
    loss: float = 0.0
    without_loss: set[int]
    """Devices whose part of the loss is missing."""
    without_time: set[int]
    """Devices that have not ended it."""
    time_s: float = 0.0


class RunLog:
    """Joins the workers' reports."""

    def __init__(self, plan: Plan, *, steps: int, first_step: int) -> None:
        self._computing = frozenset(plan.blocks[-1].devices)
        self._working = frozenset(plan.devices)
        self._samples_per_step = plan.batch * plan.num_minibatches
        self._steps, self._next = steps, first_step
        self._open: dict[int, _Step] = {}
        self._lately: dict[int, tuple[float, float]] = {}
        self.losses: list[StepLoss] = []
        """Of whole steps, in order."""

    def add(self, rank: int, report: StepsReport) -> list[StepLoss]:
        """Takes a report; returns the losses of steps that are whole now."""
        if rank in self._working:
            if report.busy_s is not None:
                self._lately[rank] = (report.busy_s, sum(report.times_s))
            for number, time_s in enumerate(report.times_s, start=report.first_step):
                step = self._step(number)
                step.without_time.discard(rank)
                step.time_s = max(step.time_s, time_s)
            for number, loss in report.losses:
                step = self._step(number)
                step.without_loss.discard(rank)
                step.loss += loss
        whole = []
        while (first := self._open.get(self._next)) and not first.without_loss and not first.without_time:
            step = self._open.pop(self._next)
            whole.append(StepLoss(step=self._next, loss=step.loss, step_time_s=step.time_s))
            self._next += 1
        self.losses += whole
        return whole

    def _step(self, number: int) -> _Step:
        if number not in self._open:
            self._open[number] = _Step(without_loss=set(self._computing), without_time=set(self._working))
        return self._open[number]

    def progress(self) -> Progress | None:
        """How the run stands; None before the first whole step."""
        if not self.losses:
            return None
        recent = self.losses[-50:]
        time_s = sum(loss.step_time_s for loss in recent)
        shares = [busy_s / span_s for busy_s, span_s in self._lately.values() if span_s > 0]
        return Progress(
            step=self._next,
            steps=self._steps,
            loss=self.losses[-1].loss,
            samples_per_s=self._samples_per_step * len(recent) / time_s if time_s > 0 else 0.0,
            utilisation=sum(shares) / len(shares) if shares else None,
        )
