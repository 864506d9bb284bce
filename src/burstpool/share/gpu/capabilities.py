"""What a GPU offers to jobs that share it: parts of its multiprocessors, and processes side by side.

Asks the driver and changes nothing. Parts (`partition.py`) need a driver with green contexts; the kernels of two
processes run side by side where an MPS server has the device, else in turns.
"""

import ctypes
from dataclasses import dataclass

from burstpool.errors import CaptureError
from burstpool.model.cuda_driver import call, check_has
from burstpool.share.gpu.partition import MADE_WITH, whole_device

_MPS_ENABLED = 133
"""The driver's `CU_DEVICE_ATTRIBUTE_MPS_ENABLED`: contexts on the device are an MPS server's."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Of one GPU."""

    no_parts: str
    """Why there are no parts of it; empty where there are."""
    side_by_side: bool
    """Whether kernels of several processes run at the same time."""


def capabilities(device_index: int) -> Capabilities:
    """Of the device with this number; nothing is offered where the driver cannot be asked."""
    return Capabilities(no_parts=_no_parts(device_index), side_by_side=_side_by_side(device_index))


def _no_parts(device_index: int) -> str:
    try:
        for name in MADE_WITH:
            check_has(name)
        whole_device(device_index)
    except CaptureError as error:
        return str(error)
    return ""


def _side_by_side(device_index: int) -> bool:
    place, enabled = ctypes.c_int(), ctypes.c_int()
    try:
        call("cuDeviceGet", ctypes.byref(place), ctypes.c_int(device_index))
        call("cuDeviceGetAttribute", ctypes.byref(enabled), ctypes.c_int(_MPS_ENABLED), place)
    except CaptureError:  # also of a driver that does not know the attribute
        return False
    return enabled.value == 1
