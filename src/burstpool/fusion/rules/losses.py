"""Losses: computed for all members' samples at once, then reduced for each member on its own.

Shapes: M = members, N = samples, R = rows of all members, C = classes, … = further dimensions.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from burstpool.fusion import kernels
from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, caller, expander

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for a loss's `reduction`."""
_MANY_CLASSES = 128
"""From here on, reading the logits is what a loss costs."""
_OPAQUE_CLASSES = 4096
"""From here on, also a compiler does better with an operator that it cannot see into than with a loss of its own."""


def cross_entropy(x_MNC: Tensor, target: Tensor, ignore_index: int, smoothing: float, reduction: int) -> Tensor:
    """Of class indices, [M] or [M, N, …]; `target` is shared [N, …] or each member's own [M, N, …]."""
    members = x_MNC.shape[0]
    own = target if target.dim() == x_MNC.dim() - 1 else target.unsqueeze(0).expand(members, *target.shape)
    counts = None
    if reduction == MEAN:
        counted = target != ignore_index
        counts = counted.sum() if own is not target else counted.view(members, -1).sum(1)
    each = _each(x_MNC.flatten(0, 1), own.flatten(0, 1), counts, ignore_index, smoothing)
    if reduction == NONE:
        return each.view(own.shape)
    total_M = each.view(members, -1).sum(1)
    return total_M if counts is None else total_M / counts


def _each(x_RC: Tensor, target_R: Tensor, counts: Tensor | None, ignore_index: int, smoothing: float) -> Tensor:
    """Each sample's loss, of which so many will be counted into a mean, for all members or for each."""
    classes = x_RC.shape[1]
    in_one = classes >= _OPAQUE_CLASSES if kernels.plain() else classes >= _MANY_CLASSES
    if x_RC.dim() == 2 and in_one and kernels.could_take(x_RC) and target_R.dtype is torch.int64:
        from burstpool.fusion.kernels import entropy

        weight_R = None if counts is None else _spread(1.0 / counts, x_RC.shape[0])
        return entropy.cross_entropy(x_RC, target_R, weight_R, ignore_index, smoothing)
    return F.cross_entropy(x_RC, target_R, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")


def _spread(values: Tensor, rows: int) -> Tensor:
    """One number for each row, of one for all or for each member."""
    members = values.numel()
    return values.view(members, 1).expand(members, rows // members).flatten()


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
        each_M = each.reshape(run.members, -1)
        return each_M.mean(1) if reduction == MEAN else each_M.sum(1)

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
