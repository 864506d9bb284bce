"""Skyline: how many devices each layer has, and what that leaves free, as data and as text for a terminal.

Takes a Plan and, for the gaps, its Timeline. Returns rows and pictures. Decides nothing; works for any plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from burstpool.plan.plan import Plan
from burstpool.report.timeline import Timeline

_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkylineRow:
    """One layer."""

    layer: str
    block: str
    """The block it runs in."""
    num_devices: int
    """How many run it."""
    most_samples: int
    """Of one of them."""
    devices: tuple[int, ...]
    """Who, in the order of their samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapRow:
    """Devices that have as much to do and as many gaps."""

    devices: tuple[int, ...]
    busy_s: float
    """A step, of each."""
    gap_s: float
    """A step, of each: the rest of it."""
    longest_gap_s: float
    """In one piece, that each of them has."""
    num_gaps: int


def skyline(plan: Plan) -> tuple[SkylineRow, ...]:
    """One row a layer, in the model's order."""
    return tuple(
        SkylineRow(
            layer=layer,
            block=block.name,
            num_devices=len(block.shares),
            most_samples=max(share.num_samples for share in block.shares),
            devices=block.devices,
        )
        for block in plan.blocks
        for layer in block.layers
    )


def gaps(timeline: Timeline) -> tuple[GapRow, ...]:
    """Devices by what they have to do in the timeline, those with most first."""
    busy, free = timeline.all_busy_s(), timeline.gaps()
    alike: dict[tuple[float, int], list[int]] = {}
    for device, spans in enumerate(free):
        # To the microsecond: devices that differ by rounding do the same.
        alike.setdefault((round(busy[device], 6), len(spans)), []).append(device)
    num_steps = max(timeline.num_steps, 1)
    rows = []
    for (_, num_gaps), devices in alike.items():
        busy_s = busy[devices[0]] / num_steps
        longest = (max((stop_s - start_s for start_s, stop_s in free[device]), default=0.0) for device in devices)
        rows.append(
            GapRow(
                devices=tuple(devices),
                busy_s=busy_s,
                gap_s=max(timeline.step_time_s - busy_s, 0.0),
                longest_gap_s=min(longest),
                num_gaps=num_gaps,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.busy_s, row.devices)))


def draw_skyline(plan: Plan, *, columns: int = 72) -> str:
    """A picture: layers from left to right, each column a line higher for twice as many devices.

    Where there are more layers than columns, a column shows the widest of its layers.
    """
    rows = skyline(plan)
    columns = min(columns, len(rows))
    heights = [1 + math.log2(max(part)) for part in _parts([row.num_devices for row in rows], columns)]
    lines = [
        f"{2 ** (line - 1):>7}│" + "".join(_bar(height - (line - 1)) for height in heights)
        for line in range(math.ceil(max(heights)), 0, -1)
    ]
    lines.append(f"{'devices':>7}└" + "─" * columns)
    names = [rows[0].layer, *([rows[-1].layer] if len(rows) > 1 else [])]
    return "\n".join([*(line.rstrip() for line in lines), f"{'':8}{' … '.join(names)}"])


def _parts(counts: Sequence[int], columns: int) -> list[Sequence[int]]:
    ends = [round(len(counts) * place / columns) for place in range(columns + 1)]
    return [counts[a:b] for a, b in pairwise(ends)]


def _bar(height: float) -> str:
    return _BARS[max(0, min(8, round(8 * height)))]


def describe_burst(
    plan: Plan, timeline: Timeline, *, data_parallel: Plan | None = None, one_device_seconds: float | None = None
) -> str:
    """What `burstpool plan --strategy burst` prints below its table: picture, times, gaps."""
    lines = [draw_skyline(plan), ""]
    lines += [_runs(plan), _times("burst", plan, one_device_seconds)]
    if data_parallel is not None:
        lines.append(_times("data parallel", data_parallel, one_device_seconds))
    lines += ["", f"{'devices':<24} {'busy':>10} {'free':>10} {'longest':>10}  gaps"]
    lines += [
        f"{_ranges(row.devices):<24} {row.busy_s * 1e3:>7.3f} ms {row.gap_s * 1e3:>7.3f} ms "
        f"{row.longest_gap_s * 1e3:>7.3f} ms  {row.num_gaps}"
        for row in gaps(timeline)
    ]
    return "\n".join(lines)


def _times(name: str, plan: Plan, one_device_seconds: float | None) -> str:
    step = "unknown" if plan.step_time_s is None else f"{plan.step_time_s * 1e3:.3f} ms a step"
    need = "" if plan.device_seconds is None else f", {plan.device_seconds * 1e3:.3f} device-ms"
    if plan.device_seconds is not None and one_device_seconds:
        need += f" ({plan.device_seconds / one_device_seconds:.2f} × one device)"
    return f"{name}: {step}{need}"


def _runs(plan: Plan) -> str:
    """Neighbouring layers of one width: `64 × 10 layers → 8 × 9 → 1 × 3`."""
    runs: list[list[int]] = []
    for row in skyline(plan):
        if runs and runs[-1][0] == row.num_devices:
            runs[-1][1] += 1
        else:
            runs.append([row.num_devices, 1])
    shown = [f"{width} × {count}" for width, count in runs]
    if len(shown) > 12:
        shown = [*shown[:6], "…", *shown[-5:]]
    return f"devices × layers: {' → '.join(shown)}"


def _ranges(devices: Sequence[int]) -> str:
    """`0-3, 8`."""
    spans: list[list[int]] = []
    for device in sorted(devices):
        if spans and device == spans[-1][1] + 1:
            spans[-1][1] = device
        else:
            spans.append([device, device])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], f"… ({len(devices)})"])
