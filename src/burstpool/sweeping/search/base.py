"""What a search is: it says which trial to train next, and for how long.

A search is a pure function of the trials so far. It holds no state and draws its random numbers from its seed and the
number of the trial, so a sweep that was cut off goes on as if it never had been.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from burstpool.run.folder import Setting
from burstpool.sweeping.space import Space
from burstpool.sweeping.trials import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A trial to train until a step: a new one, or one that is paused."""

    trial: int
    """Its number; a new one has the number of trials so far."""
    settings: Mapping[str, Setting]
    until: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSetting:
    """What every search needs to know."""

    space: Space
    num_trials: int
    """How many different trials at most."""
    steps: int
    """Of a trial that is trained to its end."""
    seed: int = 0
    eta: int = 3
    """With asha: one in so many goes on at each rung."""
    first_rung: int | None = None
    """With asha: steps of the shortest trials; None for at most three below the last one."""


class Search(Protocol):
    """Which trial next. Pure and deterministic; never called for more than `num_trials` trials' worth of starts."""

    def next(self, trials: Sequence[Trial]) -> Assignment | None:
        """What to train next, given all trials so far; None where there is nothing, perhaps until more is known."""
        ...
