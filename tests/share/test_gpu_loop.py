"""The loop that shares a GPU, on a simulated one: who is started when, what is counted, who ends whom."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from fake_cuda import Clock, Event, FakeFeeder, FakeSteps, Stream, Work, fake_cuda

from burstpool.errors import RunError, ShareError
from burstpool.share.budget import Budget, Gap
from burstpool.share.gpu.at_work import LAST_STEP, MOST_RESTARTS, BackgroundWork, JobAtWork
from burstpool.share.gpu.evictions import Evictions, Memory, Stay
from burstpool.share.gpu.loop import Idle, SharedGpu, stretches

STEP_S = 0.01
BUDGET = Budget(slowdown=1.10)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return fake_cuda(monkeypatch)


def job(clock: Clock, *piece_s: float, feeder: FakeFeeder | None = None, **steps: Any) -> JobAtWork:
    fed: Any = feeder or FakeFeeder(clock)
    return JobAtWork("job", FakeSteps(clock, *piece_s, **steps), fed)


def background(clock: Clock, *piece_s: float, feeder: FakeFeeder | None = None) -> BackgroundWork:
    return BackgroundWork(job(clock, *piece_s, feeder=feeder))


def steps_of(work: JobAtWork) -> FakeSteps:
    assert isinstance(work.steps, FakeSteps)
    return work.steps


def counted_s(gpu: SharedGpu) -> float:
    """All background work that was told to the controller, and what is still to be told."""
    return sum(gpu.measured.background_s) + sum(piece.length_s - piece.counted_s for piece in gpu.launches.under_way)


def test_the_foreground_takes_all_its_steps_in_order_and_the_background_some(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S / 2, STEP_S / 2), background(clock, 3e-4, 2e-4)
    gpu = SharedGpu(foreground, [beside], BUDGET)
    gpu.run(60)
    assert foreground.losses == [[float(step)] for step in range(60)]
    assert steps_of(foreground).ran == [(step, piece) for step in range(60) for piece in (0, 1)]
    assert gpu.measured.step_s == pytest.approx([STEP_S] * 59)
    assert beside.steps_done > 20
    assert beside.work.losses == [[float(step)] for step in range(beside.steps_done)]
    assert not beside.ended
    assert gpu.measured.background_s[:5] == [0.0] * 5  # the base is measured alone
    assert counted_s(gpu) <= beside.done_s * (1 + 1e-9)


@pytest.mark.parametrize("asking_s", [0.0, 3e-6])
def test_a_gap_of_more_pieces_than_a_queue_holds_is_filled(clock: Clock, asking_s: float) -> None:
    """Also where a piece ends between two looks at the queue."""
    clock.asking_s, gap_s = asking_s, 10 * STEP_S
    foreground, beside = job(clock, STEP_S / 2, STEP_S / 2), background(clock, *[2e-4] * 20)
    gpu = SharedGpu(foreground, [beside], BUDGET, program=[0, Idle(length_s=gap_s), 1])
    gpu.run(120)
    assert gpu.measured.step_s == pytest.approx([STEP_S + gap_s] * 119)
    assert counted_s(gpu) > 0.85 * 100 * gap_s


def test_pieces_that_take_longer_than_known_pile_up_no_further_than_a_queue(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S), background(clock, *[2e-4] * 20, feeder=FakeFeeder(clock, places=9))
    beside.work.steps.pieces = [lambda: clock.work(4e-4)] * 20
    late: list[int] = []

    def watch(gpu: SharedGpu) -> None:
        late.append(sum(not piece.end.query() for piece in gpu.launches.under_way))

    SharedGpu(foreground, [beside], BUDGET, program=[0, Idle(length_s=20 * STEP_S)], watch=watch).run(60)
    assert 100 < max(late) <= 128


@pytest.mark.parametrize("saving_s", [0.1, 1.0])
def test_a_foreground_that_stops_to_write_a_checkpoint_takes_nothing_from_the_background(
    clock: Clock, saving_s: float
) -> None:
    def shared(saving_s: float) -> SharedGpu:
        def watch(gpu: SharedGpu) -> bool:
            saves = bool(saving_s) and gpu.foreground.steps.step % 20 == 0
            if saves:
                clock.wait_for(lambda: not gpu.foreground.steps.stream.queue)
                clock.sleep(saving_s)
            return saves

        gpu = SharedGpu(
            job(clock, STEP_S, stream=Stream(clock, cost=0.5)), [background(clock, *[2e-4] * 20)], BUDGET, watch=watch
        )
        gpu.run(200)
        return gpu

    without, found = shared(0.0), shared(saving_s)
    assert found.controller.pause_debt_s == 0
    assert max(found.measured.step_s) < 1.5 * STEP_S
    assert found.measured.paused_s == {}
    assert sum(found.measured.background_s) > 0.85 * sum(without.measured.background_s)


@pytest.mark.parametrize("every_s", [0.0, 0.122])
def test_work_for_a_gap_runs_in_that_gap(clock: Clock, every_s: float) -> None:
    """However late the next samples come."""
    gap_s, fed = 10 * STEP_S, FakeFeeder(clock, every_s=every_s)
    foreground, beside = job(clock, STEP_S / 2, STEP_S / 2, feeder=fed), background(clock, *[2e-4] * 20)
    gpu = SharedGpu(foreground, [beside], BUDGET, program=[0, Idle(length_s=gap_s), 1])
    started: list[tuple[int, Work]] = []
    launch = gpu.launches._start_next

    def watched(step: int, allowed: Any) -> Any:
        before = beside.done_s
        found = launch(step, allowed)
        if beside.done_s > before and allowed and allowed.in_gap:
            started.append((step, steps_of(beside.work).works[-1]))
        return found

    gpu.launches._start_next = watched  # type: ignore[method-assign]
    gpu.run(30)
    begins = steps_of(foreground).began_s[::2]
    late = [work.began_s >= begins[step + 1] for step, work in started if 14 <= step < 28]
    assert len(late) > 0.65 * 14 * gap_s / 2e-4
    assert sum(late) < 0.12 * len(late)  # what was in the queue when the step was over


def test_while_one_queue_is_full_nothing_is_put_into_that_of_a_background_without_samples(clock: Clock) -> None:
    busy, hungry = background(clock, *[2e-4] * 20), background(clock, 2e-4, feeder=FakeFeeder(clock, every_s=math.inf))
    waits: list[Any] = []
    hungry.work.steps.stream.wait_event = waits.append  # type: ignore[method-assign]
    SharedGpu(job(clock, STEP_S), [busy, hungry], BUDGET, program=[0, Idle(length_s=20 * STEP_S)]).run(20)
    assert busy.steps_done > 50
    assert not waits


def test_what_runs_in_a_long_wait_is_counted_and_not_kept(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S, feeder=FakeFeeder(clock, every_s=0.4)), background(clock, *[1e-3] * 7)
    gpu = SharedGpu(foreground, [beside], BUDGET)
    kept: list[int] = []
    launch = gpu.launches.start_idle

    def watched(step: int) -> bool:
        kept.append(len(gpu.launches.under_way))
        return launch(step)

    gpu.launches.start_idle = watched  # type: ignore[method-assign]
    gpu.run(16)
    assert 128 <= max(kept) < 140
    assert counted_s(gpu) == pytest.approx(beside.done_s, rel=0.02)
    assert beside.done_s > 6 * 0.35


def test_a_piece_that_takes_no_time_does_no_harm(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S), background(clock, 3e-4, 0.0, 2e-4)
    SharedGpu(foreground, [beside], BUDGET).run(60)
    assert len(foreground.losses) == 60
    assert beside.steps_done > 20


def test_a_piece_that_never_ends_stops_its_own_background_only(clock: Clock) -> None:
    hung, good = background(clock, 3e-4), background(clock, 3e-4, 3e-4)
    SharedGpu(job(clock, STEP_S), [hung, good], BUDGET).run(60)
    steps_of(hung.work).pieces = [lambda: clock.work(1e6)]
    before = good.steps_done
    SharedGpu(job(clock, STEP_S), [hung, good], BUDGET).run(200)
    assert good.steps_done > before + 80


def test_a_background_ends_at_its_last_step_and_leaves_its_part_to_the_others(clock: Clock) -> None:
    foreground, goes_on = job(clock, STEP_S), background(clock, 3e-4, 3e-4)
    ends = BackgroundWork(job(clock, 3e-4, 3e-4), most_steps=5)
    SharedGpu(foreground, [ends, goes_on], BUDGET).run(150)
    assert ends.steps_done == len(ends.work.losses) == 5
    assert ends.ended == LAST_STEP
    assert ends.last_step_s is not None
    assert not ends.work.feeder.closed  # type: ignore[attr-defined]  # ending a process would hold up the foreground
    alone = background(clock, 3e-4, 3e-4)
    SharedGpu(job(clock, STEP_S), [alone], BUDGET).run(150)
    assert goes_on.steps_done >= alone.steps_done - 10
    assert BackgroundWork(ends.work, most_steps=5).ended == LAST_STEP  # it had come there before the run


def test_a_background_whose_own_code_raises_ends_alone(clock: Clock) -> None:
    foreground, bad, good = job(clock, STEP_S), background(clock, 3e-4, 3e-4), background(clock, 3e-4, 3e-4)
    steps_of(bad.work).raises_in = 3
    SharedGpu(foreground, [bad, good], BUDGET).run(100)
    assert len(foreground.losses) == 100
    assert bad.ended == "ValueError: a schedule of the user's"
    assert bad.steps_done == len(bad.work.losses) == 3
    feeder: Any = bad.work.feeder
    assert feeder.closed
    assert not good.ended
    assert good.steps_done > 20


@pytest.mark.parametrize("hungry_s", [1e-4, 2.5 * STEP_S])
@pytest.mark.parametrize("piece_s", [1e-4, 2.5 * STEP_S])
def test_a_background_without_samples_does_not_starve_another(clock: Clock, hungry_s: float, piece_s: float) -> None:
    """Whichever has the longer pieces; the long ones are several steps' allowance."""
    hungry = background(clock, hungry_s, feeder=FakeFeeder(clock, every_s=math.inf))
    fed = background(clock, piece_s)
    gpu = SharedGpu(job(clock, STEP_S), [hungry, fed], BUDGET)
    gpu.run(300)
    alone = background(clock, piece_s)
    SharedGpu(job(clock, STEP_S), [alone], BUDGET).run(300)
    assert hungry.steps_done == 0
    assert fed.done_s > 0.7 * alone.done_s > 0


def test_backgrounds_with_short_and_with_long_pieces_get_the_same(clock: Clock) -> None:
    short, long = background(clock, 1e-4), background(clock, 2.5 * STEP_S)
    SharedGpu(job(clock, STEP_S), [short, long], Budget(slowdown=1.05)).run(400)
    assert short.done_s == pytest.approx(long.done_s, rel=0.2)


def test_a_background_step_that_has_begun_is_finished(clock: Clock) -> None:
    beside = background(clock, *[1e-3] * 7)
    SharedGpu(job(clock, STEP_S), [beside], BUDGET).run(47)
    ran = steps_of(beside.work).ran
    assert ran == [(step, piece) for step in range(beside.steps_done) for piece in range(7)]
    assert len(beside.work.losses) == beside.steps_done > 0


def test_work_that_runs_on_into_later_steps_is_counted_once(clock: Clock) -> None:
    beside = background(clock, 3.5 * STEP_S)
    gpu = SharedGpu(job(clock, STEP_S), [beside], Budget(slowdown=1.5))
    gpu.run(200)
    assert beside.steps_done > 3
    assert counted_s(gpu) == pytest.approx(beside.done_s)
    shared = sum(1 for work_s in gpu.measured.background_s if work_s)
    assert shared >= 3 * (beside.steps_done - 1)  # no step with a part of it in it was taken for one alone


class Fleeting:
    """A filler whose pieces end between one look and the next."""

    name, ended, steps_done, next_s, next_place = "fleeting", "", 0, 1e-3, 0
    queue = None
    where: Any = "here"
    leaves_by_itself = True

    def __init__(self) -> None:
        self.done_s = 0.0

    def launch(self, gate: Any) -> "Fleeting.Piece":
        self.done_s += self.next_s
        return Fleeting.Piece()

    class Piece:
        looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > 1

    def look_after(self) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...
    def leave(self, *, at_once: bool = False) -> None: ...
    def come_back(self) -> None: ...


def test_a_background_that_comes_back_does_not_catch_up_on_the_others(clock: Clock) -> None:
    stayed, left = Fleeting(), Fleeting()
    got: list[tuple[float, float]] = []

    def watch(gpu: SharedGpu) -> None:
        got.append((stayed.done_s, left.done_s))
        left.where = "away" if 40 <= len(got) < 160 else "here"

    SharedGpu(job(clock, STEP_S), [stayed, left], BUDGET, watch=watch).run(220)
    before, since = (tuple(b - a for a, b in zip(got[i], got[j], strict=True)) for i, j in ((0, 39), (165, 219)))
    assert before[1] == pytest.approx(before[0], abs=2e-3)
    assert since[0] > 0.01
    assert since[1] == pytest.approx(since[0], abs=2e-3)


def test_one_that_leaves_by_itself_is_not_waited_for(clock: Clock) -> None:
    class Leaving(Fleeting):
        told: list[bool]

        def leave(self, *, at_once: bool = False) -> None:
            self.told.append(at_once)
            self.where = "leaving"

    found = []
    for by_itself in (True, False):
        job_that_leaves = Leaving()
        job_that_leaves.told, job_that_leaves.leaves_by_itself = [], by_itself
        stay = Stay(held_bytes=10, first_pause_s=0.1)
        evictions = Evictions(
            [job_that_leaves], [stay], memory=lambda: Memory(0, 100), clock=clock.monotonic, slowdown=1.1
        )
        for _ in range(30):
            evictions.look()
            clock.sleep(0.1)
        found.append(job_that_leaves.told)
    assert not any(found[0])
    assert len(found[0]) > 20
    assert any(found[1])


class Writing(Fleeting):
    """Has come to its last step and writes what it has learnt."""

    def __init__(self, *, ended: str = LAST_STEP, where: str = "leaving") -> None:
        super().__init__()
        self.ended, self.where = ended, where
        self.told: list[bool] = []

    def leave(self, *, at_once: bool = False) -> None:
        self.told.append(at_once)
        self.where = "away" if at_once else self.where


def _beside(clock: Clock, *jobs: Writing, free: int) -> Evictions:
    stays = [Stay(held_bytes=10, first_pause_s=0.1) for _ in jobs]
    return Evictions(jobs, stays, memory=lambda: Memory(free, 100), clock=clock.monotonic, slowdown=1.1)


def test_a_foreground_out_of_memory_does_not_wait_for_one_that_writes_while_another_can_leave(clock: Clock) -> None:
    writing, other = Writing(), Writing(ended="", where="here")
    evictions = _beside(clock, writing, other, free=50)
    assert evictions.make_room()
    assert (writing.told, other.told) == ([], [True])
    assert evictions.make_room()  # then there is nobody else
    assert writing.told == [True]
    assert not evictions.make_room()
    assert [stay.evictions for stay in evictions.stays] == [0, 1]


def test_memory_is_looked_after_while_one_writes_what_it_has_learnt(clock: Clock) -> None:
    writing, other = Writing(), Writing(ended="", where="here")
    evictions = _beside(clock, writing, other, free=1)
    assert evictions.look()
    assert (writing.told, other.told) == ([False], [False])
    assert "were free" in evictions.stays[1].reason
    back = Writing(ended="", where="away")
    back.come_back = lambda: setattr(back, "where", "here")  # type: ignore[method-assign]
    evictions = _beside(clock, Writing(), back, free=50)
    clock.sleep(10.0)
    assert evictions.look()
    assert back.where == "here"
    assert not evictions.look()  # nothing held the foreground up


def test_work_that_ends_while_it_is_looked_at_is_counted(clock: Clock) -> None:
    fleeting = Fleeting()
    gpu = SharedGpu(job(clock, STEP_S), [fleeting], BUDGET)
    gpu.run(60)
    assert fleeting.done_s > 0
    assert counted_s(gpu) == pytest.approx(fleeting.done_s)


def test_a_background_in_a_process_of_its_own_begins_when_the_step_has(clock: Clock) -> None:
    """Its pieces do not wait on the device: started as soon as they are allowed, they would run in the step before."""
    foreground, fleeting = job(clock, STEP_S), Fleeting()
    early: list[bool] = []

    def launch(gate: Any) -> Fleeting.Piece:
        early.append(gate.at_s is None)
        return Fleeting.launch(fleeting, gate)

    fleeting.launch = launch  # type: ignore[method-assign]
    SharedGpu(foreground, [fleeting], BUDGET).run(60)
    assert len(early) > 20
    assert not any(early)


class Apart(Fleeting):
    """A job in a process of its own: one step at a time, which begins at once."""

    def __init__(self, clock: Clock, step_s: float) -> None:
        super().__init__()
        self.next_s, self._clock, self._stream = step_s, clock, Stream(clock)
        self._last = Event(clock)
        self.early = 0

    def launch(self, gate: Any) -> Any:
        if not self._last.query():
            return None
        self.early += gate is not None and gate.at_s is None
        self.done_s += self.next_s
        self._clock.queue(self._stream, Work(self.next_s, True))
        self._last = Event(self._clock)
        self._last.record(self._stream)
        return self._last


@pytest.mark.parametrize("step_s", [4e-4, 2e-3])
def test_a_background_in_a_process_of_its_own_does_not_starve_beside_a_captured_one(
    clock: Clock, step_s: float
) -> None:
    """Though it cannot wait on the device for the step that it is allowed for, and the other can."""
    foreground, captured, apart = job(clock, STEP_S), background(clock, *[3e-4] * 4), Apart(clock, step_s)
    SharedGpu(foreground, [captured, apart], Budget(slowdown=1.05)).run(400)
    assert not apart.early
    assert apart.done_s > 0.4 * captured.done_s > 0.1


def test_while_the_foreground_waits_for_samples_the_background_has_the_gpu(clock: Clock) -> None:
    foreground = job(clock, STEP_S, feeder=FakeFeeder(clock, every_s=2 * STEP_S))
    beside = background(clock, 3e-4)
    gpu = SharedGpu(foreground, [beside], BUDGET)
    gpu.run(100)
    assert len(foreground.losses) == 100
    assert beside.done_s > 0.5 * 100 * STEP_S  # most of what the foreground leaves
    assert counted_s(gpu) == pytest.approx(beside.done_s)
    waited = max(gpu.measured.step_s) - 2 * STEP_S
    assert waited < 3 * 3e-4  # its next step begins within two pieces


def test_background_work_for_a_gap_begins_with_the_gap(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S / 2, STEP_S / 2), background(clock, 3e-4)
    gpu = SharedGpu(foreground, [beside], BUDGET, program=[0, Idle(length_s=STEP_S / 2), 1])
    gpu.run(100)
    assert gpu.measured.step_s == pytest.approx([1.5 * STEP_S] * 99)
    assert beside.done_s > 0.3 * 100 * STEP_S / 2
    starts_s = steps_of(foreground).began_s[::2]
    first_s = steps_of(beside.work).began_s[:10]  # what a gap costs is measured first, in steps without overlap
    assert all(any(start + STEP_S / 2 - 1e-9 <= at_s < start + STEP_S for start in starts_s) for at_s in first_s)


def with_gaps(clock: Clock, beside: BackgroundWork, *gaps_s: float, cost: float = 0.5) -> SharedGpu:
    """A foreground that computes for 1 ms before each gap and after the last one."""
    foreground = job(clock, *[1e-3] * (len(gaps_s) + 1), stream=Stream(clock, cost=cost))
    program: list[int | Idle] = [0]
    for place, gap_s in enumerate(gaps_s, 1):
        program += [Idle(length_s=gap_s), place]
    return SharedGpu(foreground, [beside], BUDGET, program=program)


def meant_for_gaps(gpu: SharedGpu, beside: BackgroundWork) -> list[tuple[Work, Event, Event]]:
    """Pieces that are started for a gap from now on, with the gap's begin and end."""
    found: list[tuple[Work, Event, Event]] = []
    start = gpu.launches._start_next

    def watched(step: int, allowed: Any) -> Any:
        before, tried = beside.done_s, start(step, allowed)
        if beside.done_s > before and allowed and allowed.in_gap:
            found.append((steps_of(beside.work).works[-1], allowed.window.begin, allowed.window.end))
        return tried

    gpu.launches._start_next = watched  # type: ignore[method-assign]
    return found


def test_work_beside_compute_does_not_keep_that_of_gaps_out_of_them(clock: Clock) -> None:
    slow = Stream(clock, cost=0.7)  # beside the foreground's compute, as one of low priority is
    beside = BackgroundWork(job(clock, *[1e-4] * 20, stream=slow))
    gpu = with_gaps(clock, beside, *[4e-4] * 8)
    pieces = meant_for_gaps(gpu, beside)
    gpu.run(300)
    assert sum(gpu.measured.background_s) > sum(work.ended_s - work.began_s for work, _, _ in pieces)  # others, too
    late = [work.began_s >= (end.at_s or 0.0) for work, _, end in pieces]
    assert len(late) > 0.7 * 280 * 8 * 4
    assert sum(late) < 0.05 * len(late)


@pytest.mark.parametrize("slowed", [0.2, 0.7])
def test_it_learns_how_much_work_there_is_time_for_beside_compute(clock: Clock, slowed: float) -> None:
    beside = BackgroundWork(job(clock, *[1e-4] * 20, stream=Stream(clock, cost=slowed)))
    gpu = with_gaps(clock, beside, *[1e-3] * 3)
    gpu.run(200)
    most_s = BUDGET.slowdown * 4e-3  # its compute, as long as it may get
    assert gpu.launches._beside_s() == pytest.approx((1 - slowed) * most_s, rel=0.15)


@pytest.mark.parametrize(("piece_s", "most"), [(4e-4, 1), (3e-4, 2), (9e-4, 1)])
def test_a_piece_that_does_not_half_fit_a_gap_is_not_started_in_it(clock: Clock, piece_s: float, most: int) -> None:
    beside = background(clock, *[piece_s] * 20)
    gpu = with_gaps(clock, beside, 5e-4, 1e-4, 5e-4)
    pieces = meant_for_gaps(gpu, beside)
    gpu.run(200)
    assert all(end.at_s is not None and begin.at_s is not None for _, begin, end in pieces)
    lengths_s = [(end.at_s or 0.0) - (begin.at_s or 0.0) for _, begin, end in pieces]
    assert min(lengths_s) > 4e-4  # none in the short gap
    gaps = [begin for _, begin, _ in pieces]
    assert 0 < max(gaps.count(gap) for gap in gaps) <= most


def test_pieces_that_fit_no_gap_run_all_the_same(clock: Clock) -> None:
    beside = background(clock, *[1.2e-3] * 20)
    gpu = with_gaps(clock, beside, 5e-4, 1e-4, 5e-4, cost=0.1)
    pieces = meant_for_gaps(gpu, beside)
    gpu.run(200)
    assert len(pieces) > 20


def test_no_piece_waits_for_a_gap_in_which_nothing_may_start(clock: Clock) -> None:
    beside = background(clock, *[1.2e-3] * 20)
    gpu = with_gaps(clock, beside, 5e-4, 4e-3, cost=0.1)
    gpu.controller.gaps = (Gap(length_s=5e-4), Gap(length_s=4e-3, reduces=True))
    pieces = meant_for_gaps(gpu, beside)
    gpu.run(200)
    assert len(pieces) > 20
    assert all((end.at_s or 0.0) - (begin.at_s or 0.0) < 1e-3 for _, begin, end in pieces)


def test_stretches_are_shares_of_the_compute_between_gaps() -> None:
    gap = Idle(length_s=1.0)
    assert stretches([0, 1, 2], [1.0, 1.0, 2.0]) == [1.0]
    assert stretches([0, gap, 1, 2, gap], [1.0, 1.0, 2.0]) == [0.25, 0.75, 0.0]
    assert stretches([gap, gap, 0], [3.0]) == [0.0, 0.0, 1.0]
    assert stretches([0], [math.nan]) == [1.0]


def test_samples_of_the_foreground_that_fail_are_loaded_again_and_in_the_end_the_error_comes_out(clock: Clock) -> None:
    feeder = FakeFeeder(clock, failing=MOST_RESTARTS)
    foreground = job(clock, STEP_S, feeder=feeder)
    SharedGpu(foreground, [], BUDGET).run(4)
    assert len(foreground.losses) == 4
    assert feeder.restarts == 4 * MOST_RESTARTS
    hopeless = FakeFeeder(clock, failing=10**6)
    with pytest.raises(ShareError, match="sample 7 is broken"):
        SharedGpu(job(clock, STEP_S, feeder=hopeless), [], BUDGET).run(4)
    assert hopeless.restarts == MOST_RESTARTS


def test_samples_of_a_background_that_fail_end_it_after_some_restarts(clock: Clock) -> None:
    feeder = FakeFeeder(clock, failing=10**6)
    beside = background(clock, 3e-4, feeder=feeder)
    foreground = job(clock, STEP_S)
    SharedGpu(foreground, [beside], BUDGET).run(60)
    assert len(foreground.losses) == 60
    assert beside.ended == "sample 7 is broken"
    assert feeder.restarts == MOST_RESTARTS - 1


def test_a_foreground_that_turns_nan_ends_unless_that_is_allowed(clock: Clock) -> None:
    def loss(step: int) -> float:
        return math.nan if step == 20 else 1.0

    with pytest.raises(RunError, match="the loss is nan in step 20"):
        SharedGpu(job(clock, STEP_S, loss=loss), [], BUDGET).run(40)
    foreground = job(clock, STEP_S, loss=loss)
    SharedGpu(foreground, [], BUDGET, allow_nan=True).run(40)
    assert len(foreground.losses) == 40


def test_a_background_that_turns_nan_ends_alone(clock: Clock) -> None:
    beside = BackgroundWork(job(clock, 3e-4, loss=lambda step: math.nan if step > 4 else 1.0))
    foreground = job(clock, STEP_S)
    SharedGpu(foreground, [beside], BUDGET).run(60)
    assert len(foreground.losses) == 60
    assert beside.ended == "the loss is not finite"


def test_a_request_to_stop_ends_it_with_what_was_begun(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S), background(clock, 3e-4, 3e-4)
    SharedGpu(foreground, [beside], BUDGET).run(100, stop=lambda: foreground.steps.step == 30)
    assert len(foreground.losses) == 30
    assert len(steps_of(beside.work).ran) == 2 * beside.steps_done > 0


GIB = 1 << 30


def evictions(
    clock: Clock, foreground_bytes: Callable[[float], int], *jobs: tuple[BackgroundWork, int], total: int = 100 * GIB
) -> Evictions:
    """With so much taken by the foreground at a time, and so much by each background while it is here."""

    def memory() -> Memory:
        taken = sum(held for job, held in jobs if job.where != "away")
        return Memory(total - taken - foreground_bytes(clock.now_s), total)

    stays = [Stay(held_bytes=held, first_pause_s=0.0) for _, held in jobs]
    return Evictions([job for job, _ in jobs], stays, memory=memory, clock=clock.monotonic, slowdown=BUDGET.slowdown)


def test_the_largest_background_leaves_when_memory_runs_short_and_comes_back_with_the_same_steps(clock: Clock) -> None:
    small, large = background(clock, 3e-4, 2e-4, 2e-4), background(clock, 3e-4, 2e-4, 2e-4)
    room = evictions(clock, lambda at_s: 65 * GIB if 2 < at_s < 4 else 10 * GIB, (small, 10 * GIB), (large, 30 * GIB))
    foreground = job(clock, STEP_S)
    gpu = SharedGpu(foreground, [small, large], BUDGET, evictions=room)
    gpu.run(800)
    assert foreground.losses == [[float(step)] for step in range(800)]
    assert not steps_of(small.work).moves
    left, back = steps_of(large.work).moves
    assert left.removeprefix("leaves after") == back.removeprefix("comes back before")  # at the end of a step
    ran = steps_of(large.work).ran
    assert ran == [(step, piece) for step in range(large.steps_done) for piece in range(3)]
    assert [stay.evictions for stay in room.stays] == [0, 1]
    assert "GPU's memory were free, fewer than 5120 MiB" in room.stays[1].reason
    assert not [at_s for at_s in steps_of(large.work).began_s if 2.6 < at_s < 4]
    assert [at_s for at_s in steps_of(large.work).began_s if at_s > 4.5]


def test_a_pause_is_measured_and_paid_back_but_is_no_step_to_learn_from(clock: Clock) -> None:
    beside = background(clock, 3e-4)
    steps_of(beside.work).moving_s = 0.05
    room = evictions(clock, lambda at_s: 90 * GIB if 2 < at_s < 3 else 0, (beside, 10 * GIB))
    gpu = SharedGpu(job(clock, STEP_S), [beside], BUDGET, evictions=room)
    gpu.run(1500)
    assert len(steps_of(beside.work).moves) == 2
    pauses = gpu.measured.paused_s
    assert len(pauses) == 2
    for place, paused_s in pauses.items():  # a step was queued, and what the background had begun was ended first
        assert 0.05 - STEP_S < paused_s + 1e-9 < 0.05 + STEP_S
        assert gpu.measured.step_s[place] == pytest.approx(STEP_S + paused_s)
    away_s = room.stays[0].since_s
    back_s = min(at_s for at_s in steps_of(beside.work).began_s if at_s > away_s)
    assert back_s - away_s > 0.05 / (0.2 * 0.1)  # pauses, as far as known then, take a fifth of the budget at most
    assert gpu.controller.alone_s == pytest.approx(STEP_S)
    others = [time_s for place, time_s in enumerate(gpu.measured.step_s) if place not in pauses]
    assert max(others) < 1.02 * STEP_S


def test_a_background_that_finds_no_room_to_come_back_stays_away_longer(clock: Clock) -> None:
    beside = background(clock, 3e-4)
    steps_of(beside.work).refuses = 2
    room = evictions(clock, lambda at_s: 90 * GIB if 1 < at_s < 2 else 0, (beside, 10 * GIB))
    SharedGpu(job(clock, STEP_S), [beside], BUDGET, evictions=room).run(1200)
    [stay] = room.stays
    assert (stay.evictions, stay.refusals) == (1, 2)
    assert beside.where == "here"
    assert not beside.ended
    gap_s = max(b - a for a, b in pairwise(steps_of(beside.work).began_s))
    assert gap_s > 1 + 2 + 4


def test_a_foreground_that_runs_out_of_memory_gets_that_of_the_largest_background_and_goes_on(clock: Clock) -> None:
    foreground, small, large = job(clock, STEP_S), background(clock, 3e-4, 3e-4), background(clock, 3e-4, 3e-4)
    room = evictions(clock, lambda at_s: 0, (small, GIB), (large, 2 * GIB))
    steps_of(foreground).runs_out_in = 40
    steps_of(large.work).moving_s = 0.05
    gpu = SharedGpu(foreground, [small, large], BUDGET, evictions=room)
    gpu.run(60)
    [(place, paused_s)] = gpu.measured.paused_s.items()
    assert place == 39  # the first step has none before it to be measured from
    assert paused_s > 0.04
    assert foreground.losses == [[float(step)] for step in range(60)]
    assert [stay.evictions for stay in room.stays] == [0, 1]
    assert room.stays[1].reason == "the foreground ran out of memory"
    assert len(large.work.losses) == large.steps_done == steps_of(large.work).step  # a whole number of steps


def test_a_pause_in_the_last_step_before_a_stop_is_measured_as_one(clock: Clock) -> None:
    foreground, beside = job(clock, STEP_S), background(clock, 3e-4)
    steps_of(foreground).runs_out_in, steps_of(beside.work).moving_s = 40, 0.05
    gpu = SharedGpu(foreground, [beside], BUDGET, evictions=evictions(clock, lambda at_s: 0, (beside, GIB)))
    gpu.run(60, stop=lambda: foreground.steps.step == 41)
    assert list(gpu.measured.paused_s) == [39]


@pytest.mark.parametrize(("changed", "message"), [(True, "middle of a change"), (False, "no background left")])
def test_a_foreground_that_cannot_be_helped_says_so(clock: Clock, changed: bool, message: str) -> None:
    foreground, beside = job(clock, STEP_S), background(clock, 3e-4)
    steps_of(foreground).runs_out_in, steps_of(foreground).changed = 20, changed
    room = evictions(clock, lambda at_s: 0, *([(beside, GIB)] if changed else []))
    gpu = SharedGpu(foreground, [beside], BUDGET, evictions=room)
    with pytest.raises(RunError, match=message):
        gpu.run(60)
    foreground.read(all_of_them=True)
    assert gpu.is_whole == (not changed)
    assert foreground.position == len(foreground.losses) == 20
