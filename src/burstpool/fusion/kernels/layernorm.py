"""Layer norm with each member's own weight and bias: one pass forward, one backward.

torch's kernel takes one weight for all rows; scaling by each member's own afterwards costs two passes more, and five
backward. Computes in float32.

Shapes: M = members, R = rows, F = normalised features, S = parts that a member's rows are cut into.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from burstpool.fusion.gradients import first_derivative_only

_WIDEST = 4096
"""Features that a program can hold."""
_PROGRAMS = 132 * 4


@triton.jit
def _forward(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, R, F, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    member = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    f = tl.arange(0, COLS)
    inside = (r < R)[:, None] & (f < F)[None, :]
    at = (member * R + r)[:, None] * F + f[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / F
    d = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(d * d, 1) / F + eps)
    w = tl.load(w_ptr + member * F + f, mask=f < F, other=0.0)
    b = tl.load(b_ptr + member * F + f, mask=f < F, other=0.0)
    y = d * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + member * R + r, mean, mask=r < R)
    tl.store(rstd_ptr + member * R + r, rstd, mask=r < R)


@triton.jit
def _backward(
    g_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    parts,
    R,
    F,
    MF,
    rows,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """The input's gradient, and each part's share of the weight's and the bias's → parts [S, 2, M·F]."""
    split, member = tl.program_id(0), tl.program_id(1).to(tl.int64)
    f = tl.arange(0, COLS)
    w = tl.load(w_ptr + member * F + f, mask=f < F, other=0.0)
    of_weight = tl.zeros([ROWS, COLS], tl.float32)
    of_bias = tl.zeros([ROWS, COLS], tl.float32)
    begin = split * rows
    end = tl.minimum(begin + rows, R)
    for start in range(begin, end, ROWS):
        r = start + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & (f < F)[None, :]
        at = (member * R + r)[:, None] * F + f[None, :]
        mean = tl.load(mean_ptr + member * R + r, mask=r < end, other=0.0)
        rstd = tl.load(rstd_ptr + member * R + r, mask=r < end, other=0.0)
        g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        normal = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        of_weight += g * normal
        of_bias += g
        gw = g * w[None, :]
        plain = tl.sum(gw, 1) / F
        weighted = tl.sum(gw * normal, 1) / F
        dx = (gw - plain[:, None] - normal * weighted[:, None]) * rstd[:, None]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    to = parts + split.to(tl.int64) * 2 * MF + member * F + f
    tl.store(to, tl.sum(of_weight, 0), mask=f < F)
    tl.store(to + MF, tl.sum(of_bias, 0), mask=f < F)


def _tile(F: int) -> tuple[int, int]:
    cols = max(16, triton.next_power_of_2(F))
    return max(1, 2048 // cols), cols


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        M, R, F = x.shape
        rows, cols = _tile(F)
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        mean, rstd = torch.empty(2, M * R, dtype=torch.float32, device=x.device).unbind(0)
        grid = (triton.cdiv(R, rows), M)
        _forward[grid](x, weight, bias, y, mean, rstd, R, F, eps, ROWS=rows, COLS=cols)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        M, R, F = x.shape
        rows, cols = _tile(F)
        wanted = max(1, min(triton.cdiv(_PROGRAMS, M), triton.cdiv(R, rows)))
        rows_a_split = triton.cdiv(triton.cdiv(R, wanted), rows) * rows
        splits = triton.cdiv(R, rows_a_split)
        dx = torch.empty_like(x)
        parts = torch.empty(splits, 2, M, F, dtype=torch.float32, device=x.device)
        g = grads[0].contiguous()
        _backward[(splits, M)](g, x, weight, mean, rstd, dx, parts, R, F, M * F, rows_a_split, ROWS=rows, COLS=cols)
        of_weight, of_bias = parts.sum(0).unbind(0)
        return dx, of_weight, of_bias, None, None


def layer_norm(x: Tensor, weight_MF: Tensor, bias_MF: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Of the last dimension of x [M, …, F], as `dtype`; weight and bias are float32."""
    rows = x.contiguous().view(x.shape[0], -1, x.shape[-1])
    y: Tensor = _Norm.apply(rows, weight_MF, bias_MF, eps, dtype)  # type: ignore[no-untyped-call]
    return y.view(x.shape)


def fits(x: Tensor, weight_MF: Tensor) -> bool:
    """Whether a program can hold a row."""
    return weight_MF.dim() == 2 and weight_MF.dtype is torch.float32 and x.shape[-1] <= _WIDEST and x.numel() > 0
