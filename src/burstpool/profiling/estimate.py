"""Estimates: what a measured profile would be on another device.

Takes a Profile and a device type; returns a Profile marked `estimated_from`. Each measured time is scaled
by the ratio of the two devices' rooflines for that layer, pass and batch:

    roofline_s = max(operations / peak rate, bytes moved / memory rate) + launch_s
    forward    operations = flops_per_sample · batch,  bytes = inputs + outputs + parameters
    backward   operations = twice the forward's,       bytes = 2 · inputs + outputs + 2 · parameters

A backward reads the outputs' gradients, the saved inputs and the parameters, and writes gradients of inputs
and parameters; of its two products (for inputs and for parameters) each costs as much as the forward. A
layer without operations is scaled by its bytes. So whatever part of the roofline the layer reached on the
measured device, it is taken to reach on the other.

That fails where only one of the two devices has the number format (TF32 on an A100, FP32 on a V100): tensor
cores reach a far smaller part of their peak than vector units do. There, only the roofline itself changes
rate, and what the layer took above it is scaled by the rates of the memories. (Inception-v3's convolutions
from A100 to V100: the step 10% too fast, where the plain ratio makes it 96% too slow.)

Ignores how good each device's kernels are, caches, clocks and power limits, layers of many kernels (one
launch is counted a layer), the size of the model's inputs (not in a profile), and the host: a step bound by
the host or by data loading does not get faster. docs/profile.md says what error to expect; `compare` says
what it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import numpy.typing as npt

from burstpool.errors import ClusterError, ProfileError
from burstpool.profiling.profile import LayerProfile, Profile

if TYPE_CHECKING:
    from burstpool.cluster.catalogue import DeviceType

Key = TypeVar("Key", str, int)

LAUNCH_S = 5e-6
"""Start of a kernel, about the same on all GPUs of the last ten years; keeps tiny layers from scaling."""

FALLBACKS = {"tf32": "fp32"}
"""Where a device lacks a number format, what frameworks run instead without being asked."""


def estimate(
    profile: Profile,
    device: "str | DeviceType",
    *,
    measured_on: "DeviceType | None" = None,
    launch_s: float = LAUNCH_S,
) -> Profile:
    """The profile on `device`, which is unchanged where that is the measured one.

    `measured_on` replaces the catalogue's entry for the profile's own device.
    """
    if profile.estimated_from is not None:
        raise ProfileError(
            f"this profile of {profile.model} on {profile.device} is itself an estimate; "
            f"estimate from the one measured on {profile.estimated_from}"
        )
    old = _Rates.of(measured_on or profile.device, profile)
    new = _Rates.of(device, profile)
    if new == old:
        return profile
    memory_ratio = old.memory_bytes_per_s / new.memory_bytes_per_s
    output_bytes = {layer.name: layer.output_bytes_per_sample for layer in profile.layers}
    return replace(
        profile,
        device=new.name,
        source=f"estimated from {old.name} by the ratio of rooflines; {profile.source}",
        layers=tuple(
            _estimated(layer, sum(output_bytes.get(name, 0) for name in layer.inputs), old, new, launch_s)
            for layer in profile.layers
        ),
        estimated_from=old.name,
        step_s={},
        load_s={},
        update_bytes_per_s=None,
        loss_forward_s=_scaled(profile.loss_forward_s, dict.fromkeys(profile.batches, memory_ratio)),
        loss_backward_s=_scaled(profile.loss_backward_s, dict.fromkeys(profile.batches, memory_ratio)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far an estimate was from a measurement; errors are relative, positive where it was too slow."""

    median: float
    """Of the absolute errors over layers, passes and batches."""
    worst: float
    """The largest of them, with its sign."""
    worst_layer: str
    """Whose that was."""
    by_layer: Mapping[str, float]
    """Layer → error of its forward and backward together, summed over the batches."""
    by_batch: Mapping[int, float]
    """Batch → error of the sum over all layers: the step."""

    def __str__(self) -> str:
        steps = ", ".join(f"{error:+.0%} at batch {batch}" for batch, error in self.by_batch.items())
        return f"median layer {self.median:.0%} off, worst {self.worst:+.0%} ({self.worst_layer}); step {steps}"


def compare(estimated: Profile, measured: Profile) -> Comparison:
    """Errors of an estimate at the batches both profiles have; layers that take no time are passed over."""
    names = tuple(layer.name for layer in measured.layers)
    if tuple(layer.name for layer in estimated.layers) != names:
        raise ProfileError(f"the two profiles of {measured.model} have different layers; compare like with like")
    batches = [batch for batch in measured.batches if batch in estimated.batches]
    if not batches:
        raise ProfileError(
            f"the two profiles of {measured.model} have no batch in common: "
            f"{', '.join(map(str, estimated.batches))} and {', '.join(map(str, measured.batches))}"
        )
    guessed, true = np.stack(estimated.times(batches)), np.stack(measured.times(batches))
    timed = true > 0
    if not timed.any():
        raise ProfileError(f"the measured profile of {measured.model} takes no time; there is nothing to compare")
    errors = np.divide(guessed, true, out=np.ones_like(true), where=timed) - 1
    worst = np.unravel_index(np.abs(errors).argmax(), errors.shape)
    return Comparison(
        median=float(np.median(np.abs(errors[timed]))),
        worst=float(errors[worst]),
        worst_layer=names[worst[1]],
        by_layer=_relative(names, guessed.sum(axis=(0, 2)), true.sum(axis=(0, 2))),
        by_batch=_relative(batches, guessed.sum(axis=(0, 1)), true.sum(axis=(0, 1))),
    )


def check_device(profile: Profile) -> None:
    """Raises where the catalogue does not know the profile's device."""
    _Rates.of(profile.device, profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """What a device does at best, in the number format of a profile."""

    name: str
    number_format: str
    """That the device computes in: the profile's, or what frameworks put in its place."""
    flops_per_s: float
    memory_bytes_per_s: float

    @classmethod
    def of(cls, device: "str | DeviceType", profile: Profile) -> Self:
        from burstpool.cluster.catalogue import device_type

        try:
            entry = device_type(device) if isinstance(device, str) else device
        except ClusterError as error:
            raise ProfileError(f"profile of {profile.model}: {error}") from None
        rates: dict[str, float] = dict(entry.flops_per_s.items())
        wanted = profile.autocast or profile.dtype
        found = wanted if wanted in rates else FALLBACKS.get(wanted, wanted)
        if found not in rates:
            known = ", ".join(rates)
            raise ProfileError(
                f"{entry.name} has no {wanted} rate, in which {profile.model} was measured; it has: {known}"
            )
        return cls(
            name=entry.name, number_format=found, flops_per_s=rates[found], memory_bytes_per_s=entry.memory_bytes_per_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What one pass of a layer has to do."""

    operations: int
    moved_bytes: int
    launch_s: float

    def roofline_s(self, rates: _Rates) -> float:
        """The shortest it can take."""
        computing_s, moving_s = self.operations / rates.flops_per_s, self.moved_bytes / rates.memory_bytes_per_s
        return max(computing_s, moving_s) + self.launch_s


def _estimated(layer: LayerProfile, input_bytes: int, old: _Rates, new: _Rates, launch_s: float) -> LayerProfile:
    """The layer on the new device; `input_bytes` a sample."""
    forward, backward = {}, {}
    for batch in layer.forward_s:
        operations = layer.flops_per_sample * batch
        inputs, outputs = input_bytes * batch, layer.output_bytes_per_sample * batch
        forward[batch] = _Work(
            operations=operations, moved_bytes=inputs + outputs + layer.parameter_bytes, launch_s=launch_s
        )
        backward[batch] = _Work(
            operations=2 * operations,
            moved_bytes=2 * inputs + outputs + 2 * layer.parameter_bytes,
            launch_s=launch_s,
        )
    forward_ratio = {batch: _ratio(layer.forward_s[batch], work, old, new) for batch, work in forward.items()}
    backward_ratio = {batch: _ratio(layer.backward_s[batch], work, old, new) for batch, work in backward.items()}
    return replace(
        layer,
        forward_s=_scaled(layer.forward_s, forward_ratio),
        backward_s=_scaled(layer.backward_s, backward_ratio),
        forward_spread_s=_scaled(layer.forward_spread_s, forward_ratio),
        backward_spread_s=_scaled(layer.backward_spread_s, backward_ratio),
    )


def _ratio(measured_s: float, work: _Work, old: _Rates, new: _Rates) -> float:
    """What a time measured on the old device is to be multiplied by."""
    memory_ratio = old.memory_bytes_per_s / new.memory_bytes_per_s
    if work.operations == 0 and work.moved_bytes == 0:  # nothing is known of it: take it for bound by memory
        return memory_ratio
    old_s, new_s = work.roofline_s(old), work.roofline_s(new)
    if old.number_format == new.number_format or measured_s <= old_s:
        return new_s / old_s
    return (new_s + (measured_s - old_s) * memory_ratio) / measured_s


def _scaled(table: Mapping[int, float], ratios: Mapping[int, float]) -> dict[int, float]:
    return {batch: seconds * ratios[batch] for batch, seconds in table.items()}


def _relative(keys: Sequence[Key], guessed: npt.NDArray[np.float64], true: npt.NDArray[np.float64]) -> dict[Key, float]:
    return {key: float(g / t) - 1 for key, g, t in zip(keys, guessed, true, strict=True) if t > 0}
