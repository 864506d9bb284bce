"""What of a convolution's kernel ever meets its input, and when the rest is a plain product.

A small map under a large kernel leaves taps that only see padding: on a map of one point, eight of nine in a 3 by 3
kernel. Cropped away, they cost nothing and their gradient is zero, as it would be. What is left is often a product:
a kernel of one point, a kernel that covers the whole map, or a transposed convolution of one point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from burstpool.fusion.rules.base import Call


@dataclass(frozen=True, slots=True)
class Window:
    """A convolution's geometry, padding-only taps left out. One entry a dimension of space."""

    start: tuple[int, ...]
    """The first tap that meets the input."""
    taps: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    out: tuple[int, ...]
    whole: bool
    """Whether nothing was cropped."""

    def cropped(self, weight: torch.Tensor) -> torch.Tensor:
        """[…, taps] of the weight."""
        if self.whole:
            return weight
        first = weight.dim() - len(self.taps)
        for place, (start, taps) in enumerate(zip(self.start, self.taps, strict=True)):
            weight = weight.narrow(first + place, start, taps)
        return weight

    @property
    def is_point(self) -> bool:
        """Whether each result depends on one place of the input alone."""
        return all(t == 1 for t in self.taps) and not any(self.padding)

    @property
    def is_covering(self) -> bool:
        """Whether there is one result, which depends on the whole window."""
        return all(size == 1 for size in self.out) and not any(self.padding)


def window(call: Call) -> Window | None:
    """The geometry, where all sizes are known when the plan is made."""
    x, weight = (call.tensor(name) for name in list(call.arguments)[:2])
    rank = weight.dim() - 2
    settings = [_spread(call[name], rank) for name in ("stride", "padding", "dilation")]
    sizes = [*x.shape[2:], *weight.shape[2:]]
    if any(setting is None for setting in settings) or any(not isinstance(size, int) for size in sizes):
        return None
    strides, paddings, dilations = (tuple(setting or ()) for setting in settings)
    found = [
        _touched(*given) for given in zip(x.shape[2:], weight.shape[2:], strides, paddings, dilations, strict=True)
    ]
    start, taps, padding, out = zip(*found, strict=True)
    whole = taps == tuple(weight.shape[2:])
    return Window(start, taps, padding, strides, dilations, out, whole)


def _touched(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int, int, int]:
    """First tap, number of taps, padding then, and results along one dimension."""
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    meets = [
        tap
        for tap in range(kernel)
        if any(0 <= place * stride - padding + tap * dilation < size for place in range(max(out, 0)))
    ]
    if not meets:
        return 0, kernel, padding, out
    start, taps = meets[0], meets[-1] - meets[0] + 1
    left = padding - start * dilation
    # torch pads both sides alike: crop only where that still gives as many results.
    if left < 0 or (size + 2 * left - dilation * (taps - 1) - 1) // stride + 1 != out:
        return 0, kernel, padding, out
    return start, taps, left, out


def _spread(value: Any, rank: int) -> Sequence[int] | None:
    if not isinstance(value, list | tuple) or any(not isinstance(v, int) for v in value):
        return None
    return list(value) * rank if len(value) == 1 else list(value)
