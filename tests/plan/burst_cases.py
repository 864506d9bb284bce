"""Random models for the burst planner's tests, and brute force over all plans of its search space.

Brute force follows the definitions in `burst_cost.py` and `burst_forks.py` word by word, one layer after the other, on
arrays with one entry a plan. It shares the tables of single layers and regroupings with the planner, nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from hypothesis import strategies as st

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.plan.burst_cost import BurstCost
from burstpool.profiling.profile import LayerProfile, Profile

BATCHES = (1, 2, 3, 4, 6, 12)


@dataclass(frozen=True)
class Case:
    """A model: stem, branches (none for a chain; one may be empty) and tail; the tail begins with the join."""

    profile: Profile
    stem: tuple[int, ...]
    tail: tuple[int, ...]
    branches: tuple[tuple[int, ...], ...] = field(default=())


def layer(
    name: str, inputs: tuple[str, ...], *, seconds: float, fixed_s: float, parameters: int, size: int
) -> LayerProfile:
    """Time grows with the batch from a floor."""
    forward = {batch: fixed_s + seconds * batch for batch in BATCHES}
    return LayerProfile(
        name=name,
        inputs=inputs,
        parameter_bytes=parameters,
        output_bytes_per_sample=size,
        forward_s=forward,
        backward_s={batch: 1.7 * second for batch, second in forward.items()},
    )


def profile(layers: list[LayerProfile]) -> Profile:
    return Profile(model="random", device="A100", source="made up", layers=tuple(layers))


def cluster(num_devices: int, *, num_nodes: int = 1, latency_s: float = 1e-5) -> ClusterSpec:
    link = Link(bytes_per_s=1e11, latency_s=latency_s)
    network = Link(bytes_per_s=1e10, latency_s=3 * latency_s) if num_nodes > 1 else None
    return ClusterSpec.uniform("A100", devices_per_node=num_devices, num_nodes=num_nodes, link=link, network=network)


_COSTS = st.fixed_dictionaries(
    {
        "seconds": st.sampled_from([1e-5, 7e-5, 3e-4, 1.3e-3]),
        "fixed_s": st.sampled_from([1e-5, 9e-5, 6e-4]),
        "parameters": st.sampled_from([0, 10**4, 3 * 10**7, 4 * 10**8]),
        "size": st.sampled_from([4, 10**4, 3 * 10**6]),
    }
)


@st.composite
def chains(draw: st.DrawFn, max_layers: int = 8) -> Case:
    num_layers = draw(st.integers(1, max_layers))
    costs = draw(st.lists(_COSTS, min_size=num_layers, max_size=num_layers))
    layers = [layer(f"l{i}", (f"l{i - 1}" if i else "input",), **cost) for i, cost in enumerate(costs)]
    return Case(profile(layers), tuple(range(len(layers))), ())


_LENGTHS = [(1, 1), (2, 1), (1, 2, 1), (1, 1, 1), (2, 0), (1, 1, 0), (2, 2), (3, 1), (2, 2, 2), (3, 2, 1), (4, 2, 0)]
"""Layers of each branch."""


@st.composite
def forks(draw: st.DrawFn, max_layers: int = 8) -> Case:
    lengths = draw(st.sampled_from([lengths for lengths in _LENGTHS if sum(lengths) + 2 <= max_layers]))
    num_tail = draw(st.integers(1, max(1, min(2, max_layers - 1 - sum(lengths)))))
    total = 1 + sum(lengths) + num_tail
    costs = draw(st.lists(_COSTS, min_size=total, max_size=total))
    layers, branches, ends, place = [layer("l0", ("input",), **costs[0])], [], [], 1
    for length in lengths:
        before = "l0"
        branches.append(tuple(range(place, place + length)))
        for _ in range(length):
            layers.append(layer(f"l{place}", (before,), **costs[place]))
            before, place = f"l{place}", place + 1
        ends.append(before)
    tail = tuple(range(place, total))
    for index in tail:
        layers.append(layer(f"l{index}", tuple(ends) if index == place else (f"l{index - 1}",), **costs[index]))
    return Case(profile(layers), (0,), tail, tuple(branches))


@st.composite
def graphs(draw: st.DrawFn, max_layers: int = 9) -> Profile:
    """Any graph: layers take from one or two earlier ones, or from the model's input."""
    layers = []
    for index in range(draw(st.integers(2, max_layers))):
        names = st.sampled_from([f"l{i}" for i in range(index)] or ["input"])
        inputs = draw(st.lists(names, min_size=1, max_size=2, unique=True))
        layers.append(layer(f"l{index}", tuple(inputs), **draw(_COSTS)))
    return profile(layers)


class _Clocks:
    """T, R and device-time of many plans at once, passing layers from the last to the first."""

    def __init__(self, cost: BurstCost, case: Case, shape: int, *, lane: float = 0.0, compute: float = 0.0) -> None:
        self.cost, self.layers = cost, case.profile.layers
        self.compute_s, self.lane_s, self.device_s = (np.full(shape, x, dtype=float) for x in (compute, lane, 0.0))
        self.added = cost.options.reduction == "added"

    def layer(self, index: int, place: np.ndarray) -> None:
        ops, reduce_s = self.cost.layers, self.cost.reduce_s[index][place]
        self.device_s += ops.device_s[index][place]
        self.compute_s += ops.compute_s[index][place]
        if self.added:
            self.lane_s = self.compute_s.copy()
            return
        forward_s = ops.lane_s[index][place] - reduce_s
        self.lane_s = np.maximum(self.lane_s + forward_s, self.compute_s) + reduce_s

    def move(self, there_s: np.ndarray, back_s: np.ndarray) -> None:
        self.compute_s += there_s + back_s
        self.lane_s = self.compute_s.copy() if self.added else np.maximum(self.lane_s + there_s, self.compute_s)

    def regroup(self, num_bytes: int, before: np.ndarray, after: np.ndarray) -> None:
        seconds = regroup_s(self.cost, num_bytes, before, after)
        self.move(seconds, seconds)


def regroup_s(cost: BurstCost, num_bytes: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """One way."""
    return cost.regroup_latency_s[before, after] + num_bytes * cost.regroup_s_per_byte[before, after]


def brute_force(cost: BurstCost, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Step time and device-time of every plan."""
    num_widths, num_layers = len(cost.widths.values), len(case.profile.layers)
    sizes = [x.output_bytes_per_sample for x in case.profile.layers]
    if not case.branches:
        return _chain(cost, case, sizes, num_widths, num_layers)
    found = [_serial(cost, case, sizes, num_widths, num_layers), *_beside(cost, case, sizes, num_widths)]
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]


def _assignments(num_widths: int, count: int) -> list[np.ndarray]:
    return [x.ravel() for x in np.indices((num_widths,) * count)]


def _end(cost: BurstCost, clocks: _Clocks) -> tuple[np.ndarray, np.ndarray]:
    return np.maximum(clocks.lane_s, clocks.compute_s + cost.updates_s), clocks.device_s


def _chain(cost: BurstCost, case: Case, sizes: list[int], num_widths: int, num_layers: int):  # type: ignore[no-untyped-def]
    width = _assignments(num_widths, num_layers)
    clocks = _Clocks(cost, case, len(width[0]))
    for index in reversed(range(num_layers)):
        clocks.layer(index, width[index])
        if index:
            clocks.regroup(sizes[index - 1], width[index - 1], width[index])
    return _end(cost, clocks)


def _tail(case: Case, clocks: _Clocks, sizes: list[int], width: dict[int, np.ndarray]) -> None:
    for index in reversed(case.tail):
        clocks.layer(index, width[index])
        if index != case.tail[0]:
            clocks.regroup(sizes[index - 1], width[index - 1], width[index])


def _serial(cost: BurstCost, case: Case, sizes: list[int], num_widths: int, num_layers: int):  # type: ignore[no-untyped-def]
    *width_list, port = _assignments(num_widths, num_layers + 1)
    width = dict(enumerate(width_list))
    clocks = _Clocks(cost, case, len(port))
    _tail(case, clocks, sizes, width)
    join = width[case.tail[0]]
    for branch in reversed(case.branches):
        if not branch:
            clocks.regroup(sizes[0], port, join)
        for place, index in reversed(list(enumerate(branch))):
            after = join if place + 1 == len(branch) else width[branch[place + 1]]
            clocks.regroup(sizes[index], width[index], after)
            clocks.layer(index, width[index])
            if place == 0:
                clocks.regroup(sizes[0], port, width[index])
    clocks.regroup(sizes[0], width[0], port)
    clocks.layer(0, width[0])
    return _end(cost, clocks)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put things into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


def _beside(cost: BurstCost, case: Case, sizes: list[int], num_widths: int):  # type: ignore[no-untyped-def]
    real = [i for i, branch in enumerate(case.branches) if branch]
    load = {i: sum(cost.layers.compute_s[x, 0] for x in case.branches[i]) for i in real}
    *width_list, port = _assignments(num_widths, len(case.tail) + 2)
    width = dict(zip((0, *case.tail), width_list, strict=True))
    for groups in partitions(real):
        if len(groups) < 2:
            continue
        groups.sort(key=lambda group: (-sum(load[i] for i in group), group[0]))
        for places in product(range(num_widths), repeat=len(groups)):
            if sum(cost.widths.values[place] for place in places) <= len(cost.widths.devices):
                yield _grouped(cost, case, sizes, groups, places, width, port)


def _grouped(cost, case, sizes, groups, places, width, port):  # type: ignore[no-untyped-def]
    """Groups of branches at the same time."""
    clocks = _Clocks(cost, case, len(port))
    _tail(case, clocks, sizes, width)
    join, main, whole = width[case.tail[0]], np.full(len(port), places[0]), cost.whole_s_per_byte
    ends = [sum(sizes[case.branches[i][-1]] for i in group) for group in groups]
    # Forward: the port sends to one group after the other, the join gets from all at once; backward the reverse.
    from_port, to_join = cost.regroup_s_per_byte[port, main], cost.regroup_s_per_byte[main, join]
    into = {
        "there": sizes[0] * (from_port + sum(np.maximum(whole[port], whole[place]) for place in places[1:])),
        "back": sizes[0] * (from_port + (len(groups) - 1) * whole[port]),
    }
    pairs = list(zip(ends[1:], places[1:], strict=True))
    leave = {
        "there": ends[0] * to_join + sum(size * whole[join] for size, _ in pairs),
        "back": ends[0] * to_join + sum(size * np.maximum(whole[join], whole[place]) for size, place in pairs),
    }
    effects = []
    for rank, (group, place, size) in enumerate(zip(groups, places, ends, strict=True)):
        at = np.full(len(port), place)
        leave_s, into_s = {}, {}
        for way in ("there", "back"):
            if rank == 0:
                leave_s[way] = np.where(at == join, 0.0, cost.regroup_latency_s[at, join] + leave[way])
                into_s[way] = np.where(at == port, 0.0, cost.regroup_latency_s[port, at] + into[way])
            else:
                leave_s[way] = cost.beside_latency_s + np.maximum(leave[way], size * whole[place])
                into_s[way] = cost.beside_latency_s + np.maximum(into[way], sizes[0] * whole[place])
        steps = [leave_s, *((x, at) for i in reversed(group) for x in reversed(case.branches[i])), into_s]
        effects.append(_effect(cost, case, steps, len(port)))
    if () in case.branches:
        shortcut_s = regroup_s(cost, sizes[0], port, join)
        effects.append(_effect(cost, case, [{"there": shortcut_s, "back": shortcut_s}], len(port)))
    before_s = clocks.compute_s.copy()
    clocks.compute_s = before_s + np.max([effect[0] for effect in effects], axis=0)
    lane_s = clocks.lane_s + np.max([effect[1] for effect in effects], axis=0)
    clocks.lane_s = np.maximum(lane_s, before_s + np.max([effect[2] for effect in effects], axis=0))
    clocks.device_s += sum(effect[3] for effect in effects)
    clocks.regroup(sizes[0], width[0], port)
    clocks.layer(0, width[0])
    return _end(cost, clocks)


def _effect(cost, case, steps, shape):  # type: ignore[no-untyped-def]
    """What a group adds to the compute clock; to a lane that is far ahead; to a lane that is not; device-time."""
    late = _Clocks(cost, case, shape, lane=-1e6)
    ahead = _Clocks(cost, case, shape, compute=-1e6)
    for clocks in (late, ahead):
        for step in steps:
            clocks.layer(*step) if isinstance(step, tuple) else clocks.move(step["there"], step["back"])
    lane_s = late.compute_s if cost.options.reduction == "added" else ahead.lane_s
    return late.compute_s, lane_s, late.lane_s, late.device_s
