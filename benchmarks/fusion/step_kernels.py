"""Which kernels a recorded step of ours spends its time in, on a CUDA device.

    python benchmarks/fusion/step_kernels.py transformer --dtype fp32 [--members 16] [--most 20] [--no-compile]

Builds and records the workload as run.py does, replays it under torch's profiler, and prints the step's time, the sum
of its kernels' times (more, where some run side by side), and the longest kernels by name.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))

from ways import Step, ours
from workloads import WORKLOADS, task

_STEPS = 3
"""Profiled; more tell nothing new."""


def main() -> None:
    options = parsed()
    torch.set_float32_matmul_precision("high")
    made = task(options.workload, torch.device("cuda"), torch.bfloat16 if options.dtype == "bf16" else None)
    made.compiled &= not options.no_compile
    step, members = ours(made, options.members or WORKLOADS[options.workload].members[-1])()
    step_s = step_time(step)
    rate = members * made.batch / step_s
    print(f"{made.name} ×{members}, {options.dtype}: {1e3 * step_s:.3f} ms, {rate:,.0f} samples/s")
    print(getattr(step, "choice", ""))
    print(*kernel_lines(step, options.most), sep="\n")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kernels of a recorded step.")
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--members", type=int, default=0, help="the benchmark's own if left out")
    parser.add_argument("--most", type=int, default=20, help="kernels to name")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    return parser.parse_args()


def step_time(step: Step) -> float:
    """Seconds, the smallest of several pairs of steps."""
    times_s = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        step()
        torch.cuda.synchronize()
        times_s.append((time.perf_counter() - start) / 2)
    return min(times_s)


def kernel_lines(step: Step, most: int) -> list[str]:
    """A line a kernel: its time and calls in a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    events: list[Any] = [event for event in seen.events() if event.device_type.name == "CUDA"]
    times_us, calls = Counter[str](), Counter[str]()
    for event in events:
        times_us[event.name] += event.time_range.elapsed_us()
        calls[event.name] += 1
    whole_us = times_us.total()
    lines = [f"{whole_us / _STEPS / 1e3:8.3f} ms in {calls.total() / _STEPS:,.0f} kernels"]
    for name, time_us in times_us.most_common(most):
        count, each_us = calls[name] / _STEPS, time_us / calls[name]
        step_ms, share = time_us / _STEPS / 1e3, time_us / whole_us
        lines.append(f"{step_ms:8.3f} ms {share:6.1%} {count:7.0f} × {each_us:8.1f} µs  {name[:150]}")
    return lines


if __name__ == "__main__":
    main()
