"""Feeding: a job's batches, loaded by a process of its own into pinned memory that a GPU can copy from.

The process that drives a GPU must never wait for the code of a background job, nor share Python's lock with it. So
samples are loaded elsewhere, into a ring of fixed places; the driver takes the next one if it is there and never waits.
What a data set does wrong (raises, hangs, eats memory, is killed) happens there: `take` finds out, and the order of
the samples is kept by the driver, so that a new process goes on where the last one failed.
Ignores batches whose shapes change from step to step; they cannot be captured either.
"""

import os
import signal
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing
from torch.utils import _pytree as pytree

from burstpool.engine.local import die_with, kill_at_exit, leave_signals_to_the_parent
from burstpool.errors import JobError, ShareError, in_a_line
from burstpool.job import Job
from burstpool.run.loading import Batch, Batches
from burstpool.run.order import Position
from burstpool.run.worker import JobSource
from burstpool.share.background_process import cap_memory

_PLACES = 3
"""Batches that may be loaded ahead."""
_START_S = 120.0
"""How long a process may take to import what it needs."""
_KILLED_S = 1.0
"""How long it is waited for after it was killed."""


class Feeder:
    """Batches of one job, in their order. One owner; `close` ends the process."""

    def __init__(
        self,
        source: JobSource | Job,
        job: Job,
        *,
        position: Position | None = None,
        memory_bytes: int | None = None,
        hang_s: float = 30.0,
        niceness: int = 0,
    ) -> None:
        """`source` is what the process loads the job from; `job` is the same, loaded here.

        A process that takes more than `memory_bytes` besides what it starts with fails alone, as does one that gives
        nothing for `hang_s` although there is room.
        """
        self._source, self._job = source, job
        self._memory_bytes, self._hang_s, self._niceness = memory_bytes, hang_s, niceness
        self._order = _batches(job)
        if position is not None:
            self._order.start_at(position)
        first = self._first()
        self._leaves, self._tree = pytree.tree_flatten((first.inputs, first.target))
        if odd := [leaf for leaf in self._leaves if not isinstance(leaf, torch.Tensor)]:
            raise JobError(f"a batch of job {job.name!r} holds a {type(odd[0]).__name__}, which is no tensor")
        self._places = [_pinned(self._leaves) for _ in range(_PLACES)]
        # Also where nobody calls `close`: memory that is freed while it is pinned can never be pinned again.
        self._unpin = weakref.finalize(self, _unpin, self._places)
        self._unpin.atexit = False
        self._copied: list[torch.cuda.Event | None] = [None] * _PLACES
        self._next = 0
        self._lent: int | None = None
        self._context = torch.multiprocessing.get_context("spawn")
        self._process: Any = None
        self.restarts = 0
        """Processes that had to be replaced."""
        self._start()

    @property
    def position(self) -> Position:
        """Where the next batch that `take` gives begins."""
        return self._position

    def take(self) -> list[list[Batch]] | None:
        """The next batch, in pinned memory that stays as it is until `used`; None if it is not there yet.

        Raises ShareError when the process has failed; `restart` then begins another at the same batch.
        """
        assert self._lent is None, "the last batch was not given back with `used`"
        self._give_back()
        if not self._ready.acquire(block=False):
            self._look_after()
            return None
        self._heard = time.monotonic()
        self._lent = self._next
        inputs, target = pytree.tree_unflatten(self._places[self._lent], self._tree)
        return [[Batch(0, self._job.batch, inputs, target)]]

    def used(self, stream: torch.cuda.Stream | None) -> None:
        """The batch has been read, or will have been when `stream` has done what it was given so far."""
        assert self._lent is not None
        if stream is None:
            self._copied[self._lent] = None
        else:
            self._copied[self._lent] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        self._unreturned.append(self._lent)
        self._next, self._lent = (self._next + 1) % _PLACES, None
        self._order.skip()
        self._position = self._order.position

    def restart(self) -> None:
        """Replaces a process that has failed."""
        self._end()
        for event in self._copied:
            if event is not None:
                event.synchronize()
        self._next, self._lent = 0, None
        self.restarts += 1
        self._start()

    def close(self) -> None:
        """Ends the process. May be called twice."""
        self._end()
        self._unpin()
        self._places = []

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            # One that waits for a disk or a network file system dies when that answers, which may be never.
            self._process.join(_KILLED_S)
            self._failure.close()
            self._process = None

    def _start(self) -> None:
        self._ready, self._free = self._context.Semaphore(0), self._context.Semaphore(_PLACES)
        self._unreturned: list[int] = []
        self._failure, theirs = self._context.Pipe(duplex=False)
        self._position = self._order.position
        self._heard = time.monotonic() + _START_S
        self._process = self._context.Process(
            target=_feed,
            args=(self._source, self._position, self._places, self._ready, self._free, theirs),
            kwargs={
                "memory_bytes": self._memory_bytes,
                "niceness": self._niceness,
                "batch": self._job.batch,
                "parent": os.getpid(),
            },
            daemon=True,
        )
        self._process.start()
        kill_at_exit(self, [self._process])
        theirs.close()

    def _give_back(self) -> None:
        """Places whose copy has ended may be filled again."""
        while self._unreturned:
            event = self._copied[self._unreturned[0]]
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                return
            self._unreturned.pop(0)
            self._free.release()
            self._heard = max(self._heard, time.monotonic())

    def _look_after(self) -> None:
        if self._failure.poll():
            try:
                raise ShareError(f"loading samples of job {self._job.name!r} failed: {self._failure.recv()}")
            except EOFError:
                pass
        if not self._process.is_alive():
            code = self._process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with status {code}"
            raise ShareError(f"the process that loads samples of job {self._job.name!r} {how}")
        if time.monotonic() - self._heard > self._hang_s and len(self._unreturned) < _PLACES:
            raise ShareError(f"loading samples of job {self._job.name!r} has given nothing for {self._hang_s:g} s")

    def _first(self) -> Batch:
        """For the shapes; the position stays."""
        position = self._order.position
        batch = self._order.load()[0][0]
        self._order.start_at(position)
        return batch


def _batches(job: Job) -> Batches:
    return Batches(job, ((0, job.batch),), batch=job.batch)


def _pinned(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Shared with the process that fills them, and known to the GPU's copy engine where there is one."""
    places = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
    for place in places:
        place.share_memory_()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        for place in places:
            size = place.numel() * place.element_size()
            if size:
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(cudart.cudaHostRegister(place.data_ptr(), size, 0))
    return places


def _unpin(places: Sequence[Sequence[torch.Tensor]]) -> None:
    if not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    for place in (leaf for leaves in places for leaf in leaves if leaf.numel()):
        torch.cuda.cudart().cudaHostUnregister(place.data_ptr())  # type: ignore[no-untyped-call]


def _feed(
    source: JobSource | Job,
    position: Position,
    places: Sequence[Sequence[torch.Tensor]],
    ready: Any,
    free: Any,
    failure: Connection,
    *,
    batch: int,
    memory_bytes: int | None,
    niceness: int,
    parent: int,
) -> None:
    """What the process runs."""
    die_with(parent)
    leave_signals_to_the_parent()
    os.nice(niceness)
    torch.set_num_threads(1)
    try:
        job = source.load() if isinstance(source, JobSource) else source
        batches = Batches(job, ((0, batch),), batch=batch)
        batches.start_at(position)
        if memory_bytes is not None:
            cap_memory(memory_bytes)
        place = 0
        while True:
            free.acquire()
            loaded = batches.load()[0][0]
            leaves = pytree.tree_leaves((loaded.inputs, loaded.target))
            for target, leaf in zip(places[place], leaves, strict=True):
                if target.shape != leaf.shape:
                    raise ShareError(f"a batch of shape {tuple(leaf.shape)} came after one of {tuple(target.shape)}")
                target.copy_(leaf)
            place = (place + 1) % len(places)
            ready.release()
    except BaseException as error:  # whatever the user's data does
        failure.send(in_a_line(error))
        raise SystemExit(1) from None
