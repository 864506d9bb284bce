"""Loading: the samples that one device needs, as values of the graph and targets.

A device loads what the blocks it runs take from the model's inputs and, where it runs the last block, the targets;
nothing travels. Samples are `job.data[i]`, put together by torch's default collate function. Data that draws random
numbers (augmentation) is seeded by (seed, epoch, index), so that a sample is the same on whatever device, plan or
resumed run it is loaded.
"""

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from burstpool.job import Job, model_arguments
from burstpool.model.graph import LayerGraph
from burstpool.model.traced import TracedModel
from burstpool.plan.plan import Plan
from burstpool.run.order import DataOrder, Position
from burstpool.run.seeds import mix

_PROBED_SAMPLES = 3
"""Samples that are loaded once to see whether loading draws random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Consecutive samples of a minibatch."""

    start: int
    stop: int
    """One past the last."""
    values: Mapping[str, torch.Tensor]
    """The model's inputs, by their names in the graph."""
    target: Any
    """What the loss compares the output with."""

    def target_of(self, start: int, stop: int) -> Any:
        """The targets of some of these samples."""
        if (start, stop) == (self.start, self.stop):
            return self.target
        first, last = start - self.start, stop - self.start
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[first:last], self.target)


class Batch(NamedTuple):
    """Consecutive samples of a minibatch as the job gives them, on the CPU."""

    start: int
    stop: int
    inputs: Any
    target: Any


def needed_ranges(plan: Plan, graph: LayerGraph, device: int) -> tuple[tuple[int, int], ...]:
    """The samples of a minibatch that a device must load, in order, joined where they touch."""
    inputs = {value.name for value in graph.inputs}
    takes = {layer.name for layer in graph.layers if inputs & set(layer.inputs)}
    loading = [block for block in plan.blocks if block is plan.blocks[-1] or takes & set(block.layers)]
    shares = [(share.start, share.stop) for block in loading for share in block.shares if share.device == device]
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(shares):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return tuple(joined)


class Samples:
    """A job's samples, put together to batches; the same whoever loads them and when."""

    def __init__(self, job: Job, *, seeded: bool | None = None) -> None:
        self._job = job
        self._seeded = _draws_random_numbers(job) if seeded is None else seeded

    def collated(self, indices: Sequence[int], epoch: int) -> tuple[Any, Any]:
        """`(input, target)` of these samples."""
        inputs, target = default_collate(list(self._each(indices, epoch)))
        return inputs, target

    def _each(self, indices: Sequence[int], epoch: int) -> Iterable[Any]:
        if not self._seeded:
            return (self._job.data[index] for index in indices)
        return (self._seeded_sample(index, mix(self._job.seed, "data", epoch, index)) for index in indices)

    def _seeded_sample(self, index: int, seed: int) -> Any:
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return self._job.data[index]


class Batches:
    """Samples put together on the CPU, one step after the other, from any position on. Needs no model."""

    def __init__(self, job: Job, ranges: Sequence[tuple[int, int]], *, batch: int, num_minibatches: int = 1) -> None:
        """`ranges`: (start, stop) of the samples of each minibatch that are wanted."""
        self._job, self._ranges, self._batch, self._num_minibatches = job, ranges, batch, num_minibatches
        self._order = self._order_from(Position())
        self._samples = Samples(job, seeded=None if ranges else False)

    @property
    def position(self) -> Position:
        """Where the next step begins."""
        return self._order.position

    def start_at(self, position: Position) -> None:
        """Goes on from a position of an earlier run."""
        self._order = self._order_from(position)

    def load(self) -> list[list[Batch]]:
        """The next step: for each minibatch, the wanted ranges."""
        indices = self._order.take()
        epoch = self._order.position.epoch
        return [
            [self._load(indices[first + start : first + stop].tolist(), epoch, start) for start, stop in self._ranges]
            for first in range(0, self._batch * self._num_minibatches, self._batch)
        ]

    def skip(self) -> None:
        """Passes over the next step."""
        self._order.take()

    def _load(self, indices: Sequence[int], epoch: int, start: int) -> Batch:
        inputs, target = self._samples.collated(indices, epoch)
        return Batch(start, start + len(indices), inputs, target)

    def _order_from(self, position: Position) -> DataOrder:
        return DataOrder(
            len(self._job.data),  # type: ignore[arg-type]
            samples_per_step=self._batch * self._num_minibatches,
            seed=self._job.seed,
            position=position,
        )


class Loader:
    """Loads what one device needs of one step after the other, onto the device."""

    def __init__(self, job: Job, traced: TracedModel, plan: Plan, *, device: int, on: torch.device) -> None:
        self._traced, self._on = traced, on
        ranges = needed_ranges(plan, traced.graph, device)
        self._batches = Batches(job, ranges, batch=plan.batch, num_minibatches=plan.num_minibatches)
        self._checked: set[int] = set()

    @property
    def position(self) -> Position:
        """Where the next step begins."""
        return self._batches.position

    def start_at(self, position: Position) -> None:
        """Goes on from a position of an earlier run."""
        self._batches.start_at(position)

    def load(self) -> list[list[Loaded]]:
        """The next step: for each minibatch, what this device needs of it."""
        return self.move(self.name(self._batches.load()))

    def name(self, batches: Sequence[Sequence[Batch]]) -> list[list[Loaded]]:
        """Samples as the executor takes them, where they are."""
        return [
            [
                Loaded(
                    start=batch.start,
                    stop=batch.stop,
                    values=self._values(batch.inputs, batch.stop - batch.start),
                    target=batch.target,
                )
                for batch in minibatch
            ]
            for minibatch in batches
        ]

    def move(self, loaded: list[list[Loaded]]) -> list[list[Loaded]]:
        """The same on the device."""
        if self._on.type == "cpu":
            return loaded
        return [
            [dataclasses.replace(x, values=self._moved(x.values), target=self._moved(x.target)) for x in minibatch]
            for minibatch in loaded
        ]

    def _values(self, inputs: Any, num_samples: int) -> dict[str, torch.Tensor]:
        """The model's inputs by name; structure and batch are checked once for each number of samples."""
        names = self._traced.graph.inputs
        if num_samples in self._checked and isinstance(inputs, torch.Tensor) and len(names) == 1:
            return {names[0].name: inputs}
        args, kwargs = model_arguments(inputs)
        values = self._traced.input_values(*args, **kwargs)
        self._checked.add(num_samples)
        return values

    def _moved(self, tree: Any) -> Any:
        # Pinned, so that the copy runs beside what the device computes.
        return pytree.tree_map_only(
            torch.Tensor,
            lambda x: (x if x.is_pinned() else x.pin_memory()).to(self._on, non_blocking=True),
            tree,
        )


def _draws_random_numbers(job: Job) -> bool:
    """Whether loading a sample moves any of the global random streams."""
    before = _random_state()
    for index in range(min(_PROBED_SAMPLES, len(job.data))):  # type: ignore[arg-type]
        job.data[index]
    return _random_state() != before


def _random_state() -> tuple[bytes, object, bytes, int]:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy_state[1].tobytes(), numpy_state[2]
