"""The Profile artifact: how long each layer of a model takes on one type of device, and what it weighs.

Holds tables `batch → seconds` and `batch → bytes` a layer, and answers for any batch (`interpolation.py` says
how). Checks that it is whole: every layer has a time for every batch, in an order in which layers can run.
A layer without a time is an error, never a guess. What a step does besides its layers, loading samples and changing
parameters, may be there too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, ProfileError
from burstpool.profiling.interpolation import value_at, values_at

NUMBER_FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16")
"""What `dtype` and `autocast` may say; `tf32` is fp32 in memory and tensor-float-32 in matrix products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer: its place in the graph, its sizes, and its times a batch."""

    __pydantic_config__ = STRICT

    name: str
    """Unique in the profile; the LayerGraph's name of the layer where there is one."""
    inputs: tuple[str, ...]
    """Earlier layers whose output it takes; a name that no layer has is an input of the model."""
    parameter_bytes: int
    """All its parameters; one that several layers share counts in each."""
    output_bytes_per_sample: int
    """What it hands on, a sample."""
    forward_s: Mapping[int, float]
    """Batch → seconds of its forward."""
    backward_s: Mapping[int, float]
    """Batch → seconds of its backward: gradients of its inputs and of its parameters."""
    forward_spread_s: Mapping[int, float] = field(default_factory=dict)
    """Batch → interquartile range of the repeats."""
    backward_spread_s: Mapping[int, float] = field(default_factory=dict)
    """Batch → interquartile range of the repeats."""
    activation_bytes: Mapping[int, int] = field(default_factory=dict)
    """Batch → bytes it keeps from its forward until its backward."""
    peak_memory_bytes: Mapping[int, int] = field(default_factory=dict)
    """Batch → the most it has allocated while it ran, parameters and inputs included."""
    flops_per_sample: int = 0
    """Operations (2 a multiply-add) of its matrix products and convolutions, forward, a sample."""
    kind: str = ""
    """Its operators: `conv2d+relu`."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ProfileError("a layer has no name; give each layer a unique one")
        for entry in ("parameter_bytes", "output_bytes_per_sample", "flops_per_sample"):
            if getattr(self, entry) < 0:
                raise ProfileError(f"layer {self.name!r} has {entry}={getattr(self, entry)}; it must be 0 or more")
        for entry in ("forward_s", "backward_s"):
            if not getattr(self, entry):
                raise ProfileError(f"layer {self.name!r} has no {entry}; give its seconds for each batch")
        for entry in TABLES:
            number = int if entry.endswith("_bytes") else float
            table = _sorted_table(getattr(self, entry), f"{entry} of layer {self.name!r}", number)
            object.__setattr__(self, entry, table)
            if table and tuple(table) != tuple(self.forward_s):
                odd = min(set(table) ^ set(self.forward_s))
                lacking, other = (entry, "forward_s") if odd in self.forward_s else ("forward_s", entry)
                raise ProfileError(f"layer {self.name!r} has no {lacking} for batch {odd}, but {other}; give both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table people read; times and bytes at one batch."""

    name: str
    kind: str
    inputs: tuple[str, ...]
    forward_s: float
    backward_s: float
    share: float
    """Of the sum over all layers, 0 to 1."""
    parameter_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Artifact):
    """All layers of one model on one type of device."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ProfileError

    schema_version: int = 1
    model: str
    """What was measured: `vgg16`."""
    device: str
    """The type of device, as the catalogue names it: `A100`."""
    source: str
    """Who measured, how, and what was left out."""
    layers: tuple[LayerProfile, ...]
    """In an order in which they can run."""
    dtype: str = "fp32"
    """Number format of parameters and activations, one of NUMBER_FORMATS."""
    autocast: str | None = None
    """Format of matrix products and convolutions under autocast, if any."""
    estimated_from: str | None = None
    """The device that was measured, where this profile is an estimate for another one."""
    step_s: Mapping[int, float] = field(default_factory=dict)
    """Batch → seconds of forward, loss and backward, measured in one piece; what the layers should add up to. It may
    lack batches."""
    loss_forward_s: Mapping[int, float] = field(default_factory=dict)
    """Batch → seconds of the loss."""
    loss_backward_s: Mapping[int, float] = field(default_factory=dict)
    """Batch → seconds of the loss's backward."""
    load_s: Mapping[int, float] = field(default_factory=dict)
    """Batch → seconds to load so many of the job's samples; empty where it was not measured."""
    update_bytes_per_s: float | None = None
    """Bytes of parameters that the job's own optimizer changes in a second; None where it was not measured."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Software it was measured with: `torch`, `cuda`, …"""
    _tables: "_Tables" = field(init=False, repr=False, compare=False)
    """Built from the layers; not part of the JSON."""

    def __post_init__(self) -> None:
        for entry in ("model", "device"):
            if not getattr(self, entry):
                raise ProfileError(f"the profile's {entry} is empty; give its name")
        for entry in ("dtype", "autocast"):
            if getattr(self, entry) not in (*NUMBER_FORMATS, None):
                raise ProfileError(f"{entry}={getattr(self, entry)!r} is not one of {', '.join(NUMBER_FORMATS)}")
        _check_order(self.layers)
        _check_batches(self.layers)
        object.__setattr__(self, "_tables", _Tables(self.layers))
        if self.update_bytes_per_s is not None and not 0 < self.update_bytes_per_s < math.inf:
            raise ProfileError(f"update_bytes_per_s={self.update_bytes_per_s} must be more than 0; leave it out")
        for entry in ("step_s", "loss_forward_s", "loss_backward_s", "load_s"):
            table = _sorted_table(getattr(self, entry), entry, float)
            object.__setattr__(self, entry, table)
            if odd := set(table) - set(self.batches):
                raise ProfileError(f"{entry} has batch {min(odd)}, for which the layers have no time")
            if table and entry != "step_s" and (lacking := set(self.batches) - set(table)):
                raise ProfileError(
                    f"{entry} has no time for batch {min(lacking)} that the layers have; give all or none"
                )
        if 0 in self.step_s.values():
            raise ProfileError("step_s holds 0; leave out the batches whose whole step was not measured")

    @property
    def batches(self) -> tuple[int, ...]:
        """The measured batches, rising; the same for every layer."""
        return self._tables.batches

    @property
    def graph_inputs(self) -> tuple[str, ...]:
        """Names that layers take and no layer makes, in order of their first use."""
        taken = dict.fromkeys(name for layer in self.layers for name in layer.inputs)
        return tuple(name for name in taken if name not in self._tables.by_name)

    @property
    def parameter_bytes(self) -> int:
        """Of all layers; a parameter that several layers share counts in each."""
        return sum(layer.parameter_bytes for layer in self.layers)

    def layer(self, name: str) -> LayerProfile:
        """The layer of that name."""
        try:
            return self._tables.by_name[name]
        except KeyError:
            raise ProfileError(f"the profile of {self.model} has no layer {name!r}; {self._some_names()}") from None

    def forward_s(self, layer: str, batch: int, *, extrapolate: bool = False) -> float:
        """Seconds of the layer's forward at any batch."""
        return self._at("forward_s", layer, batch, extrapolate)

    def backward_s(self, layer: str, batch: int, *, extrapolate: bool = False) -> float:
        """Seconds of the layer's backward at any batch."""
        return self._at("backward_s", layer, batch, extrapolate)

    def activation_bytes(self, layer: str, batch: int, *, extrapolate: bool = False) -> int:
        """What the layer keeps for its backward, rounded up; an error where it was not measured."""
        return math.ceil(self._at("activation_bytes", layer, batch, extrapolate))

    def peak_memory_bytes(self, layer: str, batch: int, *, extrapolate: bool = False) -> int:
        """The most the layer has allocated, rounded up; an error where it was not measured."""
        return math.ceil(self._at("peak_memory_bytes", layer, batch, extrapolate))

    def times(
        self, batches: Sequence[int], *, extrapolate: bool = False
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Forward and backward seconds of all layers at many batches: two arrays, layers × batches."""
        tables = self._tables
        return (
            values_at(tables.forward, tables.batches, batches, extrapolate=extrapolate),
            values_at(tables.backward, tables.batches, batches, extrapolate=extrapolate),
        )

    def step_time_s(self, batch: int, *, extrapolate: bool = False) -> float:
        """Sum of all layers' forward and backward, and of the loss where it was measured."""
        forward, backward = self.times([batch], extrapolate=extrapolate)
        losses = [table for table in (self.loss_forward_s, self.loss_backward_s) if table]
        loss_s = sum(value_at(table, self.batches, batch, extrapolate=extrapolate) for table in losses)
        return float(forward.sum() + backward.sum()) + loss_s

    def sum_over_step(self, batch: int) -> float:
        """Sum of layers over the whole step measured in one piece: 1.0 where the layers explain all of it."""
        if batch not in self.step_s:
            known = ", ".join(map(str, self.step_s)) or "none"
            raise ProfileError(f"no whole step was measured at batch {batch}; measured batches: {known}")
        return self.step_time_s(batch) / self.step_s[batch]

    def within_tolerance(self, tolerance: float = 0.10) -> bool:
        """Whether the layers add up to every measured whole step; true where no whole step was measured."""
        return self.accuracy_note(tolerance) is None

    def accuracy_note(self, tolerance: float = 0.10) -> str | None:
        """One line of warning where the layers do not add up to the whole step, else None."""
        off = {batch: self.sum_over_step(batch) - 1 for batch in self.step_s}
        off = {batch: error for batch, error in off.items() if abs(error) > tolerance}
        if not off:
            return None
        worst = max(off, key=lambda batch: abs(off[batch]))
        return (
            f"the layers of {self.model} on {self.device} add up to {1 + off[worst]:.0%} of the whole step "
            f"at batch {worst} (further than {tolerance:.0%} off at batches {', '.join(map(str, off))}): "
            "predictions from this profile are no better than that"
        )

    def rows(self, batch: int | None = None, *, extrapolate: bool = False) -> tuple[Row, ...]:
        """The table for people, at `batch` or the largest measured one."""
        batch = self.batches[-1] if batch is None else batch
        forward, backward = self.times([batch], extrapolate=extrapolate)
        total_s = float(forward.sum() + backward.sum())
        return tuple(
            Row(
                name=layer.name,
                kind=layer.kind,
                inputs=layer.inputs,
                forward_s=float(forward_s),
                backward_s=float(backward_s),
                share=float(forward_s + backward_s) / total_s if total_s else 0.0,
                parameter_bytes=layer.parameter_bytes,
                output_bytes=layer.output_bytes_per_sample * batch,
            )
            for layer, forward_s, backward_s in zip(self.layers, forward[:, 0], backward[:, 0], strict=True)
        )

    def __str__(self) -> str:
        batch = self.batches[-1]
        how = f"estimated from {self.estimated_from}" if self.estimated_from else "measured"
        lines = [
            f"{self.model} on {self.device} ({how}): {len(self.layers)} layers, batches "
            f"{', '.join(map(str, self.batches))}; {self.step_time_s(batch) * 1e3:.3f} ms at batch {batch}"
        ]
        lines += [
            f"  {row.name:<32} {row.kind:<20} {row.forward_s * 1e3:>10.3f} ms "
            f"{row.backward_s * 1e3:>10.3f} ms {row.share:>6.1%} {row.parameter_bytes / 1e6:>9.3f} MB "
            f"← {', '.join(row.inputs)}"
            for row in self.rows(batch)
        ]
        return "\n".join(lines)

    def _at(self, entry: str, name: str, batch: int, extrapolate: bool) -> float:
        layer = self._tables.by_name.get(name) or self.layer(name)
        table: Mapping[int, float] = getattr(layer, entry)
        if not table:
            raise ProfileError(f"layer {name!r} has no {entry}: whoever measured it left it out; measure it again")
        return value_at(table, self._tables.batches, batch, extrapolate=extrapolate)

    def _some_names(self) -> str:
        names = [layer.name for layer in self.layers]
        return f"its layers: {', '.join(names[:5])}" + (f", … ({len(names)} in all)" if len(names) > 5 else "")


TABLES = (
    "forward_s",
    "backward_s",
    "forward_spread_s",
    "backward_spread_s",
    "activation_bytes",
    "peak_memory_bytes",
)
"""The fields of a layer that are a table over batches."""


class _Tables:
    """What queries look up, computed once a profile."""

    __slots__ = ("backward", "batches", "by_name", "forward")

    def __init__(self, layers: Sequence[LayerProfile]) -> None:
        self.by_name = {layer.name: layer for layer in layers}
        self.batches = tuple(layers[0].forward_s)
        self.forward = np.array([list(layer.forward_s.values()) for layer in layers], dtype=np.float64)
        self.backward = np.array([list(layer.backward_s.values()) for layer in layers], dtype=np.float64)


def _sorted_table(table: Mapping[int, float], where: str, number: type[float]) -> dict[int, float]:
    """A copy with rising batches and plain numbers, which go to JSON as numpy's do not."""
    for batch, value in table.items():
        if batch < 1:
            raise ProfileError(f"{where} has batch {batch}; batches must be at least 1")
        if not (math.isfinite(value) and value >= 0):
            raise ProfileError(f"{where} is {value} at batch {batch}; it must be a finite number, 0 or more")
    return {int(batch): number(value) for batch, value in sorted(table.items())}


def _check_order(layers: Sequence[LayerProfile]) -> None:
    if not layers:
        raise ProfileError("the profile has no layers; it needs at least one")
    places: dict[str, int] = {}
    for index, layer in enumerate(layers):
        if layer.name in places:
            raise ProfileError(f"two layers are named {layer.name!r}; give each layer a unique name")
        places[layer.name] = index
    for index, layer in enumerate(layers):
        for name in layer.inputs:
            if places.get(name, -1) >= index:
                raise ProfileError(
                    f"layer {layer.name!r} takes {name!r}, which does not come before it; "
                    "put layers into an order in which they can run"
                )
            # A second output of a layer is written x:1 in a LayerGraph; here it would pass for a model input.
            if name not in places and name.rpartition(":")[0] in places:
                made_by = name.rpartition(":")[0]
                raise ProfileError(f"layer {layer.name!r} takes {name!r}; inputs name layers: write {made_by!r}")


def _check_batches(layers: Sequence[LayerProfile]) -> None:
    fullest = max(layers, key=lambda layer: len(layer.forward_s))
    for layer in layers:
        if odd := set(layer.forward_s) ^ set(fullest.forward_s):
            batch = min(odd)
            has, lacks = (fullest, layer) if batch in fullest.forward_s else (layer, fullest)
            raise ProfileError(
                f"layer {lacks.name!r} has no time for batch {batch} that layer {has.name!r} has; "
                "measure every layer at the same batches, or remove the batch from all"
            )
