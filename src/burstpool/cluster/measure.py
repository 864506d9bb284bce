"""Measurements of this machine: how fast a device multiplies and copies, how fast two processes talk.

Takes devices, returns plain numbers. Each measurement runs in processes of its own, so that neither its
threads nor its GPU memory stay with the caller; the caller waits with a deadline, and no process outlives the
call. One device or one pair is measured while the rest idles: contention is not seen.
"""

import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from burstpool.cluster.catalogue import DType
from burstpool.errors import ClusterError

if TYPE_CHECKING:
    import torch

MESSAGE_BYTES = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 23, 1 << 25)
"""Sizes of the messages a link is measured with: from all latency to all bandwidth."""
NUM_BATCHES = 6
"""How often each size comes round, so that a passing disturbance spoils one batch and not the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """What a device was seen to reach."""

    flops_per_s: dict[DType, float]
    """Of a large square matrix product."""
    copy_bytes_per_s: float
    """Of a copy within its memory, bytes read and bytes written counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """How long messages took, one way."""

    seconds: dict[int, float]
    """By the message's bytes: half the median round trip of the fastest batch. Other programs can only slow a
    link down, and a batch that they slowed says nothing of the link."""
    slowest: float
    """The slowest batch's median over the fastest's, at the size where they differ most: the disturbance."""


def core_rates(*, timeout_s: float) -> DeviceRates:
    """What one thread on one core reaches."""
    (rates,) = run_workers(_core_rates, 1, what="core measurement", timeout_s=timeout_s)
    return rates  # type: ignore[no-any-return]


def cuda_rates(index: int, *, timeout_s: float) -> DeviceRates:
    """What the GPU of that index reaches."""
    (rates,) = run_workers(_cuda_rates, 1, index, what=f"measurement of GPU {index}", timeout_s=timeout_s)
    return rates  # type: ignore[no-any-return]


def link_times(backend: str, *, timeout_s: float) -> LinkTimes:
    """Messages between two processes, over `gloo` from CPU to CPU or `nccl` from GPU 0 to GPU 1."""
    with tempfile.TemporaryDirectory(prefix="burstpool-") as folder:
        meeting_point = os.path.join(folder, "store")
        times = run_workers(
            _ping_pong,
            2,
            backend,
            meeting_point,
            timeout_s,
            what=f"{backend} link measurement",
            timeout_s=timeout_s,
        )
    return times[0]  # type: ignore[no-any-return]


def fit_link(seconds: dict[int, float]) -> tuple[float, float]:
    """`(bytes_per_s, latency_s)` of the line latency + bytes / rate that fits best. Pure.

    Weighted by 1/time², so that each size counts for its relative error: unweighted, the largest message
    alone would decide, and the latency would be noise.
    """
    points = [(size, time_s, time_s**-2) for size, time_s in sorted(seconds.items()) if time_s > 0]
    if len(points) < 2:
        raise ValueError(f"a line needs two sizes or more with positive times; got {seconds}")
    total = sum(weight for _, _, weight in points)
    mean_size = sum(weight * size for size, _, weight in points) / total
    mean_s = sum(weight * time_s for _, time_s, weight in points) / total
    covariance = sum(weight * (size - mean_size) * (time_s - mean_s) for size, time_s, weight in points)
    slope = covariance / sum(weight * (size - mean_size) ** 2 for size, _, weight in points)
    if slope <= 0:  # times that do not grow with size are noise; the largest message bounds the rate from below
        size, time_s, _ = points[-1]
        return size / time_s, points[0][1]
    return 1 / slope, max(mean_s - slope * mean_size, 0.0)


def run_workers(work: Callable[..., Any], num_workers: int, *arguments: Any, what: str, timeout_s: float) -> list[Any]:
    """Runs `work(rank, *arguments)` in so many new processes and returns their answers, by rank.

    `work` must be importable by its name. Whatever happens, no process is left; an error names the worker
    that failed, died or did not answer.
    """
    context = multiprocessing.get_context("spawn")
    workers = []
    try:
        for rank in range(num_workers):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(sender, work, rank, arguments), daemon=True)
            workers.append((process, receiver))
            process.start()
            sender.close()  # the worker's end is then the only one: its death shows as the end of the pipe
        return _gather(workers, what=what, timeout_s=timeout_s)
    finally:
        for process, receiver in workers:
            receiver.close()
            if process.pid is not None:
                _end(process)


def _gather(workers: Sequence[tuple[Any, Connection]], *, what: str, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    ranks = {receiver: rank for rank, (_, receiver) in enumerate(workers)}
    answers: dict[int, Any] = {}
    while len(answers) < len(workers):
        waiting = [receiver for receiver, rank in ranks.items() if rank not in answers]
        ready = wait(waiting, timeout=max(deadline - time.monotonic(), 0))
        if not ready:
            silent = " and ".join(f"worker {ranks[receiver]}" for receiver in waiting)
            raise ClusterError(f"{what}: {silent} did not answer within {timeout_s:g} s; is the machine overloaded?")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = ranks[receiver]
            answers[rank] = _receive(receiver, workers[rank][0], who=f"{what}: worker {rank}")
    return [answers[rank] for rank in range(len(workers))]


def _receive(receiver: Connection, process: Any, *, who: str) -> Any:
    try:
        succeeded, answer = receiver.recv()
    except EOFError:
        process.join(timeout=5)
        raise ClusterError(f"{who} died with exit code {process.exitcode} before it answered") from None
    if not succeeded:
        raise ClusterError(f"{who} failed: {answer}")
    return answer


def _end(process: Any) -> None:
    process.join(timeout=1)  # one that has answered is on its way out
    if process.is_alive():
        process.terminate()
        process.join(timeout=5)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _answer(sender: Connection, work: Callable[..., Any], rank: int, arguments: tuple[Any, ...]) -> None:
    """What a worker process runs."""
    try:
        sender.send((True, work(rank, *arguments)))
    except Exception as error:
        line = " ".join(str(error).split()) or "no message"
        sender.send((False, f"{type(error).__name__}: {line}"))


def _core_rates(_rank: int) -> DeviceRates:
    import torch

    torch.set_num_threads(1)  # a worker is one thread on one core
    device = torch.device("cpu")
    return DeviceRates(
        flops_per_s={
            "fp64": _product_flops_per_s(torch.float64, size=768, device=device),
            "fp32": _product_flops_per_s(torch.float32, size=1024, device=device),
        },
        copy_bytes_per_s=_copy_bytes_per_s(1 << 27, device=device),
    )


def _cuda_rates(_rank: int, index: int) -> DeviceRates:
    import torch

    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    flops_per_s: dict[DType, float] = {
        "fp64": _product_flops_per_s(torch.float64, size=2048, device=device),
        "fp32": _product_flops_per_s(torch.float32, size=4096, device=device),
        "fp16": _product_flops_per_s(torch.float16, size=8192, device=device),
    }
    if properties.major >= 8:  # Ampere brought tf32 and bf16
        flops_per_s["bf16"] = _product_flops_per_s(torch.bfloat16, size=8192, device=device)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        flops_per_s["tf32"] = _product_flops_per_s(torch.float32, size=8192, device=device)
    copied_bytes = min(1 << 30, properties.total_memory // 8)
    return DeviceRates(flops_per_s=flops_per_s, copy_bytes_per_s=_copy_bytes_per_s(copied_bytes, device=device))


def _product_flops_per_s(dtype: "torch.dtype", *, size: int, device: "torch.device") -> float:
    import torch

    left = torch.randn(size, size, device=device).to(dtype)  # zeros would run faster than real data does
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _median_s(lambda: torch.mm(left, right, out=out), device=device)


def _copy_bytes_per_s(num_bytes: int, *, device: "torch.device") -> float:
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / _median_s(lambda: target.copy_(source), device=device)


def _median_s(run: Callable[[], Any], *, device: "torch.device", repeats: int = 15) -> float:
    """Median time of one call, after a warm-up."""
    seconds = []
    for i in range(repeats + 3):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        if i >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _synchronize(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ping_pong(rank: int, backend: str, meeting_point: str, timeout_s: float) -> LinkTimes:
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks the host's name, which may not resolve
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    try:
        batches = [{size: _batch_s(rank, size, device) for size in MESSAGE_BYTES} for _ in range(NUM_BATCHES)]
    finally:
        dist.destroy_process_group()
    by_size = {size: [batch[size] for batch in batches] for size in MESSAGE_BYTES}
    return LinkTimes(
        seconds={size: min(medians) / 2 for size, medians in by_size.items()},
        slowest=max(max(medians) / min(medians) for medians in by_size.values()),
    )


def _batch_s(rank: int, size: int, device: "torch.device") -> float:
    """Median time of there-and-back trips of one message, after a warm-up; both ranks must call it."""
    import torch
    import torch.distributed as dist

    message = torch.zeros(size, dtype=torch.uint8, device=device)
    repeats = 3 + 20 // math.ceil(size / (1 << 16))  # many of the short ones, which vary most
    seconds = []
    for i in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        if rank == 0:
            dist.send(message, dst=1)
            dist.recv(message, src=1)
        else:
            dist.recv(message, src=0)
            dist.send(message, dst=0)
        _synchronize(device)
        if i >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
