"""The Timeline artifact: what each device did, or would do, and when.

The simulator and the executor both make these, so that predicted and measured are the same thing twice. What an event
spans, in both:

    forward, backward     compute        while the device runs them; the loss is part of the last block's
    step                  compute        while it changes parameters; not while it waits for the reduction
    send, receive         communication  from the first byte on the link until the receiver has the last
    reduce                communication  from when all members have started it until it has ended
    whole step            compute        all of a step that a GPU replays as one graph; its block is the job
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError

Lane = Literal["compute", "communication", "background"]
WHOLE_STEP = "whole step"
"""The kind of an event that is a step in one piece; it has no block of a plan."""


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

    @property
    def start_s(self) -> float:
        """When the first event began."""
        return min((event.start_s for event in self.events), default=0.0)

    @property
    def stop_s(self) -> float:
        """When the last event ended."""
        return max((event.stop_s for event in self.events), default=0.0)

    @property
    def num_steps(self) -> int:
        """How many steps it covers."""
        return len({event.step for event in self.events})

    def busy_s(self, device: int) -> float:
        """Seconds in which the device computes for the foreground."""
        return sum(e.stop_s - e.start_s for e in self.events if e.device == device and e.lane == "compute")

    def all_busy_s(self) -> tuple[float, ...]:
        """The same for every device, in one pass."""
        found = [0.0] * self.num_devices
        for event in self.events:
            if event.lane == "compute":
                found[event.device] += event.stop_s - event.start_s
        return tuple(found)

    def utilisation(self) -> tuple[float, ...]:
        """Device → share of the steps' time in which it computes for the foreground, 0 to 1.

        Measured steps differ, and all of a run may have been faster than those drawn: theirs is the time that counts.
        """
        measured = self.source == "measured"
        total_s = self.stop_s - self.start_s if measured else self.step_time_s * self.num_steps
        return tuple(busy_s / total_s if total_s else 0.0 for busy_s in self.all_busy_s())

    def gaps(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Device → (start, stop) of the times in which it has nothing to compute for the foreground.

        From the first event of the timeline to the last of any device; communication may be under way meanwhile.
        """
        start_s, stop_s = self.start_s, self.stop_s
        busy: list[list[tuple[float, float]]] = [[] for _ in range(self.num_devices)]
        for event in self.events:
            if event.lane == "compute":
                busy[event.device].append((event.start_s, event.stop_s))
        return tuple(tuple(_between(sorted(spans), start_s, stop_s)) for spans in busy)

    def __str__(self) -> str:
        lines = [f"{self.source}: {self.step_time_s:.6g} s a step, {self.num_devices} devices"]
        shares = enumerate(zip(self.utilisation(), self.gaps(), strict=True))
        lines += [f"  device {device:<5} {share:>6.1%} busy, {len(gaps)} gaps" for device, (share, gaps) in shares]
        return "\n".join(lines)


def _between(spans: list[tuple[float, float]], start_s: float, stop_s: float) -> Iterator[tuple[float, float]]:
    """What sorted spans leave free."""
    for begin_s, end_s in (*spans, (stop_s, stop_s)):
        if begin_s > start_s:
            yield start_s, begin_s
        start_s = max(start_s, end_s)
