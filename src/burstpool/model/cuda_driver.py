"""The CUDA driver's own functions, by way of ctypes: those that torch has no call for.

All of them are part of the driver's stable interface. Takes a function's name and its arguments; raises CaptureError
where the driver is missing, too old or refuses.
"""

import ctypes
import functools
from typing import Any

from burstpool.errors import CaptureError

Handle = ctypes.c_void_p
"""Whatever the driver hands out: a graph, a node, a stream, a context."""


def call(name: str, *arguments: Any) -> None:
    """Calls it."""
    check_has(name)
    function = getattr(_driver(), name)
    if status := function(*arguments):
        raise CaptureError(f"{name} of the CUDA driver failed with status {status}")


def check_has(name: str) -> None:
    """Raises where the driver has no such function."""
    if not hasattr(_driver(), name):
        raise CaptureError(f"the CUDA driver is too old: it has no {name}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CaptureError(f"the CUDA driver cannot be called: {error}") from None
