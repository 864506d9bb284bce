"""Tracing by operators: a captured graph becomes layers with names, bytes, FLOPs and code.

The main way to trace; `modules.py` is the fallback. Takes a module and its arguments, returns a `TracedModel`.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from burstpool.errors import TraceError
from burstpool.model.capture import BATCH_SYMBOL, Capture, capture, inner_nodes, is_random
from burstpool.model.code import OperatorCode
from burstpool.model.flops import FlopCounter
from burstpool.model.graph import Layer, LayerGraph, Value, unique
from burstpool.model.segment import Segment, free_nodes, mixes_samples, sample_dim, segment
from burstpool.model.traced import CallShape, TracedModel

_UNNAMED = {"getitem", "view", "reshape", "flatten", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "to",
            "expand", "slice", "select", "unflatten", "clone", "detach", "t", "unbind", "split", "chunk",
            "numpy_T"}  # fmt: skip
"""Operators that say little about a layer; left out of its kind where there are others."""
_MAX_KIND = 4
"""Operators named in a layer's kind."""


def trace_operators(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedModel:
    """Splits the model at the boundaries of its module calls."""
    captured = capture(model, args, kwargs)
    free = free_nodes(captured)
    segments = segment(captured, free)
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    builder = _LayerBuilder(captured, model, segments)
    layers = tuple(builder.layer(index) for index in range(len(segments)))
    codes = [
        OperatorCode(
            captured,
            seg.nodes,
            inputs=builder.entering(index),
            outputs=builder.leaving(index),
            free=free,
            device=device,
        )
        for index, seg in enumerate(segments)
    ]
    args_and_kwargs = (args, dict(kwargs))
    inputs = tuple(builder.input_value(name) for name in captured.inputs if name)
    graph = LayerGraph(
        model=type(model).__name__,
        training=model.training,
        inputs=inputs,
        layers=layers,
        outputs=tuple(dict.fromkeys(name for name, _ in builder.results() if name is not None)),
    )
    call = CallShape(
        inputs=captured.inputs,
        in_spec=captured.in_spec,
        outputs=builder.results(),
        out_spec=captured.out_spec,
        values=inputs,
        example=args_and_kwargs,
        batch_range=captured.batch_range,
    )
    return TracedModel(model=model, graph=graph, codes=codes, call=call, example=args_and_kwargs)


class _LayerBuilder:
    """Names the segments' values and weighs their layers."""

    def __init__(self, captured: Capture, model: nn.Module, segments: Sequence[Segment]) -> None:
        self.captured, self.model, self.segments = captured, model, segments
        self.placeholders = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
        self.input_nodes = [self.placeholders[name] for name in captured.inputs if name]
        self.flops = FlopCounter(captured)
        self.home = {node: index for index, seg in enumerate(segments) for node in seg.nodes}
        self.results_of_model = {node for node in captured.outputs if isinstance(node, fx.Node)}
        self.on_samples = _reached_from(self.input_nodes, captured)
        self.differentiable = _differentiable(captured, model)
        self.layer_names = _names(segments, taken=set(captured.inputs))
        self.value_names: dict[fx.Node, str] = {node: node.name for node in self.input_nodes}
        for index in range(len(segments)):
            for place, node in enumerate(self.leaving(index)):
                self.value_names[node] = self.layer_names[index] + (f":{place}" if place else "")

    def entering(self, index: int) -> list[fx.Node]:
        """What the segment takes from other segments and from the model's inputs."""
        sources = dict.fromkeys(s for node in self.segments[index].nodes for s in node.all_input_nodes)
        return [s for s in sources if s in self.input_nodes or self.home.get(s, index) != index]

    def leaving(self, index: int) -> list[fx.Node]:
        """What other segments, or the model's caller, take from it."""
        return [
            node
            for node in self.segments[index].nodes
            if node in self.results_of_model or any(self.home.get(user, index) != index for user in node.users)
        ]

    def results(self) -> list[tuple[str | None, Any]]:
        """The model's flattened results: (value's name, None) or (None, constant)."""
        return [(self.value_names[x], None) if isinstance(x, fx.Node) else (None, x) for x in self.captured.outputs]

    def input_value(self, name: str) -> Value:
        """An input of the model."""
        return self._value(self.placeholders[name])

    def layer(self, index: int) -> Layer:
        """The segment as data."""
        nodes = self.segments[index].nodes
        stored = dict.fromkeys(s.name for node in nodes for s in node.all_input_nodes if s.op == "placeholder")
        outputs = self.leaving(index)
        return Layer(
            name=self.layer_names[index],
            kind=_kind(nodes),
            inputs=tuple(self.value_names[node] for node in self.entering(index)),
            outputs=tuple(self._value(node) for node in outputs),
            parameters={
                self.captured.parameters[x]: _bytes(self.placeholders[x].meta["val"])
                for x in stored
                if x in self.captured.parameters
            },
            buffers=tuple(self.captured.buffers[x] for x in stored if x in self.captured.buffers),
            flops_per_sample=self.flops.per_sample(nodes),
            random=any(is_random(node) and not _is_off(node) for node in nodes),
            mixes_samples=any(node in self.on_samples and mixes_samples(node, self.captured) for node in nodes),
        )

    def _value(self, node: fx.Node) -> Value:
        tensor = node.meta["val"]
        sizes = [self.captured.size(size) for size in tensor.shape]
        if any(self.captured.data_dependent(size) for size in sizes):
            raise TraceError(
                f"cannot trace {type(self.model).__name__}: it returns a tensor whose size depends on values inside of "
                'another; return a mask instead, or pass fallback="modules"'
            )
        one, two = (_bytes_at(sizes, tensor.element_size(), batch) for batch in (1, 2))
        return Value(
            name=self.value_names[node],
            shape=tuple(size if isinstance(size, int) else str(size) for size in sizes),
            dtype=str(tensor.dtype).removeprefix("torch."),
            sample_dim=sample_dim(node, self.captured),
            bytes_per_sample=two - one,
            fixed_bytes=max(0, 2 * one - two),
            differentiable=node in self.differentiable,
        )


def _bytes_at(sizes: Sequence[Any], element_bytes: int, batch: int) -> int:
    total = element_bytes
    for size in sizes:
        total *= size if isinstance(size, int) else int(size.subs(BATCH_SYMBOL, batch))
    return total


def _names(segments: Sequence[Segment], *, taken: set[str]) -> list[str]:
    """`features.0` for a leaf module, `layer1.0.add` for operators between modules, `…@2` for a second call."""
    used = set(taken)
    names = []
    for seg in segments:
        operator = _kind(seg.nodes).split("+")[0]
        names.append(unique(seg.path if seg.is_leaf else f"{seg.path}.{operator}".lstrip("."), used))
    return names


def _kind(nodes: Iterable[fx.Node]) -> str:
    nodes = [inner for node in nodes for inner in (list(inner_nodes(node)) or [node]) if inner.op == "call_function"]
    named = [_operator_name(node) for node in nodes if node.users]  # without users: counters of batch norm
    named = named or [_operator_name(node) for node in nodes]
    telling = [name for name in named if name not in _UNNAMED] or [n for n in named if n != "getitem"] or named
    telling = list(dict.fromkeys(telling))
    return "+".join(telling[:_MAX_KIND]) + ("+…" if len(telling) > _MAX_KIND else "")


def _operator_name(node: fx.Node) -> str:
    target = node.target
    if target is getitem:
        return "getitem"
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")


def _is_off(node: fx.Node) -> bool:
    """A dropout, or an operator with dropout inside, that drops nothing draws no random numbers."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = node.target._schema.arguments
    given = {x.name: value for x, value in zip(arguments, node.args, strict=False)}
    found = {x.name: x.default_value for x in arguments} | given | node.kwargs
    probability = next((found[name] for name in ("p", "dropout_p", "dropout") if name in found), None)
    return probability == 0 or found.get("train") is False


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reached_from(inputs: Sequence[fx.Node], captured: Capture) -> set[fx.Node]:
    reached = set(inputs)
    for node in captured.graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def _differentiable(captured: Capture, model: nn.Module) -> set[fx.Node]:
    """Nodes through which a gradient reaches a trainable parameter."""
    trainable = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    found: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if captured.parameters.get(node.name) in trainable:
                found.add(node)
        elif any(source in found for source in node.all_input_nodes) and _passes_gradients(node):
            found.add(node)
    return found


def _passes_gradients(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.detach.default:
        return False
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return bool(node.args[0])
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
