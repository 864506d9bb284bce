"""A rehearsal: a background's code runs once in a process of its own before it runs in the one that drives the GPU.

Loading a job, building its model and tracing it are the user's code, which may hang, allocate without end or take its
process with it. Where a background is captured, this happens in the foreground's process, which must not wait for it.
So it is tried elsewhere first, on the host, while the foreground is made ready.
Ignores what goes wrong only the second time, or only on a GPU.
"""

from dataclasses import dataclass

from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine
from burstpool.errors import BurstpoolError, ShareError
from burstpool.fusion.array import FusedArray
from burstpool.job import Job, load_jobs
from burstpool.limits import available_bytes
from burstpool.run.setup import trace_job
from burstpool.share.background_process import cap_memory
from burstpool.share.base import Background
from burstpool.share.memory import reserve_bytes
from burstpool.share.preparing import LOADING, TRACING

_HANG_S = 60.0
"""For how long loading, or tracing, may take."""


class Rehearsal:
    """Of one background, going on since it was made. One owner; `close` ends the process."""

    def __init__(self, background: Background, *, memory_bytes: int | None = None, hang_s: float = _HANG_S) -> None:
        """It may allocate `memory_bytes` on the host, or what the machine has to spare."""
        wanted = _Rehearsed(
            background=background, memory_bytes=memory_bytes or max(available_bytes() - reserve_bytes(), 64 << 20)
        )
        self._workers = LocalEngine().start(_rehearse, wanted, num_workers=1, silence_s=hang_s)

    def check(self) -> None:
        """Returns when all went well; raises ShareError with the user's mistake, RunError with what else went wrong.

        The process is gone then, also one in which something of the user's goes on.
        """
        while (results := self._workers.results()) is None:
            self._workers.poll(0.25)
        self.close()
        if results[0]:
            raise ShareError(results[0])

    def close(self) -> None:
        """Whatever it does, it is over. May be called twice."""
        self._workers.terminate()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rehearsed:
    background: Background
    memory_bytes: int


def _rehearse(place: Place, wanted: _Rehearsed) -> str:
    """What the process runs; returns the user's mistake in words, if there is one."""
    cap_memory(wanted.memory_bytes)
    try:
        place.doing.say(LOADING)
        jobs = load_jobs(wanted.background.source, wanted.background.settings)
        place.doing.say(TRACING)
        _trace(jobs[0], in_array=len(jobs) > 1)
    except BurstpoolError as error:
        return str(error)
    return ""


def _trace(job: Job, *, in_array: bool) -> None:
    """As it is done later: an array holds models that cannot be split into layers. One member stands for all."""
    if in_array:
        FusedArray([job.build_model().train()], job.samples(job.batch)[0])
    else:
        trace_job(job)
