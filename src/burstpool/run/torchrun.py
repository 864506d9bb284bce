"""Under torchrun: the same workers, started and watched by somebody else.

Takes a run folder; its newest checkpoint, if there is one, is gone on from. SIGINT and SIGTERM let all workers write a
checkpoint and end. Losses and the timeline are written by rank 0 at the end.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burstpool.engine.base import Place
from burstpool.errors import BurstpoolError, RunError
from burstpool.job import from_record
from burstpool.plan.plan import Plan
from burstpool.run.checkpoint import CheckpointState, latest_checkpoint
from burstpool.run.folder import RunFolder, RunRecord, held
from burstpool.run.options import RunOptions
from burstpool.run.outcome import write_outcome
from burstpool.run.progress import RunLog
from burstpool.run.worker import JobSource, Task, idle_ranks, joined, train_at
from burstpool.schedule.actions import Schedule


class Silent:
    """Nobody watches."""

    def begin_step(self, step: int) -> None:
        """Nothing."""

    def say(self, phrase: bytes) -> None:
        """Nothing."""


def main() -> None:
    """What `python -m burstpool.run.worker RUN_FOLDER` runs; mistakes end in one line and exit status 2."""
    try:
        if len(sys.argv) != 2 or "RANK" not in os.environ:
            raise RunError("start it as: torchrun --nproc-per-node N -m burstpool.run.worker RUN_FOLDER")
        run(RunFolder.open(Path(sys.argv[1])))
    except BurstpoolError as error:
        sys.stderr.write(f"burstpool: error: {' '.join(str(error).split())}\n")
        sys.exit(2)


def run(folder: RunFolder) -> None:
    """One worker's part of the run in the folder."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    task, first_step = _task(folder)
    reports: list[Any] = []
    place = _place(task.plan, reports)
    holding = held(folder.path) if place.rank == 0 else contextlib.nullcontext()
    with holding, joined(place, task.options, idle=idle_ranks(task)) as seat:
        own = (reports, train_at(seat, place, task))
        gathered: list[Any] | None = [None] * place.num_workers if place.rank == 0 else None
        dist.gather_object(own, gathered, dst=0, group=seat.control)
    if gathered is None:
        return
    folder.cut_losses(first_step)
    log = RunLog(task.plan, steps=task.steps, first_step=first_step)
    for rank, (reported, _) in enumerate(gathered):
        for report in reported:
            folder.add_losses(log.add(rank, report))
    write_outcome(folder, task.schedule, log.losses, [result for _, result in gathered])


def _task(folder: RunFolder) -> tuple[Task, int]:
    record = RunRecord.load(folder.record)
    if not record.source:
        raise RunError(f"{folder.path} holds a job that was made in a program; torchrun needs one from a file")
    checkpoint = latest_checkpoint(folder.checkpoints)
    task = Task(
        job=JobSource(source=record.source, settings=from_record(record.source, record.settings)),
        plan=Plan.load(folder.plan),
        schedule=Schedule.load(folder.schedule),
        options=RunOptions.load(folder.options),
        steps=record.steps,
        checkpoints=str(folder.checkpoints),
        resume_from=None if checkpoint is None else str(checkpoint),
    )
    return task, 0 if checkpoint is None else CheckpointState.load(checkpoint / "state.json").step


def _place(plan: Plan, reports: list[Any]) -> Place:
    num_workers = int(os.environ["WORLD_SIZE"])
    if num_workers != plan.num_devices:
        raise RunError(f"the plan is for {plan.num_devices} devices, torchrun started {num_workers} workers")
    asked = False

    def ask(*_: Any) -> None:
        nonlocal asked
        asked = True

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, ask)
    return Place(
        rank=int(os.environ["RANK"]),
        num_workers=num_workers,
        host=os.environ.get("MASTER_ADDR", ""),
        port=0,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        num_local=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        doing=Silent(),
        report=reports.append,
        stop_asked=lambda: asked,
    )
