"""Measured messages: by how much one between two CPU workers lengthens the steps of workers that compute.

Returns, for some sizes, seconds from a worker's last computation to the other's next one, and how long the sender is
kept. A ping-pong between idle cores shows only a part of it: on a CPU the core that computes also moves the bytes, and
a worker that has waited finds its caches cold. So two workers run small training steps in turn, each when the other's
message has come; what a round takes longer than both steps alone is what its two messages cost. They run as workers of
a run do (`cores.py`), and take their receives up before they compute, as those do.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burstpool.cluster.cores import let_gloo_run
from burstpool.cluster.measure import run_workers
from burstpool.cluster.reductions import joined_by_gloo, small_step, usual_s

if TYPE_CHECKING:
    import torch

SENT_BYTES = (1 << 10, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
"""Sizes that are measured: what small blocks hand on, up to where only the rate counts."""
_TRIES = 2
"""As for reductions."""
_TURNS = 8
_STEPS = 16
"""A turn of one size; fewer of the large ones."""
_FASTEST = 5e10
"""Bytes a second: no core's memory is copied faster, whatever a disturbed measurement says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTimes:
    """How long messages took."""

    seconds: dict[int, float]
    """By the message's bytes: from one worker's step to the other's."""
    send_s: float
    """How long the smallest keeps its sender."""


def message_times(*, timeout_s: float) -> MessageTimes:
    """Between two workers on this machine, both at work."""
    several = [_message_times(timeout_s) for _ in range(_TRIES)]
    return MessageTimes(
        seconds={size: usual_s([found.seconds[size] for found in several]) for size in SENT_BYTES},
        send_s=usual_s([found.send_s for found in several]),
    )


def _message_times(timeout_s: float) -> MessageTimes:
    with tempfile.TemporaryDirectory(prefix="burstpool-") as folder:
        answers = run_workers(
            _measure,
            2,
            os.path.join(folder, "store"),
            timeout_s,
            _TURNS,
            what="measurement of messages",
            timeout_s=timeout_s,
        )
    return answers[0]  # type: ignore[no-any-return]


def _measure(rank: int, meeting_point: str, timeout_s: float, turns: int) -> MessageTimes:
    import torch
    import torch.distributed as dist

    with joined_by_gloo(rank, 2, meeting_point, timeout_s):
        compute, calls_s = small_step(), []
        messages = {size: torch.zeros(size // 4) for size in SENT_BYTES}
        longer: dict[int, list[float]] = {size: [] for size in SENT_BYTES}
        for turn in range(turns + 1):
            alone = torch.tensor(_alone_s(compute))
            dist.all_reduce(alone)  # both workers' steps are part of a round
            for size in SENT_BYTES:
                steps = max(4, _STEPS >> max(0, size.bit_length() - 18))
                round_s, call_s = _turn(rank, compute, messages[size], steps)
                if turn:  # the first warms up
                    longer[size].append((round_s - alone.item()) / 2)
                    calls_s += [call_s] if size == SENT_BYTES[0] else []
    seconds = {size: max(statistics.median(times), 1e-6 + size / _FASTEST) for size, times in longer.items()}
    return MessageTimes(seconds=seconds, send_s=statistics.median(calls_s))


def _alone_s(compute: Callable[[], None]) -> float:
    """Median seconds of a step, both workers at work."""
    import torch.distributed as dist

    dist.barrier()
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _turn(rank: int, compute: Callable[[], None], message: "torch.Tensor", steps: int) -> tuple[float, float]:
    """Median seconds of a round, there and back, and of starting to send."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    rounds_s, calls_s = [], []
    for _ in range(steps):
        start = time.perf_counter()
        answer = torch.empty_like(message)
        taken = dist.irecv(answer, 1 - rank)
        assert taken is not None
        if rank == 1:
            taken.wait()
        compute()
        before = time.perf_counter()
        let_gloo_run()
        sent = dist.isend(message, 1 - rank)
        calls_s.append(time.perf_counter() - before)
        if rank == 0:
            taken.wait()
        rounds_s.append(time.perf_counter() - start)
        assert sent is not None
        sent.wait()
    return statistics.median(rounds_s[1:]), statistics.median(calls_s[1:])
