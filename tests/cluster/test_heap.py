"""The heap of CPU workers."""

import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
_NUM_STEPS, _FLOATS = 5, (6_400_000, 6_400_000, 2_000_000)
"""Steps that take and free tensors of these sizes: as the gradients and the momentum of a large layer."""
_PAGES = _NUM_STEPS * 4 * sum(_FLOATS) // 4096


def _faults(pipe: Connection, kept: bool) -> None:
    """Page faults of some steps, after as many as the heap needs to settle."""
    import torch

    from burstpool.cluster.heap import keep_freed_memory

    if kept:
        keep_freed_memory()
    for _ in range(20):
        [torch.ones(size) for size in _FLOATS]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_NUM_STEPS):
        [torch.ones(size) for size in _FLOATS]
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_that_keeps_freed_memory_gets_it_back_without_page_faults(kept: bool) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_faults, args=(theirs, kept), daemon=True)
    process.start()
    faults = ours.recv()
    process.join()
    assert (faults < 0.1 * _PAGES) if kept else (faults > 0.5 * _PAGES)
