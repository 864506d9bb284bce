"""Engines: the protocol by which worker processes are started, watched and ended.

An engine runs one function in as many processes as there are devices. It knows nothing of training: workers tell it
what they are doing in words, report whatever they like, and return a result or fail. One implementation a file;
`local.py` is the simplest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from burstpool.errors import RunError


class PeerError(RunError):
    """Another worker did not answer: a consequence, not the cause, of what went wrong."""


class Doing(Protocol):
    """Where a worker writes what it is doing, so that it can be read even after the worker was killed."""

    def begin_step(self, step: int) -> None:
        """A step of training begins. Costs well under a microsecond, as does `say`."""
        ...

    def say(self, phrase: bytes) -> None:
        """Goes on to something else; `phrase` comes from `burstpool.engine.base.phrase`."""
        ...


PHRASE_BYTES = 160


def phrase(text: str) -> bytes:
    """Words for `Doing.say`, made beforehand."""
    return text.encode()[:PHRASE_BYTES].ljust(PHRASE_BYTES, b"\0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a worker knows of where it runs."""

    rank: int
    num_workers: int
    host: str
    port: int
    """Address of a torch.distributed TCPStore at which the workers find each other; port 0 where they find each other
    by environment variables, as under torchrun."""
    local_rank: int
    """Its number among the workers of its machine."""
    num_local: int
    """How many these are."""
    doing: Doing
    report: Callable[[Any], None]
    """Hands something to whoever watches the workers. May be called from the worker's main thread only."""
    stop_asked: Callable[[], bool]
    """Whether somebody asked the workers to stop; at least rank 0 gets to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something a worker handed over."""

    rank: int
    content: Any


class Workers(Protocol):
    """Started workers. One owner, not thread-safe. Whatever happens, the owner must call `terminate` at the end."""

    def poll(self, timeout_s: float) -> list[Report]:
        """What was reported since the last call; waits up to the timeout for something.

        Raises RunError, with no worker left running, when one of them failed, died or was silent for too long.
        """
        ...

    def results(self) -> list[Any] | None:
        """What the workers returned, by rank; None while any of them is running."""
        ...

    def ask_to_stop(self) -> None:
        """Lets the workers end by themselves, soon."""
        ...

    def terminate(self) -> None:
        """Ends all workers now; no process is left when it returns. May be called twice."""
        ...


class Engine(Protocol):
    """Starts workers."""

    def start(self, work: Callable[[Place, Any], Any], task: Any, *, num_workers: int, silence_s: float) -> Workers:
        """Runs `work(place, task)` in so many processes.

        `work` and `task` must be picklable. A worker that does not say what it does for `silence_s` has hung.
        """
        ...
