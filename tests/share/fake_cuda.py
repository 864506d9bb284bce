"""A GPU that is only a clock: what `share/gpu.py` and `at_work.py` use of `torch.cuda` and `time`, simulated.

A stream is the moment at which all that was queued on it has ended; work queued on it moves that moment. Streams do not
slow each other down. The host's time passes only where it waits or sleeps, and with each question whether an event is
over (`asking_s`), so that runs are the same every time.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from burstpool.errors import ShareError
from burstpool.share import at_work, gpu


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.asking_s = 0.0
        self.streams: list[Stream] = []
        self.current = Stream(self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)

    def work(self, length_s: float) -> None:
        """Queues work on the current stream."""
        self.current.ends_s = max(self.current.ends_s, self.now_s) + length_s


class Stream:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.ends_s = clock, 0.0
        clock.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        self.ends_s = max(self.ends_s, event.at_s)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at_s = clock, 0.0

    def record(self, stream: Stream) -> None:
        self.at_s = max(stream.ends_s, self.clock.now_s)

    def query(self) -> bool:
        self.clock.now_s += self.clock.asking_s
        return self.at_s <= self.clock.now_s

    def synchronize(self) -> None:
        self.clock.wait_until(self.at_s)

    def elapsed_time(self, other: "Event") -> float:
        return (other.at_s - self.at_s) * 1e3


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
        self._clock.wait_until(max(stream.ends_s for stream in self._clock.streams))


class _Torch:
    def __init__(self, clock: Clock) -> None:
        self.cuda = _Cuda(clock)

    def empty(self, *shape: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*shape, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Has `share/gpu.py` and `share/at_work.py` run on a clock."""
    clock = Clock()
    for module in (at_work, gpu):
        monkeypatch.setattr(module, "torch", _Torch(clock))
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(gpu, "waiter", lambda: clock.work)
    return clock


class FakeSteps:
    """A job's steps in pieces of given lengths; its loss is the number of the step."""

    def __init__(
        self, clock: Clock, *piece_s: float, stream: Stream | None = None, loss: Callable[[int], float] = float
    ) -> None:
        self.stream: Any = stream or Stream(clock)
        self.step = 0
        self.piece_times_s = list(piece_s)
        self.alone_s = sum(piece_s)
        self.ran: list[tuple[int, int]] = []
        """(step, piece), as they were queued."""
        self.began_s: list[float] = []
        """When each of them begins on the device."""
        self.pieces: Any = [self._piece(clock, index) for index in range(len(piece_s))]
        self.raises_in = -1
        self.moving_s = 0.0
        """How long leaving and coming back take the host."""
        self.moves: list[str] = []
        self.refuses = 0
        """How often there is no room to come back."""
        self.runs_out_in, self.changed = -1, False
        """Step in which the first piece finds no memory, once; and whether something was changed by then."""
        self._clock = clock
        self._loss = loss

    def _piece(self, clock: Clock, index: int) -> Callable[[], None]:
        def run() -> None:
            if self.step == self.raises_in:
                raise ValueError("a schedule of the user's")
            if self.step == self.runs_out_in:
                self.runs_out_in = -1
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.ran.append((self.step, index))
            self.began_s.append(max(clock.current.ends_s, clock.now_s))
            clock.work(self.piece_times_s[index])

        return run

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
    """Samples that are their number: `every_s` apart, none if that is infinite; fails `failing` times before each."""

    def __init__(self, clock: Clock, *, every_s: float = 0.0, failing: int = 0) -> None:
        self._clock, self._every_s, self._failing = clock, every_s, failing
        self._next, self._failed, self._ready_s = 0, 0, every_s
        self.restarts, self.closed = 0, False

    def take(self) -> Any:
        if self._failed < self._failing:
            self._failed += 1
            raise ShareError("sample 7 is broken")
        if self._clock.now_s < self._ready_s:
            return None
        self._failed, self._ready_s = 0, self._clock.now_s + self._every_s
        self._next += 1
        return self._next - 1

    def restart(self) -> None:
        self.restarts += 1

    def used(self, stream: Any) -> None: ...

    def close(self) -> None:
        self.closed = True
