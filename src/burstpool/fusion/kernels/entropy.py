"""Cross-entropy over many classes: the loss and its gradient in one go over the logits, in their own type.

torch widens narrow logits to float32 and keeps the log-probabilities: ten times the bytes where a vocabulary is large.
Here a row is read once and stays in registers (of more than 32,768 classes the rest is read twice), and its gradient is
written at once, with the weight that the row is expected to have in the whole loss. Where `backward` then brings
another, as with a scaled loss, the gradient is scaled in one more pass; but for float16, whose small numbers would be
gone by then, `backward` reckons it anew. A layer's bias may be left to be added where logits are read. Sums are in
float32; the gradient has the logits' type and lies in rows of the same width (padding.py).

A compiler sees two operators, `torch.ops.burstpool.cross_entropy` and `scale_rows`, and into neither.

Shapes: R = rows, C = classes, W = width of a row in memory, M = members.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from burstpool.fusion import kernels
from burstpool.fusion.gradients import first_derivative_only
from burstpool.fusion.padding import Logits, row_width, with_zeros_behind

_MOST_KEPT, _MOST_TAIL, _KEPT_BY_A_WARP = 32768, 2048, 1024
"""Logits of a row that stay in registers, those beyond for which there is room, and how many one warp has of them."""
_BLOCK = 8192
"""Those of the rest that are read at a time."""
_SCALED = 1024
"""Numbers that are scaled at a time."""
_ROUNDING = 2.0**-21
"""Weights that differ by no more are one, rounded otherwise."""
_LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _logits(x_ptr, b_ptr, c, C, W, b_w, BIASED: tl.constexpr, MASKED: tl.constexpr, BIAS_STAYS: tl.constexpr):
    """A row's logits at `c`; padding is read, as whole vectors are faster, and does not count.

    They pass the multiprocessor's own cache by, so that the bias stays there.
    """
    if not MASKED:
        x = tl.load(x_ptr + c, cache_modifier=".cg").to(tl.float32)
        if BIASED:
            x += tl.load(b_ptr + c, eviction_policy=BIAS_STAYS).to(tl.float32)
        return x
    x = tl.load(x_ptr + c, mask=c < W, other=0.0, cache_modifier=".cg").to(tl.float32)
    if BIASED:
        x += tl.load(b_ptr + c, mask=c < b_w, other=0.0, eviction_policy=BIAS_STAYS).to(tl.float32)
    return tl.where(c < C, x, float("-inf"))


@triton.jit
def _gradient(e, c, C, target, share, weight, smoothing, SMOOTHED: tl.constexpr):
    """Of exponentials; `share` times one is its probability."""
    dx = e * share - tl.where(c == target, 1.0 - smoothing, 0.0)
    if SMOOTHED:
        dx -= smoothing / C
    return weight * dx


@triton.jit
def _store_masked(dx_ptr, dx, c, C, W):
    """A row's gradient at `c`, with zeros behind."""
    tl.store(dx_ptr + c, tl.where(c < C, dx, 0.0).to(dx_ptr.dtype.element_ty), mask=c < W)


@triton.jit
def _entropy(
    x_ptr, b_ptr, t_ptr, weight_ptr, loss_ptr, dx_ptr, C, x_w, x_r, dx_r, b_w, rows_m, ignored, smoothing,
    BIASED: tl.constexpr, SMOOTHED: tl.constexpr, GRADIENT: tl.constexpr,
    KEPT: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, BIAS_STAYS: tl.constexpr,
):  # fmt: skip
    """The first `KEPT` logits and the `TAIL` next stay in registers; the rest is read again, `BLOCK` at a time.

    Where there is no tail or no rest, these are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_r
    b_ptr += row // rows_m * b_w
    # All that is read once is asked for before the first sum, which threads wait for one another in.
    c = tl.arange(0, KEPT)
    e = _logits(x_ptr, b_ptr, c, C, x_w, b_w, BIASED, False, BIAS_STAYS)
    if TAIL:
        tail_c = KEPT + tl.arange(0, TAIL)
        tail_e = _logits(x_ptr, b_ptr, tail_c, C, x_w, b_w, BIASED, True, BIAS_STAYS)
    target = tl.load(t_ptr + row)
    weight = tl.load(weight_ptr + row)
    known = (target >= 0) & (target < C)
    place = tl.where(known, target, 0).to(tl.int32)
    mine = tl.load(x_ptr + place).to(tl.float32)
    if BIASED:
        mine += tl.load(b_ptr + place).to(tl.float32)
    offset = tl.maximum(tl.max(e, 0), _LEAST)
    if TAIL:
        offset = tl.maximum(offset, tl.max(tail_e, 0))
    plain = 0.0
    if SMOOTHED:
        plain += tl.sum(e - offset, 0)
    e = tl.exp(e - offset)
    # The largest and the sum apart: with large logits their own sum would leave nothing of the latter.
    top, total = offset, tl.sum(e, 0)
    if TAIL:
        if SMOOTHED:
            plain += tl.sum(tl.where(tail_c < C, tail_e - offset, 0.0), 0)
        tail_e = tl.exp(tail_e - offset)
        total += tl.sum(tail_e, 0)
    if BLOCK:
        for start in range(KEPT + TAIL, C, BLOCK):
            rest_c = start + tl.arange(0, BLOCK)
            x = _logits(x_ptr, b_ptr, rest_c, C, x_w, b_w, BIASED, True, BIAS_STAYS)
            larger = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - larger) + tl.sum(tl.exp(x - larger), 0)
            top = larger
            if SMOOTHED:
                plain += tl.sum(tl.where(rest_c < C, x - offset, 0.0), 0)
    loss = (1.0 - smoothing) * (top - mine + tl.log(total))
    if SMOOTHED:  # not else, as 0 times infinity, of a logit of minus infinity, is no number
        loss += smoothing * (top - offset - plain / C + tl.log(total))
    counts = target != ignored
    tl.store(loss_ptr + row, tl.where(counts, tl.where(known, loss, float("nan")), 0.0))
    if GRADIENT:
        dx_ptr += row * dx_r
        weight = tl.where(counts, tl.where(known, weight, float("nan")), 0.0)
        share = tl.where(counts, 1.0 / total, 0.0)
        kept_share = tl.exp(offset - top) * share
        dx = _gradient(e, c, C, place, kept_share, weight, smoothing, SMOOTHED)
        tl.store(dx_ptr + c, dx.to(dx_ptr.dtype.element_ty))
        if TAIL:
            tail_dx = _gradient(tail_e, tail_c, C, place, kept_share, weight, smoothing, SMOOTHED)
            _store_masked(dx_ptr, tail_dx, tail_c, C, dx_r)
        if BLOCK:
            for start in range(KEPT + TAIL, dx_r, BLOCK):
                rest_c = start + tl.arange(0, BLOCK)
                x = _logits(x_ptr, b_ptr, rest_c, C, x_w, b_w, BIASED, True, BIAS_STAYS)
                rest_dx = _gradient(tl.exp(x - top), rest_c, C, place, share, weight, smoothing, SMOOTHED)
                _store_masked(dx_ptr, rest_dx, rest_c, C, dx_r)


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
    bias_MC = None if bias_MC is None else bias_MC.contiguous()
    loss = torch.empty(rows, dtype=torch.float32, device=x_RW.device)
    dx = x_RW.new_empty(rows if gradient else 0, width)
    if rows:
        members, b_w = (1, 0) if bias_MC is None else bias_MC.shape
        kept, tail, block = _parts(classes, width)
        _entropy[(rows,)](
            x_RW, x_RW if bias_MC is None else bias_MC, target_R, weight_R, loss, dx, classes,
            max(row_width(x_RW), classes), x_RW.stride(0), width, b_w, rows // members, ignored, smoothing,
            BIASED=bias_MC is not None, SMOOTHED=smoothing > 0, GRADIENT=gradient, KEPT=kept, TAIL=tail, BLOCK=block,
            BIAS_STAYS="evict_last" if x_RW.dtype.itemsize == 2 else "",
            num_warps=max(1, min(triton.next_power_of_2(kept + tail), _MOST_KEPT) // _KEPT_BY_A_WARP),
        )  # fmt: skip
    return loss, dx


def _scaled(dx_RW: Tensor, target_R: Tensor, weight_R: Tensor, g_R: Tensor, ignored: int) -> None:
    """In place: the gradient with the weights that rows turn out to have."""
    rows, width = dx_RW.shape
    if rows:
        _scale[(rows,)](dx_RW, target_R, weight_R, g_R, width, ignored, ROUNDING=_ROUNDING, BLOCK=_SCALED)


def _parts(classes: int, width: int) -> tuple[int, int, int]:
    """How many logits are kept without and with a mask, and of the rest read at a time; powers of two, or none."""
    kept = min(1 << classes.bit_length() - 1, _MOST_KEPT)
    if width == kept:
        return kept, 0, 0
    above = int(triton.next_power_of_2(width - kept))
    return (kept, above, 0) if kept + above <= _MOST_KEPT + _MOST_TAIL else (kept, 0, min(above, _BLOCK))


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
        ctx.save_for_backward(made_of.x_RW, made_of.bias_MC, target_R, weight_R, x_RC)
        ctx.numbers = x_RC.shape[1], row_width(x_RC), ignored, smoothing
        run = _opaque_run if kernels.plain() else _run
        # Half precision loses small numbers: there a scaled loss must scale them before they are rounded.
        at_once = ctx.needs_input_grad[0] and made_of.x_RW.dtype is not torch.float16
        loss: Tensor
        loss, gradient = run(*made_of, target_R, weight_R, at_once, *ctx.numbers)
        ctx.gradient = gradient if at_once else None
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        x_RW, bias_MC, target_R, weight_R, _ = ctx.saved_tensors
        classes, _, ignored, _ = ctx.numbers
        run, scaled = (_opaque_run, _opaque_scaled) if kernels.plain() else (_run, _scaled)
        g_R = grads[0].float().contiguous()
        dx, ctx.gradient = ctx.gradient, None
        if dx is None:  # none was made, or the first has gone its way, and may be another's by now
            _, dx = run(x_RW, bias_MC, target_R, g_R, True, *ctx.numbers)
        else:
            scaled(dx, target_R, weight_R, g_R, ignored)
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
