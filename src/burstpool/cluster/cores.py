"""Cores: where CPU workers and the threads of gloo run.

Two things that the kernel cannot know cost gloo milliseconds a message where every core computes (docs/LOG.md):

- A worker's gloo threads land on the core where another worker computes. So each worker claims a core of its own and
  stays there with all threads it starts later. Claims are names in the abstract socket namespace: two runs on one
  machine never share a core while another is free, and a process that dies gives its core back.
- gloo's socket thread, when it wakes while another gloo thread holds the connection's lock, asks again and again until
  it gets it; on the same core it keeps that thread from letting go until the next clock tick, 4 ms later. A thread of
  the batch class does not push others aside when it wakes, so it finds the lock free.

Takes numbers of workers, returns what was claimed. Does nothing where the system is not Linux, or cores are too few.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

_claims: list[socket.socket] = []
"""Held until the process ends."""


def claim_core(*, num_workers: int) -> int | None:
    """Moves this process to a core that no other Burstpool worker has claimed; None where it stays free to move.

    Call it before any thread is started that should stay there too. A process that has claimed one keeps it.
    """
    if sys.platform != "linux" or _claims:
        return None
    cores = sorted(os.sched_getaffinity(0))
    if not 1 < num_workers <= len(cores):  # a worker alone has no peer to disturb; too many would share cores anyway
        return None
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0burstpool-core-{core}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        os.sched_setaffinity(0, {core})
        return core
    return None


@contextlib.contextmanager
def calm_gloo() -> Iterator[None]:
    """Has threads that are started inside wait for their turn when they wake, if this process has its own core.

    They take the scheduling class over from the thread that starts them: looking for them afterwards would come too
    early for some.
    """
    if not _claims:
        yield
        return
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
