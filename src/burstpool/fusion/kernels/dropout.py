"""Dropout for all members in one pass: masks are made from each member's seed where they are needed, and never kept.

The backward pass makes the same mask again. Masks differ from torch's own; each depends on the member's stream alone.

Shapes: M = members.
"""
# ruff: noqa: N803 -- shape suffixes are capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from burstpool.fusion.gradients import first_derivative_only

_BLOCK = 2048


@triton.jit
def _dropout(x_ptr, y_ptr, seeds, chances, seed_stride, size, BLOCK: tl.constexpr):
    member = tl.program_id(1)
    seed = tl.load(seeds + member * seed_stride)
    p = tl.load(chances + member)
    quarter = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.rand4x(seed, quarter)
    drawn = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [BLOCK])
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = member.to(tl.int64) * size + place
    x = tl.load(x_ptr + at, mask=place < size, other=0.0).to(tl.float32)
    scale = tl.where(p < 1.0, 1.0 / (1.0 - p), 0.0)
    tl.store(y_ptr + at, tl.where(drawn >= p, x * scale, 0.0).to(y_ptr.dtype.element_ty), mask=place < size)


def _run(x: Tensor, seeds_M: Tensor, chances_M: Tensor) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    members, size = x.shape[0], x[0].numel()
    grid = (triton.cdiv(size, _BLOCK), members)
    if size:
        _dropout[grid](x, y, seeds_M, chances_M, seeds_M.stride(0), size, BLOCK=_BLOCK)
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seeds_M: Tensor, chances_M: Tensor) -> Tensor:
        ctx.save_for_backward(seeds_M, chances_M)
        return _run(x, seeds_M, chances_M)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _run(grads[0], *ctx.saved_tensors), None, None


def dropout(x: Tensor, seeds_M: Tensor, chances_M: Tensor) -> Tensor:
    """[M, …]: zero with the member's own chance, else x / (1 - chance)."""
    y: Tensor = _Dropout.apply(x, seeds_M, chances_M)  # type: ignore[no-untyped-call]
    return y
