"""Sharing one GPU: a foreground at a promised speed, background jobs in what it leaves.

Everything is launched by one thread of one process, in this order for each step of the foreground:

    1. the foreground's samples and its CUDA graphs, on a stream of high priority
    2. as many short pieces of background work as the controller allows, on a stream of low priority, where they wait
       for an event that the foreground's stream passes when the step, or a gap or a stretch of compute in it, begins
    3. wait for the end of the *previous* step, and tell the controller how long it took; pieces for long gaps, which
       are more than a queue holds, are started meanwhile

The GPU always has a step queued, so nothing of 2 and 3 stands between two steps, and the device itself, not a thread,
starts background work at the right moment. No lock is shared with anybody: samples of all jobs are loaded by processes
of their own (`feeding.py`). What a piece costs the foreground is not assumed but measured (`share/budget.py`).

A background job whose samples fail is restarted or ended alone; its state lives in memory that was taken before the
foreground's first shared step and never grows. Where the foreground comes to need that memory, the job goes to the
host's and comes back later (`evictions.py`), which stops the foreground for a moment between two steps. What this
cannot isolate: an error that poisons the CUDA context, such as a device-side assertion in a background's kernel, ends
the whole process.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from burstpool.errors import RunError, ShareError, in_a_line
from burstpool.run.loading import Batch
from burstpool.run.losses import not_finite
from burstpool.share.budget import Allowance, Budget, Controller, Gap, StepTaken
from burstpool.share.gpu.at_work import (
    FEED_TIMEOUT_S,
    MOST_RESTARTS,
    NAP_S,
    Filler,
    JobAtWork,
    PieceSpan,
    recorded,
)
from burstpool.share.gpu.evictions import Evictions
from burstpool.share.gpu.launches import Launches, Window, Work
from burstpool.share.gpu.moving import collector_at_rest
from burstpool.share.gpu.waiting import waiter

_LEAST_PAUSE_S = 1e-4
"""What is shorter is the device's own way from one step to the next."""
_KEPT_SPANS, _KEPT_PIECES = 40, 1000
"""Steps that can be drawn, and pieces of each: a foreground may wait for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A time in the foreground's step in which its device waits: the gap of a plan, replayed."""

    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """A step of the foreground on the device, and the background pieces that were started with it."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    pieces: list[PieceSpan] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Measured:
    """What the foreground's steps took."""

    step_s: list[float] = field(default_factory=list)
    """End of one step to the end of the next, all of them."""
    background_s: list[float] = field(default_factory=list)
    """Background work in each, by its time alone; 0 for steps that ran alone."""
    paused_s: dict[int, float] = field(default_factory=dict)
    """Place in `step_s` → for how long the foreground was stopped in it, as a background left or came back."""


class SharedGpu:
    """Runs a foreground and its backgrounds. One thread, one GPU."""

    def __init__(
        self,
        foreground: JobAtWork,
        backgrounds: Sequence[Filler],
        budget: Budget,
        *,
        program: Sequence[int | Idle] | None = None,
        watch: Callable[["SharedGpu"], bool | None] | None = None,
        allow_nan: bool = False,
        evictions: Evictions | None = None,
    ) -> None:
        """`program`: the foreground's pieces by number, and gaps between them; all pieces without gaps if None.

        `watch` is called after each step was launched, and says whether it has held up the next one for the
        foreground's own sake. `evictions`: who makes room in the GPU's memory; None where all stay.
        """
        self.foreground, self.backgrounds = foreground, list(backgrounds)
        self._program = list(program) if program is not None else list(range(len(foreground.steps.pieces)))
        self._watch, self._allow_nan, self._evictions = watch, allow_nan, evictions
        self._resumed: dict[int, torch.cuda.Event] = {}
        """Step → the moment, on the device, at which the foreground went on after it was stopped before it."""
        self._own_pauses: dict[int, torch.cuda.Event] = {}
        """The same where it had stopped for itself, as to write a checkpoint."""
        self._restarts = 0
        gaps = [Gap(length_s=part.length_s) for part in self._program if isinstance(part, Idle)]
        self._stretches = stretches(self._program, foreground.steps.piece_times_s)
        self.controller = Controller(budget, gaps=gaps)
        self._allowance: Allowance = self.controller.allowance
        self.launches = Launches(self.backgrounds, self.controller, self._note)
        self._alone: dict[int, bool] = {}
        """Step under way → whether it is to be alone."""
        self._newest = -1
        """The step that was launched last."""
        self.is_whole = True
        """Whether the foreground's state is, or will be, that after whole steps."""
        self._wait = waiter() if gaps else None
        self.measured = Measured()
        self.spans: collections.deque[StepSpan] = collections.deque(maxlen=_KEPT_SPANS)
        """When the last steps and their background pieces ran."""

    def run(self, steps: int, *, stop: Callable[[], bool] = lambda: False) -> None:
        """So many steps of the foreground, or until asked to stop."""
        with collector_at_rest():
            self._run(steps, stop)

    def _run(self, steps: int, stop: Callable[[], bool]) -> None:
        ends: list[torch.cuda.Event] = []
        for step in range(steps):
            if stop():
                break
            batch = self._next_batch(step, ends[-1] if ends else None)
            windows = self._launch_foreground(step, batch)
            self._newest = step
            self._alone[step] = self._allowance.alone
            self.launches.allow(step, windows, self._allowance)
            ends = [*ends[-2:], self.spans[-1].end]
            if len(ends) > 1:
                self._settle(step - 1, ends[:-1])
            if self._watch is not None and self._watch(self):
                self._own_pauses[step + 1] = recorded(self.foreground.steps.stream, timing=True)
            if self._evictions is not None and self._evictions.look():
                self._resumed[step + 1] = recorded(self.foreground.steps.stream, timing=True)
        if ends:
            self._settle(self._newest, ends[-2:])
        torch.cuda.synchronize()
        self._read_foreground(all_of_them=True)
        for background in self.backgrounds:
            background.finish()

    def _next_batch(self, step: int, previous: torch.cuda.Event | None) -> list[list[Batch]]:
        """The foreground's samples; while they are missing and the GPU is idle, everything is the background's."""
        deadline = time.monotonic() + FEED_TIMEOUT_S
        while (batch := self._taken()) is None:
            if time.monotonic() > deadline:
                raise ShareError(f"no samples of {self.foreground.name} came within {FEED_TIMEOUT_S:g} s")
            idle = previous is None or bool(previous.query())  # type: ignore[no-untyped-call]
            started = self._start_more()
            if not started and not (idle and not self._allowance.alone and self.launches.start_idle(step)):
                time.sleep(NAP_S)
        self._restarts = 0
        return batch

    def _taken(self) -> list[list[Batch]] | None:
        """The foreground's next samples, if they are there; a process that failed to load them is started again."""
        try:
            return self.foreground.feeder.take()
        except ShareError:
            self._restarts += 1
            if self._restarts > MOST_RESTARTS:
                raise
            self.foreground.feeder.restart()
            return None

    def _launch_foreground(self, step: int, batch: list[list[Batch]]) -> list[Window]:
        """Queues a step; returns its stretches of compute and its gaps, in the order of time."""
        steps, windows, shares = self.foreground.steps, list[Window](), iter(self._stretches)
        self.is_whole = False
        begin = since = recorded(steps.stream, timing=True)
        self._with_room(step, lambda: steps.begin(batch))
        self.foreground.feeder.used(steps.stream)
        with torch.cuda.stream(steps.stream):
            for part in self._program:
                if isinstance(part, Idle):
                    gap_begin = recorded(steps.stream)
                    assert self._wait is not None
                    self._wait(part.length_s)
                    gap_end = recorded(steps.stream)
                    windows += [Window(since, gap_begin, next(shares)), Window(gap_begin, gap_end, 0.0, in_gap=True)]
                    since = gap_end
                else:
                    self._with_room(step, steps.pieces[part])
        self.foreground.read_later(steps.end())
        self.is_whole = True
        end = recorded(steps.stream, timing=True)
        self.spans.append(StepSpan(begin=begin, end=end))
        windows.append(Window(since, end, next(shares)))
        return [window for window in windows if window.in_gap or window.share]

    def _with_room(self, step: int, work: Callable[[], object]) -> None:
        """Does a part of the foreground's step; where memory does not suffice, backgrounds leave and it is done again.

        Only as long as nothing is changed that cannot be put back; a captured step takes no memory at all.
        """
        while True:
            try:
                work()
                return
            except torch.OutOfMemoryError as error:
                words = in_a_line(error)
            # Outside of the handler: an exception keeps alive whatever the step had made.
            if not self.foreground.steps.undo():
                raise RunError(f"the foreground ran out of memory in the middle of a change: {words}")
            if self._evictions is None or not self._evictions.make_room():
                self.is_whole = True
                raise RunError(f"the foreground ran out of memory, with no background left to make room: {words}")
            self._resumed[step] = recorded(self.foreground.steps.stream, timing=True)

    def _note(self, step: int, piece: PieceSpan) -> None:
        """A piece was started; where the foreground idles before a step, it is drawn with the one before."""
        back = max(self._newest - step, 0)
        if back < len(self.spans) and len(self.spans[-1 - back].pieces) < _KEPT_PIECES:
            self.spans[-1 - back].pieces.append(piece)

    def _start_more(self) -> bool:
        """Starts some background pieces; whether there may be more. Reads losses, whose places on the host are few."""
        more = self.launches.start_more()
        for background in self.backgrounds:
            background.look_after()
        return more

    def _settle(self, step: int, ends: Sequence[torch.cuda.Event]) -> None:
        """Waits for a step's end and has the controller decide on the next one."""
        while self.launches.is_waiting and not ends[-1].query():  # type: ignore[no-untyped-call]
            if not self._start_more():
                time.sleep(NAP_S)
        ends[-1].synchronize()
        done = self.launches.ended(step, ends[-1])
        if len(ends) > 1:
            own_s = _until(ends[-2], self._own_pauses.pop(step, None))
            paused_s = max(_until(ends[-2], self._resumed.pop(step, None)) - own_s, 0.0)
            whole_s = float(ends[-2].elapsed_time(ends[-1])) / 1e3
            work = self.launches.work_in(step, whole_s, done)
            self._observe(step, whole_s - own_s, work, paused_s=paused_s, stopped=own_s > _LEAST_PAUSE_S)
        else:
            self._alone.pop(step)
        self._read_foreground()
        for background in self.backgrounds:
            background.look_after()
            if background.ended or background.where == "away":
                self.launches.prices.forget(id(background))

    def _observe(self, step: int, time_s: float, work: Work, *, paused_s: float, stopped: bool) -> None:
        """A pause for a background is measured as a part of the step; the controller is told of it apart.

        `stopped`: the foreground had stopped for itself before the step, which is no part of it.
        """
        paused = paused_s > _LEAST_PAUSE_S
        if paused:
            self.measured.paused_s[len(self.measured.step_s)] = paused_s
            self.controller.charge_pause(paused_s)
        taken = StepTaken(
            time_s=max(time_s - paused_s, 1e-9),
            overlapped_s=work.overlapped_s,
            in_gaps_s=work.in_gaps_s,
            meant_alone=self._alone.pop(step),
        )
        self._allowance = self.controller.observe(taken, alone_under_way=sum(self._alone.values()))
        if not paused and not stopped:
            self.launches.learn(taken, work.pieces)
        self.measured.step_s.append(time_s)
        self.measured.background_s.append(work.length_s)

    def _read_foreground(self, *, all_of_them: bool = False) -> None:
        before = len(self.foreground.losses)
        if not self.foreground.read(all_of_them=all_of_them) and not self._allow_nan:
            bad = next(i for i, x in enumerate(self.foreground.losses[before:], before) if not math.isfinite(x[0]))
            raise RunError(not_finite(self.foreground.losses[bad][0], bad))


def stretches(program: Sequence[int | Idle], piece_times_s: Sequence[float]) -> list[float]:
    """Shares of a step's compute before its first gap, between gaps and after the last; 0 where there is none. Pure."""
    lengths_s = [0.0]
    for part in program:
        if isinstance(part, Idle):
            lengths_s.append(0.0)
        else:
            lengths_s[-1] += piece_times_s[part]
    whole_s = sum(lengths_s)  # not a number of a foreground that was never timed
    return [length_s / whole_s if whole_s > 0 else 1 / len(lengths_s) for length_s in lengths_s]


def _until(end: torch.cuda.Event, resumed: torch.cuda.Event | None) -> float:
    """Seconds from a step's end to when the foreground went on; 0 where it did not stop."""
    return max(float(end.elapsed_time(resumed)) / 1e3, 0.0) if resumed is not None else 0.0


@contextlib.contextmanager
def alone_in_a_group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process only, as the executor's setup wants one."""
    if dist.is_initialized():
        raise ShareError("this process is a member of a process group already; share a GPU from a process of its own")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """One of the highest priority, one of the lowest."""
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
    high = torch.cuda.Stream(device, priority=min(least, greatest))  # type: ignore[no-untyped-call]
    low = torch.cuda.Stream(device, priority=max(least, greatest))  # type: ignore[no-untyped-call]
    return high, low
