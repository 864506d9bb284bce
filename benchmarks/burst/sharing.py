"""What background jobs get on a foreground job's devices, and what they cost it: the seam to measured interference.

`Sharing` is all that the simulation at scale asks for; whoever has measurements implements it. `Rates` is the simplest
one: three measured numbers. Without any, the simulation says nothing of background jobs: nothing is assumed free.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from burstpool.profiling.profile import Profile
from burstpool.report.timeline import Event, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A foreground job with background jobs beside it on all devices of the cluster."""

    foreground_slowdown: float
    """Its step over its step alone; 1 or more."""
    background_device_s: float
    """Background work done in one step, the slowed one, on all devices: in seconds that a device of its own would need
    for it."""


class Sharing(Protocol):
    """Predicts from measurements. Pure and deterministic."""

    def predict(self, timeline: Timeline, profile: Profile) -> Shared:
        """What comes of background jobs on every device of a timeline of one step.

        The timeline has the foreground's step, what each device computes and its gaps; the profile says which kinds of
        layers the foreground has. Large timelines have few kinds of devices: see `alike_devices`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One slowdown and two rates for all plans, whatever the length of gaps and the kinds of layers."""

    gap_rate: float
    """Part of its speed alone that a background job keeps in the foreground's gaps."""
    beside_rate: float
    """Part of it that it keeps while the foreground computes."""
    foreground_slowdown: float
    """Of the foreground's step meanwhile."""

    @classmethod
    def load(cls, path: Path) -> "Rates":
        """From a JSON file with these three numbers; others in it are ignored."""
        found = json.loads(path.read_text())
        missing = [name for name in cls.__slots__ if name not in found]
        if missing:
            raise SystemExit(f"{path} lacks {', '.join(missing)}; measure them and write them there")
        return cls(**{name: float(found[name]) for name in cls.__slots__})

    def predict(self, timeline: Timeline, profile: Profile) -> Shared:
        """The foreground's work and its gaps both take longer by the slowdown."""
        busy_s = sum(timeline.all_busy_s())
        gap_s = timeline.num_devices * timeline.step_time_s - busy_s
        kept_s = gap_s * self.gap_rate + busy_s * self.beside_rate
        return Shared(
            foreground_slowdown=self.foreground_slowdown, background_device_s=self.foreground_slowdown * kept_s
        )


def alike_devices(timeline: Timeline) -> dict[int, int]:
    """One device of each kind → how many: those with the same work and the same gaps, to the microsecond."""
    busy_s = timeline.all_busy_s()
    found: dict[tuple[object, ...], list[int]] = {}
    for device, gaps in enumerate(timeline.gaps()):
        key = tuple((round(start_s, 6), round(stop_s, 6)) for start_s, stop_s in gaps)
        found.setdefault((round(busy_s[device], 6), *key), []).append(device)
    return {devices[0]: len(devices) for devices in found.values()}


def even_timeline(num_devices: int, step_time_s: float, device_seconds: float) -> Timeline:
    """Where no simulation could be afforded: all devices alike, each busy in one piece."""
    busy_s = min(device_seconds / num_devices, step_time_s)
    events = tuple(
        Event(device=device, lane="compute", kind="forward", block="all", start_s=0.0, stop_s=busy_s)
        for device in range(num_devices)
    )
    return Timeline(source="predicted", num_devices=num_devices, step_time_s=step_time_s, events=events)
