"""A fused array as a background job: several settings of one job trained as one, slice by slice.

What a worker process runs, as `run/worker.py` is for a single job. Each member gets the batches that `run` would give
it alone; those whose data and seeds agree share them. Forward, backward and change of an array are one slice each.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from burstpool.engine.base import Place, phrase
from burstpool.errors import RunError
from burstpool.fusion.array import FusedArray
from burstpool.fusion.jobs import attach
from burstpool.job import Job, load_jobs
from burstpool.run.known_data import KnownData
from burstpool.run.loading import Batches
from burstpool.share.array_file import load_array, save_array

_FORWARD, _BACKWARD, _STEP = (
    phrase("forward of the array"),
    phrase("backward of the array"),
    phrase("step of the array"),
)
_LOADING, _SAVING = phrase("loading samples"), phrase("writing a checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTask:
    """What the worker of an array is told; picklable."""

    source: str
    settings: tuple[Mapping[str, Any], ...]
    """One for each member."""
    steps: int
    checkpoint: str
    """A file; gone on from where it is there."""
    checkpoint_every: int
    autocast: bool = False
    """Whether matrix products are taken in bf16."""
    device: Literal["cpu", "cuda"] = "cpu"
    """On CUDA, the GPU of the worker's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedReport:
    """One step of an array."""

    step: int
    losses: tuple[float, ...]
    """One a member."""


def fused_work(place: Place, task: FusedTask) -> int:
    """Trains the array; returns how many steps it has come."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    place.doing.say(phrase("fusing the array"))
    jobs = load_jobs(task.source, task.settings)
    torch.manual_seed(jobs[0].seed)
    if task.device == "cuda":
        device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        array = _array_on(jobs, device)
    else:
        array = FusedArray.from_job(task.source, jobs)
    training = _Training(array, jobs, task)
    while training.step < task.steps and not place.stop_asked():
        place.doing.begin_step(training.step)
        losses = training.run(place)
        place.report(FusedReport(step=training.step - 1, losses=losses))
        if training.step % task.checkpoint_every == 0:
            place.doing.say(_SAVING)
            training.save()
    if training.saved_step != training.step:
        place.doing.say(_SAVING)
        training.save()
    return training.step


def _array_on(jobs: Sequence[Job], device: torch.device) -> FusedArray:
    """The array on a GPU."""
    example, _ = jobs[0].samples(jobs[0].batch)
    models = [job.build_model().to(device) for job in jobs]
    array = FusedArray(models, _moved(example, device), seeds=[job.seed for job in jobs])
    attach(array, jobs)
    return array


def _moved(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)


class _Training:
    """An array, its data and how far it has come."""

    def __init__(self, array: FusedArray, jobs: Sequence[Job], task: FusedTask) -> None:
        self.array, self.loss, self.path, self.autocast = array, jobs[0].loss, Path(task.checkpoint), task.autocast
        self.step = 0
        self.saved_step: int | None = None
        saved = load_array(self.path) if self.path.exists() else None
        known = KnownData()
        jobs = [known.shared(job) for job in jobs]
        self._lines = [(id(job.data), job.seed) for job in jobs]
        """Which batches are each member's."""
        self._batches = {
            line: Batches(job, [(0, job.batch)], batch=job.batch) for line, job in zip(self._lines, jobs, strict=True)
        }
        if saved is not None:
            for line, position in zip(self._lines, saved.positions, strict=True):
                self._batches[line].start_at(position)
            array.load_state_dict(saved.array)
            self.step = self.saved_step = saved.step

    def run(self, place: Place) -> tuple[float, ...]:
        """One step; returns the members' losses."""
        say, array, optimizer = place.doing.say, self.array, self.array.optimizers[0]
        say(_LOADING)
        inputs, targets, shared = self._batch()
        if array.device.type != "cpu":
            inputs, targets = _moved((inputs, targets), array.device)
        optimizer.zero_grad()
        say(_FORWARD)
        with torch.autocast(array.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            losses = array.losses(inputs, self.loss, targets, per_member=not shared)
        say(_BACKWARD)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        say(_STEP)
        optimizer.step()
        for schedule in array.schedulers:
            schedule.step()
        self.step += 1
        if len(array.stopped()) == len(array):
            raise RunError(f"no member's loss is a finite number after step {self.step - 1}")
        return tuple(losses.tolist())

    def save(self) -> None:
        """Writes the checkpoint."""
        positions = [self._batches[line].position for line in self._lines]
        save_array(self.array, self.path, step=self.step, positions=positions)
        self.saved_step = self.step

    def _batch(self) -> tuple[Any, Any, bool]:
        """Inputs and targets of the next step: one batch if all members share it, else one for each."""
        loaded = {line: batches.load()[0][0] for line, batches in self._batches.items()}
        each = [loaded[line] for line in self._lines]
        if len(loaded) == 1:
            return each[0].inputs, each[0].target, True
        return [batch.inputs for batch in each], [batch.target for batch in each], False
