"""Sharing on CPU workers, with real processes; how backgrounds fail is in `test_share_failures.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from share_alone import JOBS, foreground_plan, losses_alone, share

from burstpool.engine.base import Place
from burstpool.job import load_job
from burstpool.run.folder import RunFolder
from burstpool.run.loading import Batches
from burstpool.run.setup import trace_job
from burstpool.run.torchrun import Silent
from burstpool.share.base import Background, find
from burstpool.share.fused import FusedReport, FusedTask, fused_work
from burstpool.share.gates.workers import _started
from burstpool.share.preparing import Mistake, Preparing, prepare_work, sliced_plan

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
