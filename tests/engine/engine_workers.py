"""What test workers do. Apart from the tests, so that a worker process starts without importing torch."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from burstpool.engine.base import PeerError, Place, phrase


def echo(place: Place, task: str) -> str:
    place.report(f"hello from {place.rank}")
    return f"{task} {place.rank} of {place.num_workers}"


def large(place: Place, size: int) -> bytes:
    return bytes(size)


def fail_second(place: Place, task: Any) -> None:
    place.doing.begin_step(3)
    place.doing.say(phrase("thinking"))
    if place.rank == 1:
        raise ValueError("no\nluck")
    time.sleep(600)


def lose_peer(place: Place, task: str) -> None:
    """The first only loses the second, which dies a moment later."""
    place.doing.say(phrase("waiting for the second" if place.rank == 0 else "about to die"))
    _meet(place, task)
    if place.rank == 0:
        raise PeerError("waited for rank 1: the connection was closed")
    time.sleep(0.5)
    os._exit(7)


def hang_second(place: Place, task: str) -> None:
    place.doing.say(phrase("waiting" if place.rank == 0 else "hanging"))
    _meet(place, task)
    if place.rank == 1:
        time.sleep(600)
    raise PeerError("waited for rank 1: it did not come in time")


def _meet(place: Place, file: str) -> None:
    """The first waits until the second is there, however long it takes to start."""
    if place.rank == 1:
        Path(file).touch()
    while not Path(file).exists():
        time.sleep(0.01)


def hang(place: Place, task: Any) -> None:
    place.doing.say(phrase("hanging"))
    time.sleep(600)


def until_asked(place: Place, task: Any) -> str:
    while not place.stop_asked():
        time.sleep(0.01)
        place.doing.begin_step(int(time.monotonic() * 100))
    return "stopped"


def outlive_sigterm(place: Place, task: Any) -> int:
    """Has a child of its own that waits; returns the number of the signal that ended it."""
    ready, say_ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say_ready, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(child, signal.SIGTERM)
    return os.WTERMSIG(os.waitpid(child, 0)[1])
