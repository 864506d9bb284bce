"""What background jobs get on a foreground job's devices, and what they cost it: the seam to measured interference.

`Sharing` is all that the simulation at scale asks for; whoever has measurements implements it. `Rates` is the simplest
one: three measured numbers. Without any, the simulation says nothing of background jobs: nothing is assumed free.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from burstpool.report.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """Devices of a plan that have as much to do, in one step of the foreground alone."""

    num_devices: int
    busy_s: float
    """Of each: what it computes."""
    gaps_s: tuple[float, ...]
    """Of each: how long it has nothing to compute, piece by piece; with `busy_s` the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A foreground job with background jobs beside it on all its devices."""

    foreground_slowdown: float
    """Its step over its step alone; 1 or more."""
    background_device_s: float
    """Background work done in one step, the slowed one, on all devices: in seconds that a device of its own would need
    for it."""


class Sharing(Protocol):
    """Predicts from measurements. Pure and deterministic."""

    def predict(self, loads: Sequence[DeviceLoad], step_time_s: float) -> Shared:
        """What comes of background jobs on these devices; together they are all devices of the cluster."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One slowdown and two rates for all plans, whatever the length of gaps."""

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

    def predict(self, loads: Sequence[DeviceLoad], step_time_s: float) -> Shared:
        """The foreground's work and its gaps both take longer by the slowdown."""
        busy_s = sum(load.num_devices * load.busy_s for load in loads)
        gap_s = sum(load.num_devices for load in loads) * step_time_s - busy_s
        kept_s = gap_s * self.gap_rate + busy_s * self.beside_rate
        return Shared(
            foreground_slowdown=self.foreground_slowdown, background_device_s=self.foreground_slowdown * kept_s
        )


def loads_of(timeline: Timeline) -> tuple[DeviceLoad, ...]:
    """A timeline's devices, those that are alike to the microsecond together.

    Gaps are those of the first step; where a step in steady state is shorter or longer, they are stretched to fill it.
    """
    step_s, busy = timeline.step_time_s, timeline.all_busy_s()
    alike: dict[tuple[float, tuple[float, ...]], list[int]] = {}
    for device, spans in enumerate(timeline.gaps()):
        lengths = tuple(round(stop_s - start_s, 6) for start_s, stop_s in spans)
        alike.setdefault((round(busy[device], 6), lengths), []).append(device)
    found = []
    for (_, lengths), devices in alike.items():
        free_s, total_s = max(step_s - busy[devices[0]], 0.0), sum(lengths)
        gaps_s = tuple(length * free_s / total_s for length in lengths if length) if total_s else (free_s,)
        found.append(DeviceLoad(num_devices=len(devices), busy_s=busy[devices[0]], gaps_s=gaps_s))
    return tuple(found)


def even_loads(num_devices: int, step_time_s: float, device_seconds: float) -> tuple[DeviceLoad, ...]:
    """Where no timeline could be afforded: all devices alike, with one gap each."""
    busy_s = min(device_seconds / num_devices, step_time_s)
    return (DeviceLoad(num_devices=num_devices, busy_s=busy_s, gaps_s=(step_time_s - busy_s,)),)
