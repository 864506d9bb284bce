"""Convolutions, 1 to 3 dimensions and transposed: members become groups.

Lowerings, none of which wins everywhere (see docs/fusion.md): `grouped` on [N, M·C, …]; the same with channels last
in memory; a `loop` over members, on a GPU on several `streams`; a `kernel` of our own for all members at once
(convolution_at_once.py); and a batched `product` where the convolution is one (products.py). Taps that only ever see
padding are left out first (window.py). Members that share their input need no groups at all: one convolution with
M times the filters.

Shapes: M = members, N = samples, C = channels, O = output channels, … = space.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion.rules.base import Call, Kernel, Lowered, Rule, Run, autocast_dtype, with_members
from burstpool.fusion.rules.concurrent import side_by_side
from burstpool.fusion.rules.convolution_at_once import convolution_at_once, suits, transposed_at_once
from burstpool.fusion.rules.depthwise import depthwise_kernel
from burstpool.fusion.rules.layout import channels_folded, channels_unfolded, laid_weight
from burstpool.fusion.rules.products import covering_product, point_product, spreading_product
from burstpool.fusion.rules.window import Window, window

aten = torch.ops.aten

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Memory formats by rank; a convolution over one dimension has none."""


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The operator and where its groups stand among the arguments after weight and bias."""

    op: Callable[..., Tensor]
    groups_at: int
    transposed: bool

    def call(self, x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...], groups: int) -> Tensor:
        options = (*rest[: self.groups_at], groups, *rest[self.groups_at + 1 :])
        return self.op(x, weight, bias, *options)


def _rule(call: Call) -> Lowered | None:
    names = list(call.arguments)
    x, weight, bias = names[:3]
    rank = call.rank(weight)
    if call.rank(x) != rank or call.per_member():
        return None  # a single sample without a batch dimension: vmap knows it
    if call[bias] is not None and call.is_batched(bias) != call.is_batched(weight):
        return None
    transposed = "transpose" in call.op.overloadpacket.__name__
    convolution = _Convolution(call.op, names.index("groups") - 3, transposed)
    if not call.is_batched(weight):
        return Lowered(kernel=_one_weight(convolution), why="all members use one weight: folded into samples")
    batched = call.is_batched(x)
    if transposed:
        return _lowered_transposed(call, convolution, batched)
    device, geometry = call.tensor(x).device.type, window(call)
    ways = _ways(convolution, batched, rank, device, depthwise=call.tensor(weight).shape[1] == 1)
    if suits(call):
        ways["kernel"] = convolution_at_once(ways["channels_last"])
    why = "members as groups of one convolution"
    if not batched and call["groups"] == 1:
        ways = {"": _shared(convolution, None)}
        ways |= {"channels_last": _shared(convolution, _LAST[rank])} if rank in _LAST else {}
        why = "members share the input: one convolution, M times the filters"
    if geometry is not None and not geometry.whole:
        ways = {name: _cropped(kernel, geometry, names.index("padding") - 3) for name, kernel in ways.items()}
        why += "; taps that only see padding left out"
    if geometry is None or call["groups"] != 1:
        return Lowered(kernel=ways.pop(""), why=why, others=ways)
    if geometry.is_covering and batched:
        product, words = covering_product(geometry, batched), "the kernel covers the map: one batched product"
    elif geometry.is_point:
        product, words = point_product(geometry, batched), "a kernel of one point: one product"
    else:
        return Lowered(kernel=ways.pop(""), why=why, others=ways)
    if device == "cuda":
        # Slower in 2 of 21 shapes on an H200 (docs/LOG.md); measuring cuDNN's ways costs tenths of a second a layer.
        return Lowered(kernel=product, why=words)
    if geometry.is_covering and batched:
        return Lowered(kernel=product, why=words, others={"grouped": ways.pop(""), **ways})
    return Lowered(kernel=ways.pop(""), why=why, others={**ways, "product": product})


def _lowered_transposed(call: Call, convolution: _Convolution, batched: bool) -> Lowered:
    x, weight = (call.tensor(name) for name in list(call.arguments)[:2])
    ways = _ways(convolution, batched, weight.dim(), x.device.type, depthwise=False)
    if suits(call):
        ways["kernel"] = transposed_at_once(ways["channels_last"])
    plain = all(v in (0, 1) for name in ("padding", "output_padding", "dilation") for v in call[name])
    plain = plain and not any((*call["padding"], *call["output_padding"])) and call["groups"] == 1
    if plain and all(size == 1 for size in x.shape[2:]):
        ways = {"": spreading_product(batched), "grouped": ways.pop(""), **ways}
        return Lowered(kernel=ways.pop(""), why="maps of one point: one batched product", others=ways)
    return Lowered(kernel=ways.pop(""), why="members as groups of one convolution", others=ways)


def _ways(convolution: _Convolution, batched: bool, rank: int, device: str, *, depthwise: bool) -> dict[str, Kernel]:
    """The general lowerings; the first is the rule's own choice."""
    ways: dict[str, Kernel] = {"": _grouped(convolution, batched, None)}
    if rank in _LAST:
        ways["channels_last"] = _grouped(convolution, batched, _LAST[rank])
    if device == "cuda" and depthwise and convolution.op is aten.conv2d.default:
        # Members' channels side by side are what these kernels are made for.
        return {"": depthwise_kernel(batched, None), "channels_last": depthwise_kernel(batched, torch.channels_last)}
    if device == "cuda" and rank in _LAST:
        return {**ways, "streams": _loop(convolution, batched, _LAST[rank])}
    return {**ways, "loop": _loop(convolution, batched, None)}


def _cropped(kernel: Kernel, geometry: Window, padding_at: int) -> Kernel:
    def cropped(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        options = (*rest[:padding_at], list(geometry.padding), *rest[padding_at + 1 :])
        return kernel(run, x, geometry.cropped(w_MOC), b_MO, *options)  # type: ignore[no-any-return]

    return cropped


def _laid(x: Tensor, weight: Tensor, memory_format: torch.memory_format) -> tuple[Tensor, Tensor]:
    """Input and weight as the convolution is to find them."""
    x = x.contiguous(memory_format=memory_format)
    if x.shape[0] == 1:
        # One sample may have any stride; torch's CPU kernels then give a grouped weight a wrong gradient.
        x = x.movedim(1, -1).flatten().view(1, *x.shape[2:], x.shape[1]).movedim(-1, 1)
    return x, laid_weight(weight, autocast_dtype(weight), memory_format)


def _one_weight(convolution: _Convolution) -> Kernel:
    def kernel(run: Run, x_MNC: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        y = convolution.op(x_MNC.flatten(0, 1), weight, bias, *rest)
        return y.view(run.members, -1, *y.shape[1:])

    return kernel


def _shared(convolution: _Convolution, memory_format: torch.memory_format | None) -> Kernel:
    def kernel(run: Run, x_NC: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        weight, bias = w_MOC.flatten(0, 1), None if b_MO is None else b_MO.flatten()
        if memory_format is not None:
            x_NC, weight = _laid(x_NC, weight, memory_format)
        return channels_unfolded(convolution.op(x_NC, weight, bias, *rest), run.members)

    return kernel


def _grouped(convolution: _Convolution, batched: bool, memory_format: torch.memory_format | None) -> Kernel:
    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        x_NC = channels_folded(x if batched else with_members(x, run.members))
        weight, bias = w_MOC.flatten(0, 1), None if b_MO is None else b_MO.flatten()
        if memory_format is not None:
            x_NC, weight = _laid(x_NC, weight, memory_format)
        groups = rest[convolution.groups_at] * run.members
        return channels_unfolded(convolution.call(x_NC, weight, bias, rest, groups), run.members)

    return kernel


def _loop(convolution: _Convolution, batched: bool, memory_format: torch.memory_format | None) -> Kernel:
    """Member by member; with a memory format also on several streams."""

    def laid_out(x: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        assert memory_format is not None
        return convolution.op(*_laid(x, weight, memory_format), bias, *rest)

    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        inputs = x.unbind(0) if batched else [x] * run.members
        biases = [None] * run.members if b_MO is None else b_MO.unbind(0)
        rows = list(zip(inputs, w_MOC.unbind(0), biases, strict=True))
        if memory_format is None:
            return torch.stack([convolution.op(*row, *rest) for row in rows])
        return torch.stack(side_by_side([functools.partial(laid_out, *row, rest) for row in rows], x.device))

    return kernel


RULES: dict[Callable[..., Any], Rule] = dict.fromkeys(
    (
        aten.conv1d,
        aten.conv2d,
        aten.conv3d,
        aten.conv_transpose1d,
        aten.conv_transpose2d,
        aten.conv_transpose3d,
    ),
    _rule,
)
