"""Forks: what branches between two stages take, for each width of the stage before and of the stage after.

Takes BurstCost and a Fork. Returns alternatives, each with the widths of all layers in it. Branches run

- one after the other, each layer at a width of its own on the same nested devices; or
- in groups at the same time: a group has its own devices, as many for all its layers, and runs its branches one after
  the other. The group with most to do takes the first devices, the others come behind it; together they never have more
  devices than there are. Only on equal devices.

Which alternatives are returned depends on the weights. Without, all there are: right for small forks, where it makes
the search exact. With weights (seconds a device-second is worth), for each of them the one with the least compute and
device-time, whose widths inside a branch are found by dynamic programming; groups then are as narrow as the slowest of
them allows, or one for each branch and all of one width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, product

import numpy as np
import numpy.typing as npt

from burstpool.plan.branches import Fork, Row, Stage, layers_of
from burstpool.plan.burst_cost import BurstCost, Ops
from burstpool.plan.cost import Floats
from burstpool.plan.pareto import front

Codes = npt.NDArray[np.int32]
"""Alternatives × width before × width after × layers: place of the layer's width + number of widths × first rank."""

_MOST_BRANCHES = 5
"""With more in a large fork, groups are either one branch each or the longest against the rest."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some of a model between two widths, in one or more ways."""

    ops: Ops
    """Alternatives × width before × width after."""
    codes: Codes
    layers: tuple[int, ...]
    """Those the codes are of."""


def num_alternatives(row: Row, num_widths: int) -> int:
    """How many ways there are to run the layers of a row one after the other."""
    return int(min(num_widths ** len(layers_of(row)), 10**9))


def num_groupings(cost: BurstCost, fork: Fork, most: int) -> int:
    """In how many ways branches, also those of forks inside of it, can run at the same time; stops counting at
    `most`."""
    groups = _Groups(cost, fork, 0, [row for row in fork.branches if row])
    count = sum(1 for _ in islice(groups.all(), most))
    inner = (part for row in fork.branches for part in row if isinstance(part, Fork))
    for part in inner:
        if count >= most:
            return most
        count += num_groupings(cost, part, most - count)
    return count


def fork_part(cost: BurstCost, fork: Fork, port_bytes: int, weights: Floats | None) -> Part:
    """All alternatives, or the best for each weight."""
    serial = reduce(
        lambda before, branch: _follow(before, branch, weights),
        (_branch_part(cost, branch, fork, port_bytes, weights) for branch in fork.branches),
    )
    beside = _groups_part(cost, fork, port_bytes, weights)
    if beside is None:
        return serial
    if weights is None:
        ops = Ops(*(np.concatenate(both) for both in zip(serial.ops, beside.ops, strict=True)))
        return Part(ops, np.concatenate([serial.codes, beside.codes]), serial.layers)
    is_better = _score(beside.ops, weights) < _score(serial.ops, weights)
    ops = Ops(*(np.where(is_better, b, a) for a, b in zip(serial.ops, beside.ops, strict=True)))
    return Part(ops, np.where(is_better[..., None], beside.codes, serial.codes), serial.layers)


def stage_part(cost: BurstCost, stage: Stage, bytes_in: int) -> Part:
    """Regrouping into a stage, and the stage."""
    ops = stage_ops(cost, stage).then(cost.regrouping(bytes_in)).at(np.newaxis)
    num_widths = len(cost.widths.values)
    shape = (1, num_widths, num_widths, len(stage.layers))
    codes = np.broadcast_to(np.arange(num_widths, dtype=np.int32)[:, None], shape)
    return Part(ops, codes, stage.layers)


def stage_ops(cost: BurstCost, stage: Stage) -> Ops:
    """The layers of a stage, by width."""
    zeros = np.zeros(len(cost.widths.values))
    parts = (cost.layers.at(layer) for layer in reversed(stage.layers))
    return reduce(Ops.then, parts, Ops(zeros, zeros, zeros, zeros)) if stage.layers else Ops(zeros, zeros, zeros, zeros)


def _branch_part(cost: BurstCost, row: Row, fork: Fork, port_bytes: int, weights: Floats | None) -> Part:
    """A branch from the port up to the stage after the fork, regrouping into that included."""
    found: Part | None = None
    bytes_in, after_fork = port_bytes if row else fork.shortcut_bytes, False
    for part in row:
        if isinstance(part, Fork):
            after_fork, piece = True, fork_part(cost, part, bytes_in, weights)
        elif after_fork:
            assert found is not None
            after_fork = False
            found = Part(stage_ops(cost, part).then(found.ops), _with_last(found, part), (*found.layers, *part.layers))
            bytes_in = part.bytes_per_sample
            continue
        else:
            piece = stage_part(cost, part, bytes_in)
            bytes_in = part.bytes_per_sample
        found = piece if found is None else _chain(found, piece, weights)
    if after_fork:
        assert found is not None
        return found
    leave = stage_part(cost, Stage(), bytes_in)
    return _aligned(leave, weights) if found is None else _chain(found, leave, weights)


def _with_last(found: Part, stage: Stage) -> Codes:
    own = np.arange(found.codes.shape[2], dtype=np.int32)[:, None]
    return np.concatenate([found.codes, np.broadcast_to(own, (*found.codes.shape[:3], len(stage.layers)))], axis=3)


def _aligned(part: Part, weights: Floats | None) -> Part:
    """One alternative a weight."""
    if weights is None or len(part.codes) == len(weights):
        return part
    repeat = np.zeros(len(weights), dtype=np.intp)
    return Part(part.ops.at(repeat), part.codes[repeat], part.layers)


def _score(ops: Ops, weights: Floats) -> Floats:
    """Weights in front × the shape of the parts."""
    priced = weights.reshape(-1, *(1,) * (ops.device_s.ndim - 1)) * np.where(np.isinf(ops.device_s), 0.0, ops.device_s)
    return np.asarray(np.where(np.isinf(ops.device_s), np.inf, ops.compute_s + priced))


def _chain(before: Part, after: Part, weights: Floats | None) -> Part:
    """One behind the other, with every width in between, or the best for each weight."""
    layers = before.layers + after.layers
    if weights is None:
        return _chain_all(before, after)
    before, after = _aligned(before, weights), _aligned(after, weights)
    total = _score(before.ops, weights)[..., None] + _score(after.ops, weights)[:, None]
    middle = total.argmin(axis=2)
    place, row, column = np.ogrid[: len(weights), : middle.shape[1], : middle.shape[2]]
    front_index, back_index = (place, row, middle), (place, middle, column)
    ops = after.ops.at(back_index).then(before.ops.at(front_index))
    return Part(ops, np.concatenate([before.codes[front_index], after.codes[back_index]], axis=3), layers)


def _chain_all(before: Part, after: Part) -> Part:
    num_before, num_after, num_widths = len(before.codes), len(after.codes), before.codes.shape[2]
    a, b, middle = (x.ravel() for x in np.indices((num_before, num_after, num_widths)))
    front = before.ops.at((a, slice(None), middle))
    back = after.ops.at((b, middle))
    ops = back.at((slice(None), np.newaxis)).then(front.at((..., np.newaxis)))
    shape = ops.compute_s.shape
    parts = (before.codes[a, :, middle][:, :, None], after.codes[b, middle][:, None])
    codes = np.concatenate([np.broadcast_to(c, (*shape, c.shape[-1])) for c in parts], axis=3)
    return Part(ops, codes, before.layers + after.layers)


def _follow(before: Part, after: Part, weights: Floats | None) -> Part:
    """Two branches one after the other, between the same widths."""
    a, b = np.arange(len(before.codes)), np.arange(len(after.codes))
    if weights is None:
        a, b = (x.ravel() for x in np.indices((len(a), len(b))))
    codes = np.concatenate([before.codes[a], after.codes[b]], axis=3)
    return Part(after.ops.at(b).then(before.ops.at(a)), codes, before.layers + after.layers)


def _groups_part(cost: BurstCost, fork: Fork, port_bytes: int, weights: Floats | None) -> Part | None:
    """Branches at the same time."""
    rows = [row for row in fork.branches if row]
    if len(rows) < 2 or not cost.equal_devices or not cost.options.branches_beside:
        return None
    groups = _Groups(cost, fork, port_bytes, rows)
    choices = list(groups.all() if weights is None else groups.promising())
    if not choices:
        return None
    found = [groups.ops(partition, places) for partition, places in choices]
    ops = Ops(*(np.stack(arrays) for arrays in zip(*found, strict=True)))
    codes = np.stack([groups.codes(partition, places) for partition, places in choices])[:, None, None]
    layers = tuple(layer for row in fork.branches for layer in layers_of(row))
    codes = np.broadcast_to(codes, (*ops.compute_s.shape, codes.shape[-1]))
    if weights is None:
        return Part(ops, codes, layers)
    best = _score(ops.at(np.newaxis), weights).argmin(axis=1)
    _, row, column = np.ogrid[: len(weights), : best.shape[1], : best.shape[2]]
    return Part(ops.at((best, row, column)), codes[best, row, column], layers)


Partition = tuple[tuple[int, ...], ...]
"""Groups of branches; the one with most to do first."""


class _Groups:
    """Which branches run beside which, on how many devices each."""

    def __init__(self, cost: BurstCost, fork: Fork, port_bytes: int, rows: Sequence[Row]) -> None:
        self.cost, self.fork, self.port_bytes, self.rows = cost, fork, port_bytes, rows
        self.num_devices = len(cost.widths.devices)
        self.inner = [stage_ops(cost, Stage(layers=layers_of(row))) for row in rows]
        self.load = [float(ops.compute_s[0]) for ops in self.inner]
        self.known: dict[tuple[int, ...], Ops] = {}

    def all(self) -> Iterator[tuple[Partition, tuple[int, ...]]]:
        """Every partition into at least two groups, with every width for each."""
        values = self.cost.widths.values
        for partition in self._partitions():
            for places in product(range(len(values)), repeat=len(partition)):
                if sum(values[place] for place in places) <= self.num_devices:
                    yield partition, places

    def promising(self) -> list[tuple[Partition, tuple[int, ...]]]:
        """Those in which no group could be narrower without being the slowest, and that no other beats; and each branch
        for itself, all with one width: wide groups are reached faster."""
        found = [choice for partition in self._some_partitions() for choice in self._widening(partition)]
        if not found:
            return []
        seconds, device_s = (np.array(x) for x in zip(*(self._alone(*choice) for choice in found), strict=True))
        return list(dict.fromkeys([*(found[place] for place in front(seconds, device_s)), *self._alike()]))

    def _alike(self) -> Iterator[tuple[Partition, tuple[int, ...]]]:
        separate = self._ordered([[i] for i in range(len(self.rows))])
        for place, width in enumerate(self.cost.widths.values):
            if width * len(separate) <= self.num_devices:
                yield separate, (place,) * len(separate)

    def ops(self, partition: Partition, places: tuple[int, ...]) -> Ops:
        """Width before × width after: there, each group's branches one after the other, and back."""
        cost, main = self.cost, places[0]
        ends = [sum(_end_bytes(self.rows[i]) for i in group) for group in partition]
        num_devices = np.array(cost.widths.values)
        regroup, whole, others = cost.regroup_s_per_byte, cost.whole_s_per_byte, len(partition) - 1
        # One side of a fork sends to all groups, in the backward the other: over the same links, one after the other.
        slower = [np.maximum(whole, whole[place]) for place in places[1:]]
        into_s = self.port_bytes * np.stack([regroup[:, main] + sum(slower), regroup[:, main] + others * whole])
        sizes = zip(ends[1:], slower, strict=True)
        leave_s = ends[0] * regroup[main] + np.stack([sum(ends[1:]) * whole, sum(size * s for size, s in sizes)])
        parts = []
        for rank, (group, place, size) in enumerate(zip(partition, places, ends, strict=True)):
            if rank == 0:
                into = np.where(regroup[:, main] > 0, cost.regroup_latency_s[:, main] + into_s, 0.0)
                leave = np.where(regroup[main] > 0, cost.regroup_latency_s[main] + leave_s, 0.0)
            else:
                into = cost.beside_latency_s + np.maximum(into_s, self.port_bytes * whole[place])
                leave = cost.beside_latency_s + np.maximum(leave_s, size * whole[place])
            before = cost.there_and_back(into[0, :, None], into[1, :, None], cost.widths.values[place])
            after = cost.there_and_back(leave[0, None], leave[1, None], num_devices)
            parts.append(after.then(self._inner(group).at(place)).then(before))
        if () in self.fork.branches:
            parts.append(cost.regrouping(self.fork.shortcut_bytes))
        return reduce(Ops.beside, parts)

    def codes(self, partition: Partition, places: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """For all layers of the fork."""
        values, offset, of_row = self.cost.widths.values, 0, {}
        for group, place in zip(partition, places, strict=True):
            of_row.update(dict.fromkeys(group, place + len(values) * offset))
            offset += values[place]
        return np.array([of_row[i] for i, row in enumerate(self.rows) for _ in layers_of(row)], dtype=np.int32)

    def _inner(self, group: tuple[int, ...]) -> Ops:
        """A group's branches one after the other, by width."""
        if group not in self.known:
            self.known[group] = reduce(Ops.then, (self.inner[i] for i in reversed(group)))
        return self.known[group]

    def _alone(self, partition: Partition, places: tuple[int, ...]) -> tuple[float, float]:
        inner = [self._inner(group).at(place) for group, place in zip(partition, places, strict=True)]
        return max(float(ops.compute_s) for ops in inner), sum(float(ops.device_s) for ops in inner)

    def _widening(self, partition: Partition) -> Iterator[tuple[Partition, tuple[int, ...]]]:
        values, places = self.cost.widths.values, [0] * len(partition)
        seconds = [np.where(np.isfinite(x.device_s), x.compute_s, np.inf) for x in map(self._inner, partition)]
        while sum(values[place] for place in places) <= self.num_devices:
            yield partition, tuple(places)
            slowest = max(range(len(places)), key=lambda i: seconds[i][places[i]])
            if places[slowest] + 1 == len(values):
                return
            places[slowest] += 1

    def _partitions(self) -> Iterator[Partition]:
        """Into two groups or more, no more than there are devices."""
        for groups in _set_partitions(list(range(len(self.rows)))):
            if 1 < len(groups) <= self.num_devices:
                yield self._ordered(groups)

    def _some_partitions(self) -> Iterator[Partition]:
        """All of few branches; of many, each for itself, and the longest against the rest."""
        if len(self.rows) <= _MOST_BRANCHES:
            yield from self._partitions()
            return
        branches = range(len(self.rows))
        longest = max(branches, key=self.load.__getitem__)
        yield self._ordered([[i] for i in branches])
        yield self._ordered([[longest], [i for i in branches if i != longest]])

    def _ordered(self, groups: Sequence[Sequence[int]]) -> Partition:
        by_load = sorted(groups, key=lambda group: (-sum(self.load[i] for i in group), group[0]))
        return tuple(tuple(group) for group in by_load)


def _set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in _set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [items[0], *rest[place]], *rest[place + 1 :]]


def _end_bytes(row: Row) -> int:
    """What a branch hands on to the stage after the fork, a sample."""
    last = row[-1]
    if isinstance(last, Stage):
        return last.bytes_per_sample
    return sum(_end_bytes(branch) if branch else last.shortcut_bytes for branch in last.branches)
