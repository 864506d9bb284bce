"""Pooling and resampling: each channel of each sample is on its own, so members fold into samples or channels.

Which of the two is decided by how the tensor lies in memory: the one that needs no copy.
"""

from collections.abc import Callable
from typing import Any

import torch

from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, caller
from burstpool.fusion.rules.layout import (
    channels_folded,
    channels_unfolded,
    lies_in_channels,
    samples_folded,
    samples_unfolded,
)

aten = torch.ops.aten

_SPACE = {
    aten.max_pool1d: 1, aten.max_pool2d: 2, aten.max_pool3d: 3, aten.avg_pool1d: 1, aten.avg_pool2d: 2,
    aten.avg_pool3d: 3, aten.adaptive_avg_pool1d: 1, aten.adaptive_avg_pool2d: 2, aten.adaptive_avg_pool3d: 3,
    aten.adaptive_max_pool1d: 1, aten.adaptive_max_pool2d: 2, aten.adaptive_max_pool3d: 3,
    aten.max_pool1d_with_indices: 1, aten.max_pool2d_with_indices: 2, aten.max_pool3d_with_indices: 3,
    aten.upsample_nearest1d: 1, aten.upsample_nearest2d: 2, aten.upsample_nearest3d: 3, aten.upsample_linear1d: 1,
    aten.upsample_bilinear2d: 2, aten.upsample_trilinear3d: 3, aten.upsample_bicubic2d: 2,
    aten._upsample_nearest_exact2d: 2, aten.im2col: 2,
}  # fmt: skip
"""Operator → dimensions of space."""
_SAMPLES_ONLY = (aten.pixel_shuffle, aten.pixel_unshuffle, aten.channel_shuffle, aten.im2col, aten.col2im)
"""They mix channels: members can only fold into samples."""


def _rule(call: Call) -> Lowered | None:
    first = next(iter(call.arguments))
    packet = call.op.overloadpacket
    if call.rank(first) != _SPACE.get(packet, call.rank(first) - 2) + 2 or call.rank(first) < 3:
        return None
    if call.batched_names() != [first]:
        return None
    op, samples_only = caller(call.op), packet in _SAMPLES_ONLY

    def kernel(run: Run, x: torch.Tensor, *rest: Any) -> Any:
        in_channels = not samples_only and lies_in_channels(x)
        fold, unfold = (channels_folded, channels_unfolded) if in_channels else (samples_folded, samples_unfolded)
        y = op(fold(x), *rest)
        return tuple(unfold(part, run.members) for part in y) if isinstance(y, tuple) else unfold(y, run.members)

    return Lowered(kernel=kernel, why="members folded into samples or channels, as they lie")


RULES: dict[Callable[..., Any], Rule] = dict.fromkeys((*_SPACE, *_SAMPLES_ONLY), _rule)
