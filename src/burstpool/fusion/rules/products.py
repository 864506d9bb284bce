"""Convolutions that are products: kernels of one point, kernels that cover the map, transposed ones of one point.

`point_product` leaves its result as its input lies in memory, [M, P, C] or [P, M, C], so that a grouped convolution
with channels last before and after it finds what it needs.

Shapes: M = members, N = samples, C = channels, O = output channels, P = samples times space, K = a window's values.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
from torch import Tensor

from burstpool.fusion import kernels
from burstpool.fusion.gradients import first_derivative_only
from burstpool.fusion.rules.base import Kernel, Run, autocast_dtype, with_members
from burstpool.fusion.rules.window import Window


class _PointProduct(torch.autograd.Function):
    """x [M, P, C] times w [M, O, C], and the gradients, each in the layout of what it belongs to.

    Sums may begin with what all points of a sample have in common, [M, N, O].
    """

    @staticmethod
    def forward(ctx: Any, x_MPC: Tensor, w_MOC: Tensor, start_MNO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MPC, w_MOC)
        ctx.samples = 0 if start_MNO is None else start_MNO.shape[1]
        y_MPO, w_MCO = _like(x_MPC, w_MOC.shape[1]), w_MOC.transpose(1, 2)
        if start_MNO is None:
            return _into(y_MPO, x_MPC, w_MCO)
        _by_sample(y_MPO, ctx.samples).copy_(start_MNO.unsqueeze(2))
        return y_MPO.baddbmm_(x_MPC, w_MCO)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_MPC, w_MOC = (saved.conj() for saved in ctx.saved_tensors)  # itself where it is real
        g_MPO = grads[0] if 1 in (grads[0].stride(1), grads[0].stride(2)) else grads[0].contiguous()
        wants_x, wants_w, wants_start = ctx.needs_input_grad
        gx = _into(_like(x_MPC, x_MPC.shape[2]), g_MPO, w_MOC) if wants_x else None
        gw = _summed(g_MPO, x_MPC) if wants_w else None
        return gx, gw, _by_sample(g_MPO, ctx.samples).sum(2) if wants_start else None


def _by_sample(y_MPO: Tensor, samples: int) -> Tensor:
    """[M, P, O] → [M, N, P / N, O], a view."""
    return y_MPO.view(len(y_MPO), samples, -1, y_MPO.shape[2])


def _like(x_MPC: Tensor, width: int) -> Tensor:
    """Room for [M, P, width], members and rows nested as in x."""
    members, rows = x_MPC.shape[:2]
    if x_MPC.stride(0) < x_MPC.stride(1):
        return x_MPC.new_empty(rows, members, width).transpose(0, 1)
    return x_MPC.new_empty(members, rows, width)


def _into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.bmm(a, b, out=out)


def _summed(g_MPO: Tensor, x_MPC: Tensor) -> Tensor:
    """[M, O, C]: g times x, summed over rows; in parts where else few products of long sums leave a GPU idle."""
    parts = _parts(g_MPO, x_MPC)
    if parts == 1:
        return torch.bmm(g_MPO.transpose(1, 2), x_MPC)
    members, rows, outputs = g_MPO.shape
    g_SPO, x_SPC = (t.view(members * parts, rows // parts, -1) for t in (g_MPO, x_MPC))
    exact: Any = {} if x_MPC.dtype is torch.float32 else {"out_dtype": torch.float32}
    each_SOC: Tensor = torch.bmm(g_SPO.transpose(1, 2), x_SPC, **exact)
    return each_SOC.view(members, parts, outputs, -1).sum(1).to(x_MPC.dtype)


def _parts(g_MPO: Tensor, x_MPC: Tensor) -> int:
    """Into how many parts the sum over rows is cut; they must be of one length, and members lie one after another."""
    members, rows, outputs = g_MPO.shape
    apart = any(t.stride(0) != rows * t.stride(1) for t in (g_MPO, x_MPC))
    if not x_MPC.is_cuda or apart or x_MPC.dtype.itemsize > 4:
        return 1
    products = members * -(-outputs // _TILE) * -(-x_MPC.shape[2] // _TILE)
    wanted = int(_BUSY[x_MPC.dtype.itemsize] * torch.cuda.get_device_properties(x_MPC.device).multi_processor_count)
    most = min(wanted // products, rows // _LEAST_ROWS)
    return next((parts for parts in range(most, 1, -1) if rows % parts == 0), 1)


_TILE, _LEAST_ROWS = 128, 1024
"""Side of the part of a product that a multiprocessor makes; rows below which a sum is not cut."""
_BUSY = {2: 0.5, 4: 2.0}
"""By the bytes of a number: such parts a multiprocessor, beyond which cutting sums did not help.

Eight members, 80,000 rows, on an H200, in 32 bits: 64 by 64 channels 0.10 instead of 0.82 ms, 256 by 128 0.26 instead
of 0.83, 128 by 1,024 0.83 instead of 1.17; in 16 bits 0.06 instead of 0.13, 0.16 instead of 0.21, the last not cut.
"""
_WHOLE_CHANNELS = 8
"""Channels of a 16-bit product come in multiples of this, or the GPU's matrix units go unused."""


def point_product(window: Window, batched: bool) -> Kernel:
    """A kernel of one point, with any stride. `start_MNO` is added to all points of a sample."""

    def kernel(
        run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any, start_MNO: Tensor | None = None
    ) -> Tensor:
        first = 3 if batched else 2
        for place, (stride, out) in enumerate(zip(window.stride, window.out, strict=True)):
            if stride > 1 or x.shape[first + place] != out:
                x = x[(slice(None),) * (first + place) + (slice(0, (out - 1) * stride + 1, stride),)]
        *_, samples, channels = x.shape[:first]
        space, dtype = x.shape[first:], autocast_dtype(x)
        w_MOC = window.cropped(w_MOC).flatten(2).reshape(run.members, -1, channels).to(dtype)
        rows = x.movedim(first - 1, -1).reshape(*x.shape[: first - 2], -1, channels).to(dtype)
        if channels % _WHOLE_CHANNELS and dtype.itemsize == 2 and x.is_cuda:
            missing = -channels % _WHOLE_CHANNELS
            rows, w_MOC = torch.nn.functional.pad(rows, (0, missing)), torch.nn.functional.pad(w_MOC, (0, missing))
        if start_MNO is not None:
            start_MNO = start_MNO.expand(-1, samples, -1)
        y_MPO: Tensor
        if batched and kernels.plain():  # a compiler chooses layouts itself; it cannot take in writing to a given one
            y_MPO = torch.bmm(rows, w_MOC.transpose(1, 2))
        elif batched:
            y_MPO = _PointProduct.apply(rows, w_MOC, start_MNO)  # type: ignore[no-untyped-call]
            start_MNO = None
        else:
            y_MPO = (rows @ w_MOC.flatten(0, 1).t()).view(len(rows), run.members, -1).transpose(0, 1)
        if b_MO is not None:
            y_MPO = y_MPO + b_MO.unsqueeze(1).to(dtype)
        if start_MNO is not None:
            y_MPO = (_by_sample(y_MPO, samples) + start_MNO.unsqueeze(2)).flatten(1, 2)
        return y_MPO.view(run.members, samples, *space, -1).movedim(-1, 2)

    return kernel


def covering_product(window: Window, batched: bool) -> Kernel:
    """A kernel that covers the map: one result a sample."""

    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        x_MNC = x if batched else with_members(x, run.members)
        for place, (taps, dilation) in enumerate(zip(window.taps, window.dilation, strict=True)):
            x_MNC = x_MNC[(slice(None),) * (3 + place) + (slice(0, (taps - 1) * dilation + 1, dilation),)]
        x_MNK = x_MNC.movedim(2, -1).flatten(2)
        w_MOK = window.cropped(w_MOC).movedim(2, -1).flatten(2)
        y_MNO = _product(x_MNK, w_MOK.transpose(1, 2), b_MO)
        return y_MNO.view(*y_MNO.shape, *[1] * len(window.taps))

    return kernel


def spreading_product(batched: bool) -> Kernel:
    """A transposed convolution of maps of one point: each sample's kernel-sized result is a product."""

    def kernel(run: Run, x: Tensor, w_MCO: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        x_MNC = (x if batched else with_members(x, run.members)).flatten(2)
        members, _, out_channels, *space = w_MCO.shape
        w_MCK = w_MCO.movedim(2, -1).flatten(2)
        y_MNK = _product(x_MNC, w_MCK, None)
        y = y_MNK.view(*y_MNK.shape[:2], *space, out_channels).movedim(-1, 2)
        return y if b_MO is None else y + b_MO.view(members, 1, -1, *[1] * len(space)).to(y.dtype)

    return kernel


def _product(a: Tensor, b: Tensor, bias_MO: Tensor | None) -> Tensor:
    return torch.bmm(a, b) if bias_MO is None else torch.baddbmm(bias_MO.unsqueeze(1), a, b)
