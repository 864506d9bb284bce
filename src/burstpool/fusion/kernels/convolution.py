"""Convolutions over two dimensions, all members in one kernel: each a product that never writes its windows out.

A row of the product is a place of the result, its sum runs over the kernel's taps and the input's channels; the window
under a place is read where it lies. Three kernels: `_gathered` (the convolution), `_scattered` (its gradient by the
input, which is also a transposed convolution) and `_correlated` (its gradient by the weight). With a stride, places of
the input fall into classes that meet different taps; `_scattered` goes through them class by class, so that no tap
is tried in vain.

Takes channels innermost, and any strides outside of them: members outermost, or between samples and channels.
Sums are float32; factors of 32 bits are rounded to TF32, so the caller asks whether they may be.

Shapes: M = members, N = samples, C = input channels, O = output channels, P = samples times places, T = taps.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_LEAST = 16
"""A side of the smallest product that the matrix units take."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How the kernel lies on the map; one number for each of the two dimensions."""

    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


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
        total = tl.dot(x, b, total)
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
        total = tl.dot(y, b, total)
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
        total = tl.dot(tl.trans(y), x, total)
    at = w_ptr + part.to(tl.int64) * w_part + member * O * C * (KH * KW)
    at = at + (o * C * (KH * KW))[:, None] + tap * C + c[None, :]
    tl.store(at, total.to(w_ptr.dtype.element_ty), mask=(o < O)[:, None] & (c < C)[None, :])


def gathered(x_MNHWC: Tensor, w_MOTC: Tensor, geometry: Geometry) -> Tensor:
    """[M, N, …, O]: the convolution of x with w [M, O, taps…, C]."""
    members, samples, height, width, channels = x_MNHWC.shape
    outputs = w_MOTC.shape[1]
    out = [
        (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        for size, taps, stride, padding, dilation in zip((height, width), *_each(geometry), strict=True)
    ]
    y = x_MNHWC.new_empty(members, samples, *out, outputs)
    rows = samples * out[0] * out[1]
    sizes = _sizes(rows, outputs, channels, members, x_MNHWC)
    grid = (triton.cdiv(rows, sizes.rows), triton.cdiv(outputs, sizes.columns), members)
    _gathered[grid](
        x_MNHWC, w_MOTC, y, rows, channels, outputs, height, width, *out, *x_MNHWC.stride()[:4],
        *_constants(geometry), *sizes.blocks, **_OPTIONS,
    )  # fmt: skip
    return y


def scattered(y_MNHWO: Tensor, w_MOTC: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """[M, N, *size, C]: what a convolution with w to y adds up of y at each place of its input."""
    members, samples, *out, outputs = y_MNHWO.shape
    channels, (stride_h, stride_w) = w_MOTC.shape[-1], geometry.stride
    x = y_MNHWO.new_empty(members, samples, *size, channels)
    places = samples * triton.cdiv(size[0], stride_h) * triton.cdiv(size[1], stride_w)
    sizes = _sizes(places, channels, outputs, members * stride_h * stride_w, y_MNHWO)
    tiles = triton.cdiv(places, sizes.rows) * stride_h * stride_w
    if w_MOTC.dtype.itemsize == 4:  # matrix units take factors of 32 bits only along the sum, which is over O
        w_MOTC = w_MOTC.transpose(1, 4).contiguous().transpose(1, 4)
    _scattered[tiles, triton.cdiv(channels, sizes.columns), members](
        y_MNHWO, w_MOTC, x, samples, channels, outputs, *size, *out, *y_MNHWO.stride()[:4],
        *(w_MOTC.stride(dim) for dim in (0, 1, 3, 4)), *_constants(geometry), *sizes.blocks, **_OPTIONS,
    )  # fmt: skip
    return x


def correlated(x_MNHWC: Tensor, y_MNHWO: Tensor, geometry: Geometry) -> Tensor:
    """[M, O, taps…, C]: what each weight of a convolution of x met, times y."""
    members, samples, height, width, channels = x_MNHWC.shape
    *_, out_h, out_w, outputs = y_MNHWO.shape
    y_MPO = y_MNHWO.flatten(1, 3)
    rows, taps = samples * out_h * out_w, geometry.taps[0] * geometry.taps[1]
    side = min(_side(outputs), _side(channels))
    sizes = _Sizes(side, side, min(_side(rows), _depth(x_MNHWC)))
    tiles = triton.cdiv(outputs, side) * triton.cdiv(channels, side)
    parts, part_rows = _parts(rows, tiles * taps * members, x_MNHWC.device, sizes.depth)
    dtype = x_MNHWC.dtype if parts == 1 else torch.float32
    w = x_MNHWC.new_empty(parts, members, outputs, *geometry.taps, channels, dtype=dtype)
    _correlated[tiles, taps * parts, members](
        x_MNHWC, y_MPO, w, rows, channels, outputs, height, width, *x_MNHWC.stride()[:4],
        *y_MPO.stride()[:2], part_rows, w.stride(0), out_h, out_w, *_constants(geometry), *sizes.blocks, **_OPTIONS,
    )  # fmt: skip
    return w[0] if parts == 1 else w.sum(0).to(x_MNHWC.dtype)


def _each(geometry: Geometry) -> tuple[tuple[int, int], ...]:
    return geometry.taps, geometry.stride, geometry.padding, geometry.dilation


def _constants(geometry: Geometry) -> tuple[int, ...]:
    """As the kernels take them."""
    return tuple(number for pair in _each(geometry) for number in pair)


_OPTIONS = {"num_warps": 4, "num_stages": 3}
"""Of all three kernels; eight warps or four stages were slower for most of nine shapes (docs/LOG.md)."""
_BUSY = 0.75
"""Programs a multiprocessor below which tiles are made smaller."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of the product that one program makes."""

    rows: int
    columns: int
    depth: int
    """How much of the sum is taken at a time."""

    @property
    def blocks(self) -> tuple[int, int, int]:
        """As the kernels take them."""
        return self.rows, self.columns, self.depth


def _side(size: int) -> int:
    return min(max(int(triton.next_power_of_2(size)), _LEAST), 128)


def _depth(like: Tensor) -> int:
    return 128 // int(like.dtype.itemsize)


def _sizes(rows: int, columns: int, depth: int, copies: int, like: Tensor) -> _Sizes:
    """The largest tiles of which there are enough; of small ones, more of the sum is taken at a time."""
    tall, wide = _side(rows), _side(columns)
    enough = _BUSY * _multiprocessors(like.device)
    while triton.cdiv(rows, tall) * triton.cdiv(columns, wide) * copies < enough:
        if tall > 64 and tall >= wide:
            tall //= 2
        elif wide > 32:
            wide //= 2
        else:
            break
    deep = _depth(like) * (1 if max(tall, wide) > 64 else 2)
    return _Sizes(tall, wide, min(max(triton.next_power_of_2(depth), _LEAST), deep))


def _parts(rows: int, programs: int, device: torch.device, depth: int) -> tuple[int, int]:
    """Into how many parts the sum over rows is cut, so that there is work for all, and the rows of each."""
    wanted = triton.cdiv(2 * _multiprocessors(device), programs)
    parts = max(min(wanted, rows // (8 * depth)), 1)
    part_rows = triton.cdiv(triton.cdiv(rows, parts), depth) * depth
    return triton.cdiv(rows, part_rows), part_rows


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class _Convolved(torch.autograd.Function):
    """x [M, N, H, W, C] with w [M, O, taps…, C]; transposed, x [M, N, H, W, O] to `size` places of C channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, geometry: Geometry, size: tuple[int, int] | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.geometry, ctx.transposed = geometry, size is not None
        return gathered(x, w, geometry) if size is None else scattered(x, w, geometry, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, w = ctx.saved_tensors
        g, geometry = _channels_innermost(grads[0]), ctx.geometry
        wants_x, wants_w = ctx.needs_input_grad[:2]
        gx = gw = None
        if wants_x:
            gx = gathered(g, w, geometry) if ctx.transposed else scattered(g, w, geometry, x.shape[2:4])
        if wants_w:
            gw = correlated(g, x, geometry) if ctx.transposed else correlated(x, g, geometry)
        return gx, gw, None, None


def _channels_innermost(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def convolved(x_MNHWC: Tensor, w_MOTC: Tensor, geometry: Geometry, size: tuple[int, int] | None = None) -> Tensor:
    """Members' convolutions with their own weights, channels last; with a size, transposed ones to maps of it.

    The weight is [M, O, taps…, C] and lies so; transposed, O are the input's channels. A stride has no dilation.
    """
    y: Tensor = _Convolved.apply(_channels_innermost(x_MNHWC), w_MOTC, geometry, size)  # type: ignore[no-untyped-call]
    return y
