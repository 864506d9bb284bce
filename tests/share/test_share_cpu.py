"""Sharing on CPU workers, with real processes; how backgrounds fail is in `test_share_failures.py`."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file
from share_alone import JOBS, foreground_plan, losses_alone, share

from burstpool.engine.base import Place
from burstpool.job import load_job
from burstpool.run.folder import RunRecord
from burstpool.run.loading import Batches
from burstpool.run.setup import trace_job
from burstpool.run.torchrun import Silent
from burstpool.run.trainer import InterruptedRun, train
from burstpool.share.array_file import export_members, load_array
from burstpool.share.base import Background, ShareProgress, find
from burstpool.share.fused import FusedReport, FusedTask, fused_work
from burstpool.share.gates.workers import _started, _stop
from burstpool.share.preparing import Mistake, Preparing, prepare_work, sliced_plan
from burstpool.share.results import BackgroundFolder, BackgroundRecord

pytestmark = pytest.mark.alone

STEPS = 400
"""Half a second: in a tenth of it a busy machine may leave a background no whole step."""


def place_for(report: Callable[[Any], None]) -> Place:
    return Place(
        rank=0, num_workers=1, host="", port=0, local_rank=0, num_local=1,
        doing=Silent(), report=report, stop_asked=lambda: False,
    )  # fmt: skip


def array_alone(
    settings: tuple[dict[str, Any], ...], steps: int, folder: Path, *, source: str = JOBS
) -> list[tuple[float, ...]]:
    found: list[FusedReport] = []
    place = place_for(found.append)
    task = FusedTask(
        source=source,
        settings=settings,
        steps=steps,
        checkpoint=str(folder / "alone.pt"),
        checkpoint_every=1000,
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


def test_backgrounds_that_come_to_their_last_step_leave_what_they_learnt(tmp_path: Path) -> None:
    steps, settings = 40, ({"lr": 0.05}, {"lr": 0.01})
    found = share(
        tmp_path / "shared",
        Background(source=JOBS, settings=({"lr": 0.02},), steps=steps),
        Background(source=JOBS, settings=settings, steps=steps),
        devices=1,
        steps=STEPS,
    )
    assert [each.state for each in found.backgrounds] == ["ended", "ended"]
    assert [len(each.losses) for each in found.backgrounds] == [steps, steps]
    single, array = (BackgroundFolder.of(tmp_path / "shared", number) for number in range(2))
    for folder, background in zip((single, array), found.backgrounds, strict=True):
        record = BackgroundRecord.load(folder.record)
        assert (record.state, record.steps, record.saved_steps) == ("ended", steps, steps)
        assert record.steps_beside == background.steps
    assert [member["lr"] for member in BackgroundRecord.load(array.record).settings] == [0.05, 0.01]
    assert [list(losses) for losses in zip(*array.losses_by_member(), strict=True)] == found.backgrounds[1].losses
    assert single.losses_by_member() == [tuple(found.backgrounds[0].losses)]
    # What they have learnt is what they learn alone.
    job = load_job(JOBS, {"lr": 0.02})
    plan = sliced_plan(trace_job(job).graph, batch=job.batch, name="background")
    alone = train(JOBS, plan, steps=steps, run_folder=tmp_path / "alone", settings={"lr": 0.02})
    assert_same(load_file(single.run.weights), load_file(alone.weights))
    array_alone(settings, steps, tmp_path)
    export_members(load_array(tmp_path / "alone.pt"), tmp_path / "members")
    for member in ("member-00.safetensors", "member-01.safetensors"):
        assert_same(load_file(array.weights / member), load_file(tmp_path / "members" / member))
    assert load_job(JOBS).build_model().load_state_dict(load_file(array.weights / "member-01.safetensors"))
    # And a single job goes on as any run does.
    further = train(JOBS, plan, steps=steps + 5, resume=single.run.path, settings={"lr": 0.02})
    assert further.losses[0].step == steps


def test_stopped_in_the_middle_what_backgrounds_have_learnt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 300.0)  # none is killed for being slow
    stopped: list[int] = []

    def stop(progress: ShareProgress) -> None:
        if progress.step > 200 and not stopped:
            stopped.append(progress.step)
            os.kill(os.getpid(), signal.SIGINT)

    both = (Background(source=JOBS), Background(source=JOBS, settings=({"lr": 0.05}, {"lr": 0.01})))
    with pytest.raises(InterruptedRun):
        share(tmp_path / "shared", *both, devices=1, steps=1_000_000, observer=stop)
    single, array = (BackgroundFolder.of(tmp_path / "shared", number) for number in range(2))
    for folder in (single, array):
        record = BackgroundRecord.load(folder.record)
        assert record.state == "ended"
        assert record.steps == record.saved_steps == len(folder.losses_by_member()[0]) > 0
    assert load_file(single.run.weights).keys() == load_file(array.weights / "member-01.safetensors").keys()
    assert RunRecord.load(single.run.record).steps == BackgroundRecord.load(single.record).steps


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


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
        folder=BackgroundFolder(tmp_path),
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


def test_ctrl_c_while_backgrounds_write_ends_them_at_once(caplog: pytest.LogCaptureFixture) -> None:
    hurried = threading.Event()
    keepers: Any = [Mock(stop=lambda: hurried.wait(60), hurry=hurried.set), Mock()]
    with patch("burstpool.share.gates.workers._QUIETLY_S", 0.1):
        _stop(keepers, lambda: len(caplog.records))
    assert hurried.is_set()
    assert all(keeper.stop.called for keeper in keepers[1:])
    assert [record.message for record in caplog.records] == [
        "background jobs write what they have learnt; press Ctrl-C to end them at once"
    ]


def test_unknown_device_is_refused() -> None:
    with pytest.raises(Exception, match="pass --device cpu"):
        find("abacus")
