"""All planners by name. A new strategy adds a file and a line here."""

from burstpool.errors import PlanError
from burstpool.plan import burst, data
from burstpool.plan.base import Planner

STRATEGIES: dict[str, Planner] = {
    "data": data.plan,
    "burst": burst.plan,
}
"""What `--strategy` may say."""


def planner(strategy: str) -> Planner:
    """The planner of that name."""
    if strategy not in STRATEGIES:
        raise PlanError(f"there is no strategy {strategy!r}; give {' or '.join(STRATEGIES)}")
    return STRATEGIES[strategy]
