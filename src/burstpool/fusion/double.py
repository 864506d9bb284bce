"""The captured graph in double precision: what `verify` runs, fused and alone.

Types that the graph was captured with (`zeros(…, dtype=float32)`, `.float()`) become float64, constants too.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from burstpool.fusion.modes import Mode
from burstpool.model.capture import Capture

_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_CONVERSIONS = {
    torch.ops.aten.to.dtype: 3,
    torch.ops.aten.to.dtype_layout: 1,
    torch.ops.aten.to.device: 4,
    torch.ops.aten.to.other: 3,
}
"""Conversions that are asked for a copy by a word → their arguments before it."""


def doubled(value: Any) -> Any:
    """A tensor, or a type, in double precision; all else as it is."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return value.to(_WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in _WIDER else value


def doubled_mode(mode: Mode) -> Mode:
    """The mode with its graph in double precision."""
    made = copy.copy(mode)
    made.capture = _doubled_capture(mode.capture)
    made.constants = [[doubled(value) for value in constants] for constants in mode.constants]
    made._forget()
    return made


def _doubled_capture(capture: Capture) -> Capture:
    graph, new = _copy(capture.graph)
    root = nn.Module()
    for node in capture.graph.nodes:
        inner = getattr(capture.root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            setattr(root, str(node.target), fx.GraphModule(inner, _copy(inner.graph)[0]))
    outputs = tuple(new.get(output, output) if isinstance(output, fx.Node) else output for output in capture.outputs)
    return dataclasses.replace(capture, graph=graph, root=root, outputs=outputs)


def _copy(old: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in old.nodes:
        made = graph.node_copy(node, lambda source: new[source])
        made.name = node.name  # copying gives another one to `input`, which is also a function of Python's
        made.args = map_aggregate(made.args, lambda a: doubled(a) if isinstance(a, torch.dtype) else a)
        made.kwargs = map_aggregate(made.kwargs, lambda a: doubled(a) if isinstance(a, torch.dtype) else a)
        if made.meta.get("copies") and made.target is torch.ops.aten.type_as.default:
            made.target = torch.ops.aten.to.other
        if made.meta.get("copies") and made.target in _CONVERSIONS:  # also where both types become one
            made.kwargs = {**{k: v for k, v in made.kwargs.items() if k != "copy"}, "copy": True}
            made.args = made.args[: _CONVERSIONS[made.target]]
        if "val" in made.meta:
            made.meta = {**made.meta, "val": _doubled_value(made.meta["val"])}
        new[node] = made
    return graph, new


def _doubled_value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_doubled_value(item) for item in value)
    return doubled(value)
