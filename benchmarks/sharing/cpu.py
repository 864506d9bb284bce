"""Background jobs beside a foreground on this machine's cores: what each way of sharing costs and keeps.

    python benchmarks/sharing/cpu.py --seconds 60 --out rows.json              all pairs; again, to go on
    python benchmarks/sharing/cpu.py --foregrounds tiny_vgg:256 --with zoo:tiny_resnet --cores 1
    python benchmarks/sharing/cpu.py --plan plan.json --foregrounds tiny_vgg:32 --set width=64
    python benchmarks/sharing/budget_tables.py rows.json

Ways: `two processes`, both of one priority; `niced`, the background at the lowest priority and ungated; `ours B`, gated
by the controller at budget B and at the lowest priority; `controller B`, gated only; `no background`, sharing on with a
gate at which nobody waits, for its overhead. One step in 25 to 90 of ours runs alone, so that their p95 is known from
some thousand steps on: a minute's lines have them. Prints one JSON line a way; lines that `--out` holds are left out.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cpu_ways import WARM_UP, Case, measured, steps_alone
from measured_rows import all_rows, write_rows

from burstpool.cli.share import background as parse_background
from burstpool.cli.share import spread
from burstpool.job import load_job
from burstpool.plan.plan import Plan
from burstpool.run.even import even_plan
from burstpool.run.setup import trace_job
from burstpool.share.base import Background

FOREGROUNDS = "tiny_vgg:32,tiny_vgg:256,tiny_resnet:64,tiny_inception:64,tiny_lstm:256,tiny_transformer:16"
BACKGROUNDS = ("zoo:tiny_resnet", "zoo:tiny_mlp lr=0.1,0.05,0.03,0.02,0.01,0.005,0.003,0.001")
WAYS = "two processes,niced,ours 1.05,ours 1.10,ours 1.20"
TRIED_STEPS = 100
"""By which the number of steps in `--seconds` is known."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foregrounds", default=FOREGROUNDS, help="models of the zoo, each with its batch")
    parser.add_argument("--set", action="append", default=[], help="a setting of the foregrounds")
    parser.add_argument("--with", action="append", dest="backgrounds", help="as `burstpool share` does")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--plan", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=None, help="instead of --steps: as many as take so long alone")
    parser.add_argument("--cores", type=int, default=None, help="keep all processes to so many cores")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--out", type=Path, help="where rows are added as they come; what it holds is left out")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)  # processes started later inherit it
    rows = [dict(row) for row in all_rows(args.out)] if args.out and args.out.exists() else []
    known = {(row["foreground"], row["background"], row["way"]) for row in rows}
    for foreground in args.foregrounds.split(","):
        lines = [
            (background, way)
            for background in args.backgrounds or BACKGROUNDS
            for way in args.ways.split(",")
            if (foreground, called(background), way) not in known
        ]
        if not lines:
            continue
        with tempfile.TemporaryDirectory(prefix="burstpool-sharing-") as folder:
            case = case_of(args, foreground, Path(folder))
            for number, (background, way) in enumerate(lines):
                beside = backgrounds(background, way, len(case.plan.devices))
                figures = measured(way, replace(case, backgrounds=beside, folder=Path(folder) / str(number)))
                row = {"foreground": foreground, "background": called(background), "way": way, "steps": case.steps}
                row |= {key: value if value is None else round(value, 4) for key, value in figures.items()}
                print(json.dumps(row), flush=True)
                rows.append(row)
                if args.out:
                    write_rows(args.out, {"cores": len(cores), "rows": rows})


def called(background: str) -> str:
    """`"zoo:tiny_resnet"` → `"tiny_resnet"`; an array by the number of its members too."""
    parsed = parse_background(background)
    members = len(parsed.settings)
    return parsed.source.removeprefix("zoo:") + (f" ×{members}" if members > 1 else "")


def backgrounds(words: str, way: str, num_devices: int) -> list[Background]:
    """One for each device, at the priority that the way asks for."""
    lowest = way.split()[0] not in ("two", "controller")
    return spread([replace(parse_background(words), lowest_priority=lowest)], num_devices)


def case_of(args: argparse.Namespace, foreground: str, folder: Path) -> Case:
    """The foreground with its plan, and as many steps as were asked for."""
    name, batch = foreground.split(":")
    settings: Mapping[str, str] = dict(pair.split("=") for pair in args.set)
    job = load_job(f"zoo:{name}", settings)
    if args.plan is not None:
        plan = Plan.load(args.plan)
    else:
        plan = even_plan(trace_job(job).graph, num_devices=args.devices, batch=int(batch), name=job.name)
    case = Case(foreground=f"zoo:{name}", settings=settings, plan=plan, backgrounds=(), steps=args.steps, folder=folder)
    if args.seconds is None:
        return case
    times = steps_alone(replace(case, steps=TRIED_STEPS).in_folder("tried"))
    return replace(case, steps=max(math.ceil(args.seconds * len(times) / sum(times)), 2 * WARM_UP))


if __name__ == "__main__":
    sys.exit(main())
