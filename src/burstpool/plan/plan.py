"""The Plan artifact: which devices run each block, with which samples, and how copies of a block agree.

Says nothing of order or time: `schedule/lower.py` turns a plan into actions, `schedule/simulate.py` times them.
Knows layers by name only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The samples of a minibatch that one device runs a block on."""

    __pydantic_config__ = STRICT

    device: int
    """Its index in the cluster."""
    start: int
    """First sample."""
    stop: int
    """One past the last; more than `start`: a device without samples has no share."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ValueError(f"share {self.start}:{self.stop} of device {self.device} is empty; leave it out")
        if self.device < 0:
            raise ValueError(f"device={self.device} must be 0 or more")

    @property
    def num_samples(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlock:
    """Consecutive layers that run together on one set of devices."""

    __pydantic_config__ = STRICT

    name: str
    """Unique in the plan; its first layer's name is a good one."""
    layers: tuple[str, ...]
    """Consecutive in the model's order."""
    shares: tuple[Share, ...]
    """In the order of samples; together every sample of the minibatch, each once."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"block {self.name!r} has no layers")
        devices = [share.device for share in self.shares]
        if len(set(devices)) < len(devices):
            raise ValueError(f"block {self.name!r} names a device twice; give it one share")
        expected = 0
        for share in self.shares:
            if share.start != expected:
                raise ValueError(f"shares of block {self.name!r} leave or repeat sample {min(expected, share.start)}")
            expected = share.stop

    @property
    def devices(self) -> tuple[int, ...]:
        """Those that run it, in the order of their samples."""
        return tuple(share.device for share in self.shares)

    @property
    def batch(self) -> int:
        """Samples over all its devices."""
        return self.shares[-1].stop if self.shares else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Artifact):
    """One training step of a model on a cluster."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = PlanError

    schema_version: int = 1
    model: str
    """What is planned: `vgg16`."""
    strategy: str
    """The planner that made it: `data`, `burst`, …"""
    num_devices: int
    """Devices of the cluster it was made for; some may have nothing to do."""
    batch: int
    """Samples of one minibatch over all devices."""
    blocks: tuple[PlannedBlock, ...]
    """In the model's order; together all its layers, each once."""
    num_minibatches: int = 1
    """Minibatches a step: their gradients are added before the parameters change (gradient accumulation, or those
    that are in flight in a pipeline)."""
    agreement: Literal["reduce", "waves"] = "reduce"
    """How copies of a block agree: their gradients are averaged every step, or waves of updates are pushed to and
    pulled from a parameter server."""
    clock_distance: int = 0
    """With waves: how many a fast virtual worker may run ahead."""
    step_time_s: float | None = None
    """As predicted by the planner."""
    device_seconds: float | None = None
    """Busy seconds of all devices together a step, as predicted."""

    def __post_init__(self) -> None:
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            raise ValueError(f"two blocks are named {max(names, key=names.count)!r}; names must be unique")
        layers = [layer for block in self.blocks for layer in block.layers]
        if len(set(layers)) < len(layers):
            raise ValueError(f"layer {max(layers, key=layers.count)!r} is in two blocks")
        if self.num_minibatches < 1:
            raise ValueError(f"num_minibatches={self.num_minibatches} must be at least 1")
        for block in self.blocks:
            if block.batch != self.batch:
                raise ValueError(f"block {block.name!r} runs {block.batch} samples of {self.batch}")
            if (last := max(block.devices)) >= self.num_devices:
                raise ValueError(f"block {block.name!r} names device {last}; there are {self.num_devices}")

    def block(self, name: str) -> PlannedBlock:
        """The block of that name."""
        for block in self.blocks:
            if block.name == name:
                return block
        raise PlanError(f"the plan has no block {name!r}")

    @property
    def devices(self) -> tuple[int, ...]:
        """Those that have anything to do."""
        return tuple(sorted({device for block in self.blocks for device in block.devices}))

    def __str__(self) -> str:
        times = f", {self.step_time_s:.6g} s a step" if self.step_time_s is not None else ""
        lines = [
            f"{self.model}, batch {self.batch}, strategy {self.strategy}: {len(self.devices)} of {self.num_devices} "
            f"devices{times}"
        ]
        for block in self.blocks:
            lines.append(f"  {block.name:<32} {len(block.layers):>4} layers on {len(block.shares):>4} devices")
        return "\n".join(lines)


def even_shares(batch: int, devices: tuple[int, ...]) -> tuple[Share, ...]:
    """Splits samples as evenly as they go; the first devices get one more, the last none where they are too few."""
    base, more = divmod(batch, len(devices))
    shares, start = [], 0
    for place, device in enumerate(devices):
        stop = start + base + (place < more)
        if stop > start:
            shares.append(Share(device=device, start=start, stop=stop))
        start = stop
    return tuple(shares)
