"""A process that disturbs nobody: it runs when nothing else wants to, and its memory is capped."""

import contextlib
import os
import resource
from pathlib import Path


def take_lowest_priority() -> None:
    """Runs only when nothing else wants to, and is what the kernel ends first when memory runs out."""
    with contextlib.suppress(OSError):
        os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def cap_memory(num_bytes: int) -> None:
    """Has allocations beyond so much more than now fail in this process, where the system can."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    line = next(line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmData:"))
    limit = int(line.split()[1]) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
