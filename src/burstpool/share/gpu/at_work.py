"""Jobs at work on a GPU: their steps in pieces, their samples, their losses; and background jobs as the loop sees them.

What a step is made of is `Steps` (`graph_steps.py`, `array_steps.py`), where samples come from is `feeding.py`; here
they become a job that hands out one piece after the other, can leave the GPU and come back, and goes bad alone. The
loop that starts pieces is `loop.py`.
"""

import collections
import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from burstpool.errors import ShareError, in_a_line
from burstpool.run.loading import Batch
from burstpool.share.base import ENDLESS
from burstpool.share.gpu.evictions import Evictable, Where
from burstpool.share.gpu.feeding import Feeder
from burstpool.share.gpu.moving import give_back
from burstpool.share.gpu.pieces import Piece

MOST_RESTARTS = 3
"""How often a background job's loading may fail without a step in between."""
FEED_TIMEOUT_S = 120.0
"""How long samples of a foreground are waited for."""
NAP_S = 20e-6
"""Between two looks for them."""
LAST_STEP = "it has trained all of its steps"
"""Why a background has `ended` with which nothing is wrong."""
_LOSSES = 256
"""Places for losses on their way to the host: a background may be many short steps ahead of what was read."""


class Steps(Protocol):
    """A job's steps on a stream, in pieces: `GraphStep`, or a fused array's."""

    stream: torch.cuda.Stream
    step: int
    pieces: list[Piece]
    piece_times_s: list[float]
    alone_s: float

    @property
    def warm_up_steps(self) -> int: ...
    def warm_up(self, batches: Sequence[Sequence[Batch]]) -> torch.Tensor: ...
    def capture(self) -> None: ...
    def capture_as_cut(self) -> None: ...
    def let_go(self) -> None: ...
    def rehearsed(self) -> AbstractContextManager[Callable[[], None]]: ...
    def state(self) -> list[torch.Tensor]: ...
    def begin(self, batches: Sequence[Sequence[Batch]]) -> None: ...
    def end(self) -> torch.Tensor: ...
    def leave(self) -> None: ...
    def come_back(self) -> None: ...
    def undo(self) -> bool: ...


def move(steps: Steps, stream: torch.cuda.Stream, *, as_cut: bool = False) -> None:
    """Captures a step again for another stream of the same GPU; trains nothing.

    `as_cut`: in the pieces it had, with the times they had, instead of measuring where to cut it there.
    """
    steps.let_go()
    give_back()  # a capture cannot have memory that another graph is only waiting to hand back
    steps.stream = stream
    if as_cut:
        steps.capture_as_cut()
    else:
        steps.capture()


class JobAtWork:
    """One job on the GPU: its steps, its samples, its losses."""

    def __init__(self, name: str, steps: Steps, feeder: Feeder) -> None:
        self.name, self.steps, self.feeder = name, steps, feeder
        self.losses: list[list[float]] = []
        """Of every finished step, one number for each model that is trained."""
        self.capture_s = 0.0
        """How long the capture took."""
        self.position = feeder.position
        """Where the samples of the step after the last whole one begin."""
        self._late: collections.deque[tuple[torch.Tensor, torch.cuda.Event]] = collections.deque()
        self._hosts: list[torch.Tensor] = []
        """Places in pinned memory that losses can be copied to."""

    def start(self, *, most_steps: int | None = None) -> None:
        """The eager steps, `most_steps` at most, then the capture."""
        while self.steps.warm_up_steps and (most_steps is None or len(self._late) < most_steps):
            batch = self.wait_for_batch()
            loss = self.steps.warm_up(batch)
            self.feeder.used(self.steps.stream)
            self.read_later(loss)
        begun_s = time.monotonic()
        self.steps.capture()
        self.capture_s = time.monotonic() - begun_s

    def wait_for_batch(self) -> list[list[Batch]]:
        """The next samples, waited for."""
        deadline = time.monotonic() + FEED_TIMEOUT_S
        while (batch := self.feeder.take()) is None:
            if time.monotonic() > deadline:
                raise ShareError(f"no samples of {self.name} came within {FEED_TIMEOUT_S:g} s")
            time.sleep(NAP_S)
        return batch

    def read_later(self, loss: torch.Tensor) -> None:
        """A step has ended: has its loss copied to the host without waiting for it."""
        self.position = self.feeder.position
        if not self._hosts or (self._hosts[-1].shape, self._hosts[-1].dtype) != (loss.shape, loss.dtype):
            # As a rule only once: taking pinned memory may wait for all that the GPU was given.
            self._hosts = [*torch.empty((_LOSSES, *loss.shape), dtype=loss.dtype, pin_memory=True)]
        with torch.cuda.stream(self.steps.stream):
            host = self._hosts.pop()
            host.copy_(loss, non_blocking=True)
            self._late.append((host, recorded(self.steps.stream)))

    def read(self, *, all_of_them: bool = False) -> bool:
        """Takes in the losses that have arrived; whether in each step any number was finite.

        A member of an array that turns NaN stops alone.
        """
        finite = True
        while self._late:
            host, event = self._late[0]
            if all_of_them:
                event.synchronize()
            elif not event.query():  # type: ignore[no-untyped-call]
                break
            self._late.popleft()
            self.losses.append([float(x) for x in host.reshape(-1)])
            self._hosts.append(host)
            finite = finite and any(map(math.isfinite, self.losses[-1]))
        return finite


class Marker(Protocol):
    """Tells whether something that was started has ended; a CUDA event is one."""

    def query(self) -> bool:
        """Whether it has."""
        ...


class Filler(Evictable, Protocol):
    """A background job, whoever runs it: starts one piece of its work after the other."""

    done_s: float
    """Work that was started, by its time alone."""
    steps_done: int
    last_step_s: float | None
    """When it had trained all of its steps, by `time.monotonic`; None as long as it has not. It is `ended` then too."""

    @property
    def next_s(self) -> float:
        """How long the next piece takes alone."""
        ...

    @property
    def next_place(self) -> int:
        """Which piece of its step that is."""
        ...

    @property
    def queue(self) -> Hashable:
        """What its pieces stand in until they run, one after the other: a stream. None where they begin at once."""
        ...

    def launch(self, gate: torch.cuda.Event | None) -> Marker | None:
        """Starts the next piece, once the GPU has passed the gate; None if it has nothing to do now."""
        ...

    def look_after(self) -> None:
        """Now and then: ends it when it has gone bad. Never raises."""
        ...

    def finish(self) -> None:
        """Ends the step that has begun, and waits for it."""
        ...

    def close(self) -> None:
        """Lets go of its processes. May be called twice."""
        ...


class PieceSpan(NamedTuple):
    """A background piece on the device: a `Marker`, and when it ran."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event

    def query(self) -> bool:
        """See `Marker`."""
        return bool(self.end.query())  # type: ignore[no-untyped-call]


class BackgroundWork:
    """A captured background job: hands out one piece after the other, as long as its samples come."""

    leaves_by_itself = False

    def __init__(self, work: JobAtWork, *, most_steps: int = ENDLESS) -> None:
        """`most_steps`: at which step it has ended, those included that it has trained by now."""
        self.name, self.work = work.name, work
        self.steps_done = 0
        self.done_s = 0.0
        self.ended = ""
        self.last_step_s: float | None = None
        self.where: Where = "here"
        self._next = 0
        self._failures = 0
        self._is_finite = True
        self._most_steps = most_steps
        self._end_at_last()

    @property
    def next_s(self) -> float:
        """See `Filler`."""
        return self.work.steps.piece_times_s[self._next]

    @property
    def next_place(self) -> int:
        """See `Filler`."""
        return self._next

    @property
    def queue(self) -> torch.cuda.Stream:
        """See `Filler`."""
        return self.work.steps.stream

    def launch(self, gate: torch.cuda.Event | None) -> "PieceSpan | None":
        """See `Filler`."""
        try:
            return self._launch(gate)
        except (Exception, SystemExit) as error:  # whatever its optimizer or its schedule does between graphs
            self.end(in_a_line(error))
            return None

    def _launch(self, gate: torch.cuda.Event | None) -> "PieceSpan | None":
        steps = self.work.steps
        if self.ended or self.where == "away":
            return None
        batch = self._next_batch() if self._next == 0 else None
        if self._next == 0 and batch is None:
            return None
        if gate is not None:
            steps.stream.wait_event(gate)
        if batch is not None:
            steps.begin(batch)
            self.work.feeder.used(steps.stream)
        self.done_s += self.next_s
        begin = recorded(steps.stream, timing=True)
        with torch.cuda.stream(steps.stream):
            steps.pieces[self._next]()
        end = recorded(steps.stream, timing=True)
        self._next += 1
        if self._next == len(steps.pieces):
            self.work.read_later(steps.end())
            self._next = 0
            self.steps_done += 1
            self._failures = 0
            self._end_at_last()
        return PieceSpan(self.name, begin, end)

    def _end_at_last(self) -> None:
        """Its process, which has nothing to load any more, goes with the others: ending one takes a moment."""
        if self.work.steps.step >= self._most_steps:
            self.ended, self.last_step_s = LAST_STEP, time.monotonic()

    @property
    def is_sound(self) -> bool:
        """Whether its state is that after whole steps with finite losses, as far as is known."""
        return self._is_finite and not self._next

    def look_after(self) -> None:
        """See `Filler`."""
        self._read()

    def finish(self) -> None:
        """See `Filler`; a step that has begun is gone through with, so that its state is that of whole steps."""
        while self._next and not self.ended:
            self.launch(None)
        self._read(all_of_them=True)

    def _read(self, *, all_of_them: bool = False) -> None:
        if self.work.read(all_of_them=all_of_them):
            return
        self._is_finite = False
        if not self.ended or self.last_step_s is not None:
            self.last_step_s = None
            self.end("the loss is not finite")

    def leave(self, *, at_once: bool = False) -> None:
        """See `Evictable`."""
        self.where = "leaving"
        if self._next and not at_once:
            return
        self.finish()
        try:
            self.work.steps.leave()
        except Exception as error:  # the host's memory is full, say
            self.end(in_a_line(error))
        self.where = "away"

    def come_back(self) -> None:
        """See `Evictable`."""
        try:
            self.work.steps.come_back()
        except torch.OutOfMemoryError:
            return
        except Exception as error:
            self.end(in_a_line(error))
            return
        self.where = "here"

    def close(self) -> None:
        """See `Filler`."""
        self.work.feeder.close()

    def end(self, reason: str) -> None:
        """Never to be run again; its state stays."""
        self.ended = reason
        self.close()

    def _next_batch(self) -> list[list[Batch]] | None:
        """Samples for a step, if there are any and it is to begin one."""
        if self.where == "leaving":
            return None
        try:
            return self.work.feeder.take()
        except ShareError as error:
            self._failures += 1
            if self._failures >= MOST_RESTARTS:
                self.end(str(error))
            else:
                self.work.feeder.restart()
            return None


def recorded(stream: torch.cuda.Stream, *, timing: bool = False) -> torch.cuda.Event:
    """An event at the end of what the stream was given so far."""
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
