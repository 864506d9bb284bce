"""The cost that the burst planner minimises: what a layer takes at each width, and what regrouping between two takes.

Takes CostModel, Widths, BurstOptions. Returns tables that numpy can search. Defined as follows, for one step.

A layer of width w takes the slowest of its devices' forward and backward, and the reduction of its gradients among
them. Two clocks run: compute, and the lane of reductions. Passing the layers from the last to the first, with `T` the
compute so far and `R` the end of the lane:

    a layer        T ← T + forward + backward        R ← max(R + forward, T) + reduce
    a regrouping   T ← T + there + back              R ← max(R + there, T)
    the end        step time = max(R, T + updates)

so a reduction costs only what backward does not hide. With `reduction="added"` there is no lane: every layer takes
forward + backward + bytes / rate, as DeepPool's planner has it (no latency, no factor of the ring).

A regrouping costs, each way, a latency and the bytes of the samples that change devices: the most into or out of one
device over its link, or of one node over the network, whichever takes longer. To and from devices that run beside (of
another group of branches) every sample moves. A stage sends to one such group after the other, each as fast as the
slower side allows; it gets from all of them at once, as fast as its own links allow.

Parameters change after the step; all of them on the first device, so their time is the same for every plan.

Device-time is what all devices together are busy: forward, backward and updates of every device with its own number of
samples, as the simulator counts it. With `device_time="held"` it is width × seconds, including the regrouping into the
layer and an added reduction, as DeepPool counts.

Not modelled, next to what CostModel leaves out: reductions and regroupings that hinder each other; messages that wait
for a link although another they could take is free; that devices with fewer samples may begin their backward earlier.
Reductions are made in buckets (`bucket_bytes`), of which a layer pays the part it fills.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from burstpool.errors import PlanError
from burstpool.plan.burst_memory import fitting_widths
from burstpool.plan.cost import Collective, CostModel, Floats
from burstpool.plan.widths import Widths

_BUCKET_STARTS = 4.0
"""A bucket of gradients is full when moving it takes so many times as long as starting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstOptions:
    """What counts, and how."""

    reduction: Literal["overlapped", "added"] = "overlapped"
    """Whether gradients are reduced beside the backward of earlier layers, or after each layer."""
    device_time: Literal["busy", "held"] = "busy"
    """Whether device-time is what devices compute, or also what they wait for messages."""
    updates: bool = True
    """Whether changing the parameters counts."""
    branches_beside: bool = True
    """Whether branches may run at the same time on different devices."""
    regroup_latency_s: float | None = None
    """Of one regrouping, one way; None for the latency of the link it takes."""

    def __post_init__(self) -> None:
        if self.regroup_latency_s is not None and self.regroup_latency_s < 0:
            raise PlanError(f"regroup_latency_s={self.regroup_latency_s} must be 0 or more")


class Ops(NamedTuple):
    """What some part of the model does to the clocks: T ← T + compute_s, R ← max(R + lane_s, T + both_s)."""

    compute_s: Floats
    lane_s: Floats
    both_s: Floats
    device_s: Floats
    """Device-time; infinite where the part may not run like that."""

    def then(self, earlier: "Ops") -> "Ops":
        """This part's effect, then that of one that stands earlier in the model; shapes broadcast."""
        return Ops(
            self.compute_s + earlier.compute_s,
            self.lane_s + earlier.lane_s,
            np.maximum(self.both_s + earlier.lane_s, self.compute_s + earlier.both_s),
            self.device_s + earlier.device_s,
        )

    def beside(self, other: "Ops") -> "Ops":
        """Both at the same time on different devices: each clock waits for the later one."""
        return Ops(
            np.maximum(self.compute_s, other.compute_s),
            np.maximum(self.lane_s, other.lane_s),
            np.maximum(self.both_s, other.both_s),
            self.device_s + other.device_s,
        )

    def at(self, index: Any) -> "Ops":
        """The same index of every array."""
        return Ops(*(array[index] for array in self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BurstCost:
    """Tables of one model on one cluster at one batch."""

    widths: Widths
    options: BurstOptions
    layers: Ops
    """Layers × widths."""
    reduce_s: Floats
    """Layers × widths: the reduction alone."""
    updates_s: float
    """Seconds in which the first device changes all parameters."""
    one_device_seconds: float
    """What one device would need for the step; the narrowest width that can be predicted stands in for it."""
    regroup_latency_s: Floats
    """Widths × widths, one way; 0 where nothing moves."""
    regroup_s_per_byte: Floats
    """Widths × widths, one way, for each byte a sample."""
    beside_latency_s: float
    """One way, to or from devices that run beside."""
    whole_s_per_byte: Floats
    """Width → for each byte a sample, seconds in which its busiest device or node hands over all it has."""
    equal_devices: bool
    """Whether all are of one type."""
    bucket_bytes: tuple[float, ...]
    """Width → gradients that are worth a reduction of their own."""

    def regrouping(self, bytes_per_sample: float) -> Ops:
        """From width to width, there and back, of a value of so many bytes a sample."""
        seconds = self.regroup_latency_s + bytes_per_sample * self.regroup_s_per_byte
        seconds = seconds if bytes_per_sample else 0 * seconds
        return self.there_and_back(seconds, seconds, np.array(self.widths.values))

    def there_and_back(self, there_s: Floats, back_s: Floats, num_devices: npt.NDArray[np.int_] | int) -> Ops:
        """A regrouping that takes so long in the forward and in the backward, into so many devices."""
        both_s = there_s + back_s
        lane_s = both_s if self.options.reduction == "added" else there_s
        is_held = self.options.device_time == "held"
        return Ops(both_s, lane_s, both_s, both_s * num_devices if is_held else np.zeros_like(both_s))


def burst_cost(
    cost: CostModel, widths: Widths, parameter_bytes: npt.NDArray[np.float64], options: BurstOptions
) -> BurstCost:
    """All tables; `parameter_bytes` of each layer, those that are shared with their first layer only."""
    forward, backward, busy = _compute(cost, widths)
    values = np.array(widths.values)
    reduce_s, buckets = _reductions(cost, widths, parameter_bytes, options)
    if options.device_time == "held":
        busy = values * (forward + backward + (reduce_s if options.reduction == "added" else 0.0))
    first = widths.devices[0]
    update_s = np.array([cost.step_s(size, first) for size in parameter_bytes]) * options.updates
    busy = busy + _all_updates(cost, widths, parameter_bytes) * options.updates
    if options.reduction == "added":
        compute_s = forward + backward + reduce_s
        layers = Ops(compute_s, compute_s, compute_s, busy)
    else:
        layers = Ops(forward + backward, forward + reduce_s, forward + backward + reduce_s, busy)
    one_device_s = float(busy[:, 0].sum())
    fits = fitting_widths(cost, widths, parameter_bytes)
    layers = layers._replace(device_s=np.where(fits, layers.device_s, np.inf))
    return BurstCost(
        widths=widths,
        options=options,
        layers=layers,
        reduce_s=reduce_s,
        updates_s=float(update_s.sum()),
        one_device_seconds=one_device_s,
        equal_devices=cost.cluster.homogeneous,
        bucket_bytes=buckets,
        **_regroupings(cost, widths, options),
    )


def _compute(cost: CostModel, widths: Widths) -> tuple[Floats, Floats, Floats]:
    """Layers × widths: the slowest device's forward and backward, and the sum over devices; the loss with the last."""
    num_layers, num_widths = len(cost.layers), len(widths.values)
    forward, backward, busy = (np.zeros((num_layers, num_widths)) for _ in range(3))
    kinds = np.array([cost.device_type(device) for device in widths.devices])
    for kind in dict.fromkeys(kinds.tolist()):
        own = widths.counts[:, kinds == kind]
        samples = np.unique(own[own > 0]).tolist()
        there, back = cost.layer_times(kind, samples)
        device = widths.devices[int(np.argmax(kinds == kind))]
        there[-1] += [cost.loss_forward_s(device, number) for number in samples]
        back[-1] += [cost.loss_backward_s(device, number) for number in samples]
        for place, number in enumerate(samples):
            devices = (own == number).sum(axis=1)
            used = devices > 0
            forward[:, used] = np.maximum(forward[:, used], there[:, place, None])
            backward[:, used] = np.maximum(backward[:, used], back[:, place, None])
            busy += (there[:, place] + back[:, place])[:, None] * devices
    return forward, backward, busy


def _all_updates(cost: CostModel, widths: Widths, parameter_bytes: Floats) -> Floats:
    """Layers × widths: seconds of all devices together."""
    steps = {
        kind: np.array([cost.step_s(size, device) for size in parameter_bytes])
        for kind, device in {cost.device_type(device): device for device in widths.devices}.items()
    }
    kinds = np.array([cost.device_type(device) for device in widths.devices])
    return sum(
        (seconds[:, None] * (widths.counts[:, kinds == kind] > 0).sum(axis=1) for kind, seconds in steps.items()),
        start=np.zeros((len(parameter_bytes), len(widths.values))),
    )


def _reductions(
    cost: CostModel, widths: Widths, parameter_bytes: Floats, options: BurstOptions
) -> tuple[Floats, tuple[float, ...]]:
    """Layers × widths: seconds of a layer's reduction; and what fills a bucket."""
    found = np.zeros((len(parameter_bytes), len(widths.values)))
    buckets = []
    rate, _ = _inside(cost)
    network_rate = cost.cluster.network.bytes_per_s if cost.cluster.network else np.inf
    for place, width in enumerate(widths.values):
        if width == 1:
            buckets.append(np.inf)
            continue
        collective = cost.collective(tuple(sorted(widths.devices[:width])))
        bucket = _bucket_bytes(collective)
        buckets.append(bucket)
        if options.reduction == "added":
            found[:, place] = parameter_bytes / (network_rate if widths.spans_nodes[place] else rate)
            continue
        part = np.minimum(parameter_bytes / bucket, 1.0) if bucket else np.ones(len(parameter_bytes))
        found[:, place] = part * collective.reduces_s(np.maximum(parameter_bytes, bucket))
    return np.where(parameter_bytes[:, None] > 0, found, 0.0), tuple(buckets)


def _bucket_bytes(collective: Collective) -> float:
    start_s, large = collective.reduce_s(0), 2.0**30
    return _BUCKET_STARTS * start_s * large / (collective.reduce_s(large) - start_s)


def _inside(cost: CostModel) -> tuple[float, float]:
    """Rate and latency inside the slowest node."""
    links = [node.link for node in cost.cluster.nodes() if node.link is not None]
    if not links:
        return np.inf, 0.0
    return min(link.bytes_per_s for link in links), max(link.latency_s for link in links)


def _regroupings(cost: CostModel, widths: Widths, options: BurstOptions) -> dict[str, Any]:
    device, node = widths.moved()
    rate, latency_s = _inside(cost)
    network = cost.cluster.network
    network_rate, network_latency_s = (network.bytes_per_s, network.latency_s) if network else (np.inf, latency_s)
    if options.regroup_latency_s is not None:
        latency_s = network_latency_s = options.regroup_latency_s
    is_far = widths.spans_nodes[:, None] | widths.spans_nodes[None, :]
    by_node = np.add.reduceat(widths.counts, widths.node_starts, axis=1).max(axis=1)
    return {
        "regroup_latency_s": np.where(device > 0, np.where(is_far, network_latency_s, latency_s), 0.0),
        "regroup_s_per_byte": np.maximum(device / rate, node / network_rate),
        "beside_latency_s": max(latency_s, network_latency_s),
        "whole_s_per_byte": np.maximum(widths.counts.max(axis=1) / rate, by_node / network_rate),
    }
