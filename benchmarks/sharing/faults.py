"""Background jobs that raise, hang, allocate without end, turn NaN or are killed: does the foreground notice?

    python benchmarks/sharing/faults.py [--points 50] [--seed 0] [--at-once 5]
    python benchmarks/sharing/faults.py --device cuda --at-once 10 --steps 8000

Trains a foreground alone, then again and again beside backgrounds of which each does one of these at a random moment,
`--at-once` of them in one run. Compares the foreground's losses bit by bit, and its p95 step with budget + 0.05 over
the steps that ran alone in between. Prints one JSON line, and one a run on standard error.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from burstpool.job import load_job
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.share.base import Background, ShareOutcome, ShareRequest, find
from burstpool.share.budget import Budget

JOBS = str(Path(__file__).parents[2] / "tests" / "share" / "share_jobs.py")
FAULTS = ("raise", "hang", "allocate", "nan", "kill")
FOREGROUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": (JOBS, {"batch": 200, "hidden": 256}),
    "cuda": ("zoo:tiny_vgg", {"batch": 256, "width": 256}),
}
"""By device: steps of some milliseconds."""


def one_run(folder: Path, faults: list[str], chance: random.Random, arguments: argparse.Namespace) -> ShareOutcome:
    """One foreground, beside some backgrounds that come to grief."""
    backgrounds = tuple(
        Background(
            source=JOBS,
            settings=({"what": what, "after": chance.randrange(100, 4000)},),
            memory_bytes=512 << 20,
            lowest_priority=True,
        )
        for what in faults
    )
    source, settings = FOREGROUNDS[arguments.device]
    job = load_job(source, settings)
    request = ShareRequest(
        foreground=source,
        settings=settings,
        plan=even_plan(trace_job(job).graph, num_devices=1, batch=job.batch, name="foreground"),
        steps=arguments.steps,
        backgrounds=backgrounds,
        budget=Budget(slowdown=arguments.slowdown),
        options=RunOptions(device=arguments.device, timeline_steps=0, checkpoint_every=0),
        run_folder=folder,
    )
    return find(arguments.device)(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--slowdown", type=float, default=1.20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.backends.cudnn.deterministic = True  # the process that shares a GPU is this one
    chance = random.Random(arguments.seed)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="burstpool-faults-") as folder:
        expected = one_run(Path(folder) / "alone", [], chance, arguments).losses
        while (left := arguments.points - sum(len(run["faults"]) for run in runs)) > 0:
            faults = [chance.choice(FAULTS) for _ in range(min(arguments.at_once, left))]
            found = one_run(Path(folder) / str(len(runs)), faults, chance, arguments)
            runs.append(
                {
                    "faults": faults,
                    "bit_equal": found.losses == expected,
                    "happened": [each.state == "failed" or each.restarts > 0 for each in found.backgrounds],
                    "reasons": [each.reason[:80] for each in found.backgrounds],
                    "slowdown": found.slowdown,
                    "slowdown_p95": found.slowdown_p95,
                    "alone_p95": found.alone_p95,
                }
            )
            sys.stderr.write(f"{json.dumps(runs[-1])}\n")
    report = {
        "benchmark": "sharing faults",
        "device": arguments.device,
        "points": sum(len(run["faults"]) for run in runs),
        "happened": sum(sum(run["happened"]) for run in runs),
        "runs": len(runs),
        "runs_bit_equal": sum(run["bit_equal"] for run in runs),
        "slowdown": [round(run["slowdown"], 3) for run in runs],
        "slowdown_p95": [run["slowdown_p95"] and round(run["slowdown_p95"], 3) for run in runs],
        "alone_p95": [run["alone_p95"] and round(run["alone_p95"], 3) for run in runs],
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
