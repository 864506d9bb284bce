"""Cost model: how long blocks, transfers, reductions and updates take on a cluster.

Takes one Profile a device type and the ClusterSpec. Returns seconds and bytes. Decides nothing. Planners ask it
millions of times: a block's time is a difference of two prefix sums, made once a (device type, number of samples).

Assumed:
- a message takes latency + bytes / rate of its link, inside a node or between nodes; `transfer_s` is one alone;
- a reduction is hierarchical: reduce-scatter inside each node, all-reduce between nodes, all-gather inside. Each part
  is a ring or a tree, whichever is faster, as NCCL chooses. The devices of a node share its network;
- where reductions were measured among devices at work (`Link.reduce_s`), those times count instead;
- a step, and each block of it, takes the host the time that was measured of its device type, if it was;
- an update takes what the profile measured of the job's own optimizer. Else it is bound by memory: it reads parameter,
  gradient and optimizer state and writes parameter and state, so it moves (3 + 2 × slots) times the parameters' bytes
  (slots: 0 for plain SGD, 1 for momentum, 2 for Adam).

Not modelled: starting kernels beyond what the profile saw in each layer, unless the host's time was measured; compute
and communication slowing each other, unless a link `shares_compute`; the small exchanges of batch norm over several
devices; racks and oversubscribed switches; loading where the profile has no `load_s`; clipping by norm; that parameters
of a reduction are first copied together, unless it was measured; more CPU workers than cores.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError, ProfileError
from burstpool.profiling.interpolation import value_at
from burstpool.profiling.profile import Profile

Profiles = Profile | Iterable[Profile] | Mapping[str, Profile]
"""One device type's profile, several, or by device type."""
Layers = range | Sequence[str]
"""Consecutive layers, by place in the profile or by name."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What a reduction among one group of devices takes: for each part, ring or tree, seconds to start and a byte."""

    parts: tuple[tuple[tuple[float, float], ...], ...]
    """For each part that follows the other: (seconds, seconds a byte) of each way to do it."""
    nodes: tuple[int, ...]
    """Nodes the group spans."""
    measured: tuple[tuple[float, float], ...] = ()
    """(bytes, seconds) that were seen, rising; they count instead of the parts."""
    shares_compute: bool = False
    """Whether it takes its time from the members' compute."""

    def reduce_s(self, num_bytes: float) -> float:
        """Seconds to add up so many bytes on every member."""
        if self.measured:
            return float(self.reduces_s(np.array(num_bytes, dtype=np.float64)))
        return sum(min(start_s + num_bytes * byte_s for start_s, byte_s in ways) for ways in self.parts)

    def reduces_s(self, num_bytes: Floats) -> Floats:
        """The same for many sizes at once."""
        if self.measured:
            return _on_line(self.measured, num_bytes)
        total = np.zeros(np.shape(num_bytes))
        for ways in self.parts:
            total += np.min([start_s + num_bytes * byte_s for start_s, byte_s in ways], axis=0)
        return total


@dataclass(frozen=True, eq=False)
class CostModel:
    """Pure and deterministic; remembers what it has worked out, so one object serves a whole search."""

    profiles: Profiles
    """For every device type of the cluster."""
    cluster: ClusterSpec
    _: KW_ONLY
    extrapolate: bool = False
    """Whether to guess beyond the measured batches."""
    optimizer_slots: int = 1
    """Tensors of the parameters' size that the optimizer keeps: 1 for momentum, 2 for Adam."""
    step_latency_s: float = 0.0
    """Seconds one block's update takes however small it is."""
    _by_type: dict[str, Profile] = field(init=False, repr=False)
    """Device type → its profile."""
    _types: tuple[str, ...] = field(init=False, repr=False)
    """Device → its type."""
    _places: dict[str, int] = field(init=False, repr=False)
    """Layer → its place."""
    _sums: dict[tuple[str, int], tuple[list[float], list[float]]] = field(init=False, repr=False)
    """(type, samples) → prefix sums of forward and backward seconds."""
    _collectives: dict[tuple[int, ...], Collective] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        profiles = by_device_type(self.profiles)
        for device_type in dict.fromkeys(device.type for device in self.cluster.devices):
            if device_type not in profiles:
                raise ProfileError(
                    f"the cluster has devices of type {device_type!r}, but profiles are of {', '.join(profiles)}; "
                    f"measure one there, or estimate it: burstpool profile profile.json --estimate {device_type!r}"
                )
        first = next(iter(profiles.values()))
        for other in profiles.values():
            if [layer.name for layer in other.layers] != [layer.name for layer in first.layers]:
                raise ProfileError(
                    f"the profiles of {first.device} and {other.device} have different layers; profile the same model"
                )
        caches = {
            "_by_type": profiles,
            "_types": tuple(device.type for device in self.cluster.devices),
            "_places": {layer.name: place for place, layer in enumerate(first.layers)},
            "_sums": {},
            "_collectives": {},
        }
        for name, value in caches.items():
            object.__setattr__(self, name, value)

    @property
    def layers(self) -> tuple[str, ...]:
        """The model's layers, in order."""
        return tuple(self._places)

    def device_type(self, device: int) -> str:
        """The type of a device of the cluster."""
        try:
            return self._types[device]
        except IndexError:
            raise PlanError(f"there is no device {device}; the cluster has {len(self._types)}") from None

    def profile(self, device_type: str) -> Profile:
        """What was measured on a type of device."""
        return self._by_type[device_type]

    def forward_s(self, layers: Layers, device: int, samples: int) -> float:
        """Seconds of the layers' forward on one device, the loss left out."""
        sums, _ = self.prefix_sums(self.device_type(device), samples)
        span = self.span(layers)
        return sums[span.stop] - sums[span.start]

    def backward_s(self, layers: Layers, device: int, samples: int) -> float:
        """Seconds of the layers' backward on one device, the loss left out."""
        _, sums = self.prefix_sums(self.device_type(device), samples)
        span = self.span(layers)
        return sums[span.stop] - sums[span.start]

    def loss_forward_s(self, device: int, samples: int) -> float:
        """Seconds of the loss; 0 where it was not measured."""
        return self._loss_s("loss_forward_s", device, samples)

    def loss_backward_s(self, device: int, samples: int) -> float:
        """Seconds of the loss's backward; 0 where it was not measured."""
        return self._loss_s("loss_backward_s", device, samples)

    def load_s(self, device: int, samples: int) -> float:
        """Seconds to load so many samples, which a device does before its step; 0 where it was not measured."""
        profile = self.profile(self.device_type(device))
        if not profile.load_s or not samples:
            return 0.0
        # Loading is so nearly proportional to samples that a device may load more of them than a layer was timed with.
        return value_at(profile.load_s, profile.batches, samples, extrapolate=True)

    def host_s(self, device: int, num_blocks: int) -> float:
        """Seconds the host takes for a step of so many blocks besides all else; 0 where it was not measured."""
        figures = self.cluster.device_type(self.device_type(device))
        return figures.host_step_s + num_blocks * figures.host_block_s

    def prefix_sums(self, device_type: str, samples: int) -> tuple[list[float], list[float]]:
        """Seconds of forward and of backward of the first 0, 1, 2, … layers: a block's time is a difference."""
        key = (device_type, samples)
        if key not in self._sums:
            times = self.profile(device_type).times([samples], extrapolate=self.extrapolate)
            forward, backward = ([0.0, *np.cumsum(column[:, 0]).tolist()] for column in times)
            self._sums[key] = (forward, backward)
        return self._sums[key]

    def layer_times(self, device_type: str, samples: Sequence[int]) -> tuple[Floats, Floats]:
        """Forward and backward seconds of all layers for many numbers of samples: layers × samples."""
        return self.profile(device_type).times(samples, extrapolate=self.extrapolate)

    def compute_times(self, device_type: str, samples: Sequence[int]) -> Floats:
        """Forward, loss and backward seconds of the whole model for many numbers of samples."""
        forward, backward = self.layer_times(device_type, samples)
        profile = self.profile(device_type)
        loss = [sum(self._table_s(profile, name, batch) for name in LOSSES) for batch in samples]
        return np.asarray(forward.sum(axis=0) + backward.sum(axis=0) + np.array(loss))

    def span(self, layers: Layers) -> range:
        """Places of consecutive layers."""
        if isinstance(layers, range):
            return layers
        try:
            start, last = self._places[layers[0]], self._places[layers[-1]]
        except KeyError as error:
            raise PlanError(f"the profile has no layer {error.args[0]!r}; profile and plan the same model") from None
        if last - start + 1 != len(layers):
            raise PlanError(f"layers {layers[0]!r} to {layers[-1]!r} are not consecutive in the profile")
        return range(start, last + 1)

    def transfer_s(self, num_bytes: float, a: int, b: int) -> float:
        """Seconds of one message from device to device, alone on its link; 0 from a device to itself."""
        if a == b:
            return 0.0
        link = self.cluster.link(a, b)
        return link.latency_s + num_bytes / link.bytes_per_s

    def reduce_s(self, num_bytes: float, group: tuple[int, ...]) -> float:
        """Seconds to add up so many bytes among devices, so that each has the sum."""
        return self.collective(group).reduce_s(num_bytes)

    def collective(self, group: tuple[int, ...]) -> Collective:
        """What reductions among these devices take; ask once and keep it where there are many."""
        if group not in self._collectives:
            self._collectives[group] = _collective(self.cluster, group)
        return self._collectives[group]

    def step_s(self, parameter_bytes: float, device: int) -> float:
        """Seconds to change parameters of so many bytes; 0 where there are none."""
        if not parameter_bytes:
            return 0.0
        if measured := self.profile(self.device_type(device)).update_bytes_per_s:
            return parameter_bytes / measured
        moved = (3 + 2 * self.optimizer_slots) * parameter_bytes
        rate = self.cluster.device_type(self.device_type(device)).memory_bytes_per_s
        return self.step_latency_s + moved / rate

    def activation_bytes(self, layers: Layers, device: int, samples: int) -> int:
        """What the layers keep from forward to backward; an error where the profile does not say."""
        profile = self.profile(self.device_type(device))
        names = [layer.name for layer in profile.layers[self.span(layers).start : self.span(layers).stop]]
        return sum(profile.activation_bytes(name, samples, extrapolate=self.extrapolate) for name in names)

    def memory_bytes(self, device: int) -> int:
        """Memory of the device."""
        return self.cluster.device_type(self.device_type(device)).memory_bytes

    def _loss_s(self, name: str, device: int, samples: int) -> float:
        return self._table_s(self.profile(self.device_type(device)), name, samples)

    def _table_s(self, profile: Profile, name: str, samples: int) -> float:
        table: Mapping[int, float] = getattr(profile, name)
        return value_at(table, profile.batches, samples, extrapolate=self.extrapolate) if table else 0.0


LOSSES = ("loss_forward_s", "loss_backward_s")
"""The profile's tables of the loss."""


def by_device_type(profiles: Profiles) -> dict[str, Profile]:
    """The profiles by the type of device they were measured on."""
    if isinstance(profiles, Mapping):
        return dict(profiles)
    several = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if not several:
        raise ProfileError("no profile was given; measure one: burstpool profile JOB -o profile.json")
    found: dict[str, Profile] = {}
    for profile in several:
        if profile.device in found:
            raise ProfileError(f"two profiles are of device type {profile.device!r}; give one a type")
        found[profile.device] = profile
    return found


def _collective(cluster: ClusterSpec, group: tuple[int, ...]) -> Collective:
    members: dict[int, int] = {}
    for device in group:
        node = cluster.devices[device].node
        members[node] = members.get(node, 0) + 1
    nodes = cluster.nodes()
    inside = [(nodes[node].link, count) for node, count in members.items() if count > 1]
    parts = []
    if len(members) == 1:
        parts += [_all_reduce(link, count) for link, count in inside]
    else:
        # Nodes work at the same time; the slowest decides. Rates and latencies of different nodes are not mixed.
        halves = [_half(link, count) for link, count in inside]
        parts += [_slowest(halves)] * 2 if halves else []
        parts.append(_all_reduce(cluster.network, len(members)))
    links = [link for link, _ in inside if link] + ([cluster.network] if len(members) > 1 and cluster.network else [])
    alone = links[0] if len(members) == 1 and links else None
    return Collective(
        parts=tuple(parts),
        nodes=tuple(members),
        measured=_measured(alone, len(group)) if alone and alone.reduce_s else (),
        shares_compute=any(link.shares_compute for link in links),
    )


def _measured(link: Link, count: int) -> tuple[tuple[float, float], ...]:
    """What was seen among so many devices; between two numbers of devices in proportion, beyond all as the nearest."""
    known = sorted(link.reduce_s)
    low = max((number for number in known if number <= count), default=known[0])
    high = min((number for number in known if number >= count), default=known[-1])
    sizes = sorted(link.reduce_s[low])
    part = (count - low) / (high - low) if low < count < high else 0.0
    here, there = (
        _on_line(tuple(sorted(link.reduce_s[number].items())), np.array(sizes, dtype=np.float64))
        for number in (low, high)
    )
    return tuple(zip(map(float, sizes), (here + part * (there - here)).tolist(), strict=True))


def _on_line(points: Sequence[tuple[float, float]], num_bytes: Floats) -> Floats:
    """Between the points on straight lines, beyond the last on the line of the last two, never falling there."""
    sizes, seconds = np.array(points, dtype=np.float64).T
    slope = max((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]), 0.0)
    beyond = np.maximum(num_bytes - sizes[-1], 0.0) * slope
    return np.asarray(np.interp(num_bytes, sizes, seconds) + beyond)


def _all_reduce(link: Link | None, count: int) -> tuple[tuple[float, float], ...]:
    """Ring: 2(n-1) messages of 1/n. Tree: up and down, each level forwarding while it receives."""
    assert link is not None  # a cluster is checked for the links it needs when it is made
    depth = math.ceil(math.log2(count))
    ring = (2 * (count - 1) * link.latency_s, 2 * (count - 1) / count / link.bytes_per_s)
    tree = (2 * depth * link.latency_s, 2 / link.bytes_per_s)
    return (ring, tree)


def _half(link: Link | None, count: int) -> tuple[float, float]:
    """Reduce-scatter or all-gather in a ring: n-1 messages of 1/n."""
    assert link is not None
    return ((count - 1) * link.latency_s, (count - 1) / count / link.bytes_per_s)


def _slowest(halves: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The worst latency with the worst rate: never too fast, exact where nodes are alike."""
    return ((max(start_s for start_s, _ in halves), max(byte_s for _, byte_s in halves)),)
