"""The heap of CPU workers."""

import multiprocessing
import resource
import sys
from multiprocessing.connection import Connection

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
_PAGES = 24_000_000 // 4096


def _faults(pipe: Connection, kept: bool) -> None:
    """Page faults of taking and freeing 24 MB ten times."""
    import torch

    from burstpool.cluster.heap import keep_freed_memory

    if kept:
        keep_freed_memory()
    torch.ones(6_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(6_000_000)
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_that_keeps_freed_memory_gets_it_back_without_page_faults(kept: bool) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_faults, args=(theirs, kept), daemon=True)
    process.start()
    faults = ours.recv()
    process.join()
    assert (faults < 2 * _PAGES) if kept else (faults > 5 * _PAGES)
