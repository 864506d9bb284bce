"""What tests of kernels share: the device, how much is tried on it, and layouts.

On a GPU where there is one; else in Triton's interpreter, if TRITON_INTERPRET=1 says so: slowly, and without products
of 16-bit numbers, which it gets wrong.
"""

import pytest
import torch
from torch import Tensor

from burstpool.fusion import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not kernels.interpreted(), reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # numpy's, interpreting
]
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the rules' choices for a GPU; needs a CUDA device")
QUICK = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if QUICK else [torch.float32]


def members_between(shape: tuple[int, ...]) -> Tensor:
    """[M, N, C, …] in memory as a grouped convolution with channels last leaves it."""
    members, samples, channels, *space = shape
    x = torch.randn(samples, *space, members, channels, device=DEVICE) * 2 + 5
    return x.movedim(-2, 0).movedim(-1, 2)


def members_outermost(shape: tuple[int, ...]) -> Tensor:
    """[M, N, C, …] in memory as a batched product leaves it."""
    members, samples, channels, *space = shape
    return (torch.randn(members, samples, *space, channels, device=DEVICE) * 2 + 5).movedim(-1, 2)
