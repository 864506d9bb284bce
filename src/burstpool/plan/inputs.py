"""The PlanInputs artifact: what a plan was made from, so that a plan file can be simulated without naming it again."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from burstpool.artifact import STRICT, Artifact
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import ArtifactError, PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import Dataflow, dataflow
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs(Artifact):
    """Everything a planner was given."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = PlanError

    schema_version: int = 1
    cluster: ClusterSpec
    profiles: tuple[Profile, ...]
    """One a device type."""
    graph: LayerGraph | None = None
    """The traced model, where the plan was made from a job."""
    extrapolate: bool = False
    """Whether times beyond the measured batches were guessed."""

    def cost(self) -> CostModel:
        """The cost model the plan was made with."""
        return CostModel(self.profiles, self.cluster, extrapolate=self.extrapolate)

    def dataflow(self, plan: Plan) -> Dataflow:
        """The plan's blocks, joined with what the model tells of them."""
        return dataflow(plan, self.graph or self.profiles[0])

    @staticmethod
    def path(plan_file: Path) -> Path:
        """Where they lie: `plan.inputs.json` beside `plan.json`."""
        return plan_file.with_name(f"{plan_file.stem}.inputs.json")
