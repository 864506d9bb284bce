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
import time
from collections.abc import Iterator
from pathlib import Path

_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"
"""How gloo calls the thread that reads and writes sockets."""
_CLAIM = "burstpool-core-"
"""What a claim is called on this machine, and the core's number."""
_NAMING_S = 0.5
"""How long new threads are waited for until they have names."""
_claims: list[socket.socket] = []
"""Held until the process ends."""


def claim_core(*, num_workers: int) -> int | None:
    """Moves this process to a core that no other Burstpool worker has claimed; None where nothing changes.

    Nothing changes for a process that has claimed one, or is pinned to one core already: it stays there. Nor where the
    system is not Linux, a worker is alone, or cores are too few or all claimed: it stays free to move.
    Call it before any thread is started that should stay there too.
    """
    if sys.platform != "linux" or _claims:
        return None
    cores = sorted(os.sched_getaffinity(0))
    if not 1 < num_workers <= len(cores):  # a worker alone has no peer to disturb; too many would share cores anyway
        return None
    for core in cores:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0{_CLAIM}{core}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        os.sched_setaffinity(0, {core})
        return core
    return None


@contextlib.contextmanager
def calm_gloo() -> Iterator[None]:
    """Has the socket threads of gloo that are started inside wait for their turn, if this process has its own core."""
    if not _claims:
        yield
        return
    before = set(_threads())
    yield
    deadline = time.monotonic() + _NAMING_S
    while (names := {thread: name for thread, name in _threads().items() if thread not in before}) and (
        _threads()[os.getpid()] in names.values() and time.monotonic() < deadline
    ):
        time.sleep(0.001)  # a new thread has its parent's name until it first runs
    for thread, name in names.items():
        if name == _LOOP:
            with contextlib.suppress(OSError):  # it may have ended
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def let_gloo_run() -> None:
    """Gives gloo's socket thread a turn, where this process has its own core: call it right before a message is sent.

    The receiver has said beforehand that it is ready, but a thread of the batch class does not learn of it while this
    one computes. A message sent before it did waits for it, until this thread next sleeps: often a whole block later.
    """
    if _claims:
        os.sched_yield()


def _threads() -> dict[int, str]:
    """Threads of this process by their ids, with their names."""
    found = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):
            found[int(task.name)] = (task / "comm").read_text().strip()
    return found
