"""Convolutions over two dimensions with all members in one kernel of our own (kernels/convolution.py), on a GPU.

Grouped convolutions of libraries are made for few, wide groups; members' own ones, side by side, need branches that a
step in pieces cannot have. `suits` says which convolutions the kernel takes: no groups within a member, no stride with
a dilation, at least 8 channels. What is only known at run time (types, the device, whether factors may be rounded) is
asked then, and `otherwise` runs where it cannot be.

Shapes: M = members, N = samples, C = channels, O = output channels, T = taps.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from typing import Any

import torch
from torch import Tensor

from burstpool.fusion import kernels
from burstpool.fusion.rules.base import Call, Kernel, Run, autocast_dtype
from burstpool.fusion.rules.layout import laid_weight
from burstpool.fusion.rules.rounding import convolutions_may_round

aten = torch.ops.aten

_LEAST_CHANNELS = 8
"""Below, a product is mostly padding."""


def suits(call: Call) -> bool:
    """Whether the kernel can take this convolution."""
    weight, numbers = call.tensor("weight"), [call[name] for name in ("stride", "padding", "dilation")]
    two_numbers = all(isinstance(n, list | tuple) and len(n) in (1, 2) for n in numbers)
    return (
        call.op in (aten.conv2d.default, aten.conv_transpose2d.input)
        and kernels.run_on(call.tensor("input").device)
        and call.is_batched("input")
        and call["groups"] == 1
        and two_numbers
        and all(s == 1 or d == 1 for s, d in zip(_pair(call["stride"]), _pair(call["dilation"]), strict=True))
        and min(weight.shape[:2]) >= _LEAST_CHANNELS
    )


def convolution_at_once(otherwise: Kernel) -> Kernel:
    """A convolution."""

    def kernel(run: Run, x: Tensor, w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        if not _takes(x, w_MOC):
            return otherwise(run, x, w_MOC, b_MO, *rest)  # type: ignore[no-any-return]
        stride, padding, dilation, _ = rest
        return _run(x, w_MOC, b_MO, stride, padding, dilation, None)

    return kernel


def transposed_at_once(otherwise: Kernel) -> Kernel:
    """A transposed convolution."""

    def kernel(run: Run, x: Tensor, w_MCO: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        if not _takes(x, w_MCO):
            return otherwise(run, x, w_MCO, b_MO, *rest)  # type: ignore[no-any-return]
        stride, padding, more, _, dilation = rest
        numbers = (x.shape[3:], w_MCO.shape[3:], *map(_pair, (stride, padding, dilation, more)))
        size = [(n - 1) * s - 2 * p + d * (k - 1) + m + 1 for n, k, s, p, d, m in zip(*numbers, strict=True)]
        return _run(x, w_MCO, b_MO, stride, padding, dilation, (size[0], size[1]))

    return kernel


def _takes(x: Tensor, weight: Tensor) -> bool:
    rounded = autocast_dtype(x) != torch.float32 or convolutions_may_round()
    return kernels.usable(x, weight) and rounded


def _run(
    x_MNC: Tensor,
    weight: Tensor,
    b_MO: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    size: tuple[int, int] | None,
) -> Tensor:
    from burstpool.fusion.kernels.convolution import Geometry, convolved

    members, dtype = weight.shape[0], autocast_dtype(x_MNC)
    geometry = Geometry(_pair(weight.shape[3:]), _pair(stride), _pair(padding), _pair(dilation))
    laid = laid_weight(weight.flatten(0, 1), dtype, torch.channels_last).movedim(1, -1).contiguous()
    x_MNHWC = x_MNC.movedim(2, -1)
    order = torch.preserve_format if x_MNHWC.stride(-1) == 1 else torch.contiguous_format
    x_MNHWC = x_MNHWC.to(dtype, memory_format=order)
    y = convolved(x_MNHWC, laid.view(members, -1, *laid.shape[1:]), geometry, size).movedim(-1, 2)
    return y if b_MO is None else y + b_MO.view(members, 1, -1, 1, 1).to(dtype)


def _pair(numbers: Any) -> tuple[int, int]:
    first, last = int(numbers[0]), int(numbers[-1])
    return first, last
