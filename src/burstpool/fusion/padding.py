"""Rows that are longer than what they hold: how results and gradients of padded products lie in memory.

A GPU's matrix units want rows of whole multiples: a product over a vocabulary of 30,522 takes three times as long as
one over 30,528. So a weight is given rows of zeros, and the result is the first part of each longer row. A gradient
that is written into such rows from the start needs no copy: who writes it says that zeros lie behind it, and the
product's backward pass takes the whole. For a compiler a layer's bias is added apart, and who reads the sum may add it
itself: the sum remembers what it was made of.

Shapes: M = members, P = all dimensions before the last, I = inputs, O = outputs, R = rows, C = what a row holds,
W = its width with padding.
"""
# ruff: noqa: N803, N806, N815 -- shape suffixes are capitals

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

ALIGNED = 16
"""Outputs of a padded product come in multiples of this."""
_ZEROS_BEHIND, _MADE_OF = "_burstpool_zeros_behind", "_burstpool_made_of"
"""Attributes of tensors."""


class _Padded(torch.autograd.Function):
    """As `F.pad`, but the gradient is cut where it lies, not copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, missing: int) -> Tensor:
        ctx.size = x.shape[1]
        return F.pad(x, [0, 0] * (x.dim() - 2) + [0, missing])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(1, 0, ctx.size), None


def padded_outputs(x_MO: Tensor, missing: int) -> Tensor:
    """A weight [M, O, I] or bias [M, O] with zeros for `missing` more outputs."""
    y: Tensor = _Padded.apply(x_MO, missing)  # type: ignore[no-untyped-call]
    return y


def row_width(x_RC: Tensor) -> int:
    """How far apart rows lie where they are padded; their own length where not."""
    (rows, size), apart = x_RC.shape, x_RC.stride(0)
    if x_RC.stride(1) != 1 or apart % ALIGNED or not 0 < apart - size < ALIGNED:
        return size
    end = (x_RC.storage_offset() + rows * apart) * x_RC.element_size()
    return apart if end <= x_RC.untyped_storage().nbytes() else size


class Logits(NamedTuple):
    """Rows of a layer's results, and the bias that is still to be added to them."""

    x_RW: Tensor
    bias_MC: Tensor | None

    @staticmethod
    def of(x_RC: Tensor) -> "Logits":
        """What the logits were made of, where they are a layer's results as it has left them, in their order."""
        base = x_RC._base
        if base is None or not hasattr(base, _MADE_OF):
            return Logits(x_RC.detach(), None)
        x_MPW, bias_MC, version = getattr(base, _MADE_OF)
        as_left = base._version == version and x_RC.shape == (x_MPW.shape[0] * x_MPW.shape[1], base.shape[-1])
        if not as_left or x_RC.storage_offset() != base.storage_offset() or x_RC.stride() != (x_MPW.shape[2], 1):
            return Logits(x_RC.detach(), None)
        return Logits(x_MPW.flatten(0, 1), bias_MC)


def made_of(y: Tensor, x_MPW: Tensor, bias_MC: Tensor) -> Tensor:
    """The sum y, which remembers its parts."""
    setattr(y, _MADE_OF, (x_MPW, bias_MC, y._version))
    return y


def with_zeros_behind(whole_RW: Tensor, size: int) -> Tensor:
    """The first `size` of each row, known to have zeros behind them."""
    if whole_RW.shape[1] == size:
        return whole_RW
    setattr(whole_RW, _ZEROS_BEHIND, True)
    return whole_RW[:, :size]


def whole(g_MPO: Tensor, width: int) -> Tensor:
    """[M, P, width]: the gradient in rows with zeros behind, where it lies so without a copy."""
    members, rows, size = g_MPO.shape
    if size == width:
        return g_MPO
    base = g_MPO._base
    if (
        base is not None
        and getattr(base, _ZEROS_BEHIND, False)
        and tuple(base.shape) == (members * rows, width)
        and base.is_contiguous()
        and g_MPO.storage_offset() == base.storage_offset()
        and g_MPO.stride() == (rows * width, width, 1)
    ):
        return base.view(members, rows, width)
    return F.pad(g_MPO, (0, width - size))
