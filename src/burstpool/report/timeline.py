"""The Timeline artifact: what each device did, or would do, and when.

The simulator and the executor both make these, so that predicted and measured are the same thing twice.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError

Lane = Literal["compute", "communication", "background"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One action on one device, from start to stop."""

    __pydantic_config__ = STRICT

    device: int
    lane: Lane
    """Communication runs beside compute; background is another job's work."""
    kind: str
    """The action's kind: `forward`, `reduce`, …"""
    block: str
    start_s: float
    """Since the timeline began."""
    stop_s: float
    minibatch: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(Artifact):
    """Events of some steps on all devices."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    source: Literal["predicted", "measured"]
    num_devices: int
    step_time_s: float
    """In steady state."""
    events: tuple[Event, ...]
    """In order of their start."""

    def busy_s(self, device: int) -> float:
        """Seconds in which the device computes for the foreground."""
        return sum(e.stop_s - e.start_s for e in self.events if e.device == device and e.lane == "compute")
