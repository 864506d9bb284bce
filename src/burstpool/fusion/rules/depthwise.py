"""Depthwise convolutions on a GPU: members' channels side by side, with torch's own kernels or with cuDNN's.

With channels last, cuDNN chooses its kernel by rule, not by trying: some of its kernels go through groups one by one,
and an array of 32 MobileNets has 30,000 of them, so that trying takes seconds a layer. Else torch's own kernels, which
are made for channels outermost, do it.

Shapes: M = members, N = samples, C = channels.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion.rules.base import Kernel, Run, autocast_dtype, with_members
from burstpool.fusion.rules.layout import channels_folded, channels_unfolded

aten = torch.ops.aten


def depthwise_kernel(batched: bool, memory_format: torch.memory_format | None) -> Kernel:
    """A convolution over two dimensions, each group with one input channel."""

    def kernel(
        run: Run,
        x: Tensor,
        w_MOC: Tensor,
        b_MO: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
    ) -> Tensor:
        dtype, laid = autocast_dtype(x), memory_format or torch.contiguous_format
        x_NC = channels_folded(x if batched else with_members(x, run.members)).to(dtype, memory_format=laid)
        weight = w_MOC.flatten(0, 1).to(dtype, memory_format=laid)
        y_NC: Tensor = _Depthwise.apply(  # type: ignore[no-untyped-call]
            x_NC, weight, (stride, padding, dilation), groups * run.members, memory_format is not None
        )
        y = channels_unfolded(y_NC, run.members)
        return y if b_MO is None else y + b_MO.view(run.members, 1, -1, 1, 1).to(dtype)

    return kernel


class _Depthwise(torch.autograd.Function):
    """The convolution and its gradients, by cuDNN or without."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, geometry: tuple[list[int], ...], groups: int, cudnn: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = geometry, groups, cudnn
        with _chosen(cudnn):
            y: Tensor = aten.convolution(x, weight, None, *geometry, False, [0, 0], groups)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        geometry, groups, cudnn = ctx.options
        wanted = [*ctx.needs_input_grad[:2], False]
        with _chosen(cudnn):
            gx, gw, _ = aten.convolution_backward(grads[0], x, weight, None, *geometry, False, [0, 0], groups, wanted)
        return gx, gw, None, None, None


@contextlib.contextmanager
def _chosen(cudnn: bool) -> Iterator[None]:
    """With cuDNN, which chooses by rule, or without it."""
    now = torch.backends.cudnn
    with now.flags(enabled=cudnn, benchmark=False, deterministic=now.deterministic, allow_tf32=now.allow_tf32):
        yield
