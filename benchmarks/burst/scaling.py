"""Strong scaling at a fixed global batch, simulated: five ways to use a cluster, with and without background jobs.

Takes a Profile and, for the background, a table of measured interference. Returns one row a cell and strategy.

    data                data parallelism on all devices
    data+background     the same, background jobs beside it on every device
    burst               the burst planner within a burst limit
    burst+background    the same, background jobs in its gaps and beside it
    static              data parallelism on the fewest devices that keep 90% of its speed, background jobs on the others

Data parallelism's times are the simulator's; the burst planner's are its own cost (within a few percent of the
simulator on chains, 15% with branches beside each other: `tests/plan/test_burst.py`).

The interference table is JSON: `background_samples_per_s` (alone on a device), `gap_rate` (part of it that background
jobs keep in the foreground's gaps), `beside_rate` (part of it that they keep while the foreground computes) and
`foreground_slowdown` (of the foreground's step while they run). Without such a table there are no background rows:
nothing is assumed free.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burstpool.cluster.spec import ClusterSpec
from burstpool.plan import burst, data
from burstpool.profiling.profile import Profile

DEVICES_PER_NODE = 8
LINKS = {
    "A100": ("nvlink3", "infiniband-hdr"),
    "H100": ("nvlink4", "infiniband-ndr"),
    "H200": ("nvlink4", "infiniband-ndr"),
}
"""Device type → preset inside a node and between nodes."""
STATIC_SPEED = 0.9
"""Part of data parallelism's speed that a static partition keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What sharing a device does, as measured."""

    background_samples_per_s: float
    gap_rate: float
    beside_rate: float
    foreground_slowdown: float

    @classmethod
    def load(cls, path: Path) -> "Interference":
        """From a file with these four numbers; others in it are ignored."""
        found = json.loads(path.read_text())
        missing = [name for name in cls.__slots__ if name not in found]
        if missing:
            raise SystemExit(f"{path} lacks {', '.join(missing)}; measure them and write them there")
        return cls(**{name: float(found[name]) for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One foreground job on some devices of the cluster."""

    num_devices: int
    """Of the cluster."""
    step_time_s: float
    device_seconds: float
    alone: int = 0
    """Devices the foreground never uses."""


def cluster(device: str, num_devices: int) -> ClusterSpec:
    """Nodes of eight."""
    inside, between = LINKS.get(device, ("nvlink4", "infiniband-ndr"))
    per_node = min(num_devices, DEVICES_PER_NODE)
    return ClusterSpec.uniform(
        device,
        devices_per_node=per_node,
        num_nodes=num_devices // per_node,
        link=inside,
        network=between if num_devices > per_node else None,
    )


def scaling(
    profile: Profile, batch: int, scales: Sequence[int], burst_limit: float, shared: Interference | None
) -> Iterator[dict[str, Any]]:
    """All strategies at all scales."""
    for num_devices in scales:
        on = cluster(profile.device, num_devices)
        whole = _data(profile, on, batch)
        uses = {"data": whole, "burst": _burst(profile, on, batch, burst_limit, whole)}
        for name, use in uses.items():
            yield _row(profile, batch, name, use, None)
            if shared is not None:
                yield _row(profile, batch, f"{name}+background", use, shared)
        yield _row(profile, batch, "static", _static(profile, on, batch, whole), shared)


def _data(profile: Profile, on: ClusterSpec, batch: int) -> Use:
    plan = data.plan(profile, on, batch=batch, extrapolate=True)
    assert plan.step_time_s is not None
    assert plan.device_seconds is not None
    return Use(num_devices=on.num_devices, step_time_s=plan.step_time_s, device_seconds=plan.device_seconds)


def _static(profile: Profile, on: ClusterSpec, batch: int, whole: Use) -> Use:
    """The narrowest data parallelism, halving the devices, that is fast enough."""
    best = whole
    width = on.num_devices // 2
    while width >= 1:
        part = _data(profile, cluster(profile.device, width), batch)
        if part.step_time_s > whole.step_time_s / STATIC_SPEED:
            break
        best = Use(
            num_devices=on.num_devices,
            step_time_s=part.step_time_s,
            device_seconds=part.device_seconds,
            alone=on.num_devices - width,
        )
        width //= 2
    return best


def _burst(profile: Profile, on: ClusterSpec, batch: int, burst_limit: float, whole: Use) -> Use:
    """As `burst.plan` does: data parallelism where it keeps to the budget and is faster."""
    found = burst.search(profile, on, batch=batch, extrapolate=True)
    budget = burst_limit * found.one_device_seconds
    point = found.within(budget)
    if whole.device_seconds <= budget and whole.step_time_s <= point.step_time_s:
        return whole
    return Use(num_devices=on.num_devices, step_time_s=point.step_time_s, device_seconds=point.device_seconds)


def _row(profile: Profile, batch: int, strategy: str, use: Use, shared: Interference | None) -> dict[str, Any]:
    is_split = strategy == "static"
    slowdown = shared.foreground_slowdown if shared and not is_split else 1.0
    step_time_s = use.step_time_s * slowdown
    foreground = batch / step_time_s
    background = 0.0
    if shared and is_split:
        background = use.alone * shared.background_samples_per_s
    elif shared:
        busy_s = min(use.device_seconds * slowdown, use.num_devices * step_time_s)
        gap_s = use.num_devices * step_time_s - busy_s
        rate = (gap_s * shared.gap_rate + busy_s * shared.beside_rate) / step_time_s
        background = rate * shared.background_samples_per_s
    return {
        "model": profile.model,
        "device": profile.device,
        "batch": batch,
        "num_devices": use.num_devices,
        "strategy": strategy,
        "step_ms": step_time_s * 1e3,
        "device_ms": use.device_seconds * 1e3,
        "foreground_samples_per_s": foreground,
        "background_samples_per_s": background if shared else None,
        "total_samples_per_s": foreground + background,
    }
