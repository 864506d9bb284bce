"""A background job beside a foreground on this machine's cores: what each way of sharing costs and keeps.

    python benchmarks/sharing/cpu.py [--foreground zoo:tiny_vgg] [--steps 300]
    python benchmarks/sharing/cpu.py --seconds 60
    python benchmarks/sharing/cpu.py --ways "ours 1.10" --devices 4 --background 'zoo:tiny_mlp lr=0.1,0.03,0.01,0.003'

Ways: `two processes`, both of one priority; `niced`, the background at the lowest priority and ungated; `ours B`, gated
by the controller at budget B and at the lowest priority; `controller B`, gated only; `no background`, sharing on with a
gate at which nobody waits, for its overhead.
Slowdowns are over steps alone: of ours those that ran alone in between, of the others a run alone before and one after,
since this machine drifts; `beside_runs` is ours over such runs. One step in 25 to 90 of ours runs alone, so that their
p95 is known from some thousand steps on: a minute's lines have them. Prints one JSON line a way.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burstpool.cli.share import background as parse_background
from burstpool.cli.share import spread
from burstpool.job import load_job
from burstpool.plan.plan import Plan
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.progress import Observer, Progress
from burstpool.run.setup import trace_job
from burstpool.run.trainer import train
from burstpool.share.base import Background, ShareRequest
from burstpool.share.budget import Budget, Gap
from burstpool.share.cpu import share_on_cpu
from burstpool.share.gates.announce import SHARING, StepLog, p95
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper
from burstpool.share.gates.workers import SharingEngine

OPTIONS = RunOptions(timeline_steps=0, checkpoint_every=0)
WARM_UP = 10
TURNS = 6
"""Of the overhead, in which a line's steps are divided."""


def steps_alone(
    arguments: argparse.Namespace, plan: Plan, folder: Path, engine: Any = None, observer: Observer | None = None
) -> list[float]:
    """Seconds of each step, warmed up."""
    result = train(
        arguments.foreground, plan, steps=arguments.steps, run_folder=folder, options=OPTIONS, engine=engine,
        settings=dict(pair.split("=") for pair in arguments.set), observer=observer,
    )  # fmt: skip
    return [loss.step_time_s for loss in result.losses][WARM_UP:]


def steps_in(arguments: argparse.Namespace, plan: Plan) -> int:
    """How many steps take `--seconds`."""
    with tempfile.TemporaryDirectory(prefix="burstpool-sharing-") as folder:
        tried = argparse.Namespace(**{**vars(arguments), "steps": 100})
        times = steps_alone(tried, plan, Path(folder) / "tried")
    return max(math.ceil(arguments.seconds * len(times) / sum(times)), 2 * WARM_UP)


@contextmanager
def running(backgrounds: list[Background], folder: Path) -> Iterator[list[Keeper]]:
    """Ungated background jobs, after their first steps."""
    keepers = [Keeper(b, Gate.create(folder / f"gate-{i}"), folder / str(i)) for i, b in enumerate(backgrounds)]
    try:
        for keeper in keepers:
            keeper.start()
        for keeper in keepers:
            keeper.wait_until_prepared(60.0)
        while any(keeper.gate.done().steps < 3 for keeper in keepers):
            time.sleep(0.01)
        yield keepers
    finally:
        threads = [threading.Thread(target=keeper.stop) for keeper in keepers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def rate(keepers: list[Keeper], window_s: float) -> float:
    """Steps a second of all of them together."""
    before, begun_s = sum(keeper.gate.done().steps for keeper in keepers), time.monotonic()
    time.sleep(window_s)
    return (sum(keeper.gate.done().steps for keeper in keepers) - before) / (time.monotonic() - begun_s)


def ungated(arguments: argparse.Namespace, plan: Plan, chosen: list[Background], folder: Path) -> dict[str, Any]:
    """Both run as they please."""
    before = steps_alone(arguments, plan, folder / "before")
    with running(chosen, folder) as keepers:
        alone = rate(keepers, 2.0)
        seen: list[tuple[float, int]] = []  # while the foreground trains, and neither starts nor ends

        def observe(progress: Progress) -> None:
            if progress.step >= WARM_UP:
                seen.append((time.monotonic(), sum(k.gate.done().steps for k in keepers)))

        shared = steps_alone(arguments, plan, folder / "shared", observer=observe)
        kept = None  # of a run too short to be seen twice
        if len(seen) > 1:
            (begun_s, counted), (ended_s, count) = seen[0], seen[-1]
            kept = (count - counted) / (ended_s - begun_s) / alone
    base = before + steps_alone(arguments, plan, folder / "after")
    base_s = sum(base) / len(base)
    return {
        "slowdown": sum(shared) / len(shared) / base_s,
        "slowdown_p95": p95(shared) / base_s,
        "alone_p95": p95(base) / base_s,
        "kept": kept,
    }


def ours(
    arguments: argparse.Namespace, plan: Plan, chosen: list[Background], budget: float, folder: Path
) -> dict[str, Any]:
    """Gated; also beside runs alone, as the others: a step alone between shared ones may be unlike one of those."""
    before = steps_alone(arguments, plan, folder / "before")
    found = share_on_cpu(
        ShareRequest(
            foreground=arguments.foreground,
            settings=dict(pair.split("=") for pair in arguments.set),
            plan=plan,
            steps=arguments.steps,
            backgrounds=tuple(chosen),
            budget=Budget(slowdown=budget),
            options=OPTIONS,
            run_folder=folder / "run",
            gaps=(Gap(length_s=0.0),) if len(plan.devices) > 1 else (),
        )
    )
    log = StepLog.load(folder / "run" / SHARING)
    shared = log.times_s[log.alone.index(False) :] if False in log.alone else []
    base = before + steps_alone(arguments, plan, folder / "after")
    base_s = sum(base) / len(base)
    return {
        "slowdown": found.slowdown,
        "slowdown_p95": found.slowdown_p95,
        "alone_p95": found.alone_p95,
        "beside_runs": sum(shared) / len(shared) / base_s if shared else None,
        "beside_runs_p95": p95(shared) / base_s if shared else None,
        "runs_p95": p95(base) / base_s,
        "kept": found.background_kept,
    }


def overhead(arguments: argparse.Namespace, plan: Plan, folder: Path) -> dict[str, Any]:
    """Sharing on, with a gate at which nobody waits, against a plain run; turn about, so that drift cancels."""
    arguments = argparse.Namespace(**{**vars(arguments), "steps": max(arguments.steps // TURNS, 10 * WARM_UP)})
    settings = dict(pair.split("=") for pair in arguments.set)
    request = ShareRequest(
        foreground=arguments.foreground, settings=settings, plan=plan, steps=arguments.steps, backgrounds=(),
        budget=Budget(), options=OPTIONS, run_folder=folder,
    )  # fmt: skip
    plain: list[float] = []
    shared: list[float] = []
    for turn in range(TURNS):
        gates = [[Gate.create(folder / f"gate-{turn}-{device}")] for device in range(plan.num_devices)]
        plain += steps_alone(arguments, plan, folder / f"plain-{turn}")
        engine = SharingEngine(request, gates, folder / f"log-{turn}.json")
        shared += steps_alone(arguments, plan, folder / f"shared-{turn}", engine)
    plain.sort()
    shared.sort()
    step_s = plain[len(plain) // 2]
    return {"overhead": shared[len(shared) // 2] / step_s - 1, "step_ms": 1e3 * step_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--foreground", default="zoo:tiny_vgg")
    parser.add_argument("--set", action="append", default=[], help="a setting of the foreground")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--background", default="zoo:tiny_resnet")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--plan", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=None, help="instead of --steps: as many as take so long alone")
    parser.add_argument("--cores", type=int, default=None, help="keep all processes to so many cores")
    parser.add_argument("--ways", default="two processes,niced,ours 1.05,ours 1.10,ours 1.20,no background")
    arguments = parser.parse_args()
    if arguments.cores is not None:
        os.sched_setaffinity(
            0, sorted(os.sched_getaffinity(0))[: arguments.cores]
        )  # processes started later inherit it
    job = load_job(arguments.foreground, dict(pair.split("=") for pair in arguments.set))
    if arguments.plan is not None:
        plan = Plan.load(arguments.plan)
    else:
        graph = trace_job(job).graph
        plan = even_plan(graph, num_devices=arguments.devices, batch=arguments.batch or job.batch, name=job.name)
    if arguments.seconds is not None:
        arguments.steps = steps_in(arguments, plan)
    for way in arguments.ways.split(","):
        lowest = way.split()[0] not in ("two", "controller")
        one = parse_background(arguments.background)
        one = Background(source=one.source, settings=one.settings, lowest_priority=lowest)
        chosen = spread([one], len(plan.devices))
        with tempfile.TemporaryDirectory(prefix="burstpool-sharing-") as name:
            folder = Path(name)
            if way.startswith(("ours", "controller")):
                found = ours(arguments, plan, chosen, float(way.split()[1]), folder)
            elif way == "no background":
                found = overhead(arguments, plan, folder)
            else:
                found = ungated(arguments, plan, chosen, folder)
        if "kept" in found:
            found["sum_of_shares"] = 1 / found["slowdown"] + (found["kept"] or 0.0)
        rounded = {key: value if value is None else round(value, 3) for key, value in found.items()}
        sys.stdout.write(json.dumps({"way": way, "steps": arguments.steps} | rounded) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
