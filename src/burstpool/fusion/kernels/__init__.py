"""Kernels of our own, in Triton, for what torch does in several passes over memory.

`update` is the optimizer's step, `batchnorm` batch norm with the activation that follows it, `normmax` with a maximum
over rows behind that, `layernorm` layer norm with each member's own weight, `convolution` all members' convolutions,
`dropout` their masks, `entropy` the loss over many classes, `finite` which members go on. Only these files import
triton; where it is missing, or the tensors are not on the current CUDA device, `usable` says so and torch's own
operators do the work. Results agree with torch's to rounding; dropout draws masks of its own.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""Types the kernels take; they compute in float32. Double precision, as `verify` uses, is torch's own."""


_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Inside, torch's own operators do the work: for a compiler, which cannot join what it cannot see into.

    But for a loss over many classes, where that is worth more.
    """
    before = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(before)


def plain() -> bool:
    """Whether torch's own operators are to do the work."""
    return _PLAIN.get()


@functools.cache
def present() -> bool:
    """Whether there are kernels at all."""
    return importlib.util.find_spec("triton") is not None and os.environ.get("BURSTPOOL_KERNELS") != "0"


@functools.cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs them, for tests without a GPU, on any device."""
    return present() and os.environ.get("TRITON_INTERPRET") == "1"


def run_on(device: torch.device) -> bool:
    """Whether they can run on such a device."""
    return present() and (device.type == "cuda" or interpreted())


def usable(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are to take these tensors."""
    return not plain() and could_take(*tensors)


def could_take(*tensors: torch.Tensor) -> bool:
    """Whether they can, also for a compiler, as operators that it cannot see into."""
    return present() and all((interpreted() or _is_here(t)) and t.dtype in NARROW for t in tensors)


def _is_here(tensor: torch.Tensor) -> bool:
    """On the current device, on which Triton launches."""
    return tensor.is_cuda and tensor.get_device() == torch.cuda.current_device()
