"""Memory of the machine: what background jobs may take, and what happens when it runs short.

The rule: a reserve of a tenth of the machine's memory, at most 2 GiB, stays free for the foreground. When less than
that is available, the background job that was started last is evicted, and the one before only when that one's process
is gone and it was not enough. One comes back when the reserve would be left twice over, or when what its leaving freed
would leave the reserve, whichever takes more. Where the system does not say
what is available, nothing is evicted. The same rule serves for a GPU's memory, if it is told what is free there.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from burstpool.limits import available_bytes, machine_memory_bytes

_INTERVAL_S = 0.25


class Evictable(Protocol):
    """A background job that can be sent away and come back."""

    @property
    def is_here(self) -> bool:
        """Whether a process of it takes memory, or soon will."""
        ...

    def evict(self, reason: str) -> bool:
        """Has it leave soon; False, and nothing happens, if it is not here."""
        ...

    def readmit(self) -> None:
        """It may come back; nothing happens if it is here."""
        ...


def reserve_bytes() -> int:
    """What stays free for the foreground."""
    return min(machine_memory_bytes() // 10, 2 << 30)


@dataclass(slots=True, kw_only=True)
class _Away:
    """A job that was sent away."""

    job: Evictable
    free_before: int
    freed: int | None = None
    """What its leaving freed, bytes; None until it has left."""


class MemoryWatch:
    """Looks at the machine's memory, a few times a second, in a thread of its own."""

    def __init__(
        self,
        jobs: Sequence[Evictable],
        *,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """`memory` says what is available, and what must be; that of this machine if left out."""
        reserve = reserve_bytes()
        self._jobs, self._memory = list(jobs), memory or (lambda: (available_bytes(), reserve))
        self._away: list[_Away] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory watch", daemon=True)

    def start(self) -> None:
        """Starts to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it."""
        self._stopped.set()
        self._thread.join()

    def look(self) -> None:
        """Evicts one job, lets one come back, or does nothing."""
        free, reserve = self._memory()
        last = self._away[-1] if self._away else None
        if last is not None and last.job.is_here:
            return  # it is leaving: what that frees is not known yet
        if last is not None and last.freed is None:
            last.freed = max(free - last.free_before, 0)
        if free < reserve:
            gone = [away.job for away in self._away]
            here = [job for job in self._jobs if job not in gone and job.is_here]
            words = f"{free >> 20} MiB of memory were free, fewer than {reserve >> 20} MiB"
            if here and here[-1].evict(words):
                self._away.append(_Away(job=here[-1], free_before=free))
        elif last is not None and free > max(2 * reserve, reserve + (last.freed or 0)):
            self._away.pop().job.readmit()

    def _watch(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self.look()
