"""Measured reductions: by how much adding up gradients lengthens the step of CPU workers that compute.

Takes a number of workers. Returns, for some numbers of them and some sizes, seconds. On a CPU the core that computes
also moves the bytes, and a worker that has waited finds its caches cold; a message between idle cores shows neither. So
workers run small training steps, in turns without and with a reduction of each size, and what the steps with it take
longer is what it costs. They run as workers of a run do (`cores.py`), and copy gradients together before, as those do.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from burstpool.cluster.cores import calm_gloo, claim_core
from burstpool.cluster.measure import run_workers

REDUCED_BYTES = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes that are measured: small models' gradients, and what fills a bucket."""
_TRIES = 2
"""How often workers are started anew: a machine has slower and faster seconds, and runs see both."""
_TURNS = 5
_STEPS = 24
"""A turn of one size; fewer of the large ones."""

ReduceTimes = dict[int, dict[int, float]]
"""Workers → bytes → seconds."""


def reduce_times(num_workers: int, *, num_cores: int, timeout_s: float) -> ReduceTimes:
    """For 2, 4, 8, … and all of so many workers on this machine.

    Those that would have a core each are measured as they are where the others have nothing to do.
    """
    counts = sorted({2**power for power in range(1, num_workers.bit_length())} | {num_workers})
    found: ReduceTimes = {}
    for together in ([c for c in counts if c <= num_cores], [c for c in counts if c > num_cores]):
        if together:
            found |= _usual(max(together), together, timeout_s)
    return found


def _usual(num_workers: int, counts: list[int], timeout_s: float) -> ReduceTimes:
    several = [_reduce_times(num_workers, counts, timeout_s) for _ in range(_TRIES)]
    return {
        count: {size: usual_s([found[count][size] for found in several]) for size in REDUCED_BYTES} for count in counts
    }


def usual_s(tries: Sequence[float]) -> float:
    """The mean of several tries, without those that took half as long again as the fastest: these were disturbed."""
    return statistics.fmean(time_s for time_s in tries if time_s <= 1.5 * min(tries))


def _reduce_times(num_workers: int, counts: list[int], timeout_s: float) -> ReduceTimes:
    with tempfile.TemporaryDirectory(prefix="burstpool-") as folder:
        answers = run_workers(
            _measure,
            num_workers,
            num_workers,
            counts,
            os.path.join(folder, "store"),
            timeout_s,
            _TURNS,
            what="measurement of reductions",
            timeout_s=timeout_s,
        )
    return answers[0]  # type: ignore[no-any-return]


def _measure(
    rank: int, num_workers: int, counts: list[int], meeting_point: str, timeout_s: float, turns: int
) -> ReduceTimes:
    import torch.distributed as dist

    with joined_by_gloo(rank, num_workers, meeting_point, timeout_s, counts=counts) as groups:
        found = {}
        for count, group in groups.items():
            dist.barrier()
            if rank < count:
                found[count] = _longer_steps(group, turns)
        dist.barrier()
        return found


@contextlib.contextmanager
def joined_by_gloo(
    rank: int, num_workers: int, meeting_point: str, timeout_s: float, *, counts: Sequence[int] = ()
) -> Iterator[dict[int, Any]]:
    """Meets the other workers, as those of a run do; gives groups of the first so many of them."""
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    claim_core(num_workers=num_workers)
    with calm_gloo():
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting_point}",
            rank=rank,
            world_size=num_workers,
            timeout=timedelta(seconds=timeout_s),
        )
        groups = {count: dist.new_group(list(range(count))) for count in counts}
    try:
        yield groups
    finally:
        dist.destroy_process_group()


def _longer_steps(group: "object", turns: int) -> dict[int, float]:
    """Bytes → what a step takes longer: turn by turn, and the median of the turns."""
    import torch

    compute = small_step()
    gradients = {size: torch.zeros(size // 4) for size in REDUCED_BYTES}
    flat = {size: torch.zeros(size // 4) for size in REDUCED_BYTES}
    longer: dict[int, list[float]] = {size: [] for size in REDUCED_BYTES}
    for turn in range(turns + 1):
        alone_s = _turn(compute, None, None, group, _STEPS)
        for size in REDUCED_BYTES:
            steps = max(4, _STEPS >> max(0, size.bit_length() - 19))
            with_s = _turn(compute, gradients[size], flat[size], group, steps)
            if turn:  # the first warms up
                longer[size].append(with_s - alone_s)
    return _rising({size: max(statistics.median(times), 0.0) for size, times in longer.items()})


def _turn(compute: Callable[[], None], gradient: "object", flat: "object", group: "object", steps: int) -> float:
    """Median seconds of a step, all members starting together."""
    import torch.distributed as dist

    dist.barrier(group=group)  # type: ignore[arg-type]
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        compute()
        if flat is not None:
            flat.copy_(gradient)  # type: ignore[attr-defined]
            work = dist.all_reduce(flat, group=group, async_op=True)
            assert work is not None
            work.wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def small_step() -> Callable[[], None]:
    """Forward and backward of a few small convolutions, about 2 ms."""
    import torch
    from torch import nn

    layers = [layer for _ in range(3) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers)
    images = torch.randn(8, 16, 16, 16)

    def step() -> None:
        model(images).square().mean().backward()
        model.zero_grad()

    return step


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    """More bytes never take less: where they seem to, it is noise."""
    most, found = 0.0, {}
    for size, time_s in sorted(seconds.items()):
        most = max(most, time_s)
        found[size] = most
    return found
