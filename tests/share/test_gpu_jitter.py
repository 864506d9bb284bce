"""The loop that shares a GPU keeps its order and its counts while time passes between any two of its lines.

Programs, lengths, lateness and the host's own delays are drawn by seeds. Pieces take 0.7 to 1.5 times what is known of
them, and slow the foreground's compute down while they run beside it.
"""

import math
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from fake_cuda import Clock, Event, FakeFeeder, FakeSteps, Stream, Work, fake_cuda, jitter

from burstpool.share.budget import Allowance, Budget
from burstpool.share.gpu.at_work import BackgroundWork, JobAtWork, PieceSpan
from burstpool.share.gpu.launches import Launched, Window
from burstpool.share.gpu.loop import Idle, SharedGpu

STEP_S = 5e-3
STEPS = 50
MOST_QUEUED = 128
COST = 0.3
"""What a second of background work adds to the foreground's compute beside it."""


@dataclass
class Run:
    """One run on the simulated GPU, and what was seen of it."""

    clock: Clock
    draw: random.Random
    pieces: list[list[float]]
    gaps_s: list[float]
    late: bool = True
    """Whether samples come late now and then."""
    places: int = 3
    """For samples."""
    started: list[tuple[int, bool, Work]] = field(default_factory=list)
    """Background pieces: with which step, whether for a gap of it, and what became of it."""
    alone: dict[int, bool] = field(default_factory=dict)
    queued: list[int] = field(default_factory=list)
    """Pieces on a stream, as one was started."""
    late_s: list[float] = field(default_factory=list)
    """For how long its window had been over then."""
    off: list[float] = field(default_factory=list)
    """After each step: work that was started, less what was told and what is under way."""

    def __post_init__(self) -> None:
        stream = Stream(self.clock)  # one for all of them, as it is without parts of a GPU
        self.foreground = self._job([STEP_S / 2, STEP_S / 2], Stream(self.clock, cost=COST))
        self.backgrounds = [BackgroundWork(self._job(lengths, stream)) for lengths in self.pieces]
        gaps = [Idle(length_s=length_s) for length_s in self.gaps_s]
        program = [0, *gaps[:1], 1, *gaps[1:]]
        self.gpu = SharedGpu(self.foreground, self.backgrounds, Budget(slowdown=1.2), program=program, watch=self.watch)
        start, allow = self.gpu.launches._start_next, self.gpu.launches.allow

        def started(step: int, allowed: Any) -> Any:
            before = [len(steps_of(x.work).works) for x in self.backgrounds]
            found = start(step, allowed)
            for background, count in zip(self.backgrounds, before, strict=True):
                for work in steps_of(background.work).works[count:]:
                    self.started.append((step, bool(allowed and allowed.in_gap), work))
                    self.queued.append(sum(isinstance(entry, Work) for entry in stream.queue))
                    ended_s = allowed.window.end.at_s if allowed else None
                    self.late_s.append(0.0 if ended_s is None else self.clock.now_s - ended_s)
            return found

        def allowed(step: int, windows: Any, allowance: Any) -> None:
            self.alone[step] = allowance.alone
            allow(step, windows, allowance)

        self.gpu.launches._start_next, self.gpu.launches.allow = started, allowed  # type: ignore[method-assign]

    def _job(self, lengths: list[float], stream: Stream) -> JobAtWork:
        draw = random.Random(self.draw.random())
        foreground = stream.cost > 0
        feeder: Any = FakeFeeder(
            self.clock,
            places=self.places,
            late_s=lambda: draw.uniform(0, 3 * STEP_S) if self.late and draw.random() < 0.05 else 0.0,
        )
        factor = (lambda: 1.0) if foreground else (lambda: draw.uniform(0.7, 1.5))
        return JobAtWork("job", FakeSteps(self.clock, *lengths, stream=stream, factor=factor), feeder)

    def watch(self, gpu: SharedGpu) -> None:
        under_way_s = sum(piece.length_s - piece.counted_s for piece in gpu.launches.under_way)
        kept_s = sum(gpu.launches._ended_in_wait_s.values())
        told_s = sum(gpu.measured.background_s)
        self.off.append(sum(x.done_s for x in gpu.backgrounds) - told_s - under_way_s - kept_s)

    def go(self, steps: int = STEPS) -> "Run":
        self.gpu.run(steps)
        return self

    @property
    def ends_s(self) -> list[float]:
        """Of the foreground's steps; their gaps at the end included."""
        works, last_s = steps_of(self.foreground).works[1::2], sum(self.gaps_s[1:])
        return [work.ended_s + last_s for work in works]

    def background_s(self, start_s: float, stop_s: float) -> float:
        """Background work on the device in such a time."""
        spans = (work for x in self.backgrounds for work in steps_of(x.work).works)
        return sum(max(min(work.ended_s, stop_s) - max(work.began_s, start_s), 0.0) for work in spans)


def steps_of(work: JobAtWork) -> FakeSteps:
    assert isinstance(work.steps, FakeSteps)
    return work.steps


def passed(clock: Clock) -> Any:
    event = Event(clock)
    event.record(Stream(clock))
    return event


def at(clock: Clock, time_s: float) -> Any:
    event = Event(clock)
    event.at_s = time_s
    return event


def to_come(clock: Clock) -> Any:
    event, stream = Event(clock), Stream(clock)
    clock.queue(stream, Work(1e6, False))
    event.record(stream)
    return event


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return fake_cuda(monkeypatch)


def any_run(clock: Clock, seed: int) -> Run:
    """0 to 3 gaps of 0.2 to 30 steps, 1 to 3 backgrounds of 1 to 12 pieces."""
    draw = random.Random(seed)
    gaps_s = [STEP_S * 0.2 * 150 ** draw.random() for _ in range(draw.randint(0, 3))]
    pieces = [[draw.uniform(1e-4, 6e-4) for _ in range(draw.choice((1, 2, 5, 12)))] for _ in range(draw.randint(1, 3))]
    clock.host_s = jitter(seed)
    return Run(clock, draw, pieces, gaps_s)


@pytest.fixture(params=range(8))
def any_gone(request: pytest.FixtureRequest, clock: Clock) -> Run:
    return any_run(clock, request.param).go()


def test_order_counts_and_bounds_hold_whatever_passes_between_two_lines(any_gone: Run) -> None:
    run = any_gone
    # Every step in its order, once.
    assert run.foreground.losses == [[float(step)] for step in range(STEPS)]
    assert steps_of(run.foreground).ran == [(step, piece) for step in range(STEPS) for piece in (0, 1)]
    for background, pieces in zip(run.backgrounds, run.pieces, strict=True):
        expected = [(step, piece) for step in range(background.steps_done) for piece in range(len(pieces))]
        assert steps_of(background.work).ran == expected
        assert len(background.work.losses) == background.steps_done > 0
        assert not background.ended
    # All background work is told once.
    assert max(map(abs, run.off)) < 1e-9
    # Nothing is started for a step that is to be alone.
    assert sum(run.alone.values()) >= 8
    assert not [step for step, _, _ in run.started if run.alone.get(step, False)]
    # A step that passes for one alone had no background work in it.
    spans = list(pairwise(run.ends_s))
    for (start_s, stop_s), told_s in zip(spans, run.gpu.measured.background_s, strict=True):
        assert told_s > 0 or run.background_s(start_s + 1e-9, stop_s - 1e-9) < 1e-6
    # No queue holds more than it may.
    assert max(run.queued) <= MOST_QUEUED
    # Nothing is started for a gap or a step that is over, but for the host's own delays on the way.
    assert max(run.late_s) < 3e-3


@pytest.mark.parametrize("hungry", [False, True])
@pytest.mark.parametrize("pieces", [[[2e-4] * 20], [[3e-4]], [[1e-4, 5e-4, 3e-4], [2e-4] * 5]])
def test_a_long_gap_is_filled_in_all_steps_that_are_not_alone(
    clock: Clock, pieces: list[list[float]], hungry: bool
) -> None:
    """But for a tenth: microseconds at its beginning, and a late host. Also beside a background without samples."""
    clock.host_s = jitter(1)
    run = Run(clock, random.Random(1), [*pieces, [2e-4]] if hungry else pieces, [10 * STEP_S], late=len(pieces[0]) > 1)
    if hungry:
        run.backgrounds[-1].work.feeder = FakeFeeder(clock, every_s=math.inf)  # type: ignore[assignment]
    run.go(45)
    begins_s = {step: work.ended_s for step, work in enumerate(steps_of(run.foreground).works[::2])}
    shared = [begins_s[step] for step in range(15, 45) if not run.alone[step]]
    filled_s = sum(run.background_s(at_s, at_s + run.gaps_s[0]) for at_s in shared)
    assert len(shared) > 0.8 * 30
    assert filled_s > 0.9 * len(shared) * run.gaps_s[0]


def test_pieces_shorter_than_their_launch_do_not_keep_the_foreground_waiting(clock: Clock) -> None:
    """They fill no queue: a gap's worth of them would take several gaps to start."""
    clock.host_s = lambda: 1e-5
    run = Run(clock, random.Random(1), [[2e-5] * 3], [10 * STEP_S], late=False, places=10**6).go(40)
    assert run.backgrounds[0].steps_done > 100
    assert max(run.gpu.measured.step_s) < 10 * STEP_S + (1 + COST) * STEP_S + 2e-3
    assert max(run.late_s) < 5e-4


def test_backgrounds_on_one_stream_share_its_queue(clock: Clock) -> None:
    run = Run(clock, random.Random(1), [[2e-4] * 20] * 3, [20 * STEP_S], late=False, places=100).go(30)
    assert max(run.queued) == MOST_QUEUED


def test_losses_of_a_long_gap_are_read_before_their_places_on_the_host_run_out(clock: Clock) -> None:
    run = Run(clock, random.Random(1), [[1e-4]], [20 * STEP_S], late=False, places=1000).go(20)
    assert run.backgrounds[0].steps_done > 4 * 256
    assert clock.pinned == 2  # the foreground's and the background's, once


def test_what_runs_while_the_foreground_waits_is_told_with_the_step_that_it_waits_for(clock: Clock) -> None:
    """That is the one whose time the wait is a part of."""
    run = Run(clock, random.Random(1), [[3e-4]], [], late=False)
    run.foreground.feeder = FakeFeeder(clock, late_s=lambda: 8 * STEP_S if run.foreground.steps.step % 7 == 0 else 0.0)  # type: ignore[assignment]
    run.go()
    spans = list(pairwise(run.ends_s))[15:]
    told = run.gpu.measured.background_s[15:]
    steps = list(zip(spans, told, strict=True))
    waits = [(span, told_s) for span, told_s in steps if span[1] - span[0] > 5 * STEP_S]
    assert sum(told_s > 0.5 * (stop_s - start_s) for (start_s, stop_s), told_s in waits) >= 3
    assert all(told_s >= 0.8 * run.background_s(*span) for span, told_s in waits)  # little where one is to be alone
    others = [(span, told_s) for span, told_s in steps if (span, told_s) not in waits]
    assert sum(told_s for _, told_s in others) <= sum(run.background_s(*span) for span, _ in others) + 3e-4


def test_work_that_has_ended_since_it_was_last_looked_at_is_not_behind(clock: Clock) -> None:
    run = Run(clock, random.Random(1), [[3e-4]], [])
    launches = run.gpu.launches
    over: Any = passed(clock)
    launches.under_way.append(Launched(over, (0, 0), STEP_S, 1.0, in_gap=False, step=1))
    allowance = Allowance(alone=False, overlapped_s=STEP_S / 5, gaps_s=(), waiting_s=0.0, reducing_s=0.0)
    launches.allow(9, [Window(passed(clock), to_come(clock))], allowance)
    assert len(run.started) == 3


def test_what_ended_in_the_next_step_is_not_told_with_this_one_however_late_the_host_looks(clock: Clock) -> None:
    launches = Run(clock, random.Random(1), [[3e-4]], []).gpu.launches
    clock.now_s = 10.0
    begin, step_end, piece_end, next_end = (at(clock, time_s) for time_s in (4.0, 5.0, 6.0, 7.0))
    piece = Launched(PieceSpan("late", begin, piece_end), (0, 0), 1e-3, 1.0, in_gap=False, step=3)
    launches.under_way.append(piece)
    assert launches.ended(3, step_end) == []
    assert launches.ended(4, next_end) == [piece]
