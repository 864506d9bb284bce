"""Searches by name, one a file; each takes a SearchSetting."""

from collections.abc import Callable

from burstpool.errors import RunError
from burstpool.limits import MOST_TRIALS
from burstpool.sweeping.search.asha import Asha
from burstpool.sweeping.search.base import Assignment, Search, SearchSetting
from burstpool.sweeping.search.grid import Grid
from burstpool.sweeping.search.optuna import Optuna
from burstpool.sweeping.search.random import Random
from burstpool.sweeping.space import Space

SEARCHES: dict[str, Callable[[SearchSetting], Search]] = {
    "grid": Grid,
    "random": Random,
    "asha": Asha,
    "optuna": Optuna,
}


def make_search(name: str, setting: SearchSetting) -> Search:
    """The search with this name."""
    if name not in SEARCHES:
        raise RunError(f"--search {name} is unknown; give one of {', '.join(SEARCHES)}")
    return SEARCHES[name](setting)


def number_of_trials(search: str, space: Space, asked: int | None) -> int:
    """How many trials there will be: as many as asked for, but no settings twice where they can be counted."""
    if asked is not None and asked < 1:
        raise RunError(f"--trials {asked} must be at least 1")
    if space.size is None:
        if asked is None and search != "grid":
            raise RunError("a space with ranges has no end; say how many trials: --trials 64")
        return _checked(asked or 1)
    return _checked(space.size if asked is None else asked if search == "optuna" else min(asked, space.size))


def _checked(count: int) -> int:
    if count > MOST_TRIALS:
        raise RunError(f"{count} trials are more than a sweep can write down; give --trials {MOST_TRIALS} or fewer")
    return count


__all__ = ["SEARCHES", "Assignment", "Search", "SearchSetting", "make_search", "number_of_trials"]
