"""Grid search: every combination of the values, in order, each to its end."""

from collections.abc import Sequence

from burstpool.sweeping.search.base import Assignment, SearchSetting
from burstpool.sweeping.trials import Trial


class Grid:
    """The baseline."""

    def __init__(self, setting: SearchSetting) -> None:
        self._setting = setting
        setting.space.grid(0)  # refuses ranges

    def next(self, trials: Sequence[Trial]) -> Assignment | None:
        """The next combination."""
        number = len(trials)
        if number >= self._setting.num_trials:
            return None
        return Assignment(trial=number, settings=self._setting.space.grid(number), until=self._setting.steps)
