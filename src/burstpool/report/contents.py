"""What a report is made from, in the report's own words.

Timelines are read elsewhere too, so `report` lies below plans, profiles and runs and imports none of them: whoever
asks for a report (`cli/report.py`) copies out of those what is to be shown. Every part may be missing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from burstpool.errors import ArtifactError
from burstpool.report.sweep_contents import TrialCurve
from burstpool.report.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWork:
    """A block of the plan."""

    name: str
    num_layers: int
    devices: tuple[int, ...]
    samples: tuple[int, ...]
    """Of a minibatch, by device, in the order of `devices`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """A layer of the profile, at the batch that `Contents.layers_title` names."""

    name: str
    kind: str
    """Its operators."""
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Both ways."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step that was run."""

    step: int
    loss: float
    """May be NaN."""
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundJob:
    """A job that trained in what this one left."""

    name: str
    device: int
    steps: int
    """Trained beside it."""
    kept: float | None
    """Its speed then over its speed alone."""
    state: str
    reason: str
    """Why it failed or left."""
    members: tuple[TrialCurve, ...]
    """Of an array; a single job is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that one report shows."""

    model: str
    strategy: str = ""
    """The planner; "" where no plan is known."""
    num_devices: int = 0
    """Of the cluster."""
    samples_per_step: int | None = None
    """Over all devices and minibatches."""
    predicted_step_s: float | None = None
    """By the planner; a predicted timeline knows better."""
    predicted: Timeline | None = None
    measured: Timeline | None = None
    blocks: tuple[PlannedWork, ...] = ()
    """In the model's order."""
    layers: tuple[LayerTime, ...] = ()
    """In the model's order."""
    layers_title: str = ""
    """What was measured: `vgg16 on A100, batch 64`."""
    trained: tuple[TrainedStep, ...] = ()
    """In the order of steps."""
    backgrounds: tuple[BackgroundJob, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    """More to know, as name → text: hyper-parameters, versions."""
    notes: tuple[str, ...] = ()
    """What a reader should be warned of."""
    made_by: str = "Burstpool"
    """With its version, if that is known."""

    def __post_init__(self) -> None:
        for source, timeline in (("predicted", self.predicted), ("measured", self.measured)):
            if timeline is not None and timeline.source != source:
                raise ArtifactError(f"the timeline given as {source} is {timeline.source}; give it as that")

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Those there are, the predicted one first."""
        return tuple(timeline for timeline in (self.predicted, self.measured) if timeline is not None)
