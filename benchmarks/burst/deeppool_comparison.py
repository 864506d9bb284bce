"""The burst planner against DeepPool's rule, on DeepPool's A100 profiles and one cost with right byte counts.

Takes the folder of `A100_*.prof`. Returns one row a cell: what the rule plans, and what the burst planner plans with no
more device-time. What the bars of the comparison use:

- layers are DeepPool's own operators, a ReLU for itself, because the rule looks at each of them;
- 266 GB/s between any two devices, 240 µs a regrouping each way;
- device-time is what devices compute.

`bar_cell` has the one cell with a bar of its own in all other variants too: operators or layers with their ReLU,
reductions added or overlapped, device-time as busy or as held.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.plan.burst import search
from burstpool.plan.burst_cost import BurstOptions
from burstpool.plan.deeppool_rule import plan_by_rule
from burstpool.profiling.importers import deeppool
from burstpool.profiling.profile import Profile

MODELS = {"vgg16": "A100_vgg.prof", "wide_resnet101_2": "A100_wrn.prof", "inception_v3": "A100_inception.prof"}
CELLS = [(8, 16), (8, 32), (8, 64), (64, 16), (64, 32), (64, 64), (1024, 1024)]
"""Devices, batch."""
LIMITS = (1.5, 2.0, 2.5, 5.0)
LINK_BYTES_PER_S = 266e9
REGROUP_LATENCY_S = 240e-6
DEVICES_PER_NODE = 8
VARIANTS = ("added", "overlapped")
"""Reductions after each layer as DeepPool counts them, or hierarchical and beside the backward."""
LAYERS = ("operators", "merged")
DEVICE_TIMES = ("busy", "held")
"""What devices compute, or also what they wait, as DeepPool counts."""
BAR = {"model": "vgg16", "num_devices": 64, "batch": 64, "limit": 2.0}
"""The cell in which the burst planner has to be three times faster."""


def read(path: Path, layers: str = "operators") -> Profile:
    """DeepPool's profile with every operator for itself, or `merged`: an operator and its ReLU as one layer."""
    return deeppool.read(path, merge_relus=layers == "merged")


def cluster(num_devices: int, variant: str) -> ClusterSpec:
    """All links alike; where reductions are hierarchical, nodes of eight."""
    inside = Link(bytes_per_s=LINK_BYTES_PER_S, latency_s=12e-6)
    if variant == "added" or num_devices <= DEVICES_PER_NODE:
        return ClusterSpec.uniform("A100", devices_per_node=num_devices, link=inside)
    between = Link(bytes_per_s=LINK_BYTES_PER_S, latency_s=18e-6)
    num_nodes = num_devices // DEVICES_PER_NODE
    return ClusterSpec.uniform(
        "A100", devices_per_node=DEVICES_PER_NODE, num_nodes=num_nodes, link=inside, network=between
    )


def options(variant: str, device_time: str = "busy") -> BurstOptions:
    """DeepPool knows no updates; 240 µs a regrouping are its own figure."""
    return BurstOptions(
        reduction="added" if variant == "added" else "overlapped",
        device_time="held" if device_time == "held" else "busy",
        updates=False,
        regroup_latency_s=REGROUP_LATENCY_S,
    )


def cell(
    profile: Profile,
    num_devices: int,
    batch: int,
    variant: str,
    device_time: str = "busy",
    limits: Sequence[float] = LIMITS,
) -> list[dict[str, Any]]:
    """One row a limit."""
    on, how = cluster(num_devices, variant), options(variant, device_time)
    ours = search(profile, on, batch=batch, extrapolate=True, options=how)
    rows = []
    for limit in limits:
        rule = plan_by_rule(profile, on, batch=batch, limit=limit, extrapolate=True, options=how)
        point = ours.within(rule.device_seconds)
        rows.append(
            {
                "model": profile.model,
                "variant": variant,
                "num_devices": num_devices,
                "batch": batch,
                "limit": limit,
                "rule_ms": rule.step_time_s * 1e3,
                "rule_device_ms": rule.device_seconds * 1e3,
                "burst_ms": point.step_time_s * 1e3,
                "burst_device_ms": point.device_seconds * 1e3,
                "speedup": rule.step_time_s / point.step_time_s,
                "proven": point.proven,
            }
        )
    return rows


def compare(folder: Path, device_time: str = "busy", models: Iterable[str] = tuple(MODELS)) -> Iterator[dict[str, Any]]:
    """All cells of both variants."""
    for model in models:
        profile = read(folder / MODELS[model])
        for variant in VARIANTS:
            for num_devices, batch in CELLS:
                yield from cell(profile, num_devices, batch, variant, device_time)


def bar_cell(folder: Path) -> list[dict[str, Any]]:
    """The cell of `BAR` in all variants; the first is the one the bar is about."""
    found = []
    for layers, device_time, variant in product(LAYERS, DEVICE_TIMES, VARIANTS):
        profile = read(folder / MODELS[str(BAR["model"])], layers)
        (row,) = cell(profile, int(BAR["num_devices"]), int(BAR["batch"]), variant, device_time, [float(BAR["limit"])])
        found.append({"layers": layers, "device_time": device_time} | row)
    return found
