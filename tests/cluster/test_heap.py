"""The heap of CPU workers."""

import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
_BYTES = 256 << 20
"""Larger than what glibc ever keeps by itself."""


def _held_bytes(pipe: Connection, kept: bool) -> None:
    """How much more the process holds after a large tensor was made and freed.

    As in a worker that profiles: what is kept for a while ends without ending what is kept for good.
    """
    import torch

    from burstpool.cluster.heap import freed_memory_kept, keep_freed_memory

    if kept:
        keep_freed_memory()
    before = _resident_bytes()
    with freed_memory_kept():
        torch.ones(_BYTES // 4)
    torch.ones(_BYTES // 4)
    pipe.send(_resident_bytes() - before)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("kept", [True, False])
def test_a_process_keeps_freed_memory_only_where_it_is_told_to(kept: bool) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_held_bytes, args=(theirs, kept), daemon=True)
    process.start()
    held = ours.recv()
    process.join()
    assert (held > 0.9 * _BYTES) if kept else (held < 0.5 * _BYTES)
