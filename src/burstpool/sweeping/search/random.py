"""Random search: settings drawn from the space, each to its end; of values alone none is drawn twice."""

from collections.abc import Sequence

from burstpool.sweeping.search.base import Assignment, SearchSetting
from burstpool.sweeping.trials import Trial


class Random:
    """Draws by (seed, number)."""

    def __init__(self, setting: SearchSetting) -> None:
        self._setting = setting

    def next(self, trials: Sequence[Trial]) -> Assignment | None:
        """The next draw."""
        number = len(trials)
        if number >= self._setting.num_trials:
            return None
        settings = self._setting.space.draw(number, seed=self._setting.seed)
        return Assignment(trial=number, settings=settings, until=self._setting.steps)
