"""The burst planner against DeepPool's rule, on DeepPool's A100 profiles and one cost with right byte counts.

Takes the folder of `A100_*.prof`. Returns one row a cell: what the rule plans, and what the burst planner plans with no
more device-time. Layers are DeepPool's own operators, a ReLU for itself, because the rule looks at each of them.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.plan.burst import search
from burstpool.plan.burst_cost import BurstOptions
from burstpool.plan.deeppool_rule import plan_by_rule
from burstpool.profiling.importers import deeppool
from burstpool.profiling.importers.deeppool_models import find_model
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


def operators(path: Path) -> Profile:
    """DeepPool's profile with every operator for itself; the importer makes an operator and its ReLU one layer."""
    by_batch, _ = deeppool._whole_batches(deeppool._parse(path), path)
    model = find_model([line.operator for line in next(iter(by_batch.values()))], name=path.stem)
    layers = tuple(deeppool._layers(model, by_batch, path))
    return Profile(model=model.name, device="A100", source=f"DeepPool's {path.name}, by operator", layers=layers)


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
    profile: Profile, num_devices: int, batch: int, variant: str, device_time: str = "busy"
) -> list[dict[str, Any]]:
    """One row a limit."""
    on, how = cluster(num_devices, variant), options(variant, device_time)
    ours = search(profile, on, batch=batch, extrapolate=True, options=how)
    rows = []
    for limit in LIMITS:
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
        profile = operators(folder / MODELS[model])
        for variant in VARIANTS:
            for num_devices, batch in CELLS:
                yield from cell(profile, num_devices, batch, variant, device_time)
