"""Models, plans and schedules for the tests of the schedule language: some by hand, many at random."""

from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec, DeviceCount, DeviceFigures, NodeGroup
from burstpool.errors import PlanError
from burstpool.model.graph import Layer, LayerGraph, Value
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import Source, dataflow
from burstpool.plan.plan import Plan, PlannedBlock, Share, even_shares
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.report.timeline import Timeline
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate


def value(name: str, **changes: Any) -> Value:
    fields: dict[str, Any] = {"shape": ("batch", 2), "dtype": "float32", "sample_dim": 0, "bytes_per_sample": 8}
    return Value(name=name, **(fields | changes))


def layer(name: str, *inputs: str, outputs: tuple[Value, ...] | None = None, **changes: Any) -> Layer:
    fields: dict[str, Any] = {"kind": "linear", "parameters": {f"{name}.weight": 4}}
    return Layer(name=name, inputs=inputs, outputs=(value(name),) if outputs is None else outputs, **(fields | changes))


def graph(*layers: Layer, outputs: tuple[str, ...] | None = None) -> LayerGraph:
    outputs = (layers[-1].outputs[0].name,) if outputs is None else outputs
    return LayerGraph(model="tiny", training=True, inputs=(value("input"),), layers=layers, outputs=outputs)


def chain(num_layers: int) -> LayerGraph:
    """a → b → c → …"""
    names = "abcdefghijklmnopqrstuvwxyz"[:num_layers]
    return graph(*(layer(name, names[place - 1] if place else "input") for place, name in enumerate(names)))


def block(name: str, shares: tuple[Share, ...], *layers: str) -> PlannedBlock:
    return PlannedBlock(name=name, layers=layers or (name,), shares=shares)


def plan(*blocks: PlannedBlock, num_devices: int | None = None, **changes: Any) -> Plan:
    devices = 1 + max(device for some in blocks for device in some.devices)
    fields: dict[str, Any] = {"model": "tiny", "strategy": "test", "batch": blocks[0].batch}
    return Plan(blocks=blocks, num_devices=num_devices or devices, **(fields | changes))


def on(batch: int, *devices: int) -> tuple[Share, ...]:
    """The batch split evenly over devices."""
    return even_shares(batch, devices)


def profile(*layers: tuple[str, tuple[str, ...]], device: str = "A100", **changes: Any) -> Profile:
    """Layers as (name, inputs); each takes 1 s forward and 2 s backward a sample unless told otherwise."""
    fields: dict[str, Any] = {
        "parameter_bytes": 100,
        "output_bytes_per_sample": 10,
        "forward_s": {1: 1.0, 100: 100.0},
        "backward_s": {1: 2.0, 100: 200.0},
    }
    made = tuple(LayerProfile(name=name, inputs=inputs, **(fields | changes)) for name, inputs in layers)
    return Profile(model="tiny", device=device, source="made up", layers=made)


def cluster(num_nodes: int = 1, devices_per_node: int = 4, types: tuple[str, ...] = ("unit",)) -> ClusterSpec:
    each = tuple(DeviceCount(type=name, count=devices_per_node // len(types)) for name in types)
    figures = (
        DeviceFigures(name=name, memory_bytes=10**9, memory_bytes_per_s=500.0, flops_per_s={"fp32": 1.0})
        for name in types
    )
    group = NodeGroup(name="all", count=num_nodes, devices=each, link=Link(bytes_per_s=10.0, latency_s=1.0))
    network = Link(bytes_per_s=5.0, latency_s=2.0)
    return ClusterSpec(name="test", node_groups=(group,), network=network, device_types=tuple(figures))


def units(names: str, **changes: Any) -> Profile:
    """A chain of layers."""
    return profile(*((x, (names[i - 1] if i else "input",)) for i, x in enumerate(names)), device="unit", **changes)


def run(
    case: Plan, *, where: ClusterSpec | None = None, profiles: Any = None, source: Source | None = None, steps: int = 1
) -> Timeline:
    names = "".join(name for some in case.blocks for name in some.layers)
    cost = CostModel(profiles or units(names), where or cluster())
    flow = dataflow(case, source or cost.profile(cost.device_type(0)))
    return simulate(lower(case, flow), cost, flow, steps=steps)


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    """DAGs of up to six layers: branches, several outputs, shared parameters, values without samples or gradient."""
    layers: list[Layer] = []
    known = ["input"]
    for index in range(draw(st.sampled_from([1, 2, 3, 4, 5, 6]))):
        name = f"l{index}"
        inputs = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        outputs = tuple(
            draw(odd_value(name if place == 0 else f"{name}:{place}")) for place in range(draw(st.integers(1, 2)))
        )
        keys = draw(st.sampled_from([(name,)] * 6 + [(), ("shared",), (name, "shared")]))
        mixes = draw(st.integers(0, 3)) == 0
        layers.append(layer(name, *inputs, outputs=outputs, parameters=dict.fromkeys(keys, 4), mixes_samples=mixes))
        known += [made.name for made in outputs]
    taken = {name for some in layers for name in some.inputs}
    returned = [name for name in known[1:] if name not in taken] or [layers[-1].outputs[0].name]
    extra = draw(st.lists(st.sampled_from(known[1:]), max_size=1))
    return graph(*layers, outputs=tuple(dict.fromkeys((*returned, *extra))))


@st.composite
def odd_value(draw: st.DrawFn, name: str) -> Value:
    """Mostly ordinary ones."""
    kind = draw(st.sampled_from(["plain"] * 12 + ["fixed", "folded", "index", "index"]))
    changes: dict[str, Any] = {
        "plain": {},
        "fixed": {"sample_dim": None, "bytes_per_sample": 0, "fixed_bytes": 8},
        "folded": {"sample_dim": None},
        "index": {"differentiable": False},
    }[kind]
    return value(name, **changes)


@st.composite
def shares(draw: st.DrawFn, batch: int, num_devices: int) -> tuple[Share, ...]:
    """Any devices in any order, with any cuts of the samples."""
    devices = draw(st.permutations(range(num_devices)))[: draw(st.sampled_from(range(1, min(num_devices, batch) + 1)))]
    cuts = draw(st.permutations(range(1, batch)))[: len(devices) - 1]
    edges = [0, *sorted(cuts), batch]
    return tuple(Share(device=d, start=a, stop=b) for d, (a, b) in zip(devices, pairwise(edges), strict=True))


@st.composite
def planned(draw: st.DrawFn) -> tuple[Plan, LayerGraph]:
    """A random model with a random plan that suits it."""
    model = draw(graphs())
    batch, num_devices = draw(st.sampled_from([1, 2, 3, 4, 5, 7])), draw(st.sampled_from([1, 2, 2, 3, 3, 4]))
    num_layers = len(model.layers)
    edges = [0, *(cut for cut in range(1, num_layers) if draw(st.sampled_from([True, True, False]))), num_layers]
    names = [some.name for some in model.layers]
    few = [draw(shares(batch, num_devices)) for _ in range(3)]
    blocks = [block(f"block of {names[a]}", draw(st.sampled_from(few)), *names[a:b]) for a, b in pairwise(edges)]
    found = plan(*blocks, num_devices=num_devices, num_minibatches=draw(st.integers(1, 3)))
    try:
        dataflow(found, model)
    except PlanError:  # something that must stay together was split
        same = [block(some.name, blocks[0].shares, *some.layers) for some in blocks]
        found = plan(*same, num_devices=num_devices, num_minibatches=found.num_minibatches)
    return found, model
