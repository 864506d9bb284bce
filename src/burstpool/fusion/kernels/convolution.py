"""Convolutions over two dimensions, all members in one kernel: each a product that never writes its windows out.

A row of the product is a place of the result, its sum runs over the kernel's taps and the input's channels; the window
under a place is read where it lies. Three kernels: `_gathered` (the convolution), `_scattered` (its gradient by the
input, which is also a transposed convolution) and `_correlated` (its gradient by the weight). With a stride, places of
the input fall into classes that meet different taps; `_scattered` goes through them class by class, so that taps which
the stride rules out are not tried.

Takes channels innermost, and any strides outside of them: members outermost, or between samples and channels.
Sums are float32; factors of 32 bits are rounded to TF32, so the caller asks whether they may be. How large a part of
the product a program makes is tiles.py's.

Shapes: M = members, N = samples, C = input channels, O = output channels, P = samples times places, T = taps.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from burstpool.fusion.gradients import first_derivative_only
from burstpool.fusion.kernels.tiles import OPTIONS, parts_of, square_tile, tile_of

_IN_32_BITS = 1 << 31
"""Offsets within a sample are below; those of samples and members may be beyond."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the kernel lies on the map; one number for each of the two dimensions."""

    taps: tuple[int, int]
    """The kernel's own size."""
    stride: tuple[int, int]
    padding: tuple[int, int]
    """Zeros on either side of the map."""
    dilation: tuple[int, int]
    """From one tap to the next."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """As the kernels take them."""
        return *self.taps, *self.stride, *self.padding, *self.dilation

    def out(self, size: Sequence[int]) -> tuple[int, int]:
        """Places of the result on a map of this size."""
        pairs = zip(size, self.taps, self.stride, self.padding, self.dilation, strict=True)
        first, last = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in pairs)
        return first, last


@triton.jit
def _rounded(x):
    """Factors of 32 bits to the nearest of TF32's 11 bits: matrix units cut the rest off, which would shrink sums."""
    if x.dtype == tl.float32:
        nearest = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        return tl.where(x == x, nearest, x)
    return x


@triton.jit
def _gathered(
    x_ptr, w_ptr, y_ptr, P, C, O, H, W, YH, YW, x_m, x_n, x_h, x_w,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """y [M, P, O]: for each place the sum over taps and channels of x [M, N, H, W, C] times w [M, O, T, C]."""
    member = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.program_id(1) * COLS + tl.arange(0, COLS)
    place = p % (YH * YW)
    top = place // YW * SH - PH
    left = place % YW * SW - PW
    rows = x_ptr + member * x_m + (p // (YH * YW)).to(tl.int64) * x_n
    weights = w_ptr + member * O * C * (KH * KW) + o * C * (KH * KW)
    total = tl.zeros([ROWS, COLS], tl.float32)
    blocks = tl.cdiv(C, SUM)
    for k in range(blocks * KH * KW):
        tap = k // blocks
        c = k % blocks * SUM + tl.arange(0, SUM)
        h = top + tap // KW * DH
        w = left + tap % KW * DW
        inside = (p < P) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        x = tl.load(
            (rows + h * x_h + w * x_w)[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0
        )
        b = tl.load(weights[None, :] + tap * C + c[:, None], mask=(c < C)[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(_rounded(x), _rounded(b), total)
    at = y_ptr + member * P * O + p.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(p < P)[:, None] & (o < O)[None, :])


@triton.jit
def _scattered(
    y_ptr, w_ptr, x_ptr, N, C, O, H, W, YH, YW, y_m, y_n, y_h, y_w, w_m, w_o, w_t, w_c,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """x [M, N, H, W, C]: for each place the sum over taps and outputs of y [M, N, YH, YW, O] times w [M, O, T, C].

    With a stride, a program's places are of one class: those of equal remainder, which meet the same taps.
    """
    member = tl.program_id(2).to(tl.int64)
    QH = tl.cdiv(H, SH)
    QW = tl.cdiv(W, SW)
    places = N * QH * QW
    tiles = tl.cdiv(places, ROWS)
    class_h = tl.program_id(0) // tiles // SW
    class_w = tl.program_id(0) // tiles % SW
    p = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    h = p % (QH * QW) // QW * SH + class_h
    w = p % QW * SW + class_w
    n = (p // (QH * QW)).to(tl.int64)
    first_h = (class_h + PH) % SH
    first_w = (class_w + PW) % SW
    taps_w = tl.cdiv(KW - first_w, SW)
    taps = tl.cdiv(KH - first_h, SH) * taps_w
    rows = y_ptr + member * y_m + n * y_n
    weights = w_ptr + member * w_m + c * w_c
    total = tl.zeros([ROWS, COLS], tl.float32)
    blocks = tl.cdiv(O, SUM)
    for k in range(blocks * taps):
        tap = k // blocks
        o = k % blocks * SUM + tl.arange(0, SUM)
        kh = first_h + tap // taps_w * SH
        kw = first_w + tap % taps_w * SW
        # Nothing is left over by the stride where it counts; what is negative may be rounded either way.
        above = h + PH - kh * DH
        before = w + PW - kw * DW
        yh = above // SH
        yw = before // SW
        inside = (p < places) & (above >= 0) & (yh < YH) & (before >= 0) & (yw < YW)
        y = tl.load(
            (rows + yh * y_h + yw * y_w)[:, None] + o[None, :], mask=inside[:, None] & (o < O)[None, :], other=0.0
        )
        at = o * w_o + (kh * KW + kw) * w_t
        b = tl.load(weights[None, :] + at[:, None], mask=(o < O)[:, None] & (c < C)[None, :], other=0.0)
        total = tl.dot(_rounded(y), _rounded(b), total)
    at = x_ptr + ((member * N + n) * H * W + h * W + w)[:, None] * C + c[None, :]
    inside = (p < places) & (h < H) & (w < W)
    tl.store(at, total.to(x_ptr.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])


@triton.jit
def _correlated(
    x_ptr, y_ptr, w_ptr, P, C, O, H, W, x_m, x_n, x_h, x_w, y_m, y_p, rows, w_part,
    YH: tl.constexpr, YW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Each part's sum over its places → w [parts, M, O, T, C]: x under a tap times y [M, P, O].

    The map's sizes are constants: they divide in every turn of the loop.
    """
    member = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(C, COLS)
    o = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(0) % tiles * COLS + tl.arange(0, COLS)
    tap = tl.program_id(1) % (KH * KW)
    part = tl.program_id(1) // (KH * KW)
    up = tap // KW * DH - PH
    back = tap % KW * DW - PW
    begin = part * rows
    end = tl.minimum(begin + rows, P)
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(begin, end, SUM):
        p = start + tl.arange(0, SUM)
        h = p % (YH * YW) // YW * SH + up
        w = p % YW * SW + back
        inside = (p < end) & (h >= 0) & (h < H) & (w >= 0) & (w < W)
        at = x_ptr + member * x_m + (p // (YH * YW)).to(tl.int64) * x_n + h * x_h + w * x_w
        x = tl.load(at[:, None] + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        at = y_ptr + member * y_m + p.to(tl.int64) * y_p
        y = tl.load(at[:, None] + o[None, :], mask=(p < end)[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(_rounded(y)), _rounded(x), total)
    at = w_ptr + part.to(tl.int64) * w_part + member * O * C * (KH * KW)
    at = at + (o * C * (KH * KW))[:, None] + tap * C + c[None, :]
    tl.store(at, total.to(w_ptr.dtype.element_ty), mask=(o < O)[:, None] & (c < C)[None, :])


def gathered(x_MNHWC: Tensor, w_MOTC: Tensor, geometry: Geometry, out: tuple[int, int]) -> Tensor:
    """[M, N, *out, O]: the convolution of x with w [M, O, taps…, C]."""
    members, samples, height, width, channels = x_MNHWC.shape
    outputs = w_MOTC.shape[1]
    y = x_MNHWC.new_empty(members, samples, *out, outputs)
    rows = samples * out[0] * out[1]
    tile = tile_of(rows, columns=outputs, depth=channels, copies=members, like=x_MNHWC)
    grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns), members)
    _gathered[grid](
        x_MNHWC, w_MOTC, y, rows, channels, outputs, height, width, *out, *x_MNHWC.stride()[:4],
        *geometry.numbers, *tile, **OPTIONS,
    )  # fmt: skip
    return y


def scattered(y_MNHWO: Tensor, w_MOTC: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """[M, N, *size, C]: the gradient by the input of a convolution with w, y that by its result.

    Also what a transposed convolution makes of y.
    """
    members, samples, *out, outputs = y_MNHWO.shape
    channels, (stride_h, stride_w) = w_MOTC.shape[-1], geometry.stride
    x = y_MNHWO.new_empty(members, samples, *size, channels)
    places = samples * triton.cdiv(size[0], stride_h) * triton.cdiv(size[1], stride_w)
    copies = members * stride_h * stride_w
    tile = tile_of(places, columns=channels, depth=outputs, copies=copies, like=y_MNHWO)
    tiles = triton.cdiv(places, tile.rows) * stride_h * stride_w
    if w_MOTC.dtype.itemsize == 4:  # matrix units take factors of 32 bits only along the sum, which is over O
        w_MOTC = w_MOTC.transpose(1, 4).contiguous().transpose(1, 4)
    _scattered[tiles, triton.cdiv(channels, tile.columns), members](
        y_MNHWO, w_MOTC, x, samples, channels, outputs, *size, *out, *y_MNHWO.stride()[:4],
        *(w_MOTC.stride(dim) for dim in (0, 1, 3, 4)), *geometry.numbers, *tile, **OPTIONS,
    )  # fmt: skip
    return x


def correlated(x_MNHWC: Tensor, y_MNHWO: Tensor, geometry: Geometry) -> Tensor:
    """[M, O, taps…, C]: the gradient by the weight of a convolution of x, y that by its result."""
    members, samples, height, width, channels = x_MNHWC.shape
    *_, out_h, out_w, outputs = y_MNHWO.shape
    y_MPO = y_MNHWO.flatten(1, 3)
    rows, taps = samples * out_h * out_w, geometry.taps[0] * geometry.taps[1]
    tile = square_tile(outputs, channels, depth=rows, like=x_MNHWC)
    tiles = triton.cdiv(outputs, tile.rows) * triton.cdiv(channels, tile.columns)
    parts, part_rows = parts_of(rows, programs=tiles * taps * members, tile=tile, device=x_MNHWC.device)
    dtype = x_MNHWC.dtype if parts == 1 else torch.float32
    w = x_MNHWC.new_empty(parts, members, outputs, *geometry.taps, channels, dtype=dtype)
    _correlated[tiles, taps * parts, members](
        x_MNHWC, y_MPO, w, rows, channels, outputs, height, width, *x_MNHWC.stride()[:4],
        *y_MPO.stride()[:2], part_rows, w.stride(0), out_h, out_w, *geometry.numbers, *tile, **OPTIONS,
    )  # fmt: skip
    return w[0] if parts == 1 else w.sum(0).to(x_MNHWC.dtype)


class _Convolved(torch.autograd.Function):
    """x [M, N, H, W, C] with w [M, O, taps…, C]; transposed, x [M, N, H, W, O] to `size` places of C channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int] | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry, ctx.transposed = geometry, size is not None
        return gathered(x, w, geometry, geometry.out(x.shape[2:4])) if size is None else scattered(x, w, geometry, size)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w = ctx.saved_tensors
        g, geometry, places = _readable(grads[0]), ctx.geometry, x.shape[2:4]
        wants_x, wants_w = ctx.needs_input_grad[:2]
        gx = gw = None
        if wants_x:
            gx = (gathered if ctx.transposed else scattered)(g, w, geometry, places)
        if wants_w:
            gw = correlated(g, x, geometry) if ctx.transposed else correlated(x, g, geometry)
        return gx, gw, None, None


def _readable(x_MNHWC: Tensor) -> Tensor:
    """Channels innermost, and a sample's offsets in 32 bits."""
    sample = sum(stride * size for stride, size in zip(x_MNHWC.stride()[2:4], x_MNHWC.shape[2:4], strict=True))
    return x_MNHWC if x_MNHWC.stride(-1) == 1 and sample < _IN_32_BITS else x_MNHWC.contiguous()


def convolved(x_MNHWC: Tensor, w_MOTC: Tensor, geometry: Geometry, size: tuple[int, int] | None = None) -> Tensor:
    """Members' convolutions with their own weights, channels last; with a size, transposed ones to maps of it.

    The weight is [M, O, taps…, C]; transposed, O are the input's channels. In each dimension the stride or the dilation
    must be 1.
    """
    y: Tensor = _Convolved.apply(_readable(x_MNHWC), w_MOTC.contiguous(), geometry, size)  # type: ignore[no-untyped-call]
    return y
