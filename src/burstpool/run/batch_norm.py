"""Exact batch norm: statistics over the samples of all devices that run a block.

Takes the place of `aten.batch_norm` in blocks that more than one device runs. Equal to what one device computes on the
whole minibatch, up to the order of sums: each device takes mean and squared deviations of its own samples, all
gather these, and every device joins them in the same order (Chan et al., 1979), so running statistics stay bit-equal
on all of them. Backward gathers two sums a channel. Devices may hold different numbers of samples.

Shape suffixes: C channels, G devices of the group.
"""
# ruff: noqa: N803, N806 -- shape suffixes

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

aten = torch.ops.aten
OPERATOR = aten.batch_norm.default
TRAINING = 5
"""Position of the operator's argument that asks for the statistics of the samples at hand."""


def exact_batch_norm(group: dist.ProcessGroup, num_samples: Sequence[int]) -> Callable[..., torch.Tensor]:
    """The operator over a group whose members hold so many samples each, in the order of their ranks."""
    rank = dist.get_rank(group)
    shares_G = torch.tensor(num_samples, dtype=torch.float64) / sum(num_samples)
    own, total = num_samples[rank], sum(num_samples)

    def batch_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        count = x.numel() // x.shape[1] // own * total  # every sample has as many elements a channel
        y, mean_C, var_C = _Exact.apply(x, weight, bias, eps, group, shares_G, count)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            if running_mean is not None:
                running_mean.mul_(1 - momentum).add_(mean_C.to(running_mean.dtype), alpha=momentum)
            if running_var is not None:
                unbiased_C = var_C * (count / max(count - 1, 1))
                running_var.mul_(1 - momentum).add_(unbiased_C.to(running_var.dtype), alpha=momentum)
        return y  # type: ignore[no-any-return]

    return batch_norm


class _Exact(torch.autograd.Function):
    """Normalisation over the group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        shares_G: torch.Tensor,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean_C, var_C = _joint_statistics(x, group, shares_G)
        y = torch.batch_norm(x, weight, bias, mean_C, var_C, False, 0.0, eps, False)
        ctx.save_for_backward(x, weight, mean_C, var_C)
        ctx.eps, ctx.group, ctx.count, ctx.has_bias = eps, group, count, bias is not None
        ctx.mark_non_differentiable(mean_C, var_C)
        return y, mean_C, var_C

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, weight, mean_C, var_C = ctx.saved_tensors
        # In evaluation mode the statistics are constants: this is the gradient through y alone, and the two sums.
        grad_x, grad_weight_C, grad_bias_C = aten.native_batch_norm_backward(
            gradients[0].contiguous(), x, weight, mean_C, var_C, None, None, False, ctx.eps, [True, True, True]
        )
        own_2C = torch.stack([grad_weight_C.to(mean_C.dtype), grad_bias_C.to(mean_C.dtype)])
        weighted_C, plain_C = _gathered(own_2C, ctx.group).sum(0) / ctx.count
        invstd_C = torch.rsqrt(var_C + ctx.eps)
        scale_C = invstd_C if weight is None else invstd_C * weight
        # Through the mean and the variance: what every element of the channel takes off every other.
        shape = [1, -1] + [1] * (x.dim() - 2)
        slope = (-scale_C * invstd_C * weighted_C).view(shape)
        grad_x += (x - mean_C.view(shape).to(x.dtype)) * slope.to(x.dtype)
        grad_x -= (scale_C * plain_C).view(shape).to(x.dtype)
        return (
            grad_x,
            grad_weight_C if weight is not None else None,
            grad_bias_C if ctx.has_bias else None,
            *[None] * 4,
        )


def _joint_statistics(
    x: torch.Tensor, group: dist.ProcessGroup, shares_G: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance over all devices' samples; bit-equal on each."""
    precise = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    var_C, mean_C = torch.var_mean(precise, dim=[d for d in range(x.dim()) if d != 1], correction=0)
    all_G2C = _gathered(torch.stack([mean_C, var_C]), group)
    weights_G1 = shares_G.to(all_G2C)[:, None]
    means_GC, vars_GC = all_G2C[:, 0], all_G2C[:, 1]
    joint_C = (weights_G1 * means_GC).sum(0)
    return joint_C, (weights_G1 * (vars_GC + (means_GC - joint_C).square())).sum(0)


def _gathered(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """What all devices have, in the order of their ranks. On gloo faster than adding up, and the same everywhere."""
    found = own.new_empty((dist.get_world_size(group), *own.shape))
    dist.all_gather(list(found.unbind(0)), own, group=group)
    return found
