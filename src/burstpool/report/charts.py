"""What the other pictures of a report show: axes, the plan's skyline, curves over steps, bars a layer.

Takes Contents. Returns numbers with their axes, to be drawn by `draw_charts.py`. Pure.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from burstpool.report.contents import Contents, LayerTime, PlannedWork
from burstpool.report.figures import block_seconds
from burstpool.report.words import number, unit_of

_MOST_POINTS = 600
_SMOOTHING = 0.05
"""Part of all steps that a point of the smoothed curve is the mean of."""
_SMOOTHED_FROM = 40
"""Steps from which on a smoothed curve says more than the losses themselves."""
_SLOW = 3.0
"""Steps that take more than this many medians (the first, mostly) are left outside the picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """From where to where, and what is written along it."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """(value, label), rising."""

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0


def axis(low: float, high: float, *, most: int = 6, label: Callable[[float], str] | None = None) -> Axis:
    """Round ticks within the given ends."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    step = round_step((high - low) / most)
    count = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Axis(low=low, high=high, ticks=tuple((place * step, (label or number)(place * step)) for place in count))


def time_axis(high_s: float, *, most: int = 8) -> Axis:
    """From 0, all labels in one unit."""
    unit, scale = unit_of(high_s)
    return axis(0.0, high_s, most=most, label=lambda value: f"{number(value / scale)} {unit}" if value else "0")


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least this."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least * (1 - 1e-9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """A block in the skyline."""

    name: str
    num_layers: int
    num_devices: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skyline:
    """Devices a block over the time its forward and backward take."""

    towers: tuple[Tower, ...]
    time: Axis
    devices: Axis
    source: str
    """Where the widths come from: `predicted`, `measured`; `layers` where no time is known and a layer counts 1."""


def skyline(contents: Contents) -> Skyline | None:
    """The plan's skyline; None without a plan."""
    if not contents.blocks:
        return None
    source, widths = _widths(contents)
    towers, start_s = [], 0.0
    for block in contents.blocks:
        stop_s = start_s + widths[block.name]
        towers.append(_tower(block, start_s, stop_s))
        start_s = stop_s
    most = max(contents.num_devices, *(tower.num_devices for tower in towers))
    label = None if source != "layers" else number
    return Skyline(
        towers=tuple(_readable(towers)),
        time=time_axis(start_s) if label is None else axis(0.0, start_s, label=label),
        devices=device_axis(most),
        source=source,
    )


def device_axis(most: int) -> Axis:
    """Whole devices, 0 to all."""
    step = max(1, math.ceil(round_step(most / 5))) if most > 5 else 1
    return Axis(
        low=0.0, high=float(most), ticks=tuple((float(place), str(place)) for place in range(0, most + 1, step))
    )


def _widths(contents: Contents) -> tuple[str, Mapping[str, float]]:
    names = [block.name for block in contents.blocks]
    for timeline in contents.timelines:
        spent = block_seconds(timeline)
        widths = {name: spent.get((name, "forward"), 0.0) + spent.get((name, "backward"), 0.0) for name in names}
        if any(widths.values()):
            return timeline.source, widths
    return "layers", {block.name: float(block.num_layers) for block in contents.blocks}


def _tower(block: PlannedWork, start_s: float, stop_s: float) -> Tower:
    return Tower(
        name=block.name,
        num_layers=block.num_layers,
        num_devices=len(block.devices),
        start_s=start_s,
        stop_s=stop_s,
    )


def _readable(towers: Sequence[Tower], most: int = 400) -> list[Tower]:
    """Narrow neighbours of the same height become one where there are very many."""
    if len(towers) <= most:
        return list(towers)
    narrow_s = towers[-1].stop_s / most
    kept = [towers[0]]
    for tower in towers[1:]:
        last = kept[-1]
        if tower.num_devices == last.num_devices and tower.stop_s - last.start_s <= narrow_s:
            kept[-1] = replace(last, num_layers=last.num_layers + tower.num_layers, stop_s=tower.stop_s)
        else:
            kept.append(tower)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One value over the steps of a run."""

    points: tuple[tuple[float, float], ...]
    """(step, value), thinned out where they are many: the least and the greatest of each stretch are kept."""
    smooth: tuple[tuple[float, float], ...]
    """The same, smoothed; empty where the points are few."""
    steps: Axis
    values: Axis
    line: float | None = None
    """A value to mark across all steps."""
    num_left_out: int = 0
    """Points that are no number or outside of the picture."""


def loss_curve(contents: Contents) -> Curve | None:
    """Loss over steps; None for fewer than two."""
    points = [(float(step.step), step.loss) for step in contents.trained]
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) < 2:
        return None
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    margin = (high - low) * 0.06
    return Curve(
        points=thinned(finite),
        smooth=thinned(_smoothed(finite)) if len(finite) >= _SMOOTHED_FROM else (),
        steps=axis(finite[0][0], finite[-1][0]),
        values=axis(0.0 if 0 <= low < (high - low) / 2 else low - margin, high + margin, most=5),
        num_left_out=len(points) - len(finite),
    )


def step_time_curve(contents: Contents, predicted_s: float | None) -> Curve | None:
    """Seconds a step over steps, with the predicted time across; None for fewer than two."""
    if len(contents.trained) < 2:
        return None
    middle_s = statistics.median(step.time_s for step in contents.trained)
    shown = [(float(step.step), step.time_s) for step in contents.trained if step.time_s <= _SLOW * middle_s]
    if len(shown) < 2:
        return None
    # A prediction far off stays outside: the curve itself must be legible.
    line = predicted_s if predicted_s is not None and predicted_s <= _SLOW * middle_s else None
    high_s = max([value for _, value in shown] + [line or 0.0])
    return Curve(
        points=thinned(shown),
        smooth=(),
        steps=axis(float(contents.trained[0].step), float(contents.trained[-1].step)),
        values=time_axis(high_s * 1.08 or 1.0, most=5),
        line=line,
        num_left_out=len(contents.trained) - len(shown),
    )


def thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> tuple[tuple[float, float], ...]:
    """At most so many points that look the same: the first, the last, and the extremes of each stretch."""
    if len(points) <= most:
        return tuple(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    kept = {points[0], points[-1]}
    for place in range(stretches):
        some = inner[place * len(inner) // stretches : (place + 1) * len(inner) // stretches]
        kept |= {min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])}
    return tuple(sorted(kept))


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of as many points on either side; unlike a running mean it does not lag."""
    widest = max(1, round(len(points) * _SMOOTHING / 2))
    sums = list(accumulate((value for _, value in points), initial=0.0))
    found = []
    for place, (step, _) in enumerate(points):
        reach = min(widest, place, len(points) - 1 - place)
        found.append((step, (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBars:
    """Time a layer."""

    layers: tuple[LayerTime, ...]
    """The costliest, in the model's order."""
    time: Axis
    total_s: float
    """Of all layers."""
    num_others: int
    """Cheaper layers that are not shown."""
    others_share: float
    """Of the time, 0 to 1."""


def layer_bars(contents: Contents, *, most: int = 40) -> LayerBars | None:
    """Bars of the profile; None without one."""
    if not contents.layers:
        return None
    order = sorted(range(len(contents.layers)), key=lambda place: -contents.layers[place].seconds)
    shown = tuple(contents.layers[place] for place in sorted(order[:most]))
    total_s = sum(layer.seconds for layer in contents.layers)
    rest_s = total_s - sum(layer.seconds for layer in shown)
    return LayerBars(
        layers=shown,
        time=time_axis(max(layer.seconds for layer in shown) or 1.0, most=5),
        total_s=total_s,
        num_others=len(contents.layers) - len(shown),
        others_share=max(0.0, rest_s / total_s) if total_s else 0.0,
    )
