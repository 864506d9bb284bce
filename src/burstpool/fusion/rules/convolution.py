"""Convolutions, 1 to 3 dimensions and transposed: members become groups.

Four lowerings, none of which wins everywhere (see docs/fusion.md): `grouped` on [N, M·C, …]; the same with channels
last in memory; a `loop` over members; and a batched `matmul` for kernels of one point. Members that share their
input need no groups at all: one convolution with M times the filters.

Shapes: M = members, N = samples, C = channels, O = output channels, … = space.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion.rules.base import Call, Kernel, Lowered, Rule, Run, with_members
from burstpool.fusion.rules.layout import channels_folded, channels_unfolded

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
    if not call.is_batched(x) and call["groups"] == 1 and not transposed:
        last = {"channels_last": _shared(convolution, _LAST[rank])} if rank in _LAST else {}
        why = "members share the input: one convolution, M times the filters"
        return Lowered(kernel=_shared(convolution, None), why=why, others=last)
    grouped = _grouped(convolution, call.is_batched(x), None)
    others: dict[str, Kernel] = {"loop": _loop(convolution, call.is_batched(x))}
    if rank in _LAST:
        others["channels_last"] = _grouped(convolution, call.is_batched(x), _LAST[rank])
    if _is_point(call, convolution):
        others["matmul"] = _pointwise(call.is_batched(x))
    return Lowered(kernel=grouped, why="members as groups of one convolution", others=others)


def _is_point(call: Call, convolution: _Convolution) -> bool:
    weight = call.tensor(list(call.arguments)[1])
    plain = all(_all(call[name], 1) for name in ("stride", "dilation")) and _all(call["padding"], 0)
    return not convolution.transposed and call["groups"] == 1 and plain and all(k == 1 for k in weight.shape[2:])


def _all(value: Any, wanted: int) -> bool:
    return isinstance(value, list | tuple | int) and all(
        v == wanted for v in ([value] if isinstance(value, int) else value)
    )


def _one_weight(convolution: _Convolution) -> Kernel:
    def kernel(run: Run, x_MNC: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        y = convolution.op(x_MNC.flatten(0, 1), weight, bias, *rest)
        return y.view(run.members, -1, *y.shape[1:])

    return kernel


def _shared(convolution: _Convolution, memory_format: torch.memory_format | None) -> Kernel:
    def kernel(run: Run, x_NC: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        weight, bias = w_MOC.flatten(0, 1), None if b_MO is None else b_MO.flatten()
        if memory_format is not None:
            x_NC, weight = (t.contiguous(memory_format=memory_format) for t in (x_NC, weight))
        return channels_unfolded(convolution.op(x_NC, weight, bias, *rest), run.members)

    return kernel


def _grouped(convolution: _Convolution, batched: bool, memory_format: torch.memory_format | None) -> Kernel:
    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        x_NC = channels_folded(x if batched else with_members(x, run.members))
        weight, bias = w_MOC.flatten(0, 1), None if b_MO is None else b_MO.flatten()
        if memory_format is not None:
            x_NC = x_NC.contiguous(memory_format=memory_format)
            weight = weight.contiguous(memory_format=memory_format)
        groups = rest[convolution.groups_at] * run.members
        return channels_unfolded(convolution.call(x_NC, weight, bias, rest, groups), run.members)

    return kernel


def _loop(convolution: _Convolution, batched: bool) -> Kernel:
    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        inputs = x.unbind(0) if batched else [x] * run.members
        biases = [None] * run.members if b_MO is None else b_MO.unbind(0)
        parts = zip(inputs, w_MOC.unbind(0), biases, strict=True)
        return torch.stack([convolution.op(one, weight, bias, *rest) for one, weight, bias in parts])

    return kernel


def _pointwise(batched: bool) -> Kernel:
    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        x_MNC = x if batched else with_members(x, run.members)
        members, samples, channels, *space = x_MNC.shape
        x_MPC = x_MNC.movedim(2, -1).reshape(members, -1, channels)
        w_MCO = w_MOC.flatten(2).squeeze(2).transpose(1, 2) if w_MOC.dim() > 3 else w_MOC.squeeze(-1).transpose(1, 2)
        y_MPO = torch.bmm(x_MPC, w_MCO) if b_MO is None else torch.baddbmm(b_MO.unsqueeze(1), x_MPC, w_MCO)
        return y_MPO.view(members, samples, *space, -1).movedim(-1, 2)

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
