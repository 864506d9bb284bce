"""Waiting for other workers: with a timeout, and words for who did not answer."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from burstpool.engine.base import PeerError


def wait_for(work: dist.Work, timeout: timedelta, what: str) -> None:
    """Waits until the communication has ended; `what` says, after "waited for", what and from whom."""
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise PeerError(f"waited for {what}: {reason(error)}") from error


@contextlib.contextmanager
def naming_peers(what: str) -> Iterator[None]:
    """Turns torch.distributed's errors into one that says what was waited for."""
    try:
        yield
    except RuntimeError as error:
        if not is_communication(error):
            raise
        raise PeerError(f"waited for {what}: {reason(error)}") from error


_SIGNS = ("gloo", "nccl", "timed out", "timeout", "connection closed", "connection reset", "broken pipe")
"""How errors of communication can be told: torch raises them all as RuntimeError."""


def is_communication(error: BaseException) -> bool:
    """Whether torch.distributed raised it because a peer is late or gone."""
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


def reason(error: BaseException) -> str:
    """Its message in one short line."""
    text = str(error).lower()
    if "closed" in text or "reset" in text or "broken pipe" in text:
        return "the connection was closed"
    if "timed out" in text or "timeout" in text:
        return "it did not come in time"
    return " ".join(str(error).split())[:200]
