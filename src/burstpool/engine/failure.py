"""Failures: what is said when a worker ends otherwise than it should.

Takes what the workers of a run raised, how they died, and what they were doing. Decides which of them is the cause: one
that raised or died by itself before those that only lost it, and these before one that nobody heard from. Pure, but for
reading tracebacks.
"""

import os
import signal
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from burstpool.engine.base import PeerError
from burstpool.errors import BurstpoolError, RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one worker failed."""

    rank: int
    reason: Literal["raised", "lost a peer", "died", "silent"]
    message: str
    """One line."""
    doing: str
    """What it was doing then, in words."""
    trace: str = ""
    """The whole traceback, where there is one."""


class WorkerError(RunError):
    """Some workers failed; the message names the cause."""

    def __init__(self, message: str, *, traces: Mapping[int, str]) -> None:
        super().__init__(message)
        self.traces = traces
        """Rank → traceback, of those that raised."""


def failure_of(rank: int, error: BaseException, *, doing: str) -> Failure:
    """An exception as data that travels between processes."""
    line = " ".join(str(error).split()) or "no message"
    where = user_line(error)
    ours = isinstance(error, BurstpoolError)
    message = line if ours else f"{type(error).__name__}: {line}"
    return Failure(
        rank=rank,
        reason="lost a peer" if isinstance(error, PeerError) else "raised",
        message=message + (f" ({where})" if where and not ours else ""),
        doing=doing,
        trace="".join(traceback.format_exception(error)),
    )


def died(rank: int, exit_code: int | None, *, doing: str) -> Failure:
    """A process that ended without a word."""
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
        how = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        how = f"ended with exit status {exit_code}"
    return Failure(rank=rank, reason="died", message=how, doing=doing)


def explain(failures: Sequence[Failure], silent: Mapping[int, str], *, silence_s: float) -> WorkerError:
    """The error to raise: names the worker that is the cause, and what it was doing.

    `silent` are workers that neither failed nor finished, with what they are doing.
    """
    ranked = sorted(failures, key=lambda failure: ("died", "raised", "silent", "lost a peer").index(failure.reason))
    traces = {failure.rank: failure.trace for failure in failures if failure.trace}
    first = ranked[0]
    if first.reason in ("died", "raised"):
        verb = first.message if first.reason == "died" else f"failed: {first.message}"
        return WorkerError(f"rank {first.rank} {verb}; it was {first.doing}", traces=traces)
    if first.reason == "silent":
        silent = {**silent, first.rank: first.doing}
    if not silent:
        return WorkerError(f"rank {first.rank} {first.message}; it was {first.doing}", traces=traces)
    who = " and ".join(f"rank {rank} ({doing})" for rank, doing in sorted(silent.items()))
    waited = next((failure for failure in ranked if failure.reason == "lost a peer"), None)
    seen = f"; rank {waited.rank}, {waited.doing}, {waited.message}" if waited is not None else ""
    return WorkerError(f"no answer from {who} within {silence_s:g} s{seen}", traces=traces)


_NOT_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_paths()["stdlib"] + os.sep,
    sysconfig.get_paths()["purelib"] + os.sep,
    "<",
)
"""Where code lies that is not the user's: Burstpool, Python, installed packages, generated code."""


def user_line(error: BaseException) -> str:
    """`file:line` of the innermost frame in the user's own code; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_USERS)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
