"""LayerGraph: a model as a DAG of layers, as data.

Says which layers there are, what flows between them and what each one weighs. Knows nothing of how a layer is
run (`trace.py`) or how long it takes (`profiling/`). Layers stand in an order in which they can run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from burstpool.artifact import STRICT, Artifact
from burstpool.errors import ArtifactError, TraceError

BATCH = "batch"
"""How a shape writes the number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that leaves a layer, or an input of the whole model."""

    __pydantic_config__ = STRICT

    name: str
    """The layer's name, with `:1`, `:2`, … for its second output and on; or the model argument's name."""
    shape: tuple[int | str, ...]
    """Sizes; those that grow with the batch are written as expressions: `("batch", 64, 8, 8)`."""
    dtype: str
    """As torch writes it: `float32`."""
    sample_dim: int | None
    """The dimension along which samples can be split; None where the tensor is the same for every sample or its
    samples are folded into another dimension."""
    bytes_per_sample: int
    """0 for a tensor that does not depend on the batch."""
    fixed_bytes: int = 0
    """Size of a tensor that does not depend on the batch."""
    differentiable: bool = True
    """Whether a gradient flows back through it."""

    def bytes_at(self, batch: int) -> int:
        """Size of the tensor for so many samples."""
        return self.fixed_bytes + self.bytes_per_sample * batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One module call of the user's model, or a few operators between two of them."""

    __pydantic_config__ = STRICT

    name: str
    """From the user's module tree: `features.0`; operators outside any leaf module: `layer1.0.add`."""
    kind: str
    """Its operators: `conv2d+relu`."""
    inputs: tuple[str, ...]
    """Names of the values it takes."""
    outputs: tuple[Value, ...]
    """What later layers, or the model's output, take from it."""
    parameters: Mapping[str, int]
    """State-dict key → bytes. A parameter that several layers share stands in each of them."""
    buffers: tuple[str, ...] = ()
    """State-dict keys of the buffers it reads or writes."""
    flops_per_sample: int = 0
    """Floating-point operations of matrix products and convolutions, forward, a sample."""
    random: bool = False
    """Whether it draws random numbers (dropout)."""
    mixes_samples: bool = False
    """Whether one sample's result depends on the others' (batch norm in training)."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(self.parameters.values())

    @property
    def output_bytes_per_sample(self) -> int:
        """Bytes a sample of all its outputs."""
        return sum(value.bytes_per_sample for value in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A value on its way from the layer that makes it to one that takes it."""

    producer: str
    """A layer's name, or an input's."""
    consumer: str
    """A layer's name."""
    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph(Artifact):
    """The whole model."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    model: str
    """The class of the user's model."""
    training: bool
    """Whether it was traced in training mode; dropout and batch norm differ otherwise."""
    inputs: tuple[Value, ...]
    """The tensors the model takes."""
    layers: tuple[Layer, ...]
    """In an order in which they can run: the order in which the user's model runs them."""
    outputs: tuple[str, ...]
    """Names of the values the model returns."""

    def __post_init__(self) -> None:
        known = {value.name for value in self.inputs}
        for layer in self.layers:
            for name in layer.inputs:
                if name not in known:
                    raise ValueError(f"layer {layer.name!r} takes {name!r}, which no earlier layer makes")
            for value in layer.outputs:
                if value.name in known:
                    raise ValueError(f"two values are named {value.name!r}; names must be unique")
                known.add(value.name)
        if missing := [name for name in self.outputs if name not in known]:
            raise ValueError(f"the model returns {missing[0]!r}, which no layer makes")

    def layer(self, name: str) -> Layer:
        """The layer of that name."""
        return self.layers[self.index(name)]

    def index(self, name: str) -> int:
        """Its place in the order."""
        for index, layer in enumerate(self.layers):
            if layer.name == name:
                return index
        raise TraceError(f"{self.model} has no layer {name!r}; its layers: {_some(x.name for x in self.layers)}")

    def values(self) -> dict[str, Value]:
        """All values by name, the model's inputs included."""
        made = {value.name: value for layer in self.layers for value in layer.outputs}
        return {value.name: value for value in self.inputs} | made

    def producers(self) -> dict[str, str]:
        """Value → the layer that makes it; the model's inputs make themselves."""
        made = {value.name: layer.name for layer in self.layers for value in layer.outputs}
        return {value.name: value.name for value in self.inputs} | made

    def edges(self) -> tuple[Edge, ...]:
        """Every (producer, consumer, value)."""
        values, producers = self.values(), self.producers()
        return tuple(
            Edge(producer=producers[name], consumer=layer.name, value=values[name])
            for layer in self.layers
            for name in layer.inputs
        )

    def boundary(self, start: int, stop: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the values that enter and leave the block of layers `start` to `stop - 1`, in order."""
        inside = {value.name: None for layer in self.layers[start:stop] for value in layer.outputs}
        taken = dict.fromkeys(name for layer in self.layers[start:stop] for name in layer.inputs)
        needed_later = {name for layer in self.layers[stop:] for name in layer.inputs} | set(self.outputs)
        entering = tuple(name for name in taken if name not in inside)
        leaving = tuple(name for name in inside if name in needed_later)
        return entering, leaving

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        return sum({name: size for layer in self.layers for name, size in layer.parameters.items()}.values())

    @property
    def flops_per_sample(self) -> int:
        """Forward floating-point operations a sample."""
        return sum(layer.flops_per_sample for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.layers)} layers, {self.parameter_bytes / 2**20:.1f} MiB of parameters"]
        lines += [f"  {x.name:<40} {x.kind:<28} ← {', '.join(x.inputs)}" for x in self.layers]
        return "\n".join(lines)


def unique(name: str, used: set[str]) -> str:
    """The name, or `name@2`, `name@3`, … where it is used already; adds it to the used ones."""
    count, found = 1, name
    while found in used:
        count += 1
        found = f"{name}@{count}"
    used.add(found)
    return found


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:5]) + (f", … ({len(names)} in all)" if len(names) > 5 else "")
