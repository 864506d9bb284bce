"""Prediction: what sharing would bring under a plan, before anything is run.

Takes a simulated timeline, the kinds of layers of foreground and background, an interference table and a budget.
Returns, a device, the background work of a step in its gaps and beside its compute, and the foreground's slowdown.
Pure. The rule is the controller's own: gaps first, then beside compute as much as the budget leaves.

Not modelled: that delay on a device off the critical path costs the step less than it costs the device, so that
slowdowns are upper bounds; which layers meet which (all pairs are as likely as their parts of the time make them);
the alone steps, which cost nothing on average; memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from burstpool.errors import ShareError
from burstpool.report.timeline import Timeline
from burstpool.share.budget import Budget, Gap
from burstpool.share.interference.table import InterferenceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDevice:
    """One device in a step of the foreground."""

    device: int
    gap_s: float
    """Background work in its gaps, by the background's own time alone."""
    overlapped_s: float
    """The same beside compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPrediction:
    """What sharing would bring."""

    step_time_s: float
    """Of the foreground alone."""
    slowdown: float
    """Of the foreground's step."""
    devices: tuple[SharedDevice, ...]

    @property
    def background_kept(self) -> float:
        """The background's speed on a device over its speed alone, mean over devices."""
        work_s = sum(device.gap_s + device.overlapped_s for device in self.devices)
        return work_s / (len(self.devices) * self.step_time_s * self.slowdown)

    @property
    def sum_of_shares(self) -> float:
        """1/slowdown + background kept: over 1, sharing beats giving each job devices in turn."""
        return 1 / self.slowdown + self.background_kept


def all_gaps(timeline: Timeline) -> tuple[tuple[Gap, ...], ...]:
    """Device → its gaps in one step, those of exposed all-reduces marked as such."""
    if timeline.num_steps != 1:
        raise ShareError(f"the timeline has {timeline.num_steps} steps; simulate one to see a step's gaps")
    reduces: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_devices)]
    for event in timeline.events:
        if event.kind == "reduce":
            reduces[event.device].append((event.start_s, event.stop_s))
    return tuple(
        tuple(
            Gap(length_s=stop - start, reduces=_covered(start, stop, own) > 0.5 * (stop - start))
            for start, stop in gaps
        )
        for gaps, own in zip(timeline.gaps(), reduces, strict=True)
    )


def device_gaps(timeline: Timeline, device: int) -> tuple[Gap, ...]:
    """The gaps of one device."""
    return all_gaps(timeline)[device]


def _covered(start_s: float, stop_s: float, spans: Sequence[tuple[float, float]]) -> float:
    return sum(max(min(stop_s, b) - max(start_s, a), 0.0) for a, b in spans)


def predict_sharing(
    timeline: Timeline,
    foreground: Mapping[str, float],
    background: Mapping[str, float],
    table: InterferenceTable,
    budget: Budget,
    *,
    slice_s: float = 0.0,
    devices: Sequence[int] | None = None,
) -> SharingPrediction:
    """What a background on each device would get, and what it would cost.

    `foreground` and `background` say which part of their compute each kind of layer is (`mix_of`). A gap takes whole
    slices of `slice_s`. `devices` are those that have a background; all of them if left out.
    """
    step_s = timeline.step_time_s
    shared = range(timeline.num_devices) if devices is None else devices
    slowed, done = _together(foreground, background, table)
    harmless = budget.harmless_in_reduce or table.harmless_in_reduce(background)
    busy_s, gaps = timeline.all_busy_s(), all_gaps(timeline)
    busiest_s = max((busy_s[device] for device in shared), default=0.0)
    room_s = (budget.slowdown - 1) * step_s
    # The part of its compute that a device may be accompanied in, so that the busiest one stays within the budget.
    part = min(room_s / (busiest_s * (slowed - 1)), 1.0) if busiest_s > 0 and slowed > 1 else 1.0
    found = tuple(
        SharedDevice(
            device=device,
            gap_s=sum(_usable_s(gap, slice_s, harmless) for gap in gaps[device]),
            overlapped_s=part * busy_s[device] * done,
        )
        for device in shared
    )
    added_s = part * busiest_s * max(slowed - 1, 0.0)
    return SharingPrediction(step_time_s=step_s, slowdown=1 + added_s / step_s, devices=found)


def _usable_s(gap: Gap, slice_s: float, harmless: bool) -> float:
    if gap.reduces and not harmless:
        return 0.0
    return gap.length_s if slice_s <= 0 else int(gap.length_s / slice_s) * slice_s


def _together(
    foreground: Mapping[str, float], background: Mapping[str, float], table: InterferenceTable
) -> tuple[float, float]:
    """The foreground's slowdown, and the background work done in a second of its compute, while both run."""
    slowed, kept = table.mixed(foreground, background)
    return slowed, kept * slowed
