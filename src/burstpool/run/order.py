"""Data order: which samples each step takes.

Every epoch is a permutation of the data that follows from (seed, epoch). Steps take consecutive samples of it; what is
left at its end and does not fill a step is dropped, as `DataLoader(drop_last=True)` does. A position can be written
down and taken up again at any step, also with another batch.
"""

from dataclasses import dataclass

import numpy as np

from burstpool.artifact import STRICT
from burstpool.errors import JobError

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a run has read."""

    __pydantic_config__ = STRICT

    epoch: int = 0
    sample: int = 0
    """Samples of the epoch that are used up."""


def position_at(step: int, num_samples: int, *, samples_per_step: int) -> Position:
    """Where the data stands after so many steps of one size."""
    check_enough(num_samples, samples_per_step=samples_per_step)
    epoch, steps = divmod(step, num_samples // samples_per_step)
    return Position(epoch=epoch, sample=steps * samples_per_step)


def check_enough(num_samples: int, *, samples_per_step: int) -> None:
    """Refuses data that does not fill one step."""
    if num_samples < samples_per_step:
        raise JobError(f"a step takes {samples_per_step} samples and the data has {num_samples}; pass a smaller batch")


class DataOrder:
    """The samples of each step, one after the other. Deterministic; holds one permutation."""

    def __init__(self, num_samples: int, *, samples_per_step: int, seed: int, position: Position | None = None) -> None:
        check_enough(num_samples, samples_per_step=samples_per_step)
        self._num_samples, self._samples_per_step, self._seed = num_samples, samples_per_step, seed
        self.position = position or Position()
        """Where the next step begins."""
        self._permutation: tuple[int, Indices] | None = None

    def take(self) -> Indices:
        """The indices of the next step's samples."""
        epoch, sample = self.position.epoch, self.position.sample
        if sample + self._samples_per_step > self._num_samples:
            epoch, sample = epoch + 1, 0
        self.position = Position(epoch=epoch, sample=sample + self._samples_per_step)
        return self._of_epoch(epoch)[sample : sample + self._samples_per_step]

    def _of_epoch(self, epoch: int) -> Indices:
        if self._permutation is None or self._permutation[0] != epoch:
            random = np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, epoch))))
            self._permutation = epoch, random.permutation(self._num_samples)
        return self._permutation[1]
