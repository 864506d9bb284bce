"""Sharing a GPU: both jobs train as they would alone, whatever the background does."""

import dataclasses
import functools
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from share_on_gpu import (
    ARRAY,
    STEPS,
    alone,
    array_alone,
    at_work,
    say,
    start_background,
    wide_job,
)

from burstpool.errors import ShareError
from burstpool.job import load_job
from burstpool.run.even import even_plan
from burstpool.run.graphs import WARM_UP_STEPS
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import train
from burstpool.share.base import Background, ShareRequest
from burstpool.share.budget import Budget
from burstpool.share.cuda import share_on_cuda
from burstpool.share.gpu.at_work import BackgroundWork, move
from burstpool.share.gpu.loop import Idle, SharedGpu, streams
from burstpool.share.gpu.memory import memory_cap
from burstpool.share.gpu.partition import confined_stream
from burstpool.share.gpu.width import PARTS, Widths
from burstpool.share.preparing import sliced_plan
from burstpool.share.rehearsal import Rehearsal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Faulty(torch.utils.data.Dataset[Any]):
    """The job's data, with something wrong from some sample on."""

    def __init__(self, data: Any, fault: str, after: int) -> None:
        self.data, self.fault, self.after, self.count = data, fault, after, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        inputs, target = self.data[index]
        if self.count > self.after:
            if self.fault == "raises":
                raise ValueError("a broken file")
            if self.fault == "hangs":
                time.sleep(3600)
            if self.fault == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "eats memory":
                self.eaten = [torch.ones(1 << 24) for _ in range(10_000)]
            if self.fault == "turns NaN":
                inputs = inputs * math.nan
        return inputs, target


def failed(background: BackgroundWork) -> bool:
    return bool(background.ended) or background.work.feeder.restarts > 0


@pytest.mark.parametrize(("gaps", "part"), [(False, None), (True, None), (False, 0.3)])
def test_both_jobs_train_as_they_do_alone(control: dist.ProcessGroup, gaps: bool, part: float | None) -> None:
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    background = start_background(at_work("zoo:tiny_resnet", control, low))
    if part is not None:
        tried = Widths(foreground.steps, background.work.steps).tried
        say({share: (found.slowdown, found.kept) for share, found in tried.items()})
        assert set(tried) == {1.0, *PARTS}
        move(background.work.steps, confined_stream(0, part, low.priority))
    program: list[int | Idle] = list(range(len(foreground.steps.pieces)))
    if gaps:
        program.insert(2, Idle(length_s=5e-4))
    shared = SharedGpu(foreground, (background,), Budget(slowdown=1.5), program=program)
    shared.run(STEPS)
    assert background.steps_done > 1
    foreground.feeder.close()
    background.work.feeder.close()
    assert foreground.losses == alone("zoo:tiny_vgg", control)
    mine, theirs = background.work.losses, alone("zoo:tiny_resnet", control)
    common = min(len(mine), len(theirs))
    assert mine[:common] == theirs[:common]


def test_backgrounds_on_different_parts_train_as_they_do_alone(control: dist.ProcessGroup) -> None:
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    sources = {"zoo:tiny_resnet": 0.5, "zoo:tiny_mlp": 0.3}
    backgrounds = [start_background(at_work(source, control, low)) for source in sources]
    for background, part in zip(backgrounds, sources.values(), strict=True):
        move(background.work.steps, confined_stream(0, part, low.priority))
    SharedGpu(foreground, backgrounds, Budget(slowdown=1.5)).run(STEPS)
    foreground.feeder.close()
    assert foreground.losses == alone("zoo:tiny_vgg", control)
    for background, source in zip(backgrounds, sources, strict=True):
        background.work.feeder.close()
        mine, theirs = background.work.losses, alone(source, control)
        common = min(len(mine), len(theirs))
        assert common > WARM_UP_STEPS + 1
        assert mine[:common] == theirs[:common]


@pytest.mark.parametrize("fault", ["raises", "hangs", "is killed", "eats memory", "turns NaN"])
def test_a_background_that_fails_ends_or_starts_again_alone(control: dist.ProcessGroup, fault: str) -> None:
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    job = load_job("zoo:tiny_mlp")
    job = dataclasses.replace(job, data=Faulty(job.data, fault, after=20 * job.batch))
    background = start_background(at_work("zoo:tiny_mlp", control, low, job))
    shared = SharedGpu(foreground, (background,), Budget(slowdown=2.0))
    shared.run(STEPS)
    deadline = time.monotonic() + 40
    while not failed(background) and time.monotonic() < deadline:
        background.launch(None)
        background.look_after()
    foreground.feeder.close()
    background.close()
    assert failed(background)
    assert foreground.losses == alone("zoo:tiny_vgg", control)


def test_a_long_gap_is_filled(control: dist.ProcessGroup) -> None:
    """More pieces than a queue holds, more steps than the feeder has loaded."""
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    # Steps of some 0.8 ms: with those of a tiny job, 0.2 ms, the host is what takes the time.
    background = start_background(at_work("wide", control, low, wide_job(num_layers=8)))
    gap_s = 0.05
    program = [*range(len(foreground.steps.pieces)), Idle(length_s=gap_s)]
    gpu = SharedGpu(foreground, (background,), Budget(slowdown=1.2), program=program)
    gpu.run(80)
    foreground.feeder.close()
    background.close()
    filled = [work_s / gap_s for work_s in gpu.measured.background_s[20:] if work_s]
    say((len(filled), sum(filled) / len(filled)))
    assert len(filled) > 40
    assert sum(filled) / len(filled) > 0.5  # the rest: a step between pieces takes the host some time, too


def test_a_background_that_needs_too_much_memory_is_refused(control: dist.ProcessGroup) -> None:
    _, low = streams(torch.device("cuda", 0))
    work = at_work("zoo:tiny_resnet", control, low)
    with pytest.raises(ShareError, match="more than 1024 bytes"), memory_cap("it", low.device, 1024):
        work.start()
    work.feeder.close()


def test_nothing_is_launched_for_a_background_that_has_ended(control: dist.ProcessGroup) -> None:
    _, low = streams(torch.device("cuda", 0))
    background = BackgroundWork(at_work("zoo:tiny_mlp", control, low))
    background.end("asked to")
    assert background.launch(None) is None


def test_a_background_that_hangs_when_it_is_loaded_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def request(*sources: str) -> ShareRequest:
        return ShareRequest(
            foreground="zoo:tiny_mlp",
            settings={},
            plan=even_plan(trace_job(job).graph, num_devices=1, batch=job.batch, name=job.name),
            steps=100,
            backgrounds=tuple(Background(source=source) for source in sources),
            budget=Budget(slowdown=2.0),
            options=RunOptions(device="cuda"),
            run_folder=tmp_path / "shared",
        )

    job = load_job("zoo:tiny_mlp")
    monkeypatch.setattr("burstpool.share.cuda.Rehearsal", functools.partial(Rehearsal, hang_s=5))
    with pytest.raises(ShareError, match="nowhere"):
        share_on_cuda(request("zoo:tiny_mlp", "zoo:nowhere"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(3600)\n")
    found = share_on_cuda(request(str(tmp_path / "hangs.py"), "zoo:tiny_mlp"))
    assert [background.state for background in found.backgrounds] == ["failed", "ended"]
    assert "no answer" in found.backgrounds[0].reason
    assert len(found.losses) == 100


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["eager", "captured"])
def test_workers_of_a_plan_share_their_gpus_with_backgrounds_of_their_own(cuda_graphs: bool, tmp_path: Path) -> None:
    """Two workers on one GPU, over gloo; matrix products only, so that runs can be compared to the bit."""
    job = load_job("zoo:tiny_mlp")
    plan = even_plan(trace_job(job).graph, num_devices=2, batch=job.batch, name=job.name)
    options = RunOptions(device="cuda", cuda_graphs=cuda_graphs, timeout_s=120, timeline_steps=10)
    found = share_on_cuda(
        ShareRequest(
            foreground="zoo:tiny_mlp",
            settings={},
            plan=plan,
            steps=400,
            backgrounds=(
                Background(source="zoo:tiny_mlp", settings=({"lr": "0.03"},), lowest_priority=False),
                Background(source="zoo:tiny_mlp", settings=ARRAY, lowest_priority=False),
            ),
            budget=Budget(slowdown=2.0),
            options=options,
            run_folder=tmp_path / "shared",
        )
    )
    say([(b.device, b.state, b.reason, b.restarts, b.steps, b.kept) for b in found.backgrounds])
    say((found.slowdown, found.slowdown_p95, found.alone_p95, found.step_time_s))
    assert [background.state for background in found.backgrounds] == ["ended", "ended"]
    assert [background.device for background in found.backgrounds] == [0, 1]
    assert all(background.steps > 0 for background in found.backgrounds)
    assert found.slowdown < 2.5
    alone = train("zoo:tiny_mlp", plan, steps=400, run_folder=tmp_path / "alone", options=options)
    assert list(found.losses) == [loss.loss for loss in alone.losses]
    single, array = found.backgrounds
    count = min(len(single.losses), 40)
    own_job = load_job("zoo:tiny_mlp", {"lr": "0.03"})
    own = train(
        "zoo:tiny_mlp",
        sliced_plan(trace_job(own_job).graph, batch=own_job.batch, name="own"),
        steps=count,
        settings={"lr": "0.03"},
        run_folder=tmp_path / "own",
        options=RunOptions(device="cuda", cuda_graphs=False),
    )
    assert count > 10
    assert single.losses[:count] == [loss.loss for loss in own.losses]
    members = array_alone("zoo:tiny_mlp", ARRAY, min(len(array.losses), 40), tmp_path)
    assert len(members) > 10
    assert array.losses[: len(members)] == members
