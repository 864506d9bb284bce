"""Which members go on: those that did so far and whose loss is finite, in one launch where torch makes five."""
# ruff: noqa: N803 -- what a kernel is compiled for is in capitals

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _stop(active, losses, members, BLOCK: tl.constexpr):
    member = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = member < members
    loss = tl.load(losses + member, mask=inside, other=0.0).to(tl.float32)
    # x - x is 0 where x is finite, and NaN for infinity and NaN.
    tl.store(active + member, 0, mask=inside & ~(loss - loss == 0.0))


def stop_not_finite(active: Tensor, losses: Tensor) -> None:
    """Clears `active` [M] where the loss [M] is infinite or no number."""
    members = losses.shape[0]
    _stop[(triton.cdiv(members, _BLOCK),)](active.view(torch.uint8), losses.contiguous(), members, BLOCK=_BLOCK)
