"""Batch norm in training, the activation that follows it, and the largest result of each sample's rows, as one.

What point networks do with a cloud: y = max over a sample's points of activation(norm(x)). Two passes over x forward
(statistics; the largest), one backward that reads x and writes its gradient: what lies between norm and maximum is
never written, and neither is its gradient, which is zero in all rows but one. Apart, torch makes eight passes more.

Takes x as [M, P, C] like `batchnorm.py`, the rows of a sample after one another. Of equal rows the first counts; a
channel with NaN is NaN.

Shapes: M = members, N = samples, L = rows of a sample, P = N·L, C = channels.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from burstpool.fusion.gradients import first_derivative_only
from burstpool.fusion.kernels.batchnorm import ACTIVATIONS, activated, derived, statistics, tiles_of


@triton.jit
def _largest(
    x_ptr,
    y_ptr,
    place_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    b_ptr,
    slope,
    N,
    L,
    C,
    x_m,
    x_p,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Of each sample and channel the largest result, and in which row → y, place [M, N, C]."""
    sample, member = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    column = member * C + c
    scale = tl.load(w_ptr + column, mask=c < C, other=0.0) * tl.load(rstd_ptr + column, mask=c < C, other=0.0)
    shift = tl.load(b_ptr + column, mask=c < C, other=0.0) - tl.load(mean_ptr + column, mask=c < C, other=0.0) * scale
    best = tl.full([ROWS, COLS], float("-inf"), tl.float32)
    place = tl.zeros([ROWS, COLS], tl.int32)
    for start in range(0, L, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < L)[:, None] & (c < C)[None, :]
        at = member * x_m + (sample * L + row)[:, None] * x_p + c[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = activated(x * scale[None, :] + shift[None, :], slope, ACT)
        better = inside & ((z > best) | (z != z))
        best = tl.where(better, z, best)
        place = tl.where(better, row[:, None], place)
    top = tl.max(best, 0)
    unknown = tl.max((best != best).to(tl.int32), 0) > 0
    first = tl.min(tl.where((best == top[None, :]) | unknown[None, :], place, L - 1), 0)
    top = tl.where(unknown, float("nan"), top)
    at = (member * N + sample) * C + c
    tl.store(y_ptr + at, top.to(y_ptr.dtype.element_ty), mask=c < C)
    tl.store(place_ptr + at, first, mask=c < C)


@triton.jit
def _gradient_sums(
    g_ptr,
    x_ptr,
    place_ptr,
    before_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    b_ptr,
    bias_grad,
    weight_grad,
    slope,
    N,
    L,
    C,
    x_m,
    x_p,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The gradient before the activation [M, N, C], and its sums with and without the normalised x [M, C]."""
    member = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    column = member * C + c
    mean = tl.load(mean_ptr + column, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + column, mask=c < C, other=0.0)
    scale = tl.load(w_ptr + column, mask=c < C, other=0.0) * rstd
    shift = tl.load(b_ptr + column, mask=c < C, other=0.0) - mean * scale
    plain = tl.zeros([ROWS, COLS], tl.float32)
    weighted = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, N, ROWS):
        sample = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (sample < N)[:, None] & (c < C)[None, :]
        at = (member * N + sample)[:, None] * C + c[None, :]
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        row = (sample * L)[:, None] + tl.load(place_ptr + at, mask=inside, other=0)
        x = tl.load(x_ptr + member * x_m + row * x_p + c[None, :], mask=inside, other=0.0).to(tl.float32)
        g *= derived(x * scale[None, :] + shift[None, :], slope, ACT)
        tl.store(before_ptr + at, g, mask=inside)
        plain += tl.where(inside, g, 0.0)
        weighted += tl.where(inside, g * (x - mean[None, :]), 0.0)
    tl.store(bias_grad + column, tl.sum(plain, 0), mask=c < C)
    tl.store(weight_grad + column, tl.sum(weighted, 0) * rstd, mask=c < C)


@triton.jit
def _input_gradient(
    before_ptr,
    x_ptr,
    place_ptr,
    dx_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    bias_grad,
    weight_grad,
    P,
    N,
    L,
    C,
    x_m,
    x_p,
    blocks,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    column = member * C + c
    mean = tl.load(mean_ptr + column, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + column, mask=c < C, other=0.0)
    scale = tl.load(w_ptr + column, mask=c < C, other=0.0) * rstd
    plain = tl.load(bias_grad + column, mask=c < C, other=0.0) / P
    weighted = tl.load(weight_grad + column, mask=c < C, other=0.0) / P
    place = tl.load(place_ptr + (member * N + sample) * C + c, mask=c < C, other=0)
    g = tl.load(before_ptr + (member * N + sample) * C + c, mask=c < C, other=0.0)
    inside = (row < L)[:, None] & (c < C)[None, :]
    at = member * x_m + (sample * L + row)[:, None] * x_p + c[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    here = tl.where(row[:, None] == place[None, :], g[None, :], 0.0)
    dx = scale[None, :] * (here - plain[None, :] - (x - mean[None, :]) * (rstd * weighted)[None, :])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


class _NormMax(torch.autograd.Function):
    """On a [M, P, C] tensor whose channels are innermost."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        samples: int,
        offset: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor],
        numbers: tuple[float, float],
        activation: tuple[int, float],
    ) -> Tensor:
        M, P, C = x.shape
        (act, slope), tiles, length = activation, tiles_of(M, P, C), P // samples
        mean, rstd = statistics(x, offset, running, numbers)
        y = torch.empty(M, samples, C, dtype=x.dtype, device=x.device)
        place = torch.empty(M, samples, C, dtype=torch.int32, device=x.device)
        _largest[(samples, M, tiles.column_blocks)](
            x, y, place, mean, rstd, weight, bias, slope, samples, length, C, x.stride(0), x.stride(1),
            ACT=act, ROWS=tiles.rows, COLS=tiles.cols,
        )  # fmt: skip
        ctx.save_for_backward(x, place, mean, rstd, weight, bias)
        ctx.activation, ctx.offset = activation, offset
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, place, mean, rstd, weight, bias = ctx.saved_tensors
        M, P, C = x.shape
        samples = place.shape[1]
        (act, slope), tiles, length = ctx.activation, tiles_of(M, P, C), P // samples
        before = torch.empty(M, samples, C, dtype=torch.float32, device=x.device)
        bias_grad, weight_grad = torch.empty(2, M * C, dtype=torch.float32, device=x.device).unbind(0)
        sizes = (samples, length, C, x.stride(0), x.stride(1))
        _gradient_sums[(tiles.column_blocks, M)](
            grads[0].contiguous(), x, place, before, mean, rstd, weight, bias, bias_grad, weight_grad, slope, *sizes,
            ACT=act, ROWS=tiles.rows, COLS=tiles.cols,
        )  # fmt: skip
        dx = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(length, tiles.rows)
        _input_gradient[(samples * blocks, M, tiles.column_blocks)](
            before, x, place, dx, mean, rstd, weight, bias_grad, weight_grad, P, *sizes, blocks,
            ROWS=tiles.rows, COLS=tiles.cols,
        )  # fmt: skip
        grads_of = weight_grad.view(weight.shape).to(weight.dtype), bias_grad.view(bias.shape).to(bias.dtype)
        nothing = None if ctx.offset is None else torch.zeros_like(ctx.offset)
        return dx, None, nothing, *grads_of, None, None, None


def batch_norm_max(
    x_MPC: Tensor,
    samples: int,
    offset_MC: Tensor | None,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    momentum: float,
    eps: float,
    activation: str = "",
    slope: float = 0.0,
) -> Tensor:
    """[M, N, C]: the largest of each sample's rows after norm and activation; arguments as `batch_norm`'s."""
    weight, bias, mean, var = state
    act = (ACTIVATIONS[activation], slope)
    y: Tensor = _NormMax.apply(  # type: ignore[no-untyped-call]
        x_MPC, samples, offset_MC, weight, bias, (mean, var), (momentum, eps), act
    )
    return y
