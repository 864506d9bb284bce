"""A share of test jobs on CPU workers, what it is compared with (the same jobs without company), and waiting for it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from burstpool.job import load_job
from burstpool.plan.plan import Plan
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.run.torchrun import Silent
from burstpool.schedule.lower import lower
from burstpool.share.base import Background, ShareOutcome, ShareProgress, ShareRequest
from burstpool.share.budget import Budget
from burstpool.share.cpu import share_on_cpu
from burstpool.share.gpu.loop import alone_in_a_group

OPTIONS = RunOptions(timeout_s=60, timeline_steps=10)
JOBS = str(Path(__file__).with_name("share_jobs.py"))


def foreground_plan(*, devices: int) -> Plan:
    job = load_job(JOBS)
    return even_plan(trace_job(job).graph, num_devices=devices, batch=job.batch, name="foreground")


def share(
    folder: Path,
    *backgrounds: Background,
    devices: int,
    steps: int,
    observer: Callable[[ShareProgress], None] | None = None,
) -> ShareOutcome:
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
        ),
        observer=observer,
    )


def losses_alone(plan: Plan, *, steps: int, **settings: Any) -> list[float]:
    """What the job's worker has without company; in this process, as another takes longer to start than to train."""
    job, found = load_job(JOBS, settings), []
    with alone_in_a_group() as control:
        seat = Seat(device=0, on=torch.device("cpu"), backend="gloo", control=control, doing=Silent())
        executor, loader = set_up(job, plan, lower(plan, trace_job(job).graph), RunOptions(), seat)
        for step in range(steps):
            loss = executor.run(step, loader.load())
            assert loss is not None
            found.append(loss.item())
    return found


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.001)
