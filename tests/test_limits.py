"""Memory that can be had: the machine's, or its container's, in either version of control groups."""

import os

import pytest

from burstpool import limits

GIB = 1 << 30
MACHINE = {"/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB"}
NEW = {
    "/sys/fs/cgroup/memory.max": str(8 * GIB),
    "/sys/fs/cgroup/memory.current": str(6 * GIB),
    "/sys/fs/cgroup/memory.stat": f"anon {GIB}\nactive_file 7\ninactive_file {3 * GIB}",
}
OLD = {
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(16 * GIB),
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": str(4 * GIB),
    "/sys/fs/cgroup/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}",
}
UNLIMITED = {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/memory.current": str(6 * GIB)}


@pytest.mark.parametrize(
    ("files", "machine", "available"),
    [
        ({}, 64, 64),
        (MACHINE, 64, 48),
        ({**MACHINE, **UNLIMITED}, 64, 48),
        ({**MACHINE, **NEW}, 8, 5),  # files that it keeps are given up when memory is wanted
        ({**MACHINE, **OLD}, 16, 13),
    ],
)
def test_memory_is_the_machines_or_the_containers(
    files: dict[str, str], machine: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "system_file", lambda path: files.get(path, ""))
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 64 * GIB // 4096))
    assert limits.machine_memory_bytes() == machine * GIB
    assert limits.available_bytes() == available * GIB
