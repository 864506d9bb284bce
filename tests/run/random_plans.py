"""Random burst plans of a traced model, for running: drawn freely, or by the planner from made-up measurements.

A free plan cuts the layers anywhere the language of schedules allows and gives every block any devices with any
samples, so that branches come to lie beside each other, on the same devices, or across. A planner's plan has nested
widths and groups of branches, as users get them.
"""

import itertools
import random

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.model.graph import LayerGraph
from burstpool.plan import burst
from burstpool.plan.cost import CostModel
from burstpool.plan.plan import Plan, PlannedBlock, Share
from burstpool.profiling.profile import LayerProfile, Profile


def free_plan(graph: LayerGraph, rng: random.Random, *, num_devices: int, batch: int, max_blocks: int = 9) -> Plan:
    """Blocks of random layers on random devices with random samples; `batch` must be at least `num_devices`."""
    names, places = [layer.name for layer in graph.layers], cuts(graph)
    chosen = rng.sample(places, rng.randint(0, min(max_blocks - 1, len(places))))
    edges = [0, *sorted(chosen), len(names)]
    usable = rng.sample(range(num_devices), rng.randint(2, num_devices))
    blocks = []
    for start, stop in itertools.pairwise(edges):
        devices = rng.sample(usable, rng.randint(1, len(usable)))
        inner = sorted(rng.sample(range(1, batch), len(devices) - 1))
        bounds = zip([0, *inner], [*inner, batch], devices, strict=True)
        shares = tuple(Share(device=device, start=a, stop=b) for a, b, device in bounds)
        blocks.append(PlannedBlock(name=names[start], layers=tuple(names[start:stop]), shares=shares))
    return Plan(model=graph.model, strategy="random", num_devices=num_devices, batch=batch, blocks=tuple(blocks))


def planned_plan(graph: LayerGraph, rng: random.Random, *, num_devices: int, batch: int) -> Plan:
    """A point of the planner's front for layers with random times, between devices with a random link."""
    layers = []
    for layer in graph.layers:
        fixed_s, sample_s = 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-6, -4)
        seconds = {count: fixed_s + count * sample_s for count in (1, batch)}
        layers.append(
            LayerProfile(
                name=layer.name,
                inputs=layer.inputs,
                parameter_bytes=sum(layer.parameters.values()),
                output_bytes_per_sample=sum(value.bytes_per_sample for value in layer.outputs),
                forward_s=seconds,
                backward_s={count: 2 * second for count, second in seconds.items()},
            )
        )
    model = Profile(model=graph.model, device="A100", source="made up", layers=tuple(layers))
    link = Link(bytes_per_s=10 ** rng.uniform(6, 11), latency_s=10 ** rng.uniform(-7, -4))
    on = ClusterSpec.uniform("A100", devices_per_node=num_devices, link=link)
    found = burst.search(model, on, batch=batch, graph=graph)
    point = rng.choice(found.front())
    return burst.predicted_plan(CostModel(model, on), found, point, graph)


def cuts(graph: LayerGraph) -> list[int]:
    """Layers before which a block may begin: not inside of what shares a parameter or hands on a value that has no
    samples, which must stay on the same devices."""
    joined: set[int] = set()
    first: dict[str, int] = {}
    makers = {value.name: (place, value) for place, layer in enumerate(graph.layers) for value in layer.outputs}
    for place, layer in enumerate(graph.layers):
        starts = [first.setdefault(f"parameter {name}", place) for name in layer.parameters]
        taken = [makers[name] for name in layer.inputs if name in makers]
        starts += [start for start, value in taken if value.sample_dim is None]
        joined.update(range(min(starts, default=place) + 1, place + 1))
    return [place for place in range(1, len(graph.layers)) if place not in joined]
