"""Fusion beside the other ways to train B models: aggregate samples a second, one JSON object and a table.

    python benchmarks/fusion/run.py                                     the CPU part: small models, seconds
    python benchmarks/fusion/run.py --device cuda --dtype bf16 --out results.json [--hfta PATH] [--only resnet18]
    python benchmarks/fusion/run.py --device cuda --dtype fp32 --seconds 150 --without vmap_compiled,resnet18:ours

On CUDA each workload runs in processes of its own (ways that compile, ways that do not, HFTA's code), twenty at once:
they export and compile side by side; when the first twenty have, they take turns on the GPU, by a lock, to be measured,
while others build. `--seconds` ends it all; what was not measured by then says so (turns.py). Each time is the smallest
of several: what else a machine does only ever adds. On the CPU, where others share the cache and a core's units, a
workload's ways take turns of a few steps in one process, and each time is the median of all its steps; the rows have
the smallest beside it.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import hfta_code
from processes import measure_processes
from tables import best_rates, table
from turns import Ended, all_are_built, run_all, turn
from ways import CPU_WAYS, CUDA_WAYS, ONE_MODEL, SEPARATE, Made, Step
from workloads import CPU_WORKLOADS, WORKLOADS, Task, task

PARTS = {
    "ours": ("serial_eager", "ours"),
    "compiled": ("serial_compiled",),
    "others": ("serial_graph", "streams"),
    "hfta": ("hfta", "hfta_graph"),
    "vmap": ("vmap",),
    "vmap_compiled": ("vmap_compiled",),
}
"""Ways that run in one process, in order; those that take long to build come first, those that may not end last."""
_STEPS_A_TURN = 8
_AT_ONCE = 20
"""Processes: as many as a machine of 16 cores and 128 GiB holds."""


def main() -> None:
    options = parsed()
    if options.part:
        run_part(options)
        return
    torch.set_float32_matmul_precision("high")
    rows = list(on_cpu(options)) if options.device == "cpu" else on_cuda(options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu"
    result = {"device": where, "torch": torch.__version__, "dtype": options.dtype, "rows": rows}
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    print(table(best_rates(rows)), file=sys.stderr)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fusion beside the other ways to train B models.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--only", default="", help="workloads, by commas")
    parser.add_argument("--without", default="", help="ways to leave out, by commas: ours,resnet18:vmap")
    parser.add_argument("--members", default="", help="sizes of an array to try, by commas")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out of ours")
    parser.add_argument("--hfta", default="", help="a checkout of UofT-EcoSystem/hfta, to be measured beside")
    parser.add_argument("--seconds", type=float, default=200.0, help="for all of the CUDA part")
    parser.add_argument("--build-seconds", type=float, default=150.0, help="after which measuring begins at the latest")
    parser.add_argument("--turn-seconds", type=float, default=60.0, help="after which one that is measured is stopped")
    parser.add_argument("--out", default="", help="where to write the JSON object")
    parser.add_argument("--log", default="", help="where to write what the processes had to say")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = list(CPU_WORKLOADS if options.device == "cpu" else WORKLOADS)
    options.only = options.only.split(",") if options.only else known
    options.without = frozenset(options.without.split(","))
    options.members = [int(m) for m in options.members.split(",")] if options.members else []
    return options


def wanted(name: str, ways: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Those of a workload's ways that are not left out."""
    return [way for way in ways if not {way, f"{name}:{way}"} & options.without]


def on_cpu(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One thread; a workload's ways take turns."""
    torch.set_num_threads(1)
    for name in options.only:
        made = task(name, torch.device("cpu"), torch.bfloat16 if options.dtype == "bf16" else None)
        for members in options.members or [16]:
            rows = [built(made, way, CPU_WAYS[way], members) for way in wanted(name, CPU_WAYS, options)]
            yield from by_turns(made, rows, seconds=12.0)


def by_turns(made: Task, rows: list[tuple[dict[str, Any], Made | None]], *, seconds: float) -> Iterator[dict[str, Any]]:
    """The rows with their figures: what else the machine does while they run meets all of them."""
    running: list[tuple[dict[str, Any], Step, int, list[float]]] = []
    for row, ready in rows:
        if ready is not None:
            try:
                step, models = ready()
                for _ in range(3):
                    step()
                running.append((row, step, models, []))
            except Exception as error:
                row |= failed(error)
    begun = time.perf_counter()
    while running and time.perf_counter() - begun < seconds:
        for _, step, _, times in running:
            step()  # finds in the cache what the others have left of it
            for _ in range(_STEPS_A_TURN):
                start = time.perf_counter()
                step()
                times.append(time.perf_counter() - start)
    for row, _, models, times in running:
        row["samples_per_s"] = models * made.batch / statistics.median(times)
        row["samples_per_s_at_best"] = models * made.batch / min(times)
    yield from (row for row, _ in rows)


def built(made: Task, way: str, make: Callable[[Task, int], Made], members: int) -> tuple[dict[str, Any], Made | None]:
    """The row's beginning, and what is ready to be measured; None where it cannot be had."""
    row: dict[str, Any] = {"workload": made.name, "way": way, "members": members, "batch": made.batch}
    start = time.monotonic()
    try:
        ready = make(made, members)
    except Exception as error:  # a way that cannot run is a result too
        row |= failed(error)
        ready = None
    give_back(made)
    if ready is None:
        return row, None
    return row | {"build_s": round(time.monotonic() - start, 2)}, ready


def timed(made: Task, row: dict[str, Any], ready: Made, *, seconds: float) -> dict[str, Any]:
    """The row with its figures."""
    on_device, asked = made.device.type == "cuda", time.monotonic()
    try:
        with turn() if on_device else nullcontext():
            start = time.monotonic()
            row["waited_s"] = round(start - asked, 2)
            if on_device:
                torch.cuda.reset_peak_memory_stats()
            step, models = ready()
            row["record_s"] = round(time.monotonic() - start, 2)
            row["samples_per_s"] = models * made.batch / fastest(step, on_device, seconds)
            row["choice"] = getattr(step, "choice", "")
            if on_device:
                row["peak_bytes"] = torch.cuda.max_memory_allocated()
            row["turn_s"] = round(time.monotonic() - start, 2)
            del step, ready
            give_back(made)
    except Exception as error:
        row |= failed(error)
    return row


def give_back(made: Task) -> None:
    """Memory that is not used any more: many processes share the GPU's, and what one keeps others miss."""
    if made.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def failed(error: Exception) -> dict[str, str]:
    """What a row says of an error; all of it goes to --log."""
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]}


def fastest(step: Step, on_device: bool, seconds: float) -> float:
    """Seconds of one step, the smallest of several."""

    def wait() -> None:
        if on_device:
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    wait()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begun < seconds and len(times) < 200):
        start = time.perf_counter()
        step()
        step()
        wait()
        times.append((time.perf_counter() - start) / 2)
        if len(times) >= 3 and time.perf_counter() - begun > 4 * seconds:
            break
    return min(times)


def run_part(options: argparse.Namespace) -> None:
    """One process of the CUDA part: prints a row a line."""
    torch.set_float32_matmul_precision("high")
    name, part = options.only[0], options.part
    made = task(name, torch.device("cuda"), torch.bfloat16 if options.dtype == "bf16" else None)
    made.compiled &= not options.no_compile
    ways = dict(CUDA_WAYS)
    if part == "hfta":
        if not options.hfta or not hfta_code.known(name):
            why = "no path was given (--hfta)" if not options.hfta else "HFTA has no such model"
            print(json.dumps({"workload": name, "way": "hfta", "error": why}), flush=True)
            return
        hfta_code.add_path(Path(options.hfta))
        ways.update(hfta_code.HFTA_WAYS)
    cases = [(way, members) for way in wanted(name, PARTS[part], options) for members in sizes(name, way, options)]
    rows = [built(made, way, ways[way], members) for way, members in cases]
    all_are_built()
    while rows:
        row, ready = rows.pop(0)
        print(json.dumps(row if ready is None else timed(made, row, ready, seconds=0.25)), flush=True)
        del ready
        give_back(made)  # also what an error had kept alive


def sizes(name: str, way: str, options: argparse.Namespace) -> list[int]:
    """How many members a way is tried with."""
    workload = WORKLOADS[name]
    if way in ONE_MODEL:
        return [1]
    if way in SEPARATE:
        return [workload.small]
    tried = options.members or list(workload.members)
    return tried if way == "ours" else tried[-1:]


def on_cuda(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All processes at once, until the time is up; then the processes under MPS."""
    deadline = time.monotonic() + options.seconds
    kept_s = 0.0 if "processes" in options.without else 10.0 + 3.0 * len(options.only)
    parts = [(n, part) for part, ways in PARTS.items() for n in options.only if wanted(n, ways, options)]
    ended = run_all(
        {f"{name}-{part}": command(name, part, options) for name, part in parts},
        at_once=_AT_ONCE,
        build_s=options.build_seconds,
        longest_turn_s=options.turn_seconds,
        until=deadline - kept_s,
        environment={"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"},
    )
    if options.log:
        Path(options.log).write_text("\n".join(f"== {name}\n{one.errors}" for name, one in ended.items()))
    rows = [row for name, part in parts for row in rows_of(name, part, ended[f"{name}-{part}"], options)]
    if "processes" not in options.without:
        rows += measure_processes(options.only, options.dtype, deadline - time.monotonic())
    return rows


def command(name: str, part: str, options: argparse.Namespace) -> list[str]:
    """That runs one part of a workload."""
    made = [sys.executable, __file__, "--device", "cuda", "--dtype", options.dtype, "--only", name, "--part", part]
    made += ["--without", ",".join(sorted(options.without)), "--members", ",".join(map(str, options.members))]
    return [*made, "--hfta", options.hfta, *(["--no-compile"] if options.no_compile else [])]


def rows_of(name: str, part: str, ended: Ended, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a process has measured, and why not the rest."""
    rows = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    tried = {row["way"] for row in rows}
    missing = [way for way in wanted(name, PARTS[part], options) if way not in tried]
    if part == "hfta" and tried and not ended.why:
        missing = []
    why = ended.why or (ended.errors.strip().splitlines() or ["ended"])[-1][:200]
    reasons = [why, *[f"its process ended before: {why}"] * len(missing)]  # they come in order
    return rows + [{"workload": name, "way": w, "error": reason} for w, reason in zip(missing, reasons, strict=False)]


if __name__ == "__main__":
    main()
