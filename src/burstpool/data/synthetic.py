"""Synthetic data: samples of any shape, made when they are asked for.

Sample `i` is a function of `(seed, i)` alone, so it is the same in every process and needs no storage. Takes
a description of the input and of the target. The values are noise: a model can learn them by heart, nothing
more; use it to measure speed and memory, not accuracy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from burstpool.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Floats:
    """A float32 tensor of standard normal values."""

    shape: tuple[int, ...]
    """Shape of one sample, without the batch dimension."""

    def __post_init__(self) -> None:
        _check_shape(self.shape)

    def draw(self, random: np.random.Generator) -> Tensor:
        """The next tensor of this stream of random numbers."""
        return torch.from_numpy(np.asarray(random.standard_normal(self.shape, dtype=np.float32)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """An int64 tensor of values from 0 to `count - 1`: tokens, or with no shape one class."""

    count: int
    """Size of the vocabulary, or number of classes."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, without the batch dimension."""

    def __post_init__(self) -> None:
        _check_shape(self.shape)
        if self.count < 1:
            raise JobError(f"count={self.count} leaves no value to draw; pass count>=1")

    def draw(self, random: np.random.Generator) -> Tensor:
        """The next tensor of this stream of random numbers."""
        return torch.from_numpy(np.asarray(random.integers(self.count, size=self.shape)))


Field = Floats | Integers
Structure = Field | tuple[Field, ...] | dict[str, Field]
"""What a model takes: one tensor, several by position, or several by name."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Synthetic(Dataset[tuple[Any, Any]]):
    """`num_samples` samples; deterministic, thread-safe, picklable."""

    inputs: Structure
    """The model's input."""
    target: Structure
    """What the loss compares the output with."""
    num_samples: int = 65_536
    """Length of the data set; samples past it are an IndexError."""
    seed: int = 0
    """Different seeds give different samples."""

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.seed < 0:
            raise JobError(f"num_samples={self.num_samples}, seed={self.seed}: pass num_samples>=1 and seed>=0")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        random = generator(self.seed, index % self.num_samples)
        return _draw(self.inputs, random), _draw(self.target, random)

    def __repr__(self) -> str:
        return f"Synthetic({self.inputs} → {self.target}, num_samples={self.num_samples}, seed={self.seed})"


def generator(seed: int, index: int) -> np.random.Generator:
    """The random numbers of one sample; the same for the same NumPy release, whatever the machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, index))))


def _draw(structure: Structure, random: np.random.Generator) -> Any:
    if isinstance(structure, tuple):
        return tuple(field.draw(random) for field in structure)
    if isinstance(structure, dict):
        return {name: field.draw(random) for name, field in structure.items()}
    return structure.draw(random)


def _check_shape(shape: tuple[int, ...]) -> None:
    if any(size < 1 for size in shape):
        raise JobError(f"shape={shape} has an empty dimension; every size must be at least 1")
