"""Cross-entropy over many classes: the loss and its gradient in one go over the logits, in their own type.

torch widens narrow logits to float32 and keeps the log-probabilities: ten times the bytes where a vocabulary is large.
Here a row is read twice, the second time out of the GPU's cache, and its gradient is written with the weight that the
row is expected to have in the whole loss. Where `backward` then brings another, the gradient is scaled. A layer's bias
may be left to be added where logits are read. Sums are in float32; the gradient is rounded to the logits' type, as
torch would in the end, and lies in rows of the same width (padding.py).

A compiler sees one operator for each (`torch.ops.burstpool`), and into neither.

Shapes: R = rows, C = classes, W = width of a row in memory, M = members.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from burstpool.fusion import kernels
from burstpool.fusion.padding import Logits, row_width, with_zeros_behind

_BLOCK = 8192
_ROUNDING = 2.0**-21
"""Weights that differ by no more are one, rounded otherwise."""


@triton.jit
def _logits(x_ptr, b_ptr, c, C, W, BIASED: tl.constexpr, POLICY: tl.constexpr):
    """A row's logits at `c`; padding is read, as whole vectors are faster, and does not count."""
    x = tl.load(x_ptr + c, mask=c < W, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if BIASED:
        x += tl.load(b_ptr + c, mask=c < C, other=0.0).to(tl.float32)
    return tl.where(c < C, x, float("-inf"))


@triton.jit
def _entropy(
    x_ptr, b_ptr, t_ptr, weight_ptr, loss_ptr, dx_ptr, C, x_w, x_r, dx_r, b_m, each, ignored, smoothing,
    BIASED: tl.constexpr, SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_r
    b_ptr += row // each * b_m
    target = tl.load(t_ptr + row)
    block = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        x = _logits(x_ptr, b_ptr, start + block, C, x_w, BIASED, "evict_last")
        larger = tl.maximum(largest, x)
        # A column of the block that has seen nothing but padding keeps minus infinity; its share is zero.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = larger
        if SMOOTHED:
            plain += tl.where(start + block < C, x, 0.0)
    top = tl.max(largest, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    known = (target >= 0) & (target < C)
    place = tl.where(known, target, 0)
    mine = tl.load(x_ptr + place).to(tl.float32)
    if BIASED:
        mine += tl.load(b_ptr + place).to(tl.float32)
    loss = (1.0 - smoothing) * (lse - mine)
    if SMOOTHED:  # not else, as 0 times infinity, of a logit of minus infinity, is no number
        loss += smoothing * (lse - tl.sum(plain, 0) / C)
    counts = target != ignored
    tl.store(loss_ptr + row, tl.where(counts, tl.where(known, loss, float("nan")), 0.0))
    if GRADIENT:
        weight = tl.where(counts, tl.load(weight_ptr + row), 0.0)
        for start in range(0, dx_r, BLOCK):
            c = start + block
            x = _logits(x_ptr, b_ptr, c, C, x_w, BIASED, "evict_first")
            wanted = tl.where(c == target, 1.0 - smoothing, 0.0) + smoothing / C
            dx = tl.where(c < C, weight * (tl.exp(x - lse) - wanted), 0.0)
            tl.store(dx_ptr + row * dx_r + c, dx.to(dx_ptr.dtype.element_ty), mask=c < dx_r)


@triton.jit
def _scale(dx_ptr, t_ptr, weight_ptr, g_ptr, W, ignored, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    g = tl.load(g_ptr + row).to(tl.float32)
    is_one = tl.abs(g - weight) <= ROUNDING * tl.abs(weight)
    if is_one | (tl.load(t_ptr + row) == ignored):
        return
    for start in range(0, W, BLOCK):
        c = start + tl.arange(0, BLOCK)
        dx = tl.load(dx_ptr + row * W + c, mask=c < W).to(tl.float32) * (g / weight)
        tl.store(dx_ptr + row * W + c, dx.to(dx_ptr.dtype.element_ty), mask=c < W)


def _run(
    x_RW: Tensor,
    bias_MC: Tensor | None,
    target_R: Tensor,
    weight_R: Tensor,
    gradient: bool,
    classes: int,
    width: int,
    ignored: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    """Each row's loss [R] in float32, and the gradient [R, width] of their weighted sum; else nothing, [0, width].

    Of a row's values the first `classes` count. The target is `ignored` where a row does not; the loss is no number
    where there is no such class.
    """
    rows = x_RW.shape[0]
    loss = torch.empty(rows, dtype=torch.float32, device=x_RW.device)
    dx = x_RW.new_empty(rows if gradient else 0, width)
    if rows:
        each, b_m = (rows, 0) if bias_MC is None else (rows // bias_MC.shape[0], bias_MC.stride(0))
        block = _block(classes)
        _entropy[(rows,)](
            x_RW, x_RW if bias_MC is None else bias_MC, target_R, weight_R, loss, dx, classes,
            max(row_width(x_RW), classes), x_RW.stride(0), width, b_m, each, ignored, smoothing,
            BIASED=bias_MC is not None, SMOOTHED=smoothing > 0, GRADIENT=gradient, BLOCK=block,
            num_warps=max(block // 512, 4),
        )  # fmt: skip
    return loss, dx


def _scaled(dx_RW: Tensor, target_R: Tensor, weight_R: Tensor, g_R: Tensor, ignored: int) -> None:
    """In place: the gradient with the weights that rows turn out to have."""
    rows, width = dx_RW.shape
    if rows:
        _scale[(rows,)](dx_RW, target_R, weight_R, g_R, width, ignored, ROUNDING=_ROUNDING, BLOCK=_block(width))


def _block(classes: int) -> int:
    return min(_BLOCK, max(128, int(triton.next_power_of_2(classes))))


_opaque_run = torch.library.custom_op("burstpool::cross_entropy", _run, mutates_args=())
_opaque_scaled = torch.library.custom_op("burstpool::scale_rows", _scaled, mutates_args=("dx_RW",))


@_opaque_run.register_fake
def _(
    x_RW: Tensor, bias_MC: Any, target_R: Any, weight_R: Any, gradient: bool, classes: Any, width: int, *_: Any
) -> tuple[Tensor, Tensor]:
    rows = x_RW.shape[0]
    return x_RW.new_empty(rows, dtype=torch.float32), x_RW.new_empty(rows if gradient else 0, width)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RC: Tensor, made_of: Logits, target_R: Tensor, weight_R: Tensor, ignored: int, smoothing: float
    ) -> Tensor:
        ctx.save_for_backward(made_of.x_RW, made_of.bias_MC, target_R, weight_R)
        ctx.numbers = x_RC.shape[1], row_width(x_RC), ignored, smoothing
        run = _opaque_run if kernels.plain() else _run
        loss: Tensor
        loss, ctx.gradient = run(*made_of, target_R, weight_R, ctx.needs_input_grad[0], *ctx.numbers)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x_RW, bias_MC, target_R, weight_R = ctx.saved_tensors
        classes, _, ignored, _ = ctx.numbers
        dx, ctx.gradient = ctx.gradient, None
        if dx is None:  # a second time; the first has gone its way, and may be another's by now
            _, dx = _run(x_RW, bias_MC, target_R, weight_R, True, *ctx.numbers)
        (_opaque_scaled if kernels.plain() else _scaled)(dx, target_R, weight_R, grads[0].contiguous(), ignored)
        return with_zeros_behind(dx, classes), None, None, None, None, None


def cross_entropy(x_RC: Tensor, target_R: Tensor, weight_R: Tensor | None, ignored: int, smoothing: float) -> Tensor:
    """[R] in float32: each row's loss, zero where the target is `ignored`, no number where there is no such class.

    `weight_R` is what each row is expected to count in the whole; 1 if it is None.
    """
    x_RC = x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()
    if weight_R is None:
        weight_R = torch.ones(x_RC.shape[0], dtype=torch.float32, device=x_RC.device)
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        x_RC, Logits.of(x_RC), target_R.contiguous(), weight_R.float().contiguous(), ignored, smoothing
    )
    return loss
