"""What background jobs get on a foreground job's devices, and what they cost it: the seam to measured interference.

`Sharing` is all that the simulation at scale asks for. `Measured` predicts from an interference table measured on a GPU
(`burstpool interference --device cuda`) by the rule of the sharing controller. Without a table, the simulation says
nothing of background jobs: nothing is assumed free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from burstpool.profiling.profile import Profile
from burstpool.report.timeline import Event, Timeline
from burstpool.share.budget import Budget
from burstpool.share.interference.predict import all_gaps, predict_sharing
from burstpool.share.interference.table import COMMUNICATION, InterferenceTable, mix_of

SLICE_S = 3e-4
"""As `share/cuda.py` cuts them."""


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
class Measured:
    """One background job like another on every device, held within a slowdown budget."""

    table: InterferenceTable
    background: Mapping[str, float]
    """Kind of layer → its part of the background's compute."""
    budget: Budget
    slice_s: float = SLICE_S
    """Length of the background's pieces: a gap takes whole ones."""
    in_reductions: bool = False
    """Whether background work may run while devices wait for a reduction. The table's communication is a copy by the
    GPU's copy engine; a reduction by NCCL also needs multiprocessors, and what disturbs it was not measured."""

    @classmethod
    def load(cls, table: Path, background: Path, *, batch: int, slowdown: float) -> "Measured":
        """From an interference table, and the background's profile at its batch."""
        mix = mix_of(Profile.load(background), batch)
        return cls(table=InterferenceTable.load(table), background=mix, budget=Budget(slowdown=slowdown))

    def predict(self, timeline: Timeline, profile: Profile) -> Shared:
        """Devices that are alike are predicted once."""
        counts = alike_devices(timeline)
        foreground = mix_of(profile, profile.batches[len(profile.batches) // 2])
        found = predict_sharing(
            timeline,
            foreground,
            self.background,
            self.table if self.in_reductions else _without_communication(self.table),
            self.budget,
            slice_s=self.slice_s,
            devices=list(counts),
        )
        work_s = sum(counts[device.device] * (device.gap_s + device.overlapped_s) for device in found.devices)
        return Shared(foreground_slowdown=found.slowdown, background_device_s=work_s)


def _without_communication(table: InterferenceTable) -> InterferenceTable:
    """Communication is then taken to suffer as other layers do, and reductions are left alone."""
    return replace(table, pairs=tuple(pair for pair in table.pairs if pair.foreground != COMMUNICATION))


def alike_devices(timeline: Timeline) -> dict[int, int]:
    """One device of each kind → how many: those with the same work and the same gaps, to the microsecond."""
    found: dict[tuple[object, ...], list[int]] = {}
    for device, (busy_s, gaps) in enumerate(zip(timeline.all_busy_s(), all_gaps(timeline), strict=True)):
        key = (round(busy_s, 6), *((round(gap.length_s, 6), gap.reduces) for gap in gaps))
        found.setdefault(key, []).append(device)
    return {devices[0]: len(devices) for devices in found.values()}


def even_timeline(num_devices: int, step_time_s: float, device_seconds: float) -> Timeline:
    """Where no simulation could be afforded: all devices alike, each busy in one piece."""
    busy_s = min(device_seconds / num_devices, step_time_s)
    events = tuple(
        Event(device=device, lane="compute", kind="forward", block="all", start_s=0.0, stop_s=busy_s)
        for device in range(num_devices)
    )
    return Timeline(source="predicted", num_devices=num_devices, step_time_s=step_time_s, events=events)
