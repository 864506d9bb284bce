"""Asynchronous successive halving: all trials train a little, the best of them go on.

Rungs are steps at which trials report and pause: the last one, and those at 1/η, 1/η² … of it; or, where the first is
given, that one and η, η² … times it. Whenever a place is
free, the best paused trial that is among the first 1/η of its rung is promoted to the next rung, from the highest rung
down; where there is none, a new trial starts. Nobody waits for a rung to fill (Li et al., "A System for Massively
Parallel Hyperparameter Tuning", MLSys'20, algorithm 2). A promoted trial goes on from where it stopped.
"""

import logging
import math
from collections.abc import Sequence

from burstpool.errors import RunError
from burstpool.sweeping.search.base import Assignment, SearchSetting
from burstpool.sweeping.trials import Trial

_LOG = logging.getLogger(__name__)
_MOST_RUNGS = 4
"""Where the first rung is not given."""


class Asha:
    """Random draws, most of which stop early."""

    def __init__(self, setting: SearchSetting) -> None:
        self._setting = setting
        self.rungs = rungs(setting.steps, eta=setting.eta, first=setting.first_rung, num_trials=setting.num_trials)
        """Steps, rising; the last is that of a whole trial."""
        if len(self.rungs) == 1:
            _LOG.warning("asha has no rung before step %d: every trial is trained to its end", setting.steps)

    def next(self, trials: Sequence[Trial]) -> Assignment | None:
        """A promotion if there is one, else a new trial."""
        for rung, above in reversed(list(zip(self.rungs, self.rungs[1:], strict=False))):
            promoted = self._promotable(trials, rung)
            if promoted is not None:
                return Assignment(trial=promoted.number, settings=promoted.settings, until=above)
        number = len(trials)
        if number >= self._setting.num_trials:
            return None
        settings = self._setting.space.draw(number, seed=self._setting.seed)
        return Assignment(trial=number, settings=settings, until=self.rungs[0])

    def _promotable(self, trials: Sequence[Trial], rung: int) -> Trial | None:
        """The best of the first 1/η of a rung that has not gone on yet; a trial that failed counts as the worst."""
        values = {trial.number: math.inf for trial in trials if trial.state == "failed" and trial.until == rung}
        values |= {trial.number: report.value for trial in trials for report in trial.reports if report.step == rung}
        ranked = sorted(values, key=lambda number: (values[number], number))
        top = (trials[number] for number in ranked[: len(ranked) // self._setting.eta])
        return next((trial for trial in top if trial.state == "paused" and trial.until == rung), None)


def rungs(steps: int, *, eta: int, first: int | None, num_trials: int) -> tuple[int, ...]:
    """The steps at which trials pause, rising; the last is `steps`.

    Unless the first is given there are at most four, and no more than let one of `num_trials` come to the last.
    """
    if eta < 2:
        raise RunError(f"--eta {eta} must be at least 2: one in so many trials goes on")
    if first is not None and not 1 <= first <= steps:
        raise RunError(f"--first-rung {first} must be from 1 to the number of steps, {steps}")
    if first is not None:
        rising = [first]
        while rising[-1] * eta < steps:
            rising.append(rising[-1] * eta)
        return (*rising, steps) if first < steps else (steps,)
    found = [steps]
    while found[0] // eta >= 1 and len(found) < _MOST_RUNGS and eta ** len(found) <= num_trials:
        found.insert(0, found[0] // eta)
    return tuple(found)
