"""The feed: each member's own batches, loaded once for all members that are at the same place in the same data.

A trial's data order is that of `burstpool train`: it follows from its seed and its step alone (`run/order.py`). Trials
that started together share every batch; one that joined later has its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from burstpool.errors import JobError
from burstpool.job import Job
from burstpool.run.loading import Samples
from burstpool.run.order import DataOrder, position_at


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step of an array takes."""

    inputs: Any
    """One batch for all, or a list with one a member."""
    target: Any
    per_member: bool


class Feed:
    """Batches for the members of one array, from their present steps on."""

    def __init__(self, jobs: Sequence[Job], steps: Sequence[int], *, batch: int | None, device: torch.device) -> None:
        self._device = device
        keys = [(id(job.data), job.seed, step) for job, step in zip(jobs, steps, strict=True)]
        self._lines = {
            key: _Line(job, step, batch or job.batch) for key, job, step in zip(keys, jobs, steps, strict=True)
        }
        self._keys = keys

    def take(self) -> Batch:
        """The next step's samples, on the device."""
        loaded = {key: moved(line.take(), self._device) for key, line in self._lines.items()}
        if len(loaded) == 1:
            inputs, target = loaded[self._keys[0]]
            return Batch(inputs, target, per_member=False)
        rows = [loaded[key] for key in self._keys]
        return Batch([inputs for inputs, _ in rows], [target for _, target in rows], per_member=True)


class _Line:
    """One way through the data."""

    def __init__(self, job: Job, step: int, batch: int) -> None:
        num_samples = number_of_samples(job.data, job)
        position = position_at(step, num_samples, samples_per_step=batch)
        self._order = DataOrder(num_samples, samples_per_step=batch, seed=job.seed, position=position)
        self._samples = Samples(job)

    def take(self) -> tuple[Any, Any]:
        indices = self._order.take()
        return self._samples.collated(indices.tolist(), self._order.position.epoch)


def number_of_samples(data: Any, job: Job, *, what: str = "data") -> int:
    """How many there are; refuses data without a length."""
    try:
        return len(data)
    except TypeError:
        raise JobError(f"the {what} of job {job.name!r} has no length; pass a map-style Dataset") from None


def moved(tree: Any, device: torch.device) -> Any:
    """The same tensors on a device."""
    if device.type == "cpu":
        return tree
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), tree)
