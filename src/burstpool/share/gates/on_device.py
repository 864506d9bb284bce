"""When a device gets there: has things done at the moment at which a GPU has finished what it was given before.

A worker that drives a GPU is ahead of it: what it says it does, the device will do some milliseconds later. So what it
says is marked in the device's queue, and a thread passes it on as the device comes by. A mark costs the worker some
microseconds; the thread sleeps in between.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

_END_S = 60.0
"""How long what is still on its way is waited for at the end."""


class Mark(Protocol):
    """A place in a device's queue; a CUDA event is one."""

    def synchronize(self) -> None:
        """Waits until the device has come there."""
        ...


class WhenReached:
    """Does one thing after the other, each when the device has come to the place at which it was given."""

    def __init__(self, mark: Callable[[], Mark]) -> None:
        """`mark` puts a mark behind all that the device was given so far."""
        self._mark = mark
        self._waiting: queue.SimpleQueue[tuple[Mark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="when the device gets there", daemon=True)
        self._thread.start()

    def __call__(self, action: Callable[[], None]) -> None:
        """Has it done, by another thread, when the device gets here."""
        self._waiting.put((self._mark(), action))

    def finish(self) -> None:
        """Returns when all of it is done, or the device does not get there in good time."""
        self._waiting.put(None)
        self._thread.join(_END_S)

    def _pass_on(self) -> None:
        while (item := self._waiting.get()) is not None:
            mark, action = item
            with contextlib.suppress(RuntimeError):  # a device that has failed: the worker itself will say so
                mark.synchronize()
            action()


def cuda_mark() -> Mark:
    """A CUDA event on the current stream, at which a thread sleeps rather than spins."""
    import torch

    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
