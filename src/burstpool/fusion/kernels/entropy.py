"""Cross-entropy over many classes: one pass over the logits forward, one backward, in their own type.

torch widens narrow logits to float32 and keeps the log-probabilities: ten times the bytes where a vocabulary is large.
Sums are in float32; the gradient is written in the logits' type, as torch would round it in the end, and in rows of the
same width (padding.py).

Shapes: R = rows, C = classes, W = width of a row in memory.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from burstpool.fusion.padding import row_width, with_zeros_behind

_BLOCK = 4096


@triton.jit
def _forward(x_ptr, t_ptr, loss_ptr, lse_ptr, C, x_r, ignored, smoothing, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_r
    target = tl.load(t_ptr + row)
    c = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        inside = start + c < C
        x = tl.load(x_ptr + start + c, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x)
        # A column of the block that has seen nothing but padding keeps minus infinity; its share is zero.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
        plain += tl.where(inside, x, 0.0)
    top = tl.max(largest, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    counts = target != ignored
    known = (target >= 0) & (target < C)
    mine = tl.load(x_ptr + tl.where(known, target, 0)).to(tl.float32)
    # Without smoothing a logit of minus infinity must not count: 0 times infinity is no number.
    spread = tl.where(smoothing > 0.0, smoothing * (lse - tl.sum(plain, 0) / C), 0.0)
    loss = tl.where(known, (1.0 - smoothing) * (lse - mine) + spread, float("nan"))
    tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward(x_ptr, t_ptr, lse_ptr, g_ptr, dx_ptr, C, W, x_r, ignored, smoothing, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(t_ptr + row)
    g = tl.where(target != ignored, tl.load(g_ptr + row).to(tl.float32), 0.0)
    lse = tl.load(lse_ptr + row)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_r + c, mask=c < C, other=float("-inf")).to(tl.float32)
    wanted = tl.where(c == target, 1.0 - smoothing, 0.0) + smoothing / C
    dx = tl.where(c < C, g * (tl.exp(x - lse) - wanted), 0.0)
    tl.store(dx_ptr + row * W + c, dx.to(dx_ptr.dtype.element_ty), mask=c < W)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RC: Tensor, target_R: Tensor, ignored: int, smoothing: float) -> Tensor:
        rows, classes = x_RC.shape
        loss, lse = torch.empty(2, rows, dtype=torch.float32, device=x_RC.device).unbind(0)
        if rows:
            _forward[(rows,)](
                x_RC, target_R, loss, lse, classes, x_RC.stride(0), ignored, smoothing, BLOCK=_block(classes)
            )
        ctx.save_for_backward(x_RC, target_R, lse)
        ctx.numbers = ignored, smoothing
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x_RC, target_R, lse = ctx.saved_tensors
        (rows, classes), width = x_RC.shape, row_width(x_RC)
        dx = torch.empty(rows, width, dtype=x_RC.dtype, device=x_RC.device)
        block = _block(classes)
        if rows:
            grid = (rows, triton.cdiv(width, block))
            g = grads[0].contiguous()
            _backward[grid](x_RC, target_R, lse, g, dx, classes, width, x_RC.stride(0), *ctx.numbers, BLOCK=block)
        return with_zeros_behind(dx, classes), None, None, None


def _block(classes: int) -> int:
    return min(_BLOCK, max(128, int(triton.next_power_of_2(classes))))


def cross_entropy(x_RC: Tensor, target_R: Tensor, ignored: int, smoothing: float) -> Tensor:
    """[R] in float32: each row's loss, zero where the target is `ignored`, no number where there is no such class."""
    x_RC = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
    loss: Tensor = _CrossEntropy.apply(x_RC, target_R.contiguous(), ignored, smoothing)  # type: ignore[no-untyped-call]
    return loss
