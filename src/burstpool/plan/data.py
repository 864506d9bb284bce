"""Data-parallel planner: every device runs the whole model on its part of the samples.

Decides two things. How many samples each device gets: evenly among equal devices; among unequal ones so that the
slowest is done as early as possible. And where the model is cut into blocks, whose gradients are reduced as soon as
they are there: every cut lets a reduction start earlier but costs its latency again. All ways to cut are compared by a
dynamic programme over the cost model, and the fewest blocks within 1% of the best step time are taken; `bucket_bytes`
cuts like PyTorch's DDP instead (25 MiB there).

Takes profiles, ClusterSpec, batch. Returns Plan. Ignores memory, and differences between devices other than their
speed at forward and backward.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan.cost import CostModel, Floats, Profiles
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan, PlannedBlock, Share, even_shares
from burstpool.schedule.simulate import predict

_CLOSE_ENOUGH = 1.01
"""Fewer blocks are taken for a step that is longer by no more than this: cuts have costs that are not modelled."""
_MOST_BLOCKS = 64


def plan(
    profiles: Profiles,
    cluster: ClusterSpec,
    *,
    batch: int,
    graph: LayerGraph | None = None,
    extrapolate: bool = False,
    bucket_bytes: int | None = None,
) -> Plan:
    """All devices, each with a part of the samples. O(layers² × blocks + devices × batch)."""
    if batch < 1:
        raise PlanError(f"batch={batch} must be at least 1")
    if bucket_bytes is not None and bucket_bytes < 1:
        raise PlanError(f"bucket_bytes={bucket_bytes} must be at least 1")
    cost = CostModel(profiles, cluster, extrapolate=extrapolate)
    model = cost.profile(cost.device_type(0))
    shares = fastest_shares(cost, batch)
    whole = _plan(model.model, cluster, shares, cost.layers, range(len(cost.layers) + 1))
    sizes = [block.parameter_bytes for block in dataflow(whole, graph or model).blocks.values()]
    cuts = best_cuts(cost, shares, sizes) if bucket_bytes is None else bucket_cuts(sizes, bucket_bytes)
    found = _plan(model.model, cluster, shares, cost.layers, cuts)
    return predict(found, cost, dataflow(found, graph or model))


def _plan(
    model: str, cluster: ClusterSpec, shares: tuple[Share, ...], layers: Sequence[str], cuts: Sequence[int]
) -> Plan:
    blocks = (PlannedBlock(name=layers[a], layers=tuple(layers[a:b]), shares=shares) for a, b in pairwise(cuts))
    return Plan(
        model=model,
        strategy="data",
        num_devices=cluster.num_devices,
        batch=shares[-1].stop,
        blocks=tuple(blocks),
    )


def fastest_shares(cost: CostModel, batch: int) -> tuple[Share, ...]:
    """Shares of all devices that make the slowest one's forward and backward as short as possible."""
    devices = range(cost.cluster.num_devices)
    if cost.cluster.homogeneous:
        return even_shares(batch, tuple(devices))
    times = {name: _times(cost, name, batch) for name in dict.fromkeys(map(cost.device_type, devices))}
    kinds = [cost.device_type(device) for device in devices]
    limit_s = _least_limit(times, kinds, batch)
    counts = [_most_within(times[kind], limit_s) for kind in kinds]
    _give_back(counts, [times[kind] for kind in kinds], surplus=sum(counts) - batch)
    stops = np.cumsum(counts).tolist()
    return tuple(
        Share(device=device, start=stop - count, stop=stop)
        for device, count, stop in zip(devices, counts, stops, strict=True)
        if count
    )


Times = tuple[int, list[float]]
"""The least number of samples that can be predicted, and the seconds of that many, one more, …"""


def _times(cost: CostModel, device_type: str, batch: int) -> Times:
    """Never falling, so that fewer samples always fit where more do."""
    measured = cost.profile(device_type).batches
    least = 1 if cost.extrapolate else measured[0]
    most = batch if cost.extrapolate else min(measured[-1], batch)
    if least > most:
        return least, []
    return least, np.maximum.accumulate(cost.compute_times(device_type, range(least, most + 1))).tolist()


def _most_within(times: Times, limit_s: float) -> int:
    least, seconds = times
    fitting = bisect_right(seconds, limit_s)
    return least + fitting - 1 if fitting else 0


def _least_limit(times: dict[str, Times], kinds: Sequence[str], batch: int) -> float:
    """The shortest time within which all devices together can run the batch."""
    limits = sorted({second for _, seconds in times.values() for second in seconds})
    devices = Counter(kinds)

    def capacity(limit_s: float) -> int:
        return sum(number * _most_within(times[kind], limit_s) for kind, number in devices.items())

    if not limits or capacity(limits[-1]) < batch:
        raise PlanError(
            f"no split of {batch} samples over {len(kinds)} devices keeps to the measured batches; measure more of "
            "them, or pass --extrapolate to have them guessed"
        )
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if capacity(limits[middle]) >= batch else (middle + 1, high)
    return limits[low]


def _give_back(counts: list[int], times: Sequence[Times], *, surplus: int) -> None:
    """Takes surplus samples from those that would finish last, the last devices first."""

    def entry(device: int) -> tuple[float, int]:
        least, seconds = times[device]
        return -seconds[counts[device] - least], -device

    queue = [entry(device) for device, number in enumerate(counts) if number]
    heapify(queue)
    while surplus and queue:
        device = -heappop(queue)[1]
        least = times[device][0]
        taken = 1 if counts[device] > least else counts[device]  # fewer than the least: none at all
        if taken > surplus:
            continue
        counts[device] -= taken
        surplus -= taken
        if counts[device]:
            heappush(queue, entry(device))
    if surplus:
        raise PlanError("no split of the samples keeps to the measured batches; measure batch 1, or pass --extrapolate")


def bucket_cuts(parameter_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Where blocks begin, and the end: from the last layer on, a block is full when it has so many bytes."""
    cuts, filled = [len(parameter_bytes)], 0
    for place in reversed(range(len(parameter_bytes))):
        filled += parameter_bytes[place]
        if filled >= bucket_bytes and place > 0:
            cuts.append(place)
            filled = 0
    return [*([] if cuts[-1] == 0 else [0]), *reversed(cuts)]


def best_cuts(cost: CostModel, shares: Sequence[Share], parameter_bytes: Sequence[int]) -> list[int]:
    """Where blocks begin, and the end, so that the last reduction ends as early as it can.

    Reductions follow each other from the last block to the first, each when its block's backward is done:
    end(j) = min over i > j of max(end(i), ready(j)) + reduce(layers j to i - 1), with one more block each round.
    """
    num_layers = len(parameter_bytes)
    ready = _ready_times(cost, shares)
    reduce_s = _reduce_times(cost, shares, parameter_bytes)
    host_block_s = max(cost.host_s(share.device, 1) - cost.host_s(share.device, 0) for share in shares)
    end = np.append(np.full(num_layers, np.inf), 0.0)
    choices, totals = [], []
    for _ in range(min(num_layers, _MOST_BLOCKS)):
        options = np.maximum(end[None, :], ready[:, None]) + reduce_s
        choice = options.argmin(axis=1)
        end = np.append(options[np.arange(num_layers), choice], np.inf)
        choices.append(choice)
        totals.append(end[0] + len(choices) * host_block_s)
    enough = next(k for k, total in enumerate(totals) if total <= _CLOSE_ENOUGH * min(totals))
    cuts = [0]
    for choice in reversed(choices[: enough + 1]):
        cuts.append(int(choice[cuts[-1]]))
    return cuts


def _ready_times(cost: CostModel, shares: Sequence[Share]) -> Floats:
    """Layer → when the slowest device has its gradient."""
    found = np.zeros(len(cost.layers))
    for kind, samples in {(cost.device_type(share.device), share.num_samples) for share in shares}:
        forward, backward = cost.layer_times(kind, [samples])
        loss_s = float(cost.compute_times(kind, [samples])[0] - forward.sum() - backward.sum())
        found = np.maximum(found, forward.sum() + loss_s + np.cumsum(backward[::-1, 0])[::-1])
    if len(shares) > 1 and cost.collective(tuple(sorted(share.device for share in shares))).shares_compute:
        found[:] = found.max()  # reducing early would only put off the backward
    return found


def _reduce_times(cost: CostModel, shares: Sequence[Share], parameter_bytes: Sequence[int]) -> Floats:
    """[j, i] → seconds to reduce layers j to i - 1; infinite where that is no block, 0 where nothing is reduced."""
    sums = np.concatenate([[0], np.cumsum(parameter_bytes)]).astype(np.float64)
    num_bytes = sums[None, :] - sums[:-1, None]
    seconds = np.zeros_like(num_bytes)
    if len(shares) > 1:
        collective = cost.collective(tuple(sorted(share.device for share in shares)))
        seconds = np.where(num_bytes > 0, collective.reduces_s(num_bytes), 0.0)
    seconds[np.tril_indices(len(parameter_bytes), 0, len(sums))] = np.inf
    return seconds
