"""Limits: numbers that no machine can do anything with, and the memory that this one has.

A number too many on the command line should end in one line rather than in minutes without a word, or in a process that
the system kills. Takes numbers; returns memory, or raises. Ignores what else runs on the machine but for its memory.
"""

import os
from pathlib import Path

LARGEST_BATCH = 2**24
"""Samples a step. Planners take time with each of them."""
MOST_TRIALS = 1_000_000
"""Of a sweep, which writes down every one at each checkpoint."""
MOST_THREADS = 1024
"""Of torch in one process."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
"""Words of torch's CPU allocator, of the system and of CUDA."""


def available_bytes() -> int:
    """Memory that can be had here without swapping: this machine's, or what is left of its container's."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) << 10)
    most, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if most.isdigit() and used.isdigit():
        limits.append(max(0, int(most) - int(used)))
    return min(limits)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device; torch has no class of its own for that on the CPU."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def in_gib(size_bytes: float) -> str:
    """`12.5 GiB`."""
    return f"{size_bytes / 2**30:.3g} GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not on macOS, nor in every container
        return ""
