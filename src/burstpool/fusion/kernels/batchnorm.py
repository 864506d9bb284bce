"""Batch norm in training, with what follows it: y = activation(norm(x) + residual), channels innermost in memory.

Two passes over x forward (statistics; the result), two backward (sums; gradients), whatever follows: torch makes a
pass more for each of the sum and the activation, forward and backward. Statistics are sums of x minus the channel's
first value, in float32: no cancellation where the mean is large.

Takes x as [M, P, C] with any strides for M and P: members outermost, as a batched product leaves it, or between
samples and channels, as a grouped convolution with channels last does.

Shapes: M = members, P = samples times space, C = channels, S = parts that a channel's rows are cut into.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from burstpool.fusion.gradients import first_derivative_only

ACTIVATIONS = {"": 0, "relu": 1, "hardswish": 2, "leaky_relu": 3, "silu": 4}
"""What may follow; the code is the kernels'."""


@triton.jit
def activated(z, slope, ACT: tl.constexpr):
    if ACT == 1:
        z = tl.where(z < 0.0, 0.0, z)  # not tl.maximum, which makes a number of NaN
    elif ACT == 2:
        z = z * tl.minimum(tl.maximum(z + 3.0, 0.0), 6.0) / 6.0
    elif ACT == 3:
        z = tl.where(z > 0, z, z * slope)
    elif ACT == 4:
        z = z * tl.sigmoid(z)
    return z


@triton.jit
def derived(z, slope, ACT: tl.constexpr):
    """The activation's derivative."""
    d = z * 0.0 + 1.0
    if ACT == 1:
        d = tl.where(z <= 0, 0.0, 1.0)
    elif ACT == 2:
        d = tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, z / 3.0 + 0.5, 1.0))
    elif ACT == 3:
        d = tl.where(z > 0, 1.0, slope)
    elif ACT == 4:
        s = tl.sigmoid(z)
        d = s * (1.0 + z * (1.0 - s))
    return d


@triton.jit
def _sums(
    x_ptr,
    parts,
    P,
    C,
    MC,
    x_m,
    x_p,
    rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Each part's sums of (x - first) and its square → parts [S, 2, M·C]."""
    member, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    first = tl.load(x_ptr + member * x_m + c, mask=c < C, other=0.0).to(tl.float32)
    # Added up element by element; threads meet once, at the end.
    total = tl.zeros([ROWS, COLS], tl.float32)
    squares = tl.zeros([ROWS, COLS], tl.float32)
    begin = split * rows
    end = tl.minimum(begin + rows, P)
    for start in range(begin, end, ROWS):
        p = start + tl.arange(0, ROWS)
        inside = (p < end)[:, None] & (c < C)[None, :]
        x = tl.load(x_ptr + member * x_m + p.to(tl.int64)[:, None] * x_p + c[None, :], mask=inside, other=0.0)
        d = tl.where(inside, x.to(tl.float32) - first[None, :], 0.0)
        total += d
        squares += d * d
    at = parts + split.to(tl.int64) * 2 * MC + member * C + c
    tl.store(at, tl.sum(total, 0), mask=c < C)
    tl.store(at + MC, tl.sum(squares, 0), mask=c < C)


@triton.jit
def _statistics(
    x_ptr,
    parts,
    mean_ptr,
    rstd_ptr,
    offset_ptr,
    running_mean,
    running_var,
    P,
    C,
    MC,
    x_m,
    splits,
    momentum,
    eps,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mean and 1/deviation of each channel; the running ones move, the mean's by that of x + offset."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < MC
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        at = parts + split * 2 * MC + i
        total += tl.load(at, mask=inside, other=0.0)
        squares += tl.load(at + MC, mask=inside, other=0.0)
    first = tl.load(x_ptr + (i // C).to(tl.int64) * x_m + i % C, mask=inside, other=0.0).to(tl.float32)
    moved = total / P
    var = squares / P - moved * moved
    var = tl.where(var < 0.0, 0.0, var)
    mean = first + moved
    tl.store(mean_ptr + i, mean, mask=inside)
    tl.store(rstd_ptr + i, 1.0 / tl.sqrt(var + eps), mask=inside)
    if OFFSET:
        mean += tl.load(offset_ptr + i, mask=inside, other=0.0)
    old = tl.load(running_mean + i, mask=inside, other=0.0)
    tl.store(running_mean + i, old + momentum * (mean - old), mask=inside)
    old = tl.load(running_var + i, mask=inside, other=0.0)
    unbiased = var * (P / tl.maximum(P - 1.0, 1.0))
    tl.store(running_var + i, old + momentum * (unbiased - old), mask=inside)


@triton.jit
def _apply(
    x_ptr,
    r_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    b_ptr,
    slope,
    P,
    C,
    x_m,
    x_p,
    r_m,
    r_p,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    p = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = member * C + c
    scale = tl.load(w_ptr + column, mask=c < C, other=0.0) * tl.load(rstd_ptr + column, mask=c < C, other=0.0)
    shift = tl.load(b_ptr + column, mask=c < C, other=0.0) - tl.load(mean_ptr + column, mask=c < C, other=0.0) * scale
    inside = (p < P)[:, None] & (c < C)[None, :]
    at = member * x_m + p[:, None] * x_p + c[None, :]
    z = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
    if RESIDUAL:
        z += tl.load(r_ptr + member * r_m + p[:, None] * r_p + c[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, activated(z, slope, ACT).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(g_ptr, x_ptr, y_ptr, at_g, at_x, inside, scale, shift, slope, RESIDUAL: tl.constexpr, ACT: tl.constexpr):
    """The gradient before the activation, and x."""
    g = tl.load(g_ptr + at_g, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at_x, mask=inside, other=0.0).to(tl.float32)
    if ACT > 0:
        # With a residual only ReLU and its like follow: the result's sign tells the derivative.
        z = tl.load(y_ptr + at_x, mask=inside, other=0.0).to(tl.float32) if RESIDUAL else x * scale + shift
        g *= derived(z, slope, ACT)
    return g, x


@triton.jit
def _gradient_sums(
    g_ptr,
    x_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    b_ptr,
    parts,
    slope,
    P,
    C,
    MC,
    g_m,
    g_p,
    x_m,
    x_p,
    rows,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Each part's sums of the gradient and of the gradient times the normalised x."""
    member, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    c = tl.program_id(0) * COLS + tl.arange(0, COLS)
    column = member * C + c
    mean = tl.load(mean_ptr + column, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + column, mask=c < C, other=0.0)
    scale = tl.load(w_ptr + column, mask=c < C, other=0.0) * rstd
    shift = tl.load(b_ptr + column, mask=c < C, other=0.0) - mean * scale
    plain = tl.zeros([ROWS, COLS], tl.float32)
    weighted = tl.zeros([ROWS, COLS], tl.float32)
    begin = split * rows
    end = tl.minimum(begin + rows, P)
    for start in range(begin, end, ROWS):
        p = (start + tl.arange(0, ROWS)).to(tl.int64)
        inside = (p < end)[:, None] & (c < C)[None, :]
        at_g = member * g_m + p[:, None] * g_p + c[None, :]
        at_x = member * x_m + p[:, None] * x_p + c[None, :]
        g, x = _gradient(g_ptr, x_ptr, y_ptr, at_g, at_x, inside, scale[None, :], shift[None, :], slope, RESIDUAL, ACT)
        plain += g
        weighted += g * (x - mean[None, :])
    at = parts + split.to(tl.int64) * 2 * MC + column
    tl.store(at, tl.sum(plain, 0), mask=c < C)
    tl.store(at + MC, tl.sum(weighted, 0) * rstd, mask=c < C)


@triton.jit
def _added(parts, bias_grad, weight_grad, MC, splits, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    plain = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        at = parts + split * 2 * MC + i
        plain += tl.load(at, mask=i < MC, other=0.0)
        weighted += tl.load(at + MC, mask=i < MC, other=0.0)
    tl.store(bias_grad + i, plain, mask=i < MC)
    tl.store(weight_grad + i, weighted, mask=i < MC)


@triton.jit
def _input_gradient(
    g_ptr,
    x_ptr,
    y_ptr,
    dx_ptr,
    dr_ptr,
    mean_ptr,
    rstd_ptr,
    w_ptr,
    b_ptr,
    bias_grad,
    weight_grad,
    slope,
    P,
    C,
    g_m,
    g_p,
    x_m,
    x_p,
    RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    member = tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    p = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = member * C + c
    mean = tl.load(mean_ptr + column, mask=c < C, other=0.0)
    rstd = tl.load(rstd_ptr + column, mask=c < C, other=0.0)
    scale = tl.load(w_ptr + column, mask=c < C, other=0.0) * rstd
    shift = tl.load(b_ptr + column, mask=c < C, other=0.0) - mean * scale
    plain = tl.load(bias_grad + column, mask=c < C, other=0.0) / P
    weighted = tl.load(weight_grad + column, mask=c < C, other=0.0) / P
    inside = (p < P)[:, None] & (c < C)[None, :]
    at_g = member * g_m + p[:, None] * g_p + c[None, :]
    at_x = member * x_m + p[:, None] * x_p + c[None, :]
    g, x = _gradient(g_ptr, x_ptr, y_ptr, at_g, at_x, inside, scale[None, :], shift[None, :], slope, RESIDUAL, ACT)
    dx = scale[None, :] * (g - plain[None, :] - (x - mean[None, :]) * (rstd * weighted)[None, :])
    tl.store(dx_ptr + at_x, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if RESIDUAL:
        tl.store(dr_ptr + at_x, g.to(dr_ptr.dtype.element_ty), mask=inside)


class Tiles(NamedTuple):
    """How a kernel's work is cut."""

    rows: int
    cols: int
    column_blocks: int
    row_blocks: int
    splits: int
    rows_a_split: int


_PROGRAMS = 132 * 8
"""As many as keep a large GPU's units busy."""


def tiles_of(M: int, P: int, C: int) -> Tiles:
    cols = max(8, min(128, triton.next_power_of_2(C)))
    rows = max(8, 4096 // cols)
    column_blocks = triton.cdiv(C, cols)
    wanted = max(1, min(triton.cdiv(_PROGRAMS, M * column_blocks), triton.cdiv(P, rows), 128))
    rows_a_split = triton.cdiv(triton.cdiv(P, wanted), rows) * rows
    return Tiles(rows, cols, column_blocks, triton.cdiv(P, rows), triton.cdiv(P, rows_a_split), rows_a_split)


def statistics(
    x: Tensor, offset: Tensor | None, running: tuple[Tensor, Tensor], numbers: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Mean and 1/deviation [M·C] of each channel of x [M, P, C]; moves the running ones. `numbers`: momentum, eps."""
    M, P, C = x.shape
    tiles = tiles_of(M, P, C)
    parts = torch.empty(tiles.splits, 2, M * C, dtype=torch.float32, device=x.device)
    mean, rstd = torch.empty(2, M * C, dtype=torch.float32, device=x.device).unbind(0)
    _sums[(tiles.column_blocks, M, tiles.splits)](
        x, parts, P, C, M * C, x.stride(0), x.stride(1), tiles.rows_a_split, ROWS=tiles.rows, COLS=tiles.cols
    )
    _statistics[(triton.cdiv(M * C, 128),)](
        x, parts, mean, rstd, mean if offset is None else offset, *running, P, C, M * C, x.stride(0), tiles.splits,
        *numbers, OFFSET=offset is not None, BLOCK=128,
    )  # fmt: skip
    return mean, rstd


class _Norm(torch.autograd.Function):
    """On [M, P, C] tensors whose channels are innermost."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        offset: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor],
        numbers: tuple[float, float],
        activation: tuple[int, float],
    ) -> Tensor:
        M, P, C = x.shape
        (act, slope), tiles = activation, tiles_of(M, P, C)
        mean, rstd = statistics(x, offset, running, numbers)
        y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        r = x if residual is None else residual
        _apply[(tiles.row_blocks, M, tiles.column_blocks)](
            x, r, y, mean, rstd, weight, bias, slope, P, C, x.stride(0), x.stride(1), r.stride(0), r.stride(1),
            RESIDUAL=residual is not None, ACT=act, ROWS=tiles.rows, COLS=tiles.cols,
        )  # fmt: skip
        kept = y if residual is not None and act else x
        ctx.save_for_backward(x, kept, mean, rstd, weight, bias)
        ctx.activation, ctx.residual = activation, None if residual is None else residual.dtype
        ctx.offset = offset
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y, mean, rstd, weight, bias = ctx.saved_tensors
        M, P, C = x.shape
        g = grads[0] if grads[0].stride(2) == 1 or C == 1 else grads[0].contiguous()
        act, slope = ctx.activation
        added, tiles = ctx.residual is not None, tiles_of(M, P, C)
        parts = torch.empty(tiles.splits, 2, M * C, dtype=torch.float32, device=x.device)
        bias_grad, weight_grad = torch.empty(2, M * C, dtype=torch.float32, device=x.device).unbind(0)
        dx = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        dr = torch.empty_strided(x.shape, x.stride(), dtype=ctx.residual, device=x.device) if added else dx
        strides = (g.stride(0), g.stride(1), x.stride(0), x.stride(1))
        _gradient_sums[(tiles.column_blocks, M, tiles.splits)](
            g, x, y, mean, rstd, weight, bias, parts, slope, P, C, M * C, *strides, tiles.rows_a_split,
            RESIDUAL=added, ACT=act, ROWS=tiles.rows, COLS=tiles.cols,
        )  # fmt: skip
        _added[(triton.cdiv(M * C, 128),)](parts, bias_grad, weight_grad, M * C, tiles.splits, BLOCK=128)
        _input_gradient[(tiles.row_blocks, M, tiles.column_blocks)](
            g, x, y, dx, dr, mean, rstd, weight, bias, bias_grad, weight_grad, slope, P, C, *strides,
            RESIDUAL=added, ACT=act, ROWS=tiles.rows, COLS=tiles.cols,
        )  # fmt: skip
        grads_of = weight_grad.view(weight.shape).to(weight.dtype), bias_grad.view(bias.shape).to(bias.dtype)
        nothing = None if ctx.offset is None else torch.zeros_like(ctx.offset)
        return dx, (dr if added else None), nothing, *grads_of, None, None, None


def rows_of(x_MNC: Tensor) -> Tensor | None:
    """[M, N, C, …] as [M, P, C] without a copy; None where memory does not lie so."""
    if (x_MNC.stride(2) != 1 and x_MNC.shape[2] > 1) or 0 in x_MNC.stride():
        return None
    try:
        return x_MNC.movedim(2, -1).view(x_MNC.shape[0], -1, x_MNC.shape[2])
    except RuntimeError:
        return None


def batch_norm(
    x_MPC: Tensor,
    residual_MPC: Tensor | None,
    offset_MC: Tensor | None,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    momentum: float,
    eps: float,
    activation: str = "",
    slope: float = 0.0,
) -> Tensor:
    """The norm, plus the residual, through the activation; `state` is weight, bias, running mean and variance [M, C].

    The residual's layout is its own; with one the activation is ReLU, leaky ReLU or none, whose sign is the result's.
    An offset that x is meant to have, as a convolution's bias, moves the running mean and nothing else: the norm takes
    it away again, and its gradient is zero.
    """
    weight, bias, mean, var = state
    act = (ACTIVATIONS[activation], slope)
    running, numbers = (mean, var), (momentum, eps)
    y: Tensor = _Norm.apply(x_MPC, residual_MPC, offset_MC, weight, bias, running, numbers, act)  # type: ignore[no-untyped-call]
    return y
