"""Norms: batch and instance norm see M·C channels, layer and RMS norm scale by each member's own weight.

Shapes: M = members, N = samples, C = channels, F = normalised features.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion import kernels
from burstpool.fusion.rules.base import Call, Kernel, Lowered, Rule, Run, with_members
from burstpool.fusion.rules.layout import channels_folded, channels_unfolded, per_channel

aten = torch.ops.aten

_STATE = ("weight", "bias", "running_mean", "running_var")


def _folded_norm(call: Call) -> Lowered | None:
    """Batch and instance norm: each channel is on its own, so members' channels lie side by side."""
    state = [name for name in _STATE if call[name] is not None]
    if any(not call.is_batched(name) for name in state) or call.rank("input") < 2 or call.per_member():
        return None
    batched, op = call.is_batched("input"), call.op

    def kernel(run: Run, x: Tensor, *rest: Any) -> Tensor:
        x_NC = channels_folded(x if batched else with_members(x, run.members))
        flat = [None if t is None else t.contiguous().view(-1) for t in rest[:4]]
        y = channels_unfolded(op(x_NC, *flat, *rest[4:]), run.members)
        for statistics, new in zip(rest[2:4], flat[2:], strict=True):
            if new is not None and not statistics.is_contiguous():  # a part of a larger buffer
                statistics.copy_(new.view_as(statistics))
        return y

    others: dict[str, Kernel] = {}
    if _has_formula(call):
        others["formula"] = _batch_norm_formula
        if call.tensor("input").device.type == "cuda":
            others["kernel"] = _in_one(kernel)
    return Lowered(kernel=kernel, why="one norm of M·C channels", others=others)


def _in_one(otherwise: Kernel) -> Kernel:
    def kernel(run: Run, *arguments: Any) -> Tensor:
        y = norm_in_one(arguments)
        return otherwise(run, *arguments) if y is None else y

    return kernel


def norm_in_one(
    arguments: Sequence[Any],
    residual: Tensor | None = None,
    offset: Tensor | None = None,
    activation: str = "",
    slope: float = 0.0,
) -> Tensor | None:
    """Batch norm of x + offset plus the residual, through the activation, in one kernel; None where it cannot.

    `arguments` are batch norm's own, [M, …]; the offset is each channel's, [M, C].
    """
    x, weight, bias, mean, var, _, momentum, eps, _ = arguments
    if not kernels.usable(x) or (residual is not None and residual.dtype != x.dtype):
        return None
    from burstpool.fusion.kernels.batchnorm import batch_norm, rows_of

    rows = rows_of(x)
    others = None if residual is None else rows_of(residual)
    if rows is None or (residual is not None and (others is None or residual.shape != x.shape)):
        return None
    state = (weight, bias, mean, var)
    y = batch_norm(rows, others, offset, state, momentum=momentum, eps=eps, activation=activation, slope=slope)
    return y.view(*x.shape[:2], *x.shape[3:], -1).movedim(-1, 2)


def largest_in_one(
    arguments: Sequence[Any], offset: Tensor | None = None, activation: str = "", slope: float = 0.0
) -> Tensor | None:
    """[M, N, C]: the largest over L of batch norm of x [M, N, C, L] through the activation; None where it cannot."""
    x, weight, bias, mean, var, _, momentum, eps, _ = arguments
    if not kernels.usable(x):
        return None
    from burstpool.fusion.kernels.batchnorm import rows_of
    from burstpool.fusion.kernels.normmax import batch_norm_max

    rows, state = rows_of(x), (weight, bias, mean, var)
    if rows is None:
        return None
    numbers = {"momentum": momentum, "eps": eps}
    return batch_norm_max(rows, x.shape[1], offset, state, **numbers, activation=activation, slope=slope)


def _has_formula(call: Call) -> bool:
    names = ("weight", "bias", "running_mean", "running_var")
    is_batch_norm = call.op.overloadpacket is aten.batch_norm
    return (
        is_batch_norm
        and call.is_batched("input")
        and bool(call["training"])
        and all(call[n] is not None for n in names)
    )


def _batch_norm_formula(
    run: Run,
    x_MNC: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Tensor:
    """Statistics and scaling apart, in whatever layout x has; a compiler makes two passes of it."""
    dims = [1, *range(3, x_MNC.dim())]
    rank = x_MNC.dim() - 1
    wide = x_MNC.float() if x_MNC.dtype in (torch.float16, torch.bfloat16) else x_MNC
    var_MC, mean_MC = torch.var_mean(wide, dims, correction=0)
    count = x_MNC.numel() // var_MC.numel()
    with torch.no_grad():
        running_mean.lerp_(mean_MC.to(running_mean.dtype), momentum)
        running_var.lerp_((var_MC * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
    scale_MC = weight * torch.rsqrt(var_MC + eps)
    shift_MC = bias - mean_MC * scale_MC
    return torch.addcmul(per_channel(shift_MC, rank), wide, per_channel(scale_MC, rank)).to(x_MNC.dtype)


def _group_norm(call: Call) -> Lowered | None:
    if any(call[name] is not None and not call.is_batched(name) for name in ("weight", "bias")):
        return None
    batched = call.is_batched("input")

    def kernel(
        run: Run, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool
    ) -> Tensor:
        x_NC = channels_folded(x if batched else with_members(x, run.members))
        flat = [None if t is None else t.reshape(-1) for t in (weight, bias)]
        return channels_unfolded(aten.group_norm(x_NC, groups * run.members, *flat, eps, cudnn), run.members)

    return Lowered(kernel=kernel, why="one norm of M times the groups")


def _own(w_MF: Tensor, x: Tensor) -> Tensor:
    """[M, F] → [M, 1, …, F], in the type of x."""
    return w_MF.reshape(w_MF.shape[0], *[1] * (x.dim() - w_MF.dim()), *w_MF.shape[1:]).to(x.dtype)


def _layer_norm(call: Call) -> Lowered | None:
    if any(call[name] is not None and not call.is_batched(name) for name in ("weight", "bias")):
        return None
    batched = call.is_batched("input")

    def kernel(
        run: Run, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool
    ) -> Tensor:
        if batched and weight is not None and bias is not None and kernels.usable(x, weight, bias):
            from burstpool.fusion.kernels.layernorm import fits, layer_norm

            if fits(x, weight):
                # As torch's own under autocast: in float32.
                wide = torch.is_autocast_enabled(x.device.type) and x.is_cuda
                return layer_norm(x, weight, bias, eps, torch.float32 if wide else x.dtype)
        y: Tensor = aten.layer_norm(x, shape, None, None, eps, cudnn)
        y = y if batched else y.unsqueeze(0)
        if weight is None:
            return y if bias is None else y + _own(bias, y)
        weight = _own(weight, y)
        return y * weight if bias is None else torch.addcmul(_own(bias, y), y, weight)

    return Lowered(kernel=kernel, why="normalised together, scaled by each member's own weight")


def _rms_norm(call: Call) -> Lowered | None:
    if call["weight"] is not None and not call.is_batched("weight"):
        return None
    batched = call.is_batched("input")

    def kernel(run: Run, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
        y: Tensor = aten.rms_norm(x, shape, None, eps)
        y = y if batched else y.unsqueeze(0)
        return y if weight is None else y * _own(weight, y)

    return Lowered(kernel=kernel, why="normalised together, scaled by each member's own weight")


def _weight_norm(call: Call) -> Lowered | None:
    """A weight of direction v and length g; lengths along all dimensions but one, or along all."""
    if not call.is_batched("v") or not call.is_batched("g") or call.per_member():
        return None
    rank, kept = call.rank("v"), call["dim"]
    along = [dim + 1 for dim in range(rank) if kept == -1 or dim != kept % rank]

    def kernel(run: Run, v: Tensor, g: Tensor, dim: int) -> Tensor:
        lengths: Tensor = torch.linalg.vector_norm(v, dim=along, keepdim=True)
        return v * (g.view_as(lengths) / lengths)

    return Lowered(kernel=kernel, why="each member's own lengths")


RULES: dict[Callable[..., Any], Rule] = {
    aten.batch_norm: _folded_norm,
    aten.instance_norm: _folded_norm,
    aten.group_norm: _group_norm,
    aten.layer_norm: _layer_norm,
    aten.rms_norm: _rms_norm,
    aten._weight_norm: _weight_norm,
}
