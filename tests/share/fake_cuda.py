"""A GPU that is only a clock: what `share/gpu/loop.py` and `at_work.py` use of `torch.cuda` and `time`, simulated.

A stream is a queue of work, of events to record and of events to wait for, as on a real one. The device goes on as the
host's time does; work on a stream with a `cost` takes longer while another stream works. The host's time passes where
it waits or sleeps, and with `jitter` also with everything that it asks of the GPU: between any two lines, as on a real
one. All by seeds, so that runs are the same every time.

Does not model: that background streams slow each other down, or that the foreground slows them down.
"""

import collections
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from burstpool.errors import ShareError
from burstpool.share.gpu import at_work, loop, moving

_SLACK_S = 5e-5
"""What Linux lets a thread sleep longer than it asked to."""


@dataclass(slots=True, eq=False)
class Work:
    """On a stream; without `computes` it only takes time."""

    left_s: float
    computes: bool = True
    began_s: float = math.inf
    ended_s: float = math.inf


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.asking_s = 0.0
        """How long each question whether an event is over takes the host."""
        self.host_s: Callable[[], float] = float
        """How long the next thing that the host asks of the GPU, or of a feeder, takes it."""
        self.pinned = 0
        """How often pinned memory was taken."""
        self.streams: list[Stream] = []
        self.current = Stream(self)
        self._device_s = self._next_s = 0.0
        """How far the device was simulated, and when something ends or begins on it next."""

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s + _SLACK_S

    def pass_time(self) -> None:
        """The host does something, and the device goes on meanwhile."""
        self.now_s += self.host_s()
        self._go_on(self.now_s)

    def wait_for(self, is_over: Callable[[], bool]) -> None:
        """The host sleeps until the device has come so far."""
        self._go_on(self.now_s)
        while not is_over():
            assert self._next_s < math.inf, "the host waits for what never comes"
            self._go_on(self._next_s)
        self.now_s = max(self.now_s, self._device_s)

    def queue(self, stream: "Stream", entry: Any) -> None:
        """Takes the host a moment."""
        self.pass_time()
        if not stream.queue:
            self._run(self.now_s)
            self._next_s = self.now_s
        stream.queue.append(entry)

    def work(self, length_s: float, *, computes: bool = True) -> Work:
        """Queues work on the current stream."""
        queued = Work(length_s, computes)
        self.queue(self.current, queued)
        return queued

    def idle(self, length_s: float) -> None:
        """Queues a wait."""
        self.work(length_s, computes=False)

    def _go_on(self, until_s: float) -> None:
        while self._next_s <= until_s:
            self._run(self._next_s)
            while any(stream.begin(self._device_s) for stream in self.streams):
                pass
            running = self._running()
            self._next_s = min((self._device_s + work.left_s / speed for _, work, speed in running), default=math.inf)

    def _run(self, until_s: float) -> None:
        """As far as nothing begins meanwhile."""
        for stream, work, speed in self._running():
            work.left_s -= (until_s - self._device_s) * speed
            if work.left_s <= 1e-12 or until_s + work.left_s == until_s:
                work.ended_s = until_s
                stream.queue.popleft()
        self._device_s = until_s

    def _running(self) -> list[tuple["Stream", Work, float]]:
        """Work under way, and how fast it is."""
        works = [(stream, stream.queue[0]) for stream in self.streams if stream.is_running]
        computing = sum(work.computes for _, work in works)
        return [(x, work, 1 - x.cost if work.computes and computing > 1 else 1.0) for x, work in works]


def jitter(seed: int) -> Callable[[], float]:
    """Microseconds as a rule, now and then tens of them, rarely a millisecond: another program has the core."""
    draw = random.Random(seed)
    return lambda: 1e-3 if draw.random() < 2e-3 else min(draw.expovariate(1 / 3e-6), 5e-5)


class Stream:
    def __init__(self, clock: Clock, *, cost: float = 0.0) -> None:
        """`cost`: what a second of others' work beside it adds to its own."""
        self.clock, self.cost = clock, cost
        self.queue: collections.deque[Any] = collections.deque()
        """`Work`, an event to record (`_Record`), or one to wait for."""
        clock.streams.append(self)

    @property
    def is_running(self) -> bool:
        return bool(self.queue) and isinstance(self.queue[0], Work) and self.queue[0].began_s < math.inf

    def begin(self, now_s: float) -> bool:
        """Does what takes no time; whether there was anything."""
        before = len(self.queue)
        while self.queue:
            match self.queue[0]:
                case Work() as work:
                    work.began_s = min(work.began_s, now_s)
                    break
                case _Record(event):
                    event.at_s = now_s
                case Event(at_s=None):
                    break
            self.queue.popleft()
        return len(self.queue) < before

    def wait_event(self, event: "Event") -> None:
        self.clock.queue(self, event)


class Event:
    """Recorded once."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at_s: float | None = 0.0
        """When the device passed it."""

    def record(self, stream: Stream) -> None:
        self.at_s = None
        self.clock.queue(stream, _Record(self))

    def query(self) -> bool:
        self.clock.now_s += self.clock.asking_s
        self.clock.pass_time()
        return self.at_s is not None

    def synchronize(self) -> None:
        self.clock.wait_for(lambda: self.at_s is not None)

    def elapsed_time(self, other: "Event") -> float:
        assert self.at_s is not None
        assert other.at_s is not None
        return (other.at_s - self.at_s) * 1e3


@dataclass(frozen=True, slots=True)
class _Record:
    event: Event


class _Cuda:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.Event = lambda enable_timing=False: Event(clock)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._clock.current = self._clock.current, stream
        try:
            yield
        finally:
            self._clock.current = before

    def current_stream(self) -> Stream:
        return self._clock.current

    def synchronize(self) -> None:
        self._clock.wait_for(lambda: not any(stream.queue for stream in self._clock.streams))


class _Torch:
    def __init__(self, clock: Clock) -> None:
        self.cuda, self._clock = _Cuda(clock), clock

    def empty(self, *shape: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        self._clock.pinned += 1
        return torch.empty(*shape, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *others: Any) -> Clock:
    """Has `share/gpu/loop.py`, `share/gpu/at_work.py` and other modules run on a clock."""
    clock = Clock()
    for module in (at_work, loop, *others):
        monkeypatch.setattr(module, "torch", _Torch(clock))
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(loop, "waiter", lambda: clock.idle)
    without_collector(monkeypatch)
    return clock


def without_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going through all that a process of tests has imported, for memory that is not there, takes half a second."""
    monkeypatch.setattr(moving, "gc", Mock(get_freeze_count=int))


class FakeSteps:
    """A job's steps in pieces of given lengths; its loss is the number of the step."""

    def __init__(
        self,
        clock: Clock,
        *piece_s: float,
        stream: Stream | None = None,
        loss: Callable[[int], float] = float,
        factor: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`factor`: how long the next piece takes over what is known of it."""
        self.stream: Any = stream or Stream(clock)
        self.step = 0
        self.piece_times_s = list(piece_s)
        self.piece_s = max(piece_s)
        self.alone_s = sum(piece_s)
        self.ran: list[tuple[int, int]] = []
        """(step, piece), as they were queued."""
        self.works: list[Work] = []
        """What they are on the device."""
        self.launched_s: list[float] = []
        """When the host asked for each."""
        self.pieces: Any = [self._piece(clock, index) for index in range(len(piece_s))]
        self.raises_in = -1
        self.moving_s = 0.0
        """How long leaving and coming back take the host."""
        self.moves: list[str] = []
        self.refuses = 0
        """How often there is no room to come back."""
        self.runs_out_in, self.changed = -1, False
        """Step in which the first piece finds no memory, once; and whether something was changed by then."""
        self._clock, self._loss, self._factor = clock, loss, factor

    def _piece(self, clock: Clock, index: int) -> Callable[[], None]:
        def run() -> None:
            if self.step == self.raises_in:
                raise ValueError("a schedule of the user's")
            if self.step == self.runs_out_in:
                self.runs_out_in = -1
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.launched_s.append(clock.now_s)
            self.ran.append((self.step, index))
            self.works.append(clock.work(self._factor() * self.piece_times_s[index]))

        return run

    @property
    def began_s(self) -> list[float]:
        """When each of them began on the device; infinity for those that have not."""
        return [work.began_s for work in self.works]

    warm_up_steps = 0

    def warm_up(self, batches: Any) -> torch.Tensor:
        raise AssertionError("nothing to warm up")

    def capture(self) -> None: ...

    def capture_as_cut(self) -> None: ...

    def leave(self) -> None:
        self._clock.sleep(self.moving_s)
        self.moves.append(f"leaves after step {self.step}")

    def come_back(self) -> None:
        self._clock.sleep(self.moving_s)
        if self.refuses:
            self.refuses -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.moves.append(f"comes back before step {self.step}")

    def undo(self) -> bool:
        return not self.changed

    def begin(self, batches: Any) -> None:
        assert batches == self.step  # samples come in their order

    def end(self) -> torch.Tensor:
        self.step += 1
        return torch.tensor(self._loss(self.step - 1))


class FakeFeeder:
    """Samples that are their number: `every_s` apart, none if that is infinite; fails `failing` times before each.

    Like `Feeder` it has so many `places` for samples, each taken until the GPU has copied what is in it.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        every_s: float = 0.0,
        failing: int = 0,
        places: int = 3,
        late_s: Callable[[], float] = float,
    ) -> None:
        """`late_s`: what the next samples take longer."""
        self._clock, self._every_s, self._failing, self._late_s = clock, every_s, failing, late_s
        self._next, self._failed, self._ready_s = 0, 0, every_s
        self._places, self._lent = places, collections.deque[Event]()
        self.restarts, self.closed = 0, False

    def take(self) -> Any:
        self._clock.pass_time()
        if self._failed < self._failing:
            self._failed += 1
            raise ShareError("sample 7 is broken")
        while self._lent and self._lent[0].at_s is not None:
            self._lent.popleft()
        if self._clock.now_s < self._ready_s or len(self._lent) >= self._places:
            return None
        self._failed, self._ready_s = 0, self._clock.now_s + self._every_s + self._late_s()
        self._next += 1
        return self._next - 1

    @property
    def position(self) -> Any:
        return self._next

    def restart(self) -> None:
        self.restarts += 1

    def used(self, stream: Any) -> None:
        copied = Event(self._clock)
        copied.record(stream)
        self._lent.append(copied)

    def close(self) -> None:
        self.closed = True
