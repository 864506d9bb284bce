"""Evictions: has background jobs leave a GPU's memory, and come back, as `share/room.py` decides.

Called between two steps of the foreground, by the thread that launches them: what a job does to leave or to come back
holds that thread up, and the foreground with it. So it happens rarely, and how long it takes is told to whoever asks.
A job is asked first and leaves at the end of its step; one that gets no time for that is pushed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from burstpool.share.room import FLOOR, Tenant, largest, next_move

_LOG = logging.getLogger(__name__)
_EVERY_S = 0.1
"""Between two looks at the memory."""
_PATIENCE_S = 0.5
"""How long a job may take to end its step before it is pushed."""

Where = Literal["here", "leaving", "away", "returning"]
"""Of a background job: in the GPU's memory, on its way out, in the host's, on its way back."""


class Memory(NamedTuple):
    """Of a GPU, now."""

    free_bytes: int
    total_bytes: int


class Evictable(Protocol):
    """A background job on a GPU that can leave it and come back."""

    name: str
    ended: str
    """Why it is not run any more; empty while it is."""
    where: Where
    leaves_by_itself: bool
    """Whether it leaves while this thread goes on; being told to leave at once then means to wait for it."""

    def leave(self, *, at_once: bool = False) -> None:
        """Goes out of the GPU's memory, or does something towards it; again until it is away. Never raises.

        Ends the step that has begun, which takes until the foreground lets it; at once if told so.
        """
        ...

    def come_back(self) -> None:
        """Comes back, or does something towards it; away again where there was no room after all. Never raises."""
        ...


@dataclass(slots=True, kw_only=True)
class Stay:
    """What is known of one job."""

    held_bytes: int
    first_pause_s: float
    """What coming back is thought to take before it has been seen."""
    evictions: int = 0
    reason: str = ""
    """Why it left, last."""
    since_s: float = 0.0
    """When it left, or was asked to."""
    leaving_s: float = 0.0
    """How long leaving held up the thread, last."""
    returning_s: float | None = None
    """The same of coming back; None before the first time."""
    refusals: int = 0
    """How often there was no room after all when it wanted to come back."""


class Evictions:
    """Who is here and who is away."""

    def __init__(
        self,
        jobs: Sequence[Evictable],
        stays: Sequence[Stay],
        *,
        memory: Callable[[], Memory],
        clock: Callable[[], float],
        slowdown: float,
    ) -> None:
        """`clock` gives seconds; all times are taken by it."""
        self.stays = list(stays)
        """What is known of each job."""
        self._jobs, self._memory, self._clock, self._slowdown = list(jobs), memory, clock, slowdown
        self._next_s = 0.0

    def look(self) -> bool:
        """Goes on with what is under way, or looks at the memory; whether anything was done."""
        now_s = self._clock()
        for job, stay in zip(self._jobs, self.stays, strict=True):
            if job.where == "leaving":
                writes_its_last = _writes_its_last(job)
                pushed = now_s - stay.since_s > _PATIENCE_S and not job.leaves_by_itself
                if self._leave(job, stay, at_once=pushed) or not writes_its_last:
                    return True
            if job.where == "returning":
                self._come_back(job, stay)
                return True
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _EVERY_S
        memory = self._memory()
        move = next_move(*memory, self._tenants(now_s), slowdown=self._slowdown)
        if move is None:
            return False
        job, stay = self._jobs[move.tenant], self.stays[move.tenant]
        if move.leaves:
            least = int(FLOOR * memory.total_bytes) >> 20
            words = f"{memory.free_bytes >> 20} MiB of the GPU's memory were free, fewer than {least} MiB"
            self._begin_to_leave(job, stay, words)
        else:
            self._come_back(job, stay)
        return True

    def make_room(self) -> bool:
        """The foreground has run out of memory: has the largest job leave at once; False if nobody is here.

        Those that write what they have learnt come last: they may need longer than the others, and lose it.
        """
        place = largest(self._tenants(self._clock()))
        if place is not None:
            self._begin_to_leave(self._jobs[place], self.stays[place], "the foreground ran out of memory", at_once=True)
            return True
        for job, stay in zip(self._jobs, self.stays, strict=True):
            if _writes_its_last(job):
                self._leave(job, stay, at_once=True)
                return True
        return False

    def of(self, job: object) -> Stay | None:
        """What is known of a job; None of one that is not among them."""
        return next((stay for mine, stay in zip(self._jobs, self.stays, strict=True) if mine is job), None)

    def _tenants(self, now_s: float) -> list[Tenant]:
        return [
            Tenant(
                held_bytes=stay.held_bytes,
                here=job.where != "away" and not _writes_its_last(job),
                over=bool(job.ended),
                away_s=now_s - stay.since_s,
                pause_s=stay.leaving_s + (stay.first_pause_s if stay.returning_s is None else stay.returning_s),
                evictions=stay.evictions + stay.refusals,
            )
            for job, stay in zip(self._jobs, self.stays, strict=True)
        ]

    def _begin_to_leave(self, job: Evictable, stay: Stay, reason: str, *, at_once: bool = False) -> None:
        stay.evictions += 1
        stay.reason, stay.since_s = reason, self._clock()
        _LOG.info("background %s leaves the GPU: %s", job.name, reason)
        self._leave(job, stay, at_once=at_once)

    def _leave(self, job: Evictable, stay: Stay, *, at_once: bool) -> bool:
        """Whether it is away now."""
        begun_s = self._clock()
        job.leave(at_once=at_once)
        if job.where != "away":
            return False
        stay.leaving_s, stay.since_s = self._clock() - begun_s, self._clock()
        return True

    def _come_back(self, job: Evictable, stay: Stay) -> None:
        begun_s = self._clock()
        job.come_back()
        if job.where == "here":
            stay.returning_s = self._clock() - begun_s
        elif job.where == "away" and not job.ended:  # there was no room after all: later, and more patient
            stay.refusals += 1
            stay.since_s = self._clock()


def _writes_its_last(job: Evictable) -> bool:
    """Whether it has ended and will be gone for good, without anybody's help: the others do not wait for that."""
    return job.where == "leaving" and job.leaves_by_itself and bool(job.ended)
