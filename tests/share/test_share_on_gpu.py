"""Sharing a GPU, a simulated one, from the request to the outcome: what fails fails alone, and nothing is left."""

import contextlib
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from fake_cuda import Clock, FakeFeeder, FakeSteps, Stream, fake_cuda

from burstpool.errors import CaptureError, RunError, ShareError, TraceError
from burstpool.job import load_job, load_jobs
from burstpool.run.even import even_plan
from burstpool.run.folder import RunFolder, RunRecord, read_losses
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import InterruptedRun, Start
from burstpool.schedule.lower import lower
from burstpool.share import cuda
from burstpool.share.base import ENDLESS, Background, ShareOutcome, ShareRequest
from burstpool.share.budget import Budget
from burstpool.share.gpu.array_steps import ArrayStep, check_one_batch
from burstpool.share.gpu.evictions import Memory
from burstpool.share.gpu.graph_steps import GraphStep
from burstpool.share.results import BackgroundFolder, BackgroundRecord

JOBS = str(Path(__file__).with_name("share_jobs.py"))
BACK = {"lr": "0.5"}
"""By which a background is told from the foreground."""
STEPS = 150


class Gpu:
    """What happens where: `happens` is called with the moment and whose it is."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.feeders = clock, list[FakeFeeder]()
        self.happens: Callable[[str, str], None] = lambda moment, whose: None
        self.losses: dict[str, Callable[[int], float]] = {}
        """By whose, where they are not the number of the step."""
        self.raises_in: dict[str, int] = {}
        """By whose, in the middle of which step the user's code raises."""

    def comes_to(self, moment: str, job: Any) -> None:
        self.happens(moment, whose(job))


def whose(job: Any) -> str:
    return "background" if job.settings["lr"] == 0.5 else "foreground"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu(clock := fake_cuda(monkeypatch))

    class Single(FakeSteps, GraphStep):
        is_captured = True

        def __init__(self, job: Any, *, stream: Any, control: Any, piece_s: float = math.inf, options: Any) -> None:
            found.comes_to("building", job)
            lengths_s = [1e-3] if math.isinf(piece_s) else [3e-4, 3e-4]
            super().__init__(clock, *lengths_s, stream=stream, loss=found.losses.get(whose(job), float))
            self.job, self.options = job, options
            self.pieces[-1] = self._raising(self.pieces[-1])
            self.plan = even_plan(graph := trace_job(job).graph, num_devices=1, batch=job.batch, name=job.name)
            self.schedule = lower(self.plan, graph)

        def capture(self) -> None:
            found.comes_to("capturing", self.job)

        def _raising(self, piece: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                if self.step == found.raises_in.get(whose(self.job)):
                    raise ValueError("a schedule of the user's")
                piece()

            return run

    class Array(FakeSteps, ArrayStep):
        def __init__(self, jobs: Any, *, stream: Any, piece_s: float, autocast: Any) -> None:
            super().__init__(clock, 3e-4, 3e-4, stream=stream)
            self.job = jobs[0]

        def end(self) -> torch.Tensor:
            return super().end().repeat(2)

    def feeder(*_: Any, **__: Any) -> FakeFeeder:
        found.feeders.append(FakeFeeder(clock))
        return found.feeders[-1]

    def prepared(request: ShareRequest) -> tuple[None, Start]:
        return None, Start(folder=RunFolder.create(request.run_folder), checkpoint=None, step=0)

    class Rehearsal:
        def __init__(self, wanted: Background) -> None:
            self.job = load_job(wanted.source, wanted.settings[0])

        def check(self) -> None:
            found.comes_to("rehearsing", self.job)

        def close(self) -> None: ...

    class Widths:
        def __init__(self, foreground: Any, background: Any) -> None:
            found.comes_to("trying parts", background.job)

        def take(self, *, slowdown: float) -> float:
            return 0.5

    low: Any = Stream(clock)
    low.device = torch.device("cuda", 0)
    for name, value in (
        ("is_available", lambda: True),
        ("current_device", int),
        ("mem_get_info", lambda: (90 << 30, 100 << 30)),
        ("empty_cache", lambda: None),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in (
        ("streams", lambda device: (Stream(clock, cost=0.3), low)),
        ("prepare_foreground", prepared),
        ("GraphStep", Single),
        ("ArrayStep", Array),
        ("Feeder", feeder),
        ("Rehearsal", Rehearsal),
        ("Widths", Widths),
        ("memory_cap", lambda *_: contextlib.nullcontext()),
        ("MemoryOf", lambda *_, **__: lambda: Memory(90 << 30, 100 << 30)),
        ("timeline_of", lambda *_: None),
    ):
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(cuda, "time", clock)
    monkeypatch.setattr(cuda._Sharing, "_save", lambda sharing, work, folder: found.comes_to("saving", work.steps.job))
    return found


@pytest.fixture(scope="module")
def plan() -> Any:
    job = load_job(JOBS)
    return even_plan(trace_job(job).graph, num_devices=1, batch=job.batch, name=job.name)


@pytest.fixture
def share(gpu: Gpu, plan: Any, tmp_path: Path) -> Iterator[Callable[..., ShareOutcome]]:
    """Shares with these backgrounds; afterwards nothing of it is left but its folder."""
    signals, threads = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)], set(threading.enumerate())

    def run(*backgrounds: tuple[dict[str, str], ...], steps: int = ENDLESS) -> ShareOutcome:
        return cuda.share_on_cuda(
            ShareRequest(
                foreground=JOBS,
                settings={},
                plan=plan,
                steps=STEPS,
                backgrounds=tuple(Background(source=JOBS, settings=settings, steps=steps) for settings in backgrounds),
                budget=Budget(slowdown=1.2),
                options=RunOptions(device="cuda"),
                run_folder=tmp_path / "run",
            )
        )

    yield run
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == signals
    assert set(threading.enumerate()) == threads
    assert not multiprocessing.active_children()
    assert not dist.is_initialized()
    assert all(feeder.closed for feeder in gpu.feeders)


def at(moment: str, whose: str, error: BaseException) -> Callable[[str, str], None]:
    def happens(now: str, who: str) -> None:
        if (now, who) == (moment, whose):
            raise error

    return happens


def test_all_train_and_an_array_beside_a_job_gets_its_part(share: Callable[..., ShareOutcome]) -> None:
    found = share((BACK,), (BACK, BACK))
    assert len(found.losses) == STEPS
    assert found.slowdown < 1.21
    assert [background.state for background in found.backgrounds] == ["ended", "ended"]
    assert all(background.steps > 20 for background in found.backgrounds)
    assert [len(background.losses[0]) for background in found.backgrounds[1:]] == [2]


def test_backgrounds_that_come_to_their_last_step_have_ended_well(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    found = share((BACK,), (BACK, BACK), steps=20)
    assert [(each.state, each.reason, each.steps) for each in found.backgrounds] == [("ended", "", 20)] * 2
    for number, each in enumerate(found.backgrounds):
        assert each.kept is not None
        assert 0 < each.kept < 1
        record = BackgroundRecord.load(BackgroundFolder.of(tmp_path / "run", number).record)
        assert (record.state, record.steps, record.kept) == ("ended", 20, each.kept)
    single, array = (BackgroundFolder.of(tmp_path / "run", number) for number in range(2))
    assert single.losses_by_member() == [tuple(float(step) for step in range(20))]
    assert array.losses_by_member() == [tuple(float(step) for step in range(20))] * 2
    assert RunRecord.load(single.run.record).steps == 20


@pytest.mark.parametrize(
    ("moment", "error"),
    [
        ("rehearsing", RunError("no answer")),
        ("building", ValueError("wrong")),
        ("building", SystemExit(3)),
        ("capturing", RuntimeError("of the device")),
    ],
)
def test_a_background_that_fails_before_the_run_is_left_out(
    moment: str, error: BaseException, share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    gpu.happens = at(moment, "background", error)
    found = share((BACK,))
    assert len(found.losses) == STEPS
    assert found.backgrounds[0].state == "failed"
    assert str(error) in found.backgrounds[0].reason
    record = BackgroundRecord.load(BackgroundFolder.of(tmp_path / "run", 0).record)
    assert (record.state, record.reason, record.steps) == ("failed", found.backgrounds[0].reason, 0)


def test_where_parts_cannot_be_tried_it_trains_on_the_whole(share: Callable[..., ShareOutcome], gpu: Gpu) -> None:
    gpu.happens = at("trying parts", "background", CaptureError("no memory"))
    found = share((BACK,))
    assert found.backgrounds[0].state == "ended"
    assert found.backgrounds[0].multiprocessors == 1.0
    assert found.backgrounds[0].steps > 20


def test_backgrounds_that_cannot_be_saved_have_failed_and_their_losses_and_records_are_there(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    gpu.happens = at("saving", "background", OSError(28, "No space left"))
    found = share((BACK,), (BACK, BACK))
    for number, background in enumerate(found.backgrounds):
        assert background.state == "failed"
        assert background.reason == "what it has learnt could not be saved: OSError: [Errno 28] No space left"
        folder = BackgroundFolder.of(tmp_path / "run", number)
        assert BackgroundRecord.load(folder.record).reason == background.reason
        assert len(folder.losses_by_member()[0]) == background.steps > 20


def test_where_the_foreground_cannot_be_saved_backgrounds_are(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    saved: list[str] = []

    def happens(moment: str, whose: str) -> None:
        if moment == "saving":
            saved.append(whose)
            if whose == "foreground":
                raise OSError(28, "No space left")

    gpu.happens = happens
    with pytest.raises(OSError, match="No space left"):
        share((BACK,), (BACK,))
    assert saved == ["foreground", "background", "background"]
    records = [BackgroundRecord.load(folder.record) for folder in BackgroundFolder.all_in(tmp_path / "run")]
    assert [record.state for record in records] == ["ended", "ended"]


@pytest.mark.parametrize("last", [False, True])
def test_a_background_that_turned_nan_or_raised_in_a_step_is_not_saved_as_if_it_had_not(
    last: bool, share: Callable[..., ShareOutcome], gpu: Gpu
) -> None:
    saved: list[str] = []
    gpu.happens = lambda moment, whose: saved.append(whose) if moment == "saving" else None
    gpu.losses["background"] = lambda step: math.nan if step == 20 else 1.0
    [turned] = share((BACK,), steps=21 if last else ENDLESS).backgrounds
    assert (turned.state, turned.reason) == ("failed", "the loss is not finite")
    assert len(turned.losses) >= 21
    assert saved == ["foreground"]


def test_a_background_that_raises_in_the_middle_of_a_step_is_not_saved(
    share: Callable[..., ShareOutcome], gpu: Gpu
) -> None:
    saved: list[str] = []
    gpu.happens = lambda moment, whose: saved.append(whose) if moment == "saving" else None
    gpu.raises_in["background"] = 10
    [raised] = share((BACK,)).backgrounds
    assert (raised.state, raised.reason) == ("failed", "ValueError: a schedule of the user's")
    assert raised.losses == list(range(10))
    assert saved == ["foreground"]


def test_a_foreground_that_raises_in_the_middle_of_a_step_is_not_saved_but_its_background_is(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    saved: list[str] = []
    gpu.happens = lambda moment, whose: saved.append(whose) if moment == "saving" else None
    gpu.raises_in["foreground"] = 60
    with pytest.raises(ValueError, match="a schedule of the user's"):
        share((BACK,))
    assert saved == ["background"]
    lines = read_losses(tmp_path / "run" / "losses.jsonl")
    assert [line.loss for line in lines] == list(range(60))
    assert all(line.step_time_s > 0 for line in lines[1:-1])
    assert lines[0].step_time_s == lines[-1].step_time_s == 0  # after a warm-up; not waited for


def test_equal_backgrounds_that_are_left_out_have_a_record_each(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    gpu.happens = at("building", "background", ValueError("wrong"))
    share((BACK,), (BACK,))
    assert len(BackgroundFolder.all_in(tmp_path / "run")) == 2


def test_one_more_ctrl_c_while_all_is_saved_does_it_no_harm(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.run.trainer._ONE_INTERRUPT_S", 0.0)
    saved: list[str] = []

    def happens(moment: str, whose: str) -> None:
        if moment == "saving":
            saved.append(whose)
            if whose == "foreground":
                os.kill(os.getpid(), signal.SIGINT)

    gpu.happens = happens
    looks = iter(range(STEPS))
    monkeypatch.setattr(
        cuda._Sharing,
        "_watch",
        lambda sharing, shared: os.kill(os.getpid(), signal.SIGINT) if next(looks) == 60 else None,
    )
    with pytest.raises(InterruptedRun):
        share((BACK,))
    assert saved == ["foreground", "background"]
    assert BackgroundRecord.load(BackgroundFolder.of(tmp_path / "run", 0).record).state == "ended"


class Second:
    """A background in a process of its own; Ctrl-C is pressed as it is saved, so often the first time, the second…"""

    presses: ClassVar[list[int]]
    in_a_hurry: ClassVar[list[tuple[bool, bool]]]
    """Of each that was saved: before, and then."""

    leaves_by_itself, ended, where, steps_done, done_s = True, "", "here", 0, 0.0
    next_s, next_place, queue, alone_s, last_step_s, steps_before = 1e-3, 0, None, 1e-3, None, 0

    def __init__(self, *_: Any, is_in_a_hurry: Callable[[], bool], **__: Any) -> None:
        self.is_in_a_hurry, self.losses = is_in_a_hurry, [[3.0], [2.0]]

    def save(self) -> None:
        before = self.is_in_a_hurry()
        for _ in range(self.presses.pop(0)):
            os.kill(os.getpid(), signal.SIGINT)
        self.in_a_hurry.append((before, self.is_in_a_hurry()))

    def launch(self, gate: Any) -> None: ...
    def look_after(self) -> None: ...
    def finish(self) -> None: ...
    def leave(self, *, at_once: bool = False) -> None: ...
    def come_back(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def second(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> type[Second]:
    """Backgrounds are such ones."""
    Second.presses, Second.in_a_hurry = [], []
    monkeypatch.setattr("burstpool.run.trainer._ONE_INTERRUPT_S", 0.0)
    monkeypatch.setattr(cuda, "SecondProcess", Second)
    monkeypatch.setattr(cuda, "capabilities", lambda device: Mock(side_by_side=True))
    gpu.happens = at("capturing", "background", CaptureError("branches"))
    return Second


def stopped_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(STEPS))
    monkeypatch.setattr(
        cuda._Sharing,
        "_watch",
        lambda sharing, shared: os.kill(os.getpid(), signal.SIGINT) if next(looks) == 60 else None,
    )


@pytest.mark.parametrize("in_the_run", [True, False])
def test_ctrl_c_while_backgrounds_are_saved_ends_processes_of_their_own_at_once(
    in_the_run: bool,
    share: Callable[..., ShareOutcome],
    second: type[Second],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second.presses = [1, 0]
    if in_the_run:
        stopped_in_the_run(monkeypatch)
    with pytest.raises(InterruptedRun) if in_the_run else contextlib.nullcontext():
        share((BACK,), (BACK,))
    assert second.in_a_hurry == [(False, True), (True, True)]
    records = [BackgroundRecord.load(folder.record) for folder in BackgroundFolder.all_in(tmp_path / "run")]
    assert [(record.state, record.steps) for record in records] == [("ended", 2)] * 2


def test_a_third_ctrl_c_gives_up_weights_but_leaves_records_and_losses_of_all(
    share: Callable[..., ShareOutcome], second: type[Second], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second.presses = [2]
    stopped_in_the_run(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        share((BACK,), (BACK,))
    folders = BackgroundFolder.all_in(tmp_path / "run")
    assert [BackgroundRecord.load(folder.record).state for folder in folders] == ["ended"] * 2
    assert [folder.losses_by_member() for folder in folders] == [[(3.0, 2.0)]] * 2


def test_a_third_ctrl_c_while_the_foreground_is_saved_leaves_records_of_all(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.run.trainer._ONE_INTERRUPT_S", 0.0)
    stopped_in_the_run(monkeypatch)

    def happens(moment: str, whose: str) -> None:
        if moment == "saving":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    gpu.happens = happens
    with pytest.raises(KeyboardInterrupt):
        share((BACK,), (BACK, BACK))
    folders = BackgroundFolder.all_in(tmp_path / "run")
    assert [len(folder.losses_by_member()) for folder in folders] == [1, 2]


@pytest.mark.parametrize(
    ("moment", "whose", "error"),
    [
        ("building", "foreground", KeyboardInterrupt()),
        ("building", "foreground", TraceError("cannot trace it")),
        ("capturing", "foreground", KeyboardInterrupt()),
        ("rehearsing", "background", KeyboardInterrupt()),
        ("rehearsing", "background", ShareError("an unknown setting")),
        ("building", "background", KeyboardInterrupt()),
        ("capturing", "background", KeyboardInterrupt()),
        ("trying parts", "background", KeyboardInterrupt()),
    ],
)
def test_refused_or_stopped_before_the_run_nothing_is_left(
    moment: str, whose: str, error: BaseException, share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path
) -> None:
    gpu.happens = at(moment, whose, error)
    with pytest.raises(type(error)):
        share((BACK,))
    assert not (tmp_path / "run").exists()


def test_stopped_in_the_run_what_was_learnt_is_kept(
    share: Callable[..., ShareOutcome], gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []
    gpu.happens = lambda moment, whose: saved.append(whose) if moment == "saving" else None
    looks = iter(range(STEPS))
    monkeypatch.setattr(
        cuda._Sharing,
        "_watch",
        lambda sharing, shared: os.kill(os.getpid(), signal.SIGTERM) if next(looks) == 60 else None,
    )
    with pytest.raises(InterruptedRun):
        share((BACK,))
    assert saved == ["foreground", "background"]
    assert (tmp_path / "run" / "losses.jsonl").exists()


@pytest.mark.parametrize("other", [{"lr": 0.1}, {"times": 3.0}, {"seed": 4}, {"batch": 10}])
def test_members_that_would_get_other_samples_alone_are_no_array_on_a_gpu(other: dict[str, Any]) -> None:
    jobs = load_jobs(f"{JOBS}:altered", [{}, other])
    if "lr" in other:
        check_one_batch(jobs)
        return
    with pytest.raises(ShareError, match="one seed, one batch and one data set"):
        check_one_batch(jobs)
