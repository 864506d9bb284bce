"""TracedModel: a model as layers that can be run one by one, in blocks, or all in order.

Joins the three parts of a trace: the layers as data (`LayerGraph`), their code, and the shape of the user's call.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from burstpool.errors import TraceError
from burstpool.model.block import Block
from burstpool.model.capture import flatten_arguments
from burstpool.model.code import LayerCode, ReplaceableCode, Site
from burstpool.model.graph import Layer, LayerGraph, Value


class TracedModel:
    """A model as layers that can be run one by one, in blocks, or all in order."""

    def __init__(
        self,
        *,
        model: nn.Module,
        graph: LayerGraph,
        codes: Sequence[LayerCode],
        call: "CallShape",
        example: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> None:
        self.model = model
        """The user's module; layers use its parameters and buffers, whatever they are when a layer runs."""
        self.graph = graph
        """The layers as data."""
        self.example = example
        """The positional and keyword arguments it was traced with."""
        self._codes = tuple(codes)
        self._call = call

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Short for `graph.layers`."""
        return self.graph.layers

    def block(self, start: int | str = 0, stop: int | str | None = None) -> Block:
        """Layers `start` to `stop - 1`, by place or by name; just layer `start` if it is a name and `stop` is None."""
        first = self.graph.index(start) if isinstance(start, str) else start
        if stop is None:
            last = first + 1 if isinstance(start, str) else len(self.layers)
        else:
            last = self.graph.index(stop) if isinstance(stop, str) else stop
        return Block(self.graph, self.model, self._codes, start=first, stop=last)

    def blocks(self, cuts: Sequence[int] | None = None) -> list[Block]:
        """The whole model cut before the layers at these places; before every layer when None."""
        places = range(1, len(self.layers)) if cuts is None else sorted(cuts)
        edges = [0, *places, len(self.layers)]
        return [self.block(a, b) for a, b in itertools.pairwise(edges)]

    def with_operators(self, replace: Callable[[Layer, Site], Callable[..., Any] | None]) -> "TracedModel":
        """The same model with some operators replaced: asks, for each, what to call in its place; None keeps it.

        Layers that are whole modules (`fallback="modules"`) stay as they are.
        """
        changed = copy.copy(self)
        changed._codes = tuple(
            code.with_operators(partial(replace, layer)) if isinstance(code, ReplaceableCode) else code
            for layer, code in zip(self.layers, self._codes, strict=True)
        )
        return changed

    def input_values(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """The model's arguments as named values of the graph."""
        return self._call.input_values(args, kwargs)

    def batch_of(self, values: Mapping[str, torch.Tensor]) -> int:
        """Samples in the input values."""
        return self._call.batch(values)

    def output(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The model's result, in the user's own structure, from named values."""
        return self._call.output(values)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs all layers in order; the same as calling the model."""
        values = self.input_values(*args, **kwargs)
        for block in self.blocks():
            results = block(*(values[name] for name in block.inputs), batch=self.batch_of(values))
            values.update(zip(block.outputs, results, strict=True))
        return self.output(values)

    def __repr__(self) -> str:
        return f"TracedModel({self.graph.model}, {len(self.layers)} layers)"


class CallShape:
    """How the user's arguments become the graph's inputs, and its values the user's result."""

    def __init__(
        self,
        *,
        inputs: Sequence[str],
        in_spec: pytree.TreeSpec,
        outputs: Sequence[tuple[str | None, Any]],
        out_spec: pytree.TreeSpec,
        values: Sequence[Value],
        example: tuple[tuple[Any, ...], Mapping[str, Any]],
        batch_range: tuple[int, int | None] = (1, None),
    ) -> None:
        self._inputs, self._in_spec = inputs, in_spec
        self._outputs, self._out_spec = outputs, out_spec
        self._values = {value.name: value for value in values}
        self._example = flatten_arguments(*example)[0]
        self._range = batch_range

    def input_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Named input tensors."""
        leaves, spec = flatten_arguments(args, kwargs)
        if spec != self._in_spec:
            raise TraceError(
                f"the arguments differ in structure from the traced example: {spec} is not {self._in_spec}"
            )
        for leaf, traced in zip(leaves, self._example, strict=True):
            if not isinstance(traced, torch.Tensor) and leaf != traced:
                raise TraceError(f"the model was traced with argument {traced!r}, not {leaf!r}; trace it with that")
        values = {name: leaf for name, leaf in zip(self._inputs, leaves, strict=True) if name}
        for name, tensor in values.items():
            self._check_shape(self._values[name], tensor)
        low, high = self._range
        batch = self.batch(values)
        if batch < low or (high is not None and batch > high):
            raise TraceError(f"batch {batch} is outside {low} to {high or '…'}, for which the traced code is valid")
        return values

    @staticmethod
    def _check_shape(value: Value, tensor: torch.Tensor) -> None:
        fits = tensor.dim() == len(value.shape)
        if not fits or any(isinstance(a, int) and a != b for a, b in zip(value.shape, tensor.shape, strict=True)):
            traced = "×".join(str(size) for size in value.shape)
            raise TraceError(f"input {value.name!r} was traced as {traced}, not {tuple(tensor.shape)}; trace it again")

    def batch(self, values: Mapping[str, torch.Tensor]) -> int:
        """Samples in the input values."""
        for name, value in self._values.items():
            if value.sample_dim is not None:
                return values[name].shape[value.sample_dim]
        raise TraceError("no input has samples")

    def output(self, values: Mapping[str, torch.Tensor]) -> Any:
        """The user's structure, each leaf a named value or, without a name, a constant."""
        leaves = [constant if name is None else values[name] for name, constant in self._outputs]
        return pytree.tree_unflatten(leaves, self._out_spec)
