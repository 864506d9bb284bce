"""Optuna's sampler asks, the sweep tells: needs `pip install burstpool[optuna]`.

Each question is put to a fresh in-memory study that is told all trials so far, those that still train included, and
whose sampler is seeded by the number of the trial: so the answer depends on the trials alone. Trials are trained to
their end. Ignores Optuna's storages and pruners; stopping early is what `asha` is for.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from burstpool.errors import RunError
from burstpool.sweeping.search.base import Assignment, SearchSetting
from burstpool.sweeping.space import Range, Values
from burstpool.sweeping.trials import Trial


class Optuna:
    """The tree-structured Parzen estimator."""

    def __init__(self, setting: SearchSetting) -> None:
        try:
            self._optuna: Any = importlib.import_module("optuna")
        except ImportError:
            raise RunError("--search optuna needs Optuna; install it: pip install 'burstpool[optuna]'") from None
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._setting = setting
        self._distributions = {name: self._distribution(axis) for name, axis in setting.space.axes.items()}

    def next(self, trials: Sequence[Trial]) -> Assignment | None:
        """What the sampler asks for, given the objectives so far."""
        number = len(trials)
        if number >= self._setting.num_trials:
            return None
        # Members of an array are asked for together: the liar keeps them apart.
        seed = (self._setting.seed * 100_003 + number) % 2**32  # NumPy takes no more
        sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = self._optuna.create_study(sampler=sampler)
        for trial in trials:
            study.add_trial(self._told(trial))
        params = study.ask(self._distributions).params
        settings = {name: params[name] for name in self._setting.space.axes}
        return Assignment(trial=number, settings=settings, until=self._setting.steps)

    def _told(self, trial: Trial) -> Any:
        states = self._optuna.trial.TrialState
        state = {"done": states.COMPLETE, "failed": states.FAIL}.get(trial.state, states.RUNNING)
        value = trial.value if state == states.COMPLETE else None
        return self._optuna.trial.create_trial(
            state=state, value=value, params=dict(trial.settings), distributions=self._distributions
        )

    def _distribution(self, axis: Values | Range) -> Any:
        made = self._optuna.distributions
        if isinstance(axis, Values):
            return made.CategoricalDistribution(axis.values)
        log = axis.kind.startswith("log")
        if axis.whole:
            return made.IntDistribution(int(axis.low), int(axis.high), log=log)
        return made.FloatDistribution(axis.low, axis.high, log=log)
