"""The foreground's side of a gate: says at every action what is being done, and holds the budget step by step.

Wraps the `Doing` of a worker, which hears of every action anyway; nothing else of a run is changed. Every worker
announces its own moments; the first that has work also keeps the controller for all, since a step is theirs together:
it sees the step's time and the background's work on all devices, and allows all of them the same. A worker that drives
a GPU is ahead of it: its moments are announced when the device gets there (`on_device.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from burstpool.engine.base import Doing
from burstpool.share.budget import Budget, Controller, Gap, Moment, StepTaken
from burstpool.share.gates.gate import MOMENTS, Done, Gate
from burstpool.share.step_log import StepLog

_COMPUTING, _WAITING, _REDUCING, _IDLE = (
    MOMENTS.index(moment) for moment in (Moment.COMPUTING, Moment.WAITING, Moment.REDUCING, Moment.IDLE)
)
_FOR_VIEW = 30
"""Steps that a live view's figures cover."""
_TELL_S = 0.25
"""Between two times that free memory is told."""
_WRITING = b"writing a checkpoint"


class Pace:
    """Keeps the controller of one foreground, and tells all gates what it allows."""

    def __init__(self, budget: Budget, gaps: Sequence[Gap], gates: Sequence[Sequence[Gate]]) -> None:
        self._controller = Controller(budget, gaps=gaps)
        self._gates = gates
        self._all = [gate for gates_here in gates for gate in gates_here]
        self._recent_s: deque[float] = deque(maxlen=_FOR_VIEW)
        self._done = self._done_first = [gate.done() for gate in self._all]
        self._begun_s: float | None = None
        self.log = StepLog()

    def begin(self, step: int) -> None:
        """A step begins, and the one before has ended."""
        now_s = time.time()
        if self._begun_s is not None:
            self.end(now_s)
        else:
            self._done = [gate.done() for gate in self._all]
        if not self.log.started_s:
            self.log.started_s, self._done_first = now_s, self._done
        self._begun_s = now_s
        allowance = self._controller.allowance
        for gates_here in self._gates:
            share = 1 / max(_num_here(gates_here), 1)
            for gate in gates_here:
                gate.allow(allowance, step=step, share=share)

    def end(self, now_s: float) -> None:
        """The step has ended; what follows until the next begins is no part of one. Every step waits for this."""
        if self._begun_s is None:
            return
        done, log = [gate.done() for gate in self._all], self.log
        overlapped_s, in_gaps_s = self._work_since(self._done, done)
        has_work = overlapped_s > 0 or in_gaps_s > 0
        time_s = max(now_s - self._begun_s, 1e-9)
        self._controller.observe(StepTaken(time_s=time_s, overlapped_s=overlapped_s, in_gaps_s=in_gaps_s))
        log.times_s.append(time_s)
        log.alone.append(not has_work)
        log.overlapped_s.append(overlapped_s)
        log.in_gaps_s.append(in_gaps_s)
        log.stopped_s = now_s
        self._done, self._begun_s = done, None
        if self._recent_s or has_work:  # before the first shared step there is no slowdown to tell of
            self._recent_s.append(time_s)
            if self._all and (alone_s := self._controller.alone_s) is not None:
                self._all[0].tell(alone_s=alone_s, recent_s=sum(self._recent_s) / len(self._recent_s))

    def _work_since(self, before: Sequence[Done], now: Sequence[Done]) -> tuple[float, float]:
        """Seconds beside compute and in gaps between the two, over the devices that have a background."""
        if now == before:  # as where nobody comes: what remains of sharing is to cost next to nothing then
            return 0.0, 0.0
        overlapped_s = sum(after.overlapped_s for after in now) - sum(first.overlapped_s for first in before)
        in_gaps_s = sum(after.in_gaps_s for after in now) - sum(first.in_gaps_s for first in before)
        num_shared = max(sum(1 for gates_here in self._gates if _num_here(gates_here)), 1)
        return max(overlapped_s / num_shared, 0.0), max(in_gaps_s / num_shared, 0.0)

    def save(self, path: Path) -> None:
        """The log of all steps, after the last."""
        counts = zip(self._all, self._done_first, self._done, strict=True)
        self.log.background_steps = {str(gate.path): now.steps - first.steps for gate, first, now in counts}
        self.log.save(path)


def _num_here(gates: Sequence[Gate]) -> int:
    """Backgrounds of a device that can use what is allowed."""
    return sum(1 for gate in gates if not gate.is_away)


class Announcer:
    """A worker's `Doing` that tells the gates too."""

    def __init__(
        self,
        inner: Doing,
        gates: Sequence[Gate],
        *,
        pace: Pace | None,
        reduces: bool,
        when: Callable[[Callable[[], None]], None] | None = None,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """`when` does things when the device gets to them; None for a device that is never behind.

        `memory` tells how much of the device's is free and how much there is, for gates whose backgrounds share it.
        """
        self.inner = inner
        """What it wraps: a worker's own, which nobody but whoever watches the worker reads."""
        self._gates, self._pace = gates, pace
        self._when, self._memory, self._told_s = when or _at_once, memory, 0.0
        self._step = -1
        self._moment = _IDLE
        step = _REDUCING if reduces else _COMPUTING  # with others, a `step` waits for the gradients' sums first
        self._moments = {b"rece": _WAITING, b"step": step, b"writ": _IDLE, b"read": _IDLE, b"trac": _IDLE}

    def begin_step(self, step: int) -> None:
        """See `Doing`; the second call for a step says nothing new."""
        self.inner.begin_step(step)
        if step == self._step:
            return
        self._step = step
        self._when(partial(self._begin, step))

    def _begin(self, step: int) -> None:
        if self._pace is not None:
            self._pace.begin(step)
        if self._memory is not None and time.monotonic() - self._told_s > _TELL_S:
            self._told_s = time.monotonic()
            free_bytes, total_bytes = self._memory()
            for gate in self._gates:
                gate.tell_memory(free_bytes=free_bytes, total_bytes=total_bytes)

    def say(self, phrase: bytes) -> None:
        """See `Doing`."""
        self.inner.say(phrase)
        moment = self._moments.get(phrase[:4], _COMPUTING)
        if moment == self._moment:
            return
        self._moment = moment
        self._when(partial(self._announce, moment, ends=moment == _IDLE and phrase.startswith(_WRITING)))

    def _announce(self, moment: int, *, ends: bool) -> None:
        for gate in self._gates:
            gate.announce_number(moment)
        if ends and self._pace is not None:
            self._pace.end(time.time())  # a checkpoint is no part of a step

    def end(self) -> None:
        """The foreground has ended: everything is the background's."""
        if self._pace is not None:
            self._pace.end(time.time())
        for gate in self._gates:
            gate.open()


def _at_once(action: Callable[[], None]) -> None:
    action()
