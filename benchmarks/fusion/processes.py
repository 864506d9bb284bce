"""B processes on one GPU under MPS, each training one model, its whole step in a CUDA graph.

The processes live through all workloads, so that torch is imported once; a barrier lets them begin together, and each
counts the steps it makes in a fixed time. Where MPS does not start, the reason is the result.
"""

import contextlib
import os
import queue
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

_PROCESSES = 8
_MEASURE_S = 0.7


def measure_processes(names: Sequence[str], dtype: str, seconds: float) -> list[dict[str, Any]]:
    """A row a workload."""
    if seconds < 15:
        return [_failed(name, "skipped: no time was left") for name in names]
    try:
        with _mps() as environment:
            return _measured(names, dtype, environment, time.monotonic() + seconds)
    except (OSError, subprocess.SubprocessError) as error:
        return [_failed(name, f"MPS does not start: {error}"[:200]) for name in names]


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"workload": name, "way": "processes", "members": _PROCESSES, "error": why}


@contextlib.contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """The daemon, with folders of its own."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        raise OSError("nvidia-cuda-mps-control is not installed")
    with tempfile.TemporaryDirectory() as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in environment.values():
            os.mkdir(path)
        subprocess.run([control, "-d"], env=os.environ | environment, check=True, timeout=20)
        try:
            yield environment
        finally:
            subprocess.run([control], input=b"quit\n", env=os.environ | environment, timeout=20, check=False)


def _measured(names: Sequence[str], dtype: str, environment: dict[str, str], deadline: float) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    barrier = context.Barrier(_PROCESSES)
    os.environ.update(environment)  # for the children; this process has no CUDA context of its own yet to move
    workers = [
        context.Process(target=_work, args=(rank, list(names), dtype, barrier, results)) for rank in range(_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    counts: dict[str, list[tuple[int, float, int]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    expected = _PROCESSES * len(names)
    while expected and time.monotonic() < deadline:
        try:
            name, steps, took_s, batch, error = results.get(timeout=0.5)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        expected -= 1
        if error:
            errors[name] = error
        else:
            counts[name].append((steps, took_s, batch))
    for worker in workers:
        worker.kill()
        worker.join()
    for key in environment:
        os.environ.pop(key)
    return [_row(name, counts[name], errors.get(name)) for name in names]


def _row(name: str, counts: Sequence[tuple[int, float, int]], error: str | None) -> dict[str, Any]:
    if error or len(counts) < _PROCESSES:
        return _failed(name, error or "skipped: not measured in time")
    rate = sum(steps * batch / took_s for steps, took_s, batch in counts)
    return {
        "workload": name,
        "way": "processes",
        "members": _PROCESSES,
        "batch": counts[0][2],
        "samples_per_s": rate,
    }


def _work(rank: int, names: list[str], dtype: str, barrier: Any, results: Any) -> None:
    from ways import one_step, recorded
    from workloads import task

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    for name in names:
        step, made, error = None, None, ""
        try:
            made = task(name, torch.device("cuda"), torch.bfloat16 if dtype == "bf16" else None)
            step = recorded(one_step(made, made.models(1)[0]))
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:200]
        barrier.wait()
        if step is None or made is None:
            results.put((name, 0, 0.0, 0, error))
            continue
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < _MEASURE_S:
            for _ in range(2):
                step()
            torch.cuda.synchronize()
            steps += 2
        results.put((name, steps, time.perf_counter() - start, made.batch, ""))
        barrier.wait()
        del step
        torch.cuda.empty_cache()
