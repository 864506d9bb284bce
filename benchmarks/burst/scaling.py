"""Strong scaling at a fixed global batch, simulated: five ways to use a cluster.

Takes a Profile and, for background jobs, a Sharing (`sharing.py`). Returns one row a cell and strategy.

    data                data parallelism on all devices
    data+background     the same, background jobs beside it on every device
    static              data parallelism on some devices, background jobs alone on the others: of the splits that keep
                        up with burst (with background, where that is known), the one with the fewest devices for the
                        foreground; the fastest where none keeps up
    burst               the burst planner within a burst limit
    burst+background    the same, background jobs in its gaps and beside it

Step times are the simulator's. Only where a plan has more than MOST_ACTIONS actions is its step the planner's own cost;
`step_by` says which, `planner_error` how far the planner's cost is from the simulator.

Throughput is counted in devices: the foreground's samples/s over what one device alone does at its best measured batch,
and a background job's speed over what it has on a device of its own. N devices without any loss do N devices' work.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from burstpool.cluster.spec import ClusterSpec
from burstpool.plan import burst, data
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import Profile
from burstpool.report.timeline import Timeline
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate
from sharing import Sharing, even_timeline

DEVICES_PER_NODE = 8
LINKS = {
    "A100": ("nvlink3", "infiniband-hdr"),
    "H100": ("nvlink4", "infiniband-ndr"),
    "H200": ("nvlink4", "infiniband-ndr"),
}
"""Device type → preset inside a node and between nodes."""
MOST_ACTIONS = 150_000
"""Of a schedule that is simulated; some seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One foreground job on a cluster."""

    timeline: Timeline
    """One step on all devices of the cluster."""
    step_by: str = "simulator"
    planner_error: float | None = None
    """How far the burst planner's own cost of its best plan is from the simulator, relative to the latter."""

    @property
    def step_time_s(self) -> float:
        """Of the foreground alone."""
        return self.timeline.step_time_s

    @property
    def device_seconds(self) -> float:
        """What all devices compute in it."""
        return sum(self.timeline.all_busy_s())


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
    profile: Profile, batch: int, scales: Sequence[int], burst_limit: float, sharing: Sharing | None
) -> Iterator[dict[str, Any]]:
    """All strategies at all scales."""
    known: dict[int, Use] = {}
    for num_devices in scales:
        whole = _data(profile, num_devices, batch, known)
        bursting = _burst(profile, num_devices, batch, burst_limit, whole)
        rows = [_row(profile, batch, "data", whole, None), _row(profile, batch, "burst", bursting, None)]
        if sharing is not None:
            rows.append(_row(profile, batch, "data+background", whole, sharing))
            rows.append(_row(profile, batch, "burst+background", bursting, sharing))
        rows.append(_static_row(profile, num_devices, batch, rows[-1]["step_ms"] / 1e3, known))
        for row in rows:
            yield row | {"total_over_data": row["total_devices"] / rows[0]["total_devices"]}


def _data(profile: Profile, num_devices: int, batch: int, known: dict[int, Use]) -> Use:
    if num_devices not in known:
        on = cluster(profile.device, num_devices)
        plan = data.plan(profile, on, batch=batch, extrapolate=True)
        known[num_devices] = _use(plan, profile, on)
    return known[num_devices]


def _use(plan: Plan, profile: Profile, on: ClusterSpec) -> Use:
    flow = dataflow(plan, profile)
    return Use(timeline=simulate(lower(plan, flow), CostModel(profile, on, extrapolate=True), flow))


def _burst(profile: Profile, num_devices: int, batch: int, burst_limit: float, whole: Use) -> Use:
    """What `burst.plan` plans; where simulating takes too long, the planner's best by its own cost, or data parallelism
    where that keeps to the budget and is faster."""
    on = cluster(profile.device, num_devices)
    found = burst.search(profile, on, batch=batch, extrapolate=True)
    budget = burst_limit * found.one_device_seconds
    point = found.within(budget)
    best = burst.planned(found, point, profile)
    if sum(map(len, lower(best, dataflow(best, profile)).devices)) <= MOST_ACTIONS:
        chosen = burst.plan(profile, on, batch=batch, extrapolate=True, burst_limit=burst_limit)
        # The error is of the plan that was costed; another may have been chosen because of it.
        simulated_s = burst.predicted_plan(CostModel(profile, on, extrapolate=True), found, point).step_time_s
        assert simulated_s is not None
        use = _use(chosen, profile, on)
        return replace(use, planner_error=point.step_time_s / simulated_s - 1)
    if whole.device_seconds <= budget and whole.step_time_s <= point.step_time_s:
        return whole
    return Use(timeline=even_timeline(num_devices, point.step_time_s, point.device_seconds), step_by="planner")


def _static_row(
    profile: Profile, num_devices: int, batch: int, wanted_step_s: float, known: dict[int, Use]
) -> dict[str, Any]:
    """Halving the foreground's devices; `wanted_step_s` is what it has to keep up with."""
    widths = [width for power in range(num_devices.bit_length()) if (width := num_devices >> power)]
    uses = {width: _data(profile, width, batch, known) for width in widths}
    keeping_up = [width for width, use in uses.items() if use.step_time_s <= wanted_step_s]
    width = min(keeping_up) if keeping_up else min(uses, key=lambda width: uses[width].step_time_s)
    row = _row(profile, batch, "static", uses[width], None)
    alone = num_devices - width
    return row | {
        "num_devices": num_devices,
        "background_devices": float(alone),
        "total_devices": row["foreground_devices"] + alone,
    }


def _row(profile: Profile, batch: int, strategy: str, use: Use, sharing: Sharing | None) -> dict[str, Any]:
    shared = sharing.predict(use.timeline, profile) if sharing is not None else None
    step_time_s = use.step_time_s * (shared.foreground_slowdown if shared is not None else 1.0)
    foreground = batch / step_time_s / best_samples_per_s(profile)
    background = shared.background_device_s / step_time_s if shared is not None else None
    return {
        "model": profile.model,
        "device": profile.device,
        "batch": batch,
        "num_devices": use.timeline.num_devices,
        "strategy": strategy,
        "step_ms": step_time_s * 1e3,
        "device_ms": use.device_seconds * 1e3,
        "step_by": use.step_by,
        "planner_error": use.planner_error,
        "foreground_devices": foreground,
        "background_devices": background,
        "total_devices": foreground + (background or 0.0),
    }


def best_samples_per_s(profile: Profile) -> float:
    """What one device alone does, at the measured batch that suits it best."""
    return max(batch / profile.step_time_s(batch) for batch in profile.batches)
