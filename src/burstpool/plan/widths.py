"""Widths: how many devices a layer may get, which samples each of them has then, and what moves between two widths.

Takes CostModel and batch. Returns, for each width worth considering, the samples of each device; and for each two
widths, what the busiest device and the busiest node must send or receive. Everything follows from the width alone, so
that layers of one width never regroup:

- Devices stand in one order, fastest nodes first, and width w means the first w of them: sets are nested, and narrow
  ones stay inside a node.
- Along the samples, devices stand in bit-reversed order (0 4 2 6 1 5 3 7): where a layer gets twice as many devices,
  each keeps half of what it had and hands the other half to one new device. Between widths that do not divide
  each other some more must move; it is counted.
- Equal devices share evenly; unequal ones so that the slowest is done with the whole model as early as possible.

Of widths that leave the busiest device with as many samples, only the narrowest is considered: the others are no
faster and use more devices. Ignores memory, and widths whose samples a device were not measured (unless extrapolating).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from burstpool.errors import PlanError
from burstpool.plan.cost import CostModel
from burstpool.plan.plan import Share

Counts = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Widths:
    """The widths, rising, and their layouts; arrays are by place of the width, and by rank of the device."""

    batch: int
    """Samples of a minibatch."""
    devices: tuple[int, ...]
    """Rank → device of the cluster."""
    values: tuple[int, ...]
    """Numbers of devices."""
    counts: Counts
    """Widths × ranks → samples of the device; 0 beyond the width."""
    starts: Counts
    """Widths × ranks → its first sample."""
    node_starts: Counts
    """The rank at which each node begins."""

    def shares(self, place: int, offset: int = 0) -> tuple[Share, ...]:
        """Who has which samples at a width; `offset` ranks further down where other branches run beside."""
        ranks = np.flatnonzero(self.counts[place])
        ranks = ranks[np.argsort(self.starts[place, ranks])]
        return tuple(
            Share(
                device=self.devices[rank + offset],
                start=int(self.starts[place, rank]),
                stop=int(self.starts[place, rank] + self.counts[place, rank]),
            )
            for rank in ranks
        )

    def moved(self) -> tuple[Counts, Counts]:
        """Widths × widths → most samples into or out of one device, and of one node.

        Where either width spans several nodes, all that moves is taken to leave its node.
        """
        num_widths, one_node = len(self.values), len(self.node_starts) == 1
        device, node = (np.zeros((num_widths, num_widths), dtype=np.int32) for _ in range(2))
        stops = self.starts + self.counts
        for a in range(num_widths - 1):
            used = self.values[-1]
            rest = (slice(a + 1, None), slice(0, used))
            kept = np.minimum(stops[a, :used], stops[rest]) - np.maximum(self.starts[a, :used], self.starts[rest])
            np.maximum(kept, 0, out=kept)
            into, out = self.counts[rest] - kept, self.counts[a, :used] - kept
            device[a, a + 1 :] = np.maximum(into.max(axis=1), out.max(axis=1))
            if not one_node:
                begins = self.node_starts[self.node_starts < used]
                totals = (np.add.reduceat(moving, begins, axis=1).max(axis=1) for moving in (into, out))
                node[a, a + 1 :] = np.maximum(*totals) * self.spans_nodes[a + 1 :]
        return device + device.T, node + node.T

    @property
    def spans_nodes(self) -> npt.NDArray[np.bool_]:
        """Whether a width needs more than the first node."""
        first_node = self.node_starts[1] if len(self.node_starts) > 1 else len(self.devices)
        return np.array(self.values) > first_node


def find_widths(cost: CostModel, batch: int, *, values: Iterable[int] | None = None) -> Widths:
    """All widths worth considering, or those of `values` that can be had."""
    if batch < 1:
        raise PlanError(f"batch={batch} must be at least 1")
    devices = _order(cost)
    candidates = _candidates(cost, len(devices), batch) if values is None else values
    layouts, seen = {}, set()
    for width in candidates:
        counts = _counts(cost, devices[:width], batch)
        # Of unequal devices, the busiest may be of any type: only an equal split is no news.
        if counts is not None and counts.tobytes() not in seen:
            seen.add(counts.tobytes())
            layouts[width] = counts
    if not layouts:
        raise PlanError(
            f"{batch} samples over up to {len(devices)} devices are not among the measured batches a device; measure "
            "them, or pass --extrapolate to have them guessed"
        )
    return _lay_out(cost, batch, devices, layouts)


def _candidates(cost: CostModel, num_devices: int, batch: int) -> list[int]:
    widths = range(1, min(num_devices, batch) + 1)
    if not cost.cluster.homogeneous:
        return list(widths)
    return [width for width in widths if width == 1 or -(-batch // width) < -(-batch // (width - 1))]


def _order(cost: CostModel) -> tuple[int, ...]:
    """Devices, those of a node together; fast nodes, and in each its fast devices, first."""
    if cost.cluster.homogeneous:
        return tuple(range(cost.cluster.num_devices))
    seconds = {kind: cost.profile(kind).step_time_s(cost.profile(kind).batches[-1]) for kind in _kinds(cost)}
    rate = {kind: cost.profile(kind).batches[-1] / seconds[kind] for kind in seconds}
    best: dict[int, float] = {}
    for device in cost.cluster.devices:
        best[device.node] = max(best.get(device.node, 0.0), rate[device.type])
    ranked = sorted(cost.cluster.devices, key=lambda d: (-best[d.node], d.node, -rate[d.type], d.index))
    return tuple(device.index for device in ranked)


def _kinds(cost: CostModel) -> tuple[str, ...]:
    return tuple(dict.fromkeys(device.type for device in cost.cluster.devices))


def _counts(cost: CostModel, devices: Sequence[int], batch: int) -> Counts | None:
    """Samples of each; None where some would have more or fewer than was measured, or none."""
    kinds = [cost.device_type(devices[0])] if cost.cluster.homogeneous else [*map(cost.device_type, devices)]
    if len(set(kinds)) == 1:
        base, more = divmod(batch, len(devices))
        counts = np.full(len(devices), base, dtype=np.int32)
        counts[:more] += 1
    else:
        found = _balanced(cost, kinds, batch)
        if found is None:
            return None
        counts = found
    for kind in set(kinds):
        measured = cost.profile(kind).batches
        own = counts if len(set(kinds)) == 1 else counts[[place for place, other in enumerate(kinds) if other == kind]]
        if own.min() < 1 or not (cost.extrapolate or measured[0] <= own.min() <= own.max() <= measured[-1]):
            return None
    return counts


def _balanced(cost: CostModel, kinds: Sequence[str], batch: int) -> Counts | None:
    """The split among unequal devices whose slowest is done first."""
    most = {kind: batch if cost.extrapolate else min(batch, cost.profile(kind).batches[-1]) for kind in set(kinds)}
    least = {kind: 1 if cost.extrapolate else cost.profile(kind).batches[0] for kind in set(kinds)}
    if any(least[kind] > 1 for kind in most):
        return None  # a device might need fewer samples than can be predicted
    seconds = {
        kind: np.maximum.accumulate(cost.compute_times(kind, range(1, limit + 1))) for kind, limit in most.items()
    }
    limits = np.unique(np.concatenate(list(seconds.values())))
    fitting = {kind: np.searchsorted(times, limits, side="right") for kind, times in seconds.items()}
    capacity = np.sum([fitting[kind] for kind in kinds], axis=0)
    if capacity[-1] < batch:
        return None
    place = int(np.searchsorted(capacity, batch))
    counts = np.array([fitting[kind][place] for kind in kinds], dtype=np.int32)
    times = np.array([seconds[kind][count - 1] if count else 0.0 for kind, count in zip(kinds, counts, strict=True)])
    for _ in range(int(capacity[place]) - batch):
        last = len(times) - 1 - int(times[::-1].argmax())
        counts[last] -= 1
        times[last] = seconds[kinds[last]][counts[last] - 1] if counts[last] else 0.0
    return counts


def _lay_out(cost: CostModel, batch: int, devices: tuple[int, ...], layouts: dict[int, Counts]) -> Widths:
    num_devices = len(devices)
    bits = max(num_devices - 1, 1).bit_length()
    reversed_bits = np.array([int(f"{rank:0{bits}b}"[::-1], 2) for rank in range(num_devices)])
    along = np.argsort(reversed_bits)
    counts, starts = (np.zeros((len(layouts), num_devices), dtype=np.int32) for _ in range(2))
    for place, (width, own) in enumerate(layouts.items()):
        counts[place, :width] = own
        ranks = along[along < width]
        starts[place, ranks] = np.cumsum(own[ranks]) - own[ranks]
    nodes = [cost.cluster.devices[device].node for device in devices]
    begins = [rank for rank in range(num_devices) if rank == 0 or nodes[rank] != nodes[rank - 1]]
    return Widths(
        batch=batch,
        devices=devices,
        values=tuple(layouts),
        counts=counts,
        starts=starts,
        node_starts=np.array(begins),
    )
