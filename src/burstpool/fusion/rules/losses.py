"""Losses: computed for all members' samples at once, then reduced for each member on its own.

Shapes: M = members, N = samples, R = samples of all members, C = classes, … = further dimensions.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from burstpool.fusion import kernels
from burstpool.fusion.padding import row_width, with_zeros_behind
from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, caller, expander

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for a loss's `reduction`."""
_MANY_CLASSES = 128
"""From here on, reading the logits is what a loss costs."""


def cross_entropy(x_MNC: Tensor, target: Tensor, ignore_index: int, smoothing: float, reduction: int) -> Tensor:
    """Of class indices, [M] or [M, N, …]; `target` is shared [N, …] or each member's own [M, N, …]."""
    members = x_MNC.shape[0]
    own = target if target.dim() == x_MNC.dim() - 1 else target.unsqueeze(0).expand(members, *target.shape)
    each = _each(x_MNC.flatten(0, 1), own.flatten(0, 1), ignore_index, smoothing)
    if reduction == NONE:
        return each.view(own.shape)
    total_M = each.view(members, -1).sum(1)
    if reduction == SUM:
        return total_M
    counted = target != ignore_index
    return total_M / (counted.sum() if own is not target else counted.view(members, -1).sum(1))


def _each(x_RC: Tensor, target_R: Tensor, ignore_index: int, smoothing: float) -> Tensor:
    """Each sample's loss."""
    if x_RC.dim() == 2 and x_RC.shape[1] >= _MANY_CLASSES and kernels.usable(x_RC) and target_R.dtype is torch.int64:
        from burstpool.fusion.kernels.entropy import cross_entropy as in_one

        return in_one(x_RC, target_R, ignore_index, smoothing)
    if kernels.plain() and x_RC.dim() == 2 and row_width(x_RC) > x_RC.shape[1]:
        each: Tensor = _InPaddedRows.apply(x_RC, target_R, ignore_index, smoothing)  # type: ignore[no-untyped-call]
        return each
    return F.cross_entropy(x_RC, target_R, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")


class _InPaddedRows(torch.autograd.Function):
    """Cross-entropy of logits in padded rows, whose gradient is written into such rows too; in torch's operators."""

    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, target_R: Tensor, ignored: int, smoothing: float) -> Tensor:
        log_RC, counts_R = torch.log_softmax(x_RC.float(), 1), target_R != ignored
        ctx.save_for_backward(log_RC, target_R, counts_R)
        ctx.smoothing, ctx.width, ctx.dtype = smoothing, row_width(x_RC), x_RC.dtype
        mine_R1 = torch.where(counts_R, target_R, 0).unsqueeze(1)
        loss_R = -(1 - smoothing) * log_RC.gather(1, mine_R1).squeeze(1)
        if smoothing > 0:
            loss_R = loss_R - smoothing * log_RC.mean(1)
        return torch.where(counts_R, loss_R, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        log_RC, target_R, counts_R = ctx.saved_tensors
        classes = log_RC.shape[1]
        is_mine_RC = torch.arange(classes, device=log_RC.device) == target_R.unsqueeze(1)
        wanted_RC = torch.where(is_mine_RC, 1 - ctx.smoothing + ctx.smoothing / classes, ctx.smoothing / classes)
        g_R1 = torch.where(counts_R, grads[0], 0.0).unsqueeze(1)
        dx_RC = (g_R1 * (log_RC.exp() - wanted_RC)).to(ctx.dtype)
        return with_zeros_behind(F.pad(dx_RC, (0, ctx.width - classes)), classes), None, None, None


def _cross_entropy(call: Call) -> Lowered | None:
    if call["weight"] is not None or not call.is_batched("self") or call.rank("self") < 2 or call.per_member():
        return None
    if call.tensor("target").is_floating_point() or call.rank("target") != call.rank("self") - 1:
        return None

    def kernel(
        run: Run, x: Tensor, target: Tensor, weight: None, reduction: int, ignore_index: int, smoothing: float
    ) -> Tensor:
        return cross_entropy(x, target, ignore_index, smoothing, reduction)

    return Lowered(kernel=kernel, why="one loss for all samples, a mean for each member")


def _elementwise(call: Call) -> Lowered | None:
    """A loss that compares element by element, then reduces."""
    tensors = [name for name in call.arguments if call.is_tensor(name)]
    if len({call.rank(name) for name in tensors}) != 1 or call.per_member():
        return None
    op, order, expand = caller(call.op), list(call.arguments), expander(call, tensors)

    def kernel(run: Run, *arguments: Any) -> Tensor:
        bound = dict(zip(order, arguments, strict=True))
        reduction, bound["reduction"] = bound["reduction"], NONE
        expand(run, bound)
        each: Tensor = op(*bound.values())
        if reduction == NONE:
            return each
        return each.flatten(1).mean(1) if reduction == MEAN else each.flatten(1).sum(1)

    return Lowered(kernel=kernel, why="element by element, a mean for each member")


RULES: dict[Callable[..., Any], Rule] = {
    aten.cross_entropy_loss: _cross_entropy,
    **dict.fromkeys(
        (
            aten.mse_loss,
            aten.l1_loss,
            aten.smooth_l1_loss,
            aten.huber_loss,
            aten.binary_cross_entropy,
            aten.binary_cross_entropy_with_logits,
            aten.kl_div,
            aten.soft_margin_loss,
        ),
        _elementwise,
    ),
}
