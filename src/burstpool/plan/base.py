"""What every planner is: a function of artifacts that returns a Plan."""

from typing import Protocol

from burstpool.cluster.spec import ClusterSpec
from burstpool.model.graph import LayerGraph
from burstpool.plan.cost import Profiles
from burstpool.plan.plan import Plan


class Planner(Protocol):
    """Pure and deterministic: no I/O, no clock, no torch. Options of its own have defaults."""

    def __call__(
        self,
        profiles: Profiles,
        cluster: ClusterSpec,
        *,
        batch: int,
        graph: LayerGraph | None = None,
        extrapolate: bool = False,
    ) -> Plan:
        """Plans one step of `batch` samples over the cluster.

        `graph` tells more of the model than profiles do: which values cross between layers, which parameters are
        shared. The plan comes with `step_time_s` and `device_seconds` as the simulator predicts them.
        """
        ...
