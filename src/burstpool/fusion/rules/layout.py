"""Folding members into another dimension and back (views where the strides allow it, copies where not), and weights
in the layout that a convolution reads.

Shapes: M = members, N = samples, C = channels, … = any further dimensions.
"""
# ruff: noqa: N803 -- shape suffixes are capitals

from collections.abc import Callable, Sequence
from typing import Any

import torch


def channels_folded(x_MNC: torch.Tensor) -> torch.Tensor:
    """[M, N, C, …] → [N, M·C, …]."""
    return x_MNC.transpose(0, 1).flatten(1, 2)


def channels_unfolded(x_NC: torch.Tensor, members: int) -> torch.Tensor:
    """[N, M·C, …] → [M, N, C, …], without a copy."""
    samples, channels, *rest = x_NC.shape
    return x_NC.view(samples, members, channels // members, *rest).transpose(0, 1)


def samples_folded(x_MN: torch.Tensor) -> torch.Tensor:
    """[M, N, …] → [M·N, …]."""
    return x_MN.flatten(0, 1)


def samples_unfolded(x_N: torch.Tensor, members: int) -> torch.Tensor:
    """[M·N, …] → [M, N, …], without a copy."""
    return x_N.view(members, x_N.shape[0] // members, *x_N.shape[1:])


def lies_in_channels(x_MNC: torch.Tensor) -> bool:
    """Whether members lie inside of samples in memory, as a grouped convolution leaves them."""
    return x_MNC.stride(0) < x_MNC.stride(1)


def memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The tensor's dimensions from the outermost in memory to the innermost; None for the usual order.

    torch draws a mask in this order, so a transposed input gets another mask than a contiguous one.
    """
    strides = _strides(torch.empty_like(tensor))
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    order_of_sized = [dim for dim in order if tensor.shape[dim] != 1]
    return order if order_of_sized != sorted(order_of_sized) else None


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a captured tensor fills its memory: no gaps, and no element twice."""
    sides = zip(tensor.shape, _strides(tensor), _strides(torch.empty_like(tensor)), strict=True)
    return all(mine == dense for size, mine, dense in sides if size != 1)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Of a captured tensor, at the batch it was captured with."""
    return [int(s.node.hint) if isinstance(s, torch.SymInt) else s for s in tensor.stride()]


def as_alone(captured: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Lays [M, …] so that each member's part lies in memory as the captured tensor does: it is a view where that is."""
    order = memory_order(captured)
    members_first = None if order is None else [0, *(dim + 1 for dim in order)]
    return lambda x: in_order(x, members_first)


def in_order(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """The tensor with its dimensions so in memory, from the outermost to the innermost; no view of another."""
    if order is None:
        return tensor.contiguous()
    strides, step = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim], step = step, step * tensor.shape[dim]
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def per_channel(w_MC: torch.Tensor, rank: int) -> torch.Tensor:
    """[M, C] → [M, 1, C, 1, …], to meet one member's [N, C, …] of `rank` dimensions."""
    return w_MC.reshape(w_MC.shape[0], 1, -1, *[1] * (rank - 2))


class _Laid(torch.autograd.Function):
    """A weight's type and layout changed at once, and its gradient's back: one pass instead of two."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
        ctx.like = weight.dtype
        return weight.to(dtype, memory_format=memory_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].to(ctx.like, memory_format=torch.contiguous_format), None, None


def laid_weight(weight: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
    """A weight in another type and layout."""
    laid: torch.Tensor = _Laid.apply(weight, dtype, memory_format)  # type: ignore[no-untyped-call]
    return laid
