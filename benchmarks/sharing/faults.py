"""Background jobs that raise, hang, allocate without end, turn NaN or are killed: does the foreground notice?

    python benchmarks/sharing/faults.py [--points 50] [--seed 0] [--at-once 5]

Trains a foreground alone, then again and again beside backgrounds of which each does one of these at a random moment,
`--at-once` of them in one run. Compares the foreground's losses bit by bit, and its p95 step with budget + 0.05 over
the steps that ran alone in between. Prints one JSON line.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from burstpool.job import load_job
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import train
from burstpool.share.base import Background, ShareRequest
from burstpool.share.budget import Budget
from burstpool.share.cpu import share_on_cpu

JOBS = str(Path(__file__).parents[2] / "tests" / "share" / "share_jobs.py")
FAULTS = ("raise", "hang", "allocate", "nan", "kill")
SETTINGS = {"batch": 200, "hidden": 256}
"""Of the foreground: steps of some milliseconds."""
OPTIONS = RunOptions(timeline_steps=0, checkpoint_every=0)


def one_run(folder: Path, chance: random.Random, *, at_once: int, steps: int, slowdown: float) -> dict[str, Any]:
    """One foreground, beside some backgrounds that come to grief."""
    faults = [chance.choice(FAULTS) for _ in range(at_once)]
    backgrounds = tuple(
        Background(
            source=JOBS,
            settings=({"what": what, "after": chance.randrange(100, 4000)},),
            memory_bytes=512 << 20,
            lowest_priority=True,
        )
        for what in faults
    )
    job = load_job(JOBS, SETTINGS)
    found = share_on_cpu(
        ShareRequest(
            foreground=JOBS,
            settings=SETTINGS,
            plan=even_plan(trace_job(job).graph, num_devices=1, batch=job.batch, name="foreground"),
            steps=steps,
            backgrounds=backgrounds,
            budget=Budget(slowdown=slowdown),
            options=OPTIONS,
            run_folder=folder,
        )
    )
    return {
        "losses": list(found.losses),
        "faults": faults,
        "happened": [background.state == "failed" or background.restarts > 0 for background in found.backgrounds],
        "reasons": [background.reason[:80] for background in found.backgrounds],
        "slowdown": found.slowdown,
        "slowdown_p95": found.slowdown_p95,
        "alone_p95": found.alone_p95,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--slowdown", type=float, default=1.20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    runs = []
    with tempfile.TemporaryDirectory(prefix="burstpool-faults-") as folder:
        alone = train(
            JOBS, 1, steps=arguments.steps, settings=SETTINGS, run_folder=Path(folder) / "alone", options=OPTIONS
        )
        expected = [loss.loss for loss in alone.losses]
        for number in range(-(-arguments.points // arguments.at_once)):
            run = one_run(
                Path(folder) / str(number),
                chance,
                at_once=arguments.at_once,
                steps=arguments.steps,
                slowdown=arguments.slowdown,
            )
            run["bit_equal"] = run.pop("losses") == expected
            runs.append(run)
            sys.stderr.write(f"{run}\n")
    report = {
        "benchmark": "sharing faults",
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
