"""A part of a GPU: a stream whose kernels run on some of its multiprocessors only.

Takes a device and a share of its multiprocessors, returns a stream; what a capture records on it keeps to the same
part, wherever the graph is launched. Ignores what a step records on other streams, as some lowerings of an array do. A
background on a part of the GPU disturbs a foreground less than one that is everywhere for a shorter time, for some
pairs of jobs; which, is measured (`width.py`).

The driver calls such a part a green context. Its own functions are used because a stream from torch's pool is never
confined, and torch's own streams of a part have no priority.
"""

import ctypes
import functools

import torch

from burstpool.errors import CaptureError
from burstpool.model.cuda_driver import Handle, call

_MULTIPROCESSORS = 1
"""The kind of resource that is split."""
_LARGEST_CLUSTERS = 2
"""Else kernels that run in clusters of blocks, as of cuBLAS on a Hopper GPU, could not be launched."""
_WITH_DEFAULT_STREAM, _NON_BLOCKING = 1, 1
"""Flags that the driver requires."""


MADE_WITH = (
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
)
"""The driver's functions that a part takes, after the resource is known."""


class _Resource(ctypes.Structure):
    """The driver's `CUdevResource`."""

    _fields_ = (
        ("kind", ctypes.c_uint),
        ("internal", ctypes.c_ubyte * 92),
        ("num_multiprocessors", ctypes.c_uint),
        ("more", ctypes.c_ubyte * 36),
        ("next", ctypes.c_void_p),
    )


def whole_device(device_index: int) -> tuple[ctypes.c_int, _Resource]:
    """The driver's number of the device, and all its multiprocessors; CaptureError where they cannot be had."""
    place, whole = ctypes.c_int(), _Resource()
    call("cuDeviceGet", ctypes.byref(place), ctypes.c_int(device_index))
    call("cuDeviceGetDevResource", place, ctypes.byref(whole), ctypes.c_uint(_MULTIPROCESSORS))
    return place, whole


@functools.cache
def confined_stream(device_index: int, share: float, priority: int) -> torch.cuda.Stream:
    """A stream on at least this share of the multiprocessors; the same one every time. CaptureError where it cannot."""
    place, whole = whole_device(device_index)
    part, rest = _Resource(), _Resource()
    count, wanted = ctypes.c_uint(1), max(round(share * whole.num_multiprocessors), 1)
    call(
        "cuDevSmResourceSplitByCount",
        ctypes.byref(part),
        ctypes.byref(count),
        ctypes.byref(whole),
        ctypes.byref(rest),
        ctypes.c_uint(_LARGEST_CLUSTERS),
        ctypes.c_uint(wanted),
    )
    if count.value != 1:
        raise CaptureError(f"the GPU has no part of {wanted} multiprocessors")
    description, context, stream = Handle(), Handle(), Handle()
    call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(part), ctypes.c_uint(1))
    call("cuGreenCtxCreate", ctypes.byref(context), description, place, ctypes.c_uint(_WITH_DEFAULT_STREAM))
    call(
        "cuGreenCtxStreamCreate",
        ctypes.byref(stream),
        context,
        ctypes.c_uint(_NON_BLOCKING),
        ctypes.c_int(priority),
    )
    return torch.cuda.ExternalStream(stream.value, device=device_index)  # type: ignore[no-untyped-call]
