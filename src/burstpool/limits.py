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
_CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    tuple(f"/sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
)
"""Where a container's limit, its use and what that is made of stand, in either version of control groups."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")
"""Words of torch's CPU allocator, of the system and of CUDA."""


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the container it is seen from."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += [int(text) for most, _, _ in _CONTAINERS if (text := system_file(most)).isdigit()]
    return min(limits)


def available_bytes() -> int:
    """What can be had of it without swapping."""
    limits = [machine_memory_bytes()]
    limits += [kib << 10 for name, kib in _numbers("/proc/meminfo") if name == "MemAvailable:"]
    for most, used, parts in _CONTAINERS:
        if (limit := system_file(most)).isdigit() and (use := system_file(used)).isdigit():
            files = max((size for name, size in _numbers(parts) if name.endswith("inactive_file")), default=0)
            limits.append(max(0, int(limit) - int(use) + files))  # of files it keeps what nobody else wants
    return min(limits)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device; torch has no class of its own for that on the CPU."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def in_gib(size_bytes: float) -> str:
    """`12.5 GiB`."""
    return f"{size_bytes / 2**30:.3g} GiB"


def system_file(path: str) -> str:
    """What the system says there; empty where it does not."""
    try:
        return Path(path).read_text().strip()
    except OSError:  # not on macOS, nor in every container
        return ""


def _numbers(path: str) -> list[tuple[str, int]]:
    """Lines of a name and a number."""
    words = (line.split() for line in system_file(path).splitlines())
    return [(line[0], int(line[1])) for line in words if len(line) > 1 and line[1].isdigit()]
