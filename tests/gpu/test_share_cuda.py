"""Sharing a GPU: both jobs train as they would alone, whatever the background does."""

import dataclasses
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from burstpool.errors import ShareError
from burstpool.job import Job, load_job
from burstpool.run.worker import JobSource
from burstpool.share.budget import Budget
from burstpool.share.feeding import Feeder
from burstpool.share.gpu import BackgroundWork, Idle, JobAtWork, SharedGpu, alone_in_a_group, memory_cap, streams
from burstpool.share.graph_steps import GraphStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 120


@pytest.fixture
def control() -> Iterator[dist.ProcessGroup]:
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    with alone_in_a_group() as group:
        yield group
    torch.backends.cudnn.deterministic = before


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


def at_work(source: str, control: dist.ProcessGroup, stream: torch.cuda.Stream, job: Job | None = None) -> JobAtWork:
    """A zoo job, or `job` in its place."""
    own = job or load_job(source)
    steps = GraphStep(own, stream=stream, control=control, piece_s=1e-4)
    feeder = Feeder(job or JobSource(source=source, settings={}), own, hang_s=3.0, memory_bytes=1 << 30)
    return JobAtWork(source, steps, feeder)


def start_background(work: JobAtWork) -> BackgroundWork:
    work.start()
    return BackgroundWork(work)


def failed(background: BackgroundWork) -> bool:
    return bool(background.ended) or background.work.feeder.restarts > 0


def alone(source: str, control: dist.ProcessGroup) -> list[list[float]]:
    high, _ = streams(torch.device("cuda", 0))
    work = at_work(source, control, high)
    work.start()
    SharedGpu(work, (), Budget()).run(STEPS)
    work.feeder.close()
    return work.losses


@pytest.mark.parametrize("gaps", [False, True])
def test_both_jobs_train_as_they_do_alone(control: dist.ProcessGroup, gaps: bool) -> None:
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    background = start_background(at_work("zoo:tiny_resnet", control, low))
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
