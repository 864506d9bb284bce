"""Brute force over all plans of the burst planner's search space, for any graph.

Follows the definitions in `burst_cost.py` and `burst_forks.py` word by word, one layer after the other, on arrays with
one entry a plan. It shares the tables of single layers and regroupings with the planner, and how a graph falls into
stages and forks (`branches.py`, tested on its own); nothing else.

A plan of a model chooses, for every fork that is not inside a group, whether its branches run one after the other or in
which groups at the same time and how wide each; and a width for every stage, ports included, that is in no group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from burstpool.plan.branches import Fork, ModelRow, Row, Stage
from burstpool.plan.burst_cost import BurstCost

Groups = tuple[tuple[tuple[int, ...], int], ...]
"""Branches of each group, and the place of its width; the group with most to do first."""
Shape = Mapping[int, Groups | None]
"""Fork (by id) → its groups, or None where its branches run one after the other."""


@dataclass(frozen=True)
class Plans:
    """Many plans that differ in the widths of stages only."""

    cost: BurstCost
    shape: Shape
    width: Mapping[int, np.ndarray]
    """Stage (by id) → place of its width in each plan."""


def brute_force(cost: BurstCost, model: ModelRow) -> tuple[np.ndarray, np.ndarray]:
    """Step time and device-time of every plan."""
    found = [_outcomes(cost, model.row, shape) for shape in _shapes(cost, model.row)]
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]


def _shapes(cost: BurstCost, row: Row) -> Iterator[Shape]:
    forks = [part for part in row if isinstance(part, Fork)]
    for chosen in product(*(list(_fork_shapes(cost, fork)) for fork in forks)):
        yield {key: groups for shape in chosen for key, groups in shape.items()}


def _fork_shapes(cost: BurstCost, fork: Fork) -> Iterator[Shape]:
    for inner in product(*(list(_shapes(cost, branch)) for branch in fork.branches)):
        yield {id(fork): None} | {key: groups for shape in inner for key, groups in shape.items()}
    real = [i for i, branch in enumerate(fork.branches) if branch]
    load = {i: sum(cost.layers.compute_s[x, 0] for x in _layers(fork.branches[i])) for i in real}
    for groups in _partitions(real):
        if len(groups) < 2:
            continue
        groups.sort(key=lambda group: (-sum(load[i] for i in group), group[0]))
        for places in product(range(len(cost.widths.values)), repeat=len(groups)):
            if sum(cost.widths.values[place] for place in places) <= len(cost.widths.devices):
                yield {id(fork): tuple(zip(map(tuple, groups), places, strict=True))}


def _partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in _partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


def _layers(row: Row) -> list[int]:
    found: list[int] = []
    for part in row:
        found += part.layers if isinstance(part, Stage) else [x for branch in part.branches for x in _layers(branch)]
    return found


def _free_stages(row: Row, shape: Shape) -> list[int]:
    found: list[int] = []
    for part in row:
        if isinstance(part, Stage):
            found.append(id(part))
        elif shape[id(part)] is None:
            found += [stage for branch in part.branches for stage in _free_stages(branch, shape)]
    return found


def _outcomes(cost: BurstCost, row: Row, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    stages = _free_stages(row, shape)
    assignments = [x.ravel() for x in np.indices((len(cost.widths.values),) * len(stages), dtype=np.int8)]
    plans = Plans(cost, shape, dict(zip(stages, assignments, strict=True)))
    clocks = _Clocks(cost, len(assignments[0]))
    _pass_row(plans, clocks, row, None, 0, None)
    return np.maximum(clocks.lane_s, clocks.compute_s + cost.updates_s), clocks.device_s


class _Clocks:
    """T, R and device-time of many plans at once, passing layers from the last to the first."""

    def __init__(self, cost: BurstCost, num_plans: int, *, lane: float = 0.0, compute: float = 0.0) -> None:
        self.cost = cost
        self.compute_s, self.lane_s, self.device_s = (np.full(num_plans, x) for x in (compute, lane, 0.0))
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
        seconds = _regroup_s(self.cost, num_bytes, before, after)
        self.move(seconds, seconds)


def _regroup_s(cost: BurstCost, num_bytes: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """One way; what has no bytes moves for nothing."""
    seconds = cost.regroup_latency_s[before, after] + num_bytes * cost.regroup_s_per_byte[before, after]
    return seconds if num_bytes else 0 * seconds


def _pass_row(
    plans: Plans,
    clocks: _Clocks,
    row: Row,
    before: np.ndarray | None,
    bytes_in: int,
    after: np.ndarray | None,
) -> None:
    """From what follows a row (of width `after`) to what stands before it (of width `before`, handing on `bytes_in`);
    None for the ends of the model."""
    for place in reversed(range(len(row))):
        part = row[place]
        earlier = row[place - 1] if place else None
        if isinstance(part, Fork):
            assert isinstance(earlier, Stage)  # a port
            assert after is not None
            _pass_fork(plans, clocks, part, earlier, after)
            continue
        width = plans.width[id(part)]
        if place + 1 == len(row) and after is not None:
            clocks.regroup(part.bytes_per_sample, width, after)
        for index in reversed(part.layers):
            clocks.layer(index, width)
        if isinstance(earlier, Stage):
            clocks.regroup(earlier.bytes_per_sample, plans.width[id(earlier)], width)
        elif earlier is None and before is not None:
            clocks.regroup(bytes_in, before, width)
        after = width


def _pass_fork(plans: Plans, clocks: _Clocks, fork: Fork, port: Stage, join: np.ndarray) -> None:
    groups, width = plans.shape[id(fork)], plans.width[id(port)]
    if groups is not None:
        _pass_groups(plans.cost, clocks, fork, groups, port.bytes_per_sample, width, join)
        return
    for branch in reversed(fork.branches):
        if branch:
            _pass_row(plans, clocks, branch, width, port.bytes_per_sample, join)
        else:
            clocks.regroup(fork.shortcut_bytes, width, join)


def _end_bytes(row: Row) -> int:
    last = row[-1]
    if isinstance(last, Stage):
        return last.bytes_per_sample
    return sum(_end_bytes(branch) if branch else last.shortcut_bytes for branch in last.branches)


def _pass_groups(
    cost: BurstCost,
    clocks: _Clocks,
    fork: Fork,
    groups: Groups,
    size: int,
    port: np.ndarray,
    join: np.ndarray,
) -> None:
    """Groups of branches at the same time."""
    whole, places, num_plans = cost.whole_s_per_byte, [place for _, place in groups], len(port)
    main = np.full(num_plans, places[0])
    ends = [sum(_end_bytes(fork.branches[i]) for i in group) for group, _ in groups]
    # Forward: the port sends to one group after the other, the join gets from all at once; backward the reverse.
    from_port, to_join = cost.regroup_s_per_byte[port, main], cost.regroup_s_per_byte[main, join]
    pairs = list(zip(ends[1:], places[1:], strict=True))
    into = (
        size * (from_port + sum(np.maximum(whole[port], whole[place]) for place in places[1:])),
        size * (from_port + (len(groups) - 1) * whole[port]),
    )
    leave = (
        ends[0] * to_join + sum(end * whole[join] for end, _ in pairs),
        ends[0] * to_join + sum(end * np.maximum(whole[join], whole[place]) for end, place in pairs),
    )
    effects = []
    for rank, ((group, place), end) in enumerate(zip(groups, ends, strict=True)):
        at = np.full(num_plans, place)
        if rank == 0:
            out = [np.where(at == join, 0.0, cost.regroup_latency_s[at, join] + way) for way in leave]
            come = [np.where(at == port, 0.0, cost.regroup_latency_s[port, at] + way) for way in into]
        else:
            out = [cost.beside_latency_s + np.maximum(way, end * whole[place]) for way in leave]
            come = [cost.beside_latency_s + np.maximum(way, size * whole[place]) for way in into]
        layers = [(x, at) for i in reversed(group) for x in reversed(_layers(fork.branches[i]))]
        effects.append(_effect(cost, [out, *layers, come], num_plans))
    if () in fork.branches:
        shortcut_s = _regroup_s(cost, fork.shortcut_bytes, port, join)
        effects.append(_effect(cost, [[shortcut_s, shortcut_s]], num_plans))
    before_s = clocks.compute_s.copy()
    clocks.compute_s = before_s + np.max([effect[0] for effect in effects], axis=0)
    lane_s = clocks.lane_s + np.max([effect[1] for effect in effects], axis=0)
    clocks.lane_s = np.maximum(lane_s, before_s + np.max([effect[2] for effect in effects], axis=0))
    clocks.device_s += sum(effect[3] for effect in effects)


def _effect(
    cost: BurstCost, steps: Sequence[list[np.ndarray] | tuple[int, np.ndarray]], num_plans: int
) -> tuple[np.ndarray, ...]:
    """What a group adds to the compute clock; to a lane that is far ahead; to a lane that is not; device-time."""
    late = _Clocks(cost, num_plans, lane=-1e6)
    ahead = _Clocks(cost, num_plans, compute=-1e6)
    for clocks in (late, ahead):
        for step in steps:
            clocks.layer(*step) if isinstance(step, tuple) else clocks.move(*step)
    lane_s = late.compute_s if cost.options.reduction == "added" else ahead.lane_s
    return late.compute_s, lane_s, late.lane_s, late.device_s
