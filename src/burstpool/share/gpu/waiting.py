"""A wait on the GPU of a given length, in the queue of a stream: the gap of a plan, replayed.

Takes seconds. A kernel on one multiprocessor looks at the GPU's own clock until they are over. torch's `_sleep` counts
cycles instead: those last longer when the GPU lowers its frequency under load, so that a background would seem to slow
the foreground down when all it does is draw power. It is used where Triton is missing or has no compiler.
"""

import functools
import logging
from collections.abc import Callable

import torch

_LOG = logging.getLogger(__name__)
Wait = Callable[[float], object]
"""Waits so many seconds on the current stream."""


@functools.cache
def waiter() -> Wait:
    """How to wait here."""
    try:
        from burstpool.share.gpu.clock_kernel import wait

        wait(1e-6)
    except Exception as error:  # no Triton, or no compiler for what it generates
        _LOG.info("gaps are counted in cycles: %s", " ".join(str(error).split())[:300])
        cycles = _cycles_a_second()
        return lambda time_s: torch.cuda._sleep(int(time_s * cycles))  # type: ignore[no-untyped-call]
    return wait


def _cycles_a_second() -> float:
    """Of the clock that `torch.cuda._sleep` counts, measured."""
    cycles = 20_000_000
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return cycles / (float(begin.elapsed_time(end)) / 1e3)
