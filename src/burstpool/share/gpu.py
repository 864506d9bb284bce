"""Sharing one GPU: a foreground at a promised speed, background jobs in what it leaves.

Everything is launched by one thread of one process, in this order for each step of the foreground:

    1. the foreground's samples and its CUDA graphs, on a stream of high priority
    2. as many short pieces of background work as the controller allows, on a stream of low priority, where they wait
       for an event that the foreground's stream passes when the step, or a gap in it, begins
    3. wait for the end of the *previous* step, and tell the controller how long it took; pieces for long gaps, which
       are more than a queue holds, are started meanwhile

The GPU always has a step queued, so nothing of 2 and 3 stands between two steps, and the device itself, not a thread,
starts background work at the right moment. No lock is shared with anybody: samples of all jobs are loaded by processes
of their own (`feeding.py`). What a piece costs the foreground is not assumed but measured (`budget.py`).

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

from burstpool.errors import RunError, ShareError
from burstpool.run.loading import Batch
from burstpool.run.losses import not_finite
from burstpool.share.at_work import (
    FEED_TIMEOUT_S,
    MOST_RESTARTS,
    NAP_S,
    Filler,
    JobAtWork,
    Marker,
    PieceSpan,
    in_a_line,
    recorded,
)
from burstpool.share.budget import Allowance, Budget, Controller, Credit, Gap, StepTaken
from burstpool.share.evictions import Evictions
from burstpool.share.moving import collector_at_rest
from burstpool.share.prices import Piece, Prices
from burstpool.share.waiting import waiter

_IN_FLIGHT = 2
"""Pieces on the way while the foreground idles: one runs, one waits, so that its next step begins within a piece."""
_LEAST_PAUSE_S = 1e-4
"""What is shorter is the device's own way from one step to the next."""
_KEPT_SPANS = 40
_MOST_QUEUED = 128
"""Pieces of a background that were started and have not ended. A queue holds some 1,000 entries, of which a piece takes
four; a thread that finds it full waits, and the foreground's next step with it."""
_LEAST_BUSY = 0.05
"""Share of a step in which the foreground computes, at least: its gaps may be shorter than the schedule says."""
_HUNG_STEPS, _HUNG_LENGTHS = 16, 20
"""A piece under way for more steps, and for more times its length, may never end: others do not wait for it."""


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


@dataclass(slots=True)
class _Launched:
    """A background piece that was started and may not have ended."""

    end: Marker
    which: Piece
    """The same in every step of the background."""
    length_s: float
    """By its time alone."""
    factor: float
    """What it costs the foreground, over what average work of its length does; 1 in gaps."""
    in_gap: bool
    step: int
    """The foreground's step with which it was started."""
    counted_s: float = 0.0
    """What of it was counted in steps that it did not end in."""


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Background work that may be started for a step, of which some may have been."""

    step: int
    gate: torch.cuda.Event
    credit: Credit
    """By prices; in gaps by lengths."""
    room: Credit
    """By lengths: as much as there is time for."""
    saved: Credit
    """Where what is left of the credit goes."""
    in_gap: bool


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
        watch: Callable[["SharedGpu"], None] | None = None,
        allow_nan: bool = False,
        evictions: Evictions | None = None,
    ) -> None:
        """`program`: the foreground's pieces by number, and gaps between them; all pieces without gaps if None.

        `evictions`: who makes room in the GPU's memory; None where all stay.
        """
        self.foreground, self.backgrounds = foreground, list(backgrounds)
        self._program = list(program) if program is not None else list(range(len(foreground.steps.pieces)))
        self._watch, self._allow_nan, self._evictions = watch, allow_nan, evictions
        self._resumed: dict[int, torch.cuda.Event] = {}
        """Step → the moment, on the device, at which the foreground went on after it was stopped before it."""
        self._restarts = 0
        gaps = [Gap(length_s=part.length_s) for part in self._program if isinstance(part, Idle)]
        self.controller = Controller(budget, gaps=gaps)
        self._allowance: Allowance = self.controller.allowance
        self._overlapped, self._in_gap = Credit(), [Credit() for _ in gaps]
        self._launched: list[_Launched] = []
        self._queued: dict[int, collections.deque[PieceSpan]] = {}
        """By background."""
        self._to_start: collections.deque[_Allowed] = collections.deque()
        self._stuck: set[int] = set()
        """Backgrounds with a piece that may never end."""
        self._newest = -1
        """The step that was launched last."""
        self._prices = Prices()
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
            end, gates = self._launch_foreground(step, batch)
            self.spans.append(StepSpan(begin=gates[0], end=end))
            self._newest = step
            self._launch_background(step, gates)
            ends = [*ends[-2:], end]
            if len(ends) > 1:
                self._settle(step - 1, ends[:-1])
            if self._watch is not None:
                self._watch(self)
            if self._evictions is not None and self._evictions.look():
                self._resumed[step + 1] = recorded(self.foreground.steps.stream, timing=True)
        if ends:
            self._settle(step, ends[-2:])
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
            if idle:
                self._drop_late(step - 1)
            self._start_more()
            for background in self.backgrounds:
                background.look_after()
            waiting = sum(1 for piece in self._launched if not piece.end.query())
            free = idle and not self._allowance.alone and waiting < _IN_FLIGHT
            if not (free and self._launch_next(step, None)):
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

    def _launch_foreground(
        self, step: int, batch: list[list[Batch]]
    ) -> tuple[torch.cuda.Event, list[torch.cuda.Event]]:
        """Queues a step; returns the events that mark its end, and its beginning and those of its gaps."""
        steps = self.foreground.steps
        gates = [recorded(steps.stream, timing=True)]
        self._with_room(step, lambda: steps.begin(batch))
        self.foreground.feeder.used(steps.stream)
        with torch.cuda.stream(steps.stream):
            for part in self._program:
                if isinstance(part, Idle):
                    gates.append(recorded(steps.stream))
                    assert self._wait is not None
                    self._wait(part.length_s)
                else:
                    self._with_room(step, steps.pieces[part])
        self.foreground.read_later(steps.end())
        return recorded(steps.stream, timing=True), gates

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
                raise RunError(f"the foreground ran out of memory, with no background left to make room: {words}")
            self._resumed[step] = recorded(self.foreground.steps.stream, timing=True)

    def _launch_background(self, step: int, gates: Sequence[torch.cuda.Event]) -> None:
        """Starts what this step allows, less what earlier ones started and the GPU has not got round to."""
        hung = [piece for piece in self._launched if self._is_hung(piece, step)]
        self._stuck = {owner for owner, _ in (piece.which for piece in hung)}
        behind_s = sum(piece.length_s for piece in self._launched if piece.step < step - 1 and piece not in hung)
        allowed = [(gates[0], self._overlapped, self._allowance.overlapped_s, self._busy_s())]
        allowed += [(*rest, math.inf) for rest in zip(gates[1:], self._in_gap, self._allowance.gaps_s, strict=True)]
        for place, (gate, saved, allowed_s, room_s) in enumerate(allowed):
            less_s = min(behind_s, allowed_s)
            behind_s -= less_s
            self._fill(_Allowed(step, gate, Credit(allowed_s - less_s), Credit(room_s), saved, in_gap=place > 0))
        self._start_more()

    def _is_hung(self, piece: _Launched, step: int) -> bool:
        age = step - piece.step
        return age > _HUNG_STEPS and age * (self.controller.alone_s or 0.0) > _HUNG_LENGTHS * piece.length_s

    def _busy_s(self) -> float:
        """How long a step computes, at most: more work would run on into gaps, and be late for all that follows."""
        alone_s, gaps_s = self.controller.alone_s, sum(gap.length_s for gap in self.controller.gaps)
        if alone_s is None or not gaps_s:
            return math.inf
        return self.controller.budget.slowdown * max(alone_s - gaps_s, _LEAST_BUSY * alone_s)

    def _fill(self, allowed: _Allowed) -> None:
        """Has pieces started that wait for the gate, as many as are allowed."""
        waiting = self._in_turn()
        if allowed.credit.left_s <= 0 or not waiting:
            return
        # The longest, as the first in turn may have no samples, and what it leaves must add up to a piece of another.
        longest_s = max(self._factor(background, allowed) * background.next_s for background in waiting)
        allowed.saved.add(allowed.credit.take(), piece_s=longest_s)
        allowed.credit.left_s = allowed.saved.take()
        allowed.room.left_s = max(allowed.room.left_s, *(background.next_s for background in waiting))
        self._to_start.append(allowed)

    def _factor(self, background: Filler, allowed: _Allowed | None) -> float:
        """What its next piece costs the foreground, over what average work does; in gaps nobody asks."""
        if allowed is None or allowed.in_gap:
            return 1.0
        return self._prices.meet(_which(background), background.next_s)

    def _start_more(self) -> None:
        """Starts what may be started, in order, as far as the queues hold it."""
        while self._to_start:
            allowed = self._to_start[0]
            while self._launch_next(allowed.step, allowed):
                pass
            if any(self._is_full(background) for background in self._in_turn()):
                return
            self._to_start.popleft()
            allowed.saved.left_s += allowed.credit.take()

    def _drop_late(self, step: int) -> None:
        """What was to be started for this step or earlier ones and was not: they are over."""
        while self._to_start and self._to_start[0].step <= step:
            self._to_start.popleft()

    def _is_full(self, background: Filler) -> bool:
        queued = self._queued.setdefault(id(background), collections.deque())
        while queued and queued[0].query():
            queued.popleft()
        return len(queued) >= _MOST_QUEUED

    def _launch_next(self, step: int, allowed: _Allowed | None) -> bool:
        """Starts a piece of the first background job in turn that has one ready; whether one had.

        `allowed` is None while the foreground idles. Credit that is too small for a piece is saved for it: spent on
        others with shorter pieces, it would never suffice.
        """
        for background in self._in_turn():
            which, length_s, factor = _which(background), background.next_s, self._factor(background, allowed)
            if self._is_full(background):
                continue
            if allowed and not (allowed.credit.covers(factor * length_s) and allowed.room.covers(length_s)):
                return False
            end = background.launch(allowed.gate if allowed else None)
            if end is None:
                continue
            if allowed:
                allowed.credit.spend(factor * length_s)
                allowed.room.spend(length_s)
            in_gap = allowed is None or allowed.in_gap
            self._launched.append(_Launched(end, which, length_s, factor, in_gap, step))
            if isinstance(end, PieceSpan):
                self._queued[id(background)].append(end)
                if (back := max(self._newest - step, 0)) < len(self.spans):
                    self.spans[-1 - back].pieces.append(end)
            return True
        return False

    def _in_turn(self) -> list[Filler]:
        """The background jobs that are here, neither over nor stuck, those that have got least first."""
        here = (x for x in self.backgrounds if not x.ended and x.where in ("here", "leaving"))
        return sorted((x for x in here if id(x) not in self._stuck), key=lambda background: background.done_s)

    def _settle(self, step: int, ends: Sequence[torch.cuda.Event]) -> None:
        """Waits for a step's end and has the controller decide on the next one."""
        while self._to_start and not ends[-1].query():  # type: ignore[no-untyped-call]
            self._start_more()
            time.sleep(NAP_S)
        ends[-1].synchronize()
        self._drop_late(step)
        done: list[_Launched] = []
        under_way: list[_Launched] = []
        for piece in self._launched:
            (done if piece.end.query() else under_way).append(piece)  # asked once: it may end at any moment
        self._launched = under_way
        if len(ends) > 1:
            time_s = float(ends[-2].elapsed_time(ends[-1])) / 1e3
            resumed = self._resumed.pop(step, None)
            paused_s = float(ends[-2].elapsed_time(resumed)) / 1e3 if resumed is not None else 0.0
            self._observe(time_s, done, step, paused_s=max(paused_s, 0.0))
        self._read_foreground()
        for background in self.backgrounds:
            background.look_after()
            if background.ended:
                self._prices.forget(id(background))

    def _observe(self, time_s: float, done: Sequence[_Launched], step: int, *, paused_s: float) -> None:
        """A step in which nothing ended may still have had a part of a long piece in it: then it was not alone.

        A pause is measured as a part of the step; the controller is told of it apart.
        """
        parts = [(piece, piece.length_s - piece.counted_s) for piece in done]
        there = (piece for piece in self._launched if piece.step <= step and not self._is_hung(piece, step))
        under_way = next(there, None)
        if under_way is not None and sum(part_s for _, part_s in parts) == 0:
            part_s = min(under_way.length_s - under_way.counted_s, time_s) / 2
            under_way.counted_s += part_s
            parts = [(under_way, part_s)]
        if paused_s > _LEAST_PAUSE_S:
            self.measured.paused_s[len(self.measured.step_s)] = paused_s
            self.controller.charge_pause(paused_s)
        taken = StepTaken(
            time_s=max(time_s - paused_s, 1e-9),
            overlapped_s=sum(part_s * piece.factor for piece, part_s in parts if not piece.in_gap),
            in_gaps_s=sum(part_s for piece, part_s in parts if piece.in_gap),
        )
        self._allowance = self.controller.observe(taken)
        if under_way is None and paused_s <= _LEAST_PAUSE_S and all(piece.step == step for piece in done):
            self._learn_prices(taken, [piece.which for piece in done if not piece.in_gap])
        self.measured.step_s.append(time_s)
        self.measured.background_s.append(sum(part_s for _, part_s in parts))

    def _learn_prices(self, taken: StepTaken, pieces: Sequence[Piece]) -> None:
        """Which of these pieces cost more than others, from a step that had them whole, and no part of another."""
        base = self.controller.base
        if pieces and base.num_samples:
            added_s = taken.time_s - base.median_s - self.controller.gap_cost.value * taken.in_gaps_s
            self._prices.learn(pieces, added_s, error_s=base.noise * base.median_s)

    def _read_foreground(self, *, all_of_them: bool = False) -> None:
        before = len(self.foreground.losses)
        if not self.foreground.read(all_of_them=all_of_them) and not self._allow_nan:
            bad = next(i for i, x in enumerate(self.foreground.losses[before:], before) if not math.isfinite(x[0]))
            raise RunError(not_finite(self.foreground.losses[bad][0], bad))


def _which(background: Filler) -> Piece:
    """Its next piece."""
    return id(background), background.next_place


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
