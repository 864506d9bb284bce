"""Sharing on CPU workers, with real processes; how backgrounds fail is in `test_share_failures.py`."""

import contextlib
import itertools
import math
import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from share_alone import JOBS, foreground_plan, losses_alone, wait_for

from burstpool.engine.base import Place, phrase
from burstpool.errors import RunError, ShareError
from burstpool.job import load_job
from burstpool.run.folder import RunFolder
from burstpool.run.loading import Batches
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import InterruptedRun
from burstpool.share.base import Background, ShareOutcome, ShareRequest, find, refuse_used
from burstpool.share.budget import Allowance, Budget, Moment
from burstpool.share.claim import claimed, gate_folder
from burstpool.share.cpu import share_on_cpu
from burstpool.share.fused import FusedReport, FusedTask, fused_work
from burstpool.share.gates.announce import Announcer, Pace, StepLog, p95, slowdowns
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.gated import GatedDoing
from burstpool.share.gates.keeper import Keeper
from burstpool.share.gates.on_device import WhenReached
from burstpool.share.gates.workers import _started
from burstpool.share.interference.measure_cpu import LAYERS, _rates, _run, count_in_window, measure_on_cpu
from burstpool.share.memory import MemoryWatch
from burstpool.share.preparing import Mistake, Preparing, prepare_work, sliced_plan

pytestmark = pytest.mark.alone

OPTIONS = RunOptions(timeout_s=60, timeline_steps=10)
STEPS = 400
"""Half a second: in a tenth of it a busy machine may leave a background no whole step."""


def share(folder: Path, *backgrounds: Background, devices: int, steps: int) -> ShareOutcome:
    return share_on_cpu(
        ShareRequest(
            foreground=JOBS,
            settings={},
            plan=foreground_plan(devices=devices),
            steps=steps,
            backgrounds=backgrounds,
            budget=Budget(slowdown=1.5),
            options=OPTIONS,
            run_folder=folder,
        )
    )


class _Silent:
    def begin_step(self, step: int) -> None: ...
    def say(self, words: bytes) -> None: ...


def place_for(report: Callable[[Any], None]) -> Place:
    return Place(
        rank=0, num_workers=1, host="", port=0, local_rank=0, num_local=1,
        doing=_Silent(), report=report, stop_asked=lambda: False,
    )  # fmt: skip


def array_alone(
    settings: tuple[dict[str, Any], ...], steps: int, folder: Path, *, source: str = JOBS
) -> list[tuple[float, ...]]:
    found: list[FusedReport] = []
    place = place_for(found.append)
    task = FusedTask(
        source=source, settings=settings, steps=steps, checkpoint=str(folder / "alone.pt"), checkpoint_every=1000
    )
    fused_work(place, task)
    return [report.losses for report in found]


def test_foreground_background_and_fused_array_train_as_they_do_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 300.0)  # none is killed for being slow
    settings = ({"lr": 0.05}, {"lr": 0.01}, {"lr": 0.002})
    found = share(
        tmp_path / "shared",
        Background(source=JOBS, settings=({"lr": 0.02, "hidden": 48},), lowest_priority=False),
        Background(source=JOBS, settings=settings, lowest_priority=False),
        devices=1,
        steps=STEPS,
    )
    assert list(found.losses) == losses_alone(foreground_plan(devices=1), steps=STEPS)
    single, array = found.backgrounds
    assert single.state == array.state == "ended"
    job = load_job(JOBS, {"lr": 0.02, "hidden": 48})
    count = min(len(single.losses), 30)
    assert count > 20
    plan = sliced_plan(trace_job(job).graph, batch=job.batch, name="background")
    assert single.losses[:count] == losses_alone(plan, steps=count, lr=0.02, hidden=48)
    assert len(array.losses) > 20
    count = min(len(array.losses), 60)
    alone = array_alone(settings, count, tmp_path)
    assert array.losses[:count] == [list(losses) for losses in alone]
    assert found.background_steps > 0
    assert found.background_kept is not None
    assert found.timeline is not None
    assert {event.lane for event in found.timeline.events} >= {"compute"}


@pytest.mark.parametrize("other", [{"lr": 0.1}, {"times": 3.0}, {"seed": 4}])
def test_members_get_the_batches_they_have_alone_also_when_the_array_goes_on(
    other: dict[str, Any], tmp_path: Path
) -> None:
    settings, source = ({}, other), f"{JOBS}:altered"
    found = [losses for steps in (25, 45) for losses in array_alone(settings, steps, tmp_path, source=source)]
    for member, mine in enumerate(settings):
        job = load_job(source, mine)
        model, batches = job.build_model(), Batches(job, [(0, job.batch)], batch=job.batch)
        optimizer = job.optimizer(list(model.parameters()))
        for step in range(45):
            [[batch]] = batches.load()
            loss = job.loss(model(batch.inputs), batch.target)
            assert found[step][member] == pytest.approx(loss.item(), rel=1e-4)  # sums in another order
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("hidden", (8, 16), "put this one in an array of its own"),
        ("batch", (10, 20), "members of one array have one batch, these have 10 and 20"),
    ],
)
def test_what_cannot_be_one_array_is_told_before_anything_is_trained(
    name: str, values: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    wanted = Preparing(
        background=Background(source=JOBS, settings=tuple({name: value} for value in values)),
        run=RunFolder(tmp_path / "run"),
        checkpoint=str(tmp_path / "array.pt"),
        device="cpu",
        autocast=None,
        hang_s=1.0,
    )
    found = prepare_work(place_for(pytest.fail), wanted)
    assert isinstance(found, Mistake)
    assert message in found.words
    assert not list(tmp_path.iterdir())


def test_the_foreground_waits_for_all_backgrounds_that_hang_together_not_for_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    clock = Mock(monotonic=lambda: now_s[0], sleep=lambda s: now_s.__setitem__(0, now_s[0] + 100 * s))
    monkeypatch.setattr("burstpool.share.gates.workers.time", clock)
    done = Mock(steps=0)
    keepers = [Mock(**{"kept.state": "running", "gate.done.return_value": done}) for _ in range(4)]
    assert _started(keepers) == [None] * 4
    assert now_s[0] < 60 + 3 * 10 + 1
    assert all(keeper.gate.close.called for keeper in keepers)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(Exception, match="pass --device cpu"):
        find("abacus")


def allowance(overlapped_s: float = 0.0, waiting_s: float = 0.0, *, alone: bool = False) -> Allowance:
    return Allowance(alone=alone, overlapped_s=overlapped_s, gaps_s=(), waiting_s=waiting_s, reducing_s=0.0)


def test_a_gate_allows_by_moment_and_counts_by_moment(tmp_path: Path) -> None:
    gate, other = Gate.create(tmp_path / "gate"), Gate(tmp_path / "gate")
    assert other.allowed_s(other.moment) == math.inf  # the foreground has not begun
    gate.allow(allowance(0.002, math.inf), step=0)
    gate.announce(Moment.COMPUTING)
    assert other.allowed_s(other.moment) == 0.002
    for moment in (Moment.COMPUTING, Moment.WAITING, Moment.ENDED):
        other.begin_slice(moment)
        torch.ones(300, 300) @ torch.ones(300, 300)
        assert gate.done().overlapped_s > 0  # also while it is under way
        other.end_slice()
    done = gate.done()
    assert min(done.overlapped_s, done.in_gaps_s, done.outside_s) > 0
    assert len(gate.slices()) == 2  # not what comes after the foreground
    assert all(start < stop for start, stop in gate.slices())
    gate.close()
    assert [other.allowed_s(moment) for moment in (Moment.COMPUTING, Moment.WAITING, Moment.IDLE)] == [0, 0, 0]
    gate.let_leave()
    assert other.allowed_s(Moment.COMPUTING) == math.inf


def test_what_a_background_does_when_the_foreground_has_ended_does_not_push_earlier_slices_out(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    gate.begin_slice(Moment.WAITING)
    gate.end_slice()
    [seen] = gate.slices()
    for _ in range(20_000):
        gate.begin_slice(Moment.ENDED)
        gate.end_slice()
    assert gate.slices() == [seen]
    assert gate.done().outside_s > 0


def test_a_background_that_is_gone_leaves_its_part_to_the_others_of_its_device(tmp_path: Path) -> None:
    gates = [Gate.create(tmp_path / str(i)) for i in range(3)]
    pace = Pace(Budget(), (), [gates[:2], gates[2:]])
    pace._controller = Mock(allowance=allowance(0.004), alone_s=None)
    steps = itertools.count()

    def allowed() -> list[float]:
        pace.begin(next(steps))
        return [gate.allowed_s(Moment.COMPUTING) for gate in gates]

    assert allowed() == [0.002, 0.002, 0.004]
    gates[0].say_away(True)
    assert allowed()[1:] == [0.004, 0.004]
    gates[0].say_away(False)
    assert allowed() == [0.002, 0.002, 0.004]
    gates[2].say_away(True)
    gates[1].begin_slice(Moment.COMPUTING)
    torch.ones(300, 300) @ torch.ones(300, 300)
    work_s = gates[1].end_slice()
    allowed()
    assert pace.log.overlapped_s[-1] == pytest.approx(work_s)  # on the one device that has company


def test_a_slowdown_is_told_from_the_first_shared_step_on(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    pace = Pace(Budget(), (), [[gate]])
    for step in range(5):
        pace.begin(step)
    assert gate.told() == (0, 0)  # the first steps are long, and measure the base
    gate.begin_slice(Moment.COMPUTING)
    torch.ones(300, 300) @ torch.ones(300, 300)
    gate.end_slice()
    pace.begin(5)
    assert gate.told() == (pace._controller.alone_s, pace.log.times_s[-1])


def test_a_small_allowance_adds_up_to_a_slice_now_and_then(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    doing = GatedDoing(_Silent(), Gate(tmp_path / "gate"))
    doing._slice_s = 1.0
    gate.announce(Moment.COMPUTING)
    started = 0
    for step in range(30):
        gate.allow(allowance(0.3), step=step)
        if doing._has_credit(Moment.COMPUTING):
            doing._credit[Moment.COMPUTING].spend(1.0)
            started += 1
    assert 8 <= started <= 9
    gate.allow(allowance(alone=True), step=31)
    doing._credit[Moment.COMPUTING].left_s = 5.0
    assert not doing._has_credit(Moment.COMPUTING)  # an alone step is alone, whatever was saved up


def test_steps_that_pass_during_a_long_slice_pay_for_their_part_of_it_and_save_no_more_than_a_slice(
    tmp_path: Path,
) -> None:
    gate = Gate.create(tmp_path / "gate")
    doing = GatedDoing(_Silent(), Gate(tmp_path / "gate"))
    doing._slice_s = 1.0
    gate.announce(Moment.COMPUTING)
    gate.allow(allowance(2.0), step=0)
    assert doing._has_credit(Moment.COMPUTING)
    for step in (1, 2, 3, 4):  # a checkpoint, say, is written meanwhile
        gate.allow(allowance(alone=True) if step == 2 else allowance(2.0), step=step)
    doing._credit[Moment.COMPUTING].spend(7.0)
    assert doing._has_credit(Moment.COMPUTING)
    assert doing._credit[Moment.COMPUTING].left_s == pytest.approx(1.0)  # four steps allowed 2 s each
    for step in range(5, 50):
        gate.allow(allowance(2.0, math.inf if step < 49 else 2.0), step=step)
    for moment in (Moment.COMPUTING, Moment.WAITING):
        assert doing._has_credit(moment)
        assert doing._credit[moment].left_s == pytest.approx(3.0)  # the last step's, and a slice


def test_a_step_that_begins_while_it_is_looked_at_is_paid_for_once(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    doing = GatedDoing(_Silent(), gate)
    doing._slice_s = 10.0
    for step in range(4):
        gate.allow(allowance(0.5), step=step)
        doing._has_credit(Moment.COMPUTING)
        doing._foreground_step = -1.0  # what it read before the step's number was written
        doing._has_credit(Moment.COMPUTING)
    assert doing._credit[Moment.COMPUTING].left_s == pytest.approx(2.0)


def test_before_its_first_step_a_background_does_not_ask(tmp_path: Path) -> None:
    gate = Gate.create(tmp_path / "gate")
    gate.close()
    GatedDoing(_Silent(), Gate(tmp_path / "gate")).say(phrase("tracing the model"))  # returns


def test_slowdowns_compare_with_the_alone_steps_in_between() -> None:
    log = StepLog(
        times_s=[9.0, 1.0, 1.0] + [1.2, 1.2, 1.2, 1.0] * 10, alone=[True] * 3 + [False, False, False, True] * 10
    )
    found = slowdowns(log)
    assert found["slowdown"] == pytest.approx(1.15)
    assert found["slowdown_p95"] == pytest.approx(1.2)
    assert found["alone_p95"] == 1.0
    assert slowdowns(StepLog(times_s=[1.0], alone=[True]))["slowdown"] == 1.0
    assert p95([1.0] * 95 + [2.0] * 5) == 1.0


class _Job:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_here = True

    def evict(self, reason: str) -> bool:
        self.calls.append(f"evict: {reason}")
        return True

    def readmit(self) -> None:
        self.calls.append("readmit")
        self.is_here = True


def test_memory_that_runs_short_evicts_one_after_another_and_lets_them_come_back() -> None:
    free, (first, last, ended) = [50 << 20], (_Job(), _Job(), _Job())
    ended.is_here = False
    watch = MemoryWatch([first, last, ended], memory=lambda: (free[0], 100 << 20))
    watch.look()
    watch.look()  # the last is still leaving
    assert not first.calls
    assert not ended.calls
    assert last.calls == ["evict: 50 MiB of memory were free, fewer than 100 MiB"]
    last.is_here = False
    watch.look()
    assert len(first.calls) == 1
    first.is_here = False
    free[0] = 150 << 20  # not yet: coming back would take it below again
    watch.look()
    assert first.calls[-1] != "readmit"
    free[0] = 300 << 20
    watch.look()
    watch.look()
    assert first.calls[-1] == last.calls[-1] == "readmit"


def test_a_job_comes_back_only_when_what_its_leaving_freed_is_there_again() -> None:
    free, job = [50], _Job()
    watch = MemoryWatch([job], memory=lambda: (free[0], 100))
    watch.look()
    job.is_here, free[0] = False, 550  # it held 500
    watch.look()
    assert len(job.calls) == 1
    free[0] = 601
    watch.look()
    assert job.calls[-1] == "readmit"


def test_what_is_said_of_a_device_is_passed_on_in_order_when_it_gets_there() -> None:
    reached, seen = threading.Semaphore(0), []

    class Mark:
        def synchronize(self) -> None:
            reached.acquire()

    when = WhenReached(Mark)
    for number in range(5):
        when(partial(seen.append, number))
    time.sleep(0.01)
    assert not seen
    reached.release(2)
    wait_for(lambda: seen == [0, 1])
    reached.release(3)
    when.finish()
    assert seen == [0, 1, 2, 3, 4]


def test_a_worker_that_is_ahead_of_its_device_announces_what_the_device_does(tmp_path: Path) -> None:
    gate, later = Gate.create(tmp_path / "gate"), []
    pace = Pace(Budget(), (), [[gate]])
    announcer = Announcer(
        _Silent(), [gate], pace=pace, reduces=False, when=later.append, memory=lambda: (3 << 30, 8 << 30)
    )
    for step in range(3):
        announcer.begin_step(step)
        for words in ("forward a", "receive x", "backward a"):
            announcer.say(phrase(words))
    assert (gate.moment, pace.log.times_s, gate.told_memory()) == (Moment.IDLE, [], None)
    seen = []
    for action in later:
        action()
        seen.append(gate.moment.value)
    assert seen[1:5] == ["computing", "waiting", "computing", "computing"]
    assert len(pace.log.times_s) == 2
    assert gate.told_memory() == (3 << 30, 8 << 30)


class _Clock:
    """Stands in for `time`: it goes on when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1e9

    def time(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return 0.0  # the host waits all the time

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


def test_work_that_a_gpu_does_is_counted_by_the_wall_and_when_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr("burstpool.share.gates.gate.time", clock)
    gate = Gate.create(tmp_path / "gate")
    gate.count_by_wall()
    # What the device still does:
    doing = GatedDoing(_Silent(), Gate(tmp_path / "gate"), wait=lambda: clock.pass_by(0.03))
    doing.begin_step(0)
    gate.announce(Moment.COMPUTING)
    for words in ("forward a", "forward b", "forward c"):
        doing.say(phrase(words))
    assert gate.done().overlapped_s == pytest.approx(0.06, abs=1e-6)  # c has only begun
    clock.pass_by(0.01)
    assert gate.done().overlapped_s == pytest.approx(0.07, abs=1e-6)


class _Attempts(Keeper):
    """A keeper whose attempts are the test's."""

    def __init__(self, folder: Path, attempt: Callable[["_Attempts"], None]) -> None:
        self.attempt, self.attempts = attempt, 0
        super().__init__(Background(source=JOBS), Gate.create(folder / "gate"), folder)

    def _prepare(self) -> Any:
        return None

    def _losses(self) -> list[Any]:
        return []

    def _attempt(self) -> None:
        self.attempts += 1
        self.attempt(self)


def until_asked(keeper: _Attempts) -> None:
    while keeper.gate.allowed_s(Moment.COMPUTING) != math.inf:
        time.sleep(0.001)
    raise InterruptedRun(keeper.folder, 0)


def test_stopping_a_job_that_was_evicted_does_not_start_it_again(tmp_path: Path) -> None:
    keeper = _Attempts(tmp_path, until_asked)
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    wait_for(lambda: keeper.is_here)
    assert not keeper.gate.is_away
    assert keeper.evict("no memory")
    wait_for(lambda: not keeper.is_here)
    assert keeper.gate.is_away
    keeper.stop()
    assert keeper.join(0)
    assert keeper.attempts == keeper.kept.evictions == 1
    assert keeper.kept.state == "evicted"


def test_a_job_that_was_just_starting_when_it_was_asked_to_leave_is_asked_again(tmp_path: Path) -> None:
    def forget_once(keeper: _Attempts) -> None:
        time.sleep(0.05)
        keeper.gate.let_leave(False)
        until_asked(keeper)

    keeper = _Attempts(tmp_path, forget_once)
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert keeper.join(0)
    assert keeper.kept.state == "ended"


def test_a_job_that_hangs_when_it_is_asked_to_end_has_failed_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 0.05)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()

    def hang(keeper: _Attempts) -> None:
        process.join()
        raise RunError("rank 0 was killed by SIGKILL")

    keeper = _Attempts(tmp_path, hang)
    keeper._prepared = Mock()
    keeper._engine.workers = Mock(**{"pids.return_value": [process.pid], "doing.return_value": "in step 7, forward a"})
    keeper.start()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert keeper.kept.state == "failed"
    assert keeper.kept.reason == "it did not answer for 0.05 s when it was asked to end; it was in step 7, forward a"


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [(None, "ended", ""), (OSError(28, "No space left on device"), "failed", "OSError: [Errno 28] No space left")],
)
def test_a_job_that_is_over_says_what_it_was_and_is_not_evicted(
    error: Exception | None, state: str, reason: str, tmp_path: Path
) -> None:
    def attempt(keeper: _Attempts) -> None:
        if error is not None:
            raise error

    keeper = _Attempts(tmp_path, attempt)
    assert not keeper.evict("not started")
    keeper.start()
    assert keeper.join(60)
    assert not keeper.evict("no memory")
    assert keeper.kept.state == state
    assert keeper.kept.reason.startswith(reason)
    assert keeper.kept.evictions == 0
    assert keeper.gate.is_away
    assert bool(keeper.kept.reason) == bool(reason)


def test_a_process_that_goes_while_it_is_asked_to_leave_raises_nothing(tmp_path: Path) -> None:
    class Closed:
        def pids(self) -> list[int]:
            raise ValueError("process object is closed")

        def ask_to_stop(self) -> None: ...

        def doing(self, rank: int) -> str:
            return "in step 3"

    keeper = _Attempts(tmp_path, until_asked)
    keeper._engine.workers = Closed()  # type: ignore[assignment]
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    assert keeper.pid is None
    keeper.stop()
    assert keeper.join(0)


@pytest.mark.parametrize("left", ["run.json", "background/0/array.pt", "checkpoints/step-00000050/state.json"])
def test_a_folder_that_holds_anything_of_a_run_is_refused_before_it_is_changed(left: str, tmp_path: Path) -> None:
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    with pytest.raises(ShareError, match=r"choose another --run-folder"):
        share(tmp_path, Background(source=JOBS), devices=1, steps=2)
    with pytest.raises(ShareError, match=r"choose another --run-folder"):
        refuse_used(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / left]


def test_a_share_that_never_began_gives_its_folder_back_as_it_was(tmp_path: Path) -> None:
    own = tmp_path / "there" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")

    def stopped(folder: Path, *, has_begun: bool) -> None:
        with claimed(folder) as begin:
            (folder / "background" / "0").mkdir(parents=True)
            (folder / "run.json").write_text("{}")
            if has_begun:
                begin()
            raise KeyboardInterrupt

    for folder in (own.parent, tmp_path / "runs" / "new"):
        with pytest.raises(KeyboardInterrupt):
            stopped(folder, has_begun=False)
    assert sorted(tmp_path.rglob("*")) == [own.parent, own]
    with pytest.raises(KeyboardInterrupt):
        stopped(own.parent, has_begun=True)
    assert (own.parent / "run.json").exists()


def test_gates_of_a_killed_command_go_with_the_next_one_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    left, other = tmp_path / "burstpool-share-left", tmp_path / "burstpool-share-other"
    for folder in (left, other):
        folder.mkdir()
        (folder / "gate-0").write_bytes(b"")
    (left / "owner").write_bytes(b"")  # nobody holds it
    with gate_folder(str(tmp_path)) as first, gate_folder(str(tmp_path)) as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second, other])  # one without an owner is not ours to judge
    assert list(tmp_path.iterdir()) == [other]


def test_both_processes_count_within_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    monkeypatch.setattr("burstpool.share.interference.measure_cpu.time", clock)

    def layer() -> None:
        clock.pass_by(0.25)

    assert count_in_window(layer, clock.now_s + 1, 4) == 16  # it runs before, too, but that does not count
    assert clock.now_s == 1e9 + 5
    assert count_in_window(layer, clock.now_s - 2, 4) == 8  # told when half of it was over
    assert count_in_window(layer, clock.now_s - 5, 4) == 0


def test_a_measuring_process_that_dies_is_told_and_layers_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setitem(LAYERS, "linear", lambda: made.append("linear") or (lambda: None))
    ours, theirs = multiprocessing.Pipe()
    threads = torch.get_num_threads()

    def measuring() -> None:
        with contextlib.suppress(EOFError):
            _run(theirs, False)

    thread = threading.Thread(target=measuring, daemon=True)
    thread.start()
    for _ in range(3):
        assert _rates([(ours, "linear")], 0.01)[0] > 0
    assert made == ["linear"]
    ours.close()
    thread.join(60)
    torch.set_num_threads(threads)
    with pytest.raises(ShareError, match="has died"):
        measure_on_cpu(kinds=["no such layer"], window_s=0.01)
