"""Burst parallelism: the comparison with DeepPool's planner, and strong scaling to 1024 devices.

run.py --deeppool [--json]       the burst planner against DeepPool's rule
run.py --times [--json]          how long planning takes
run.py [--profiles DIR] [--interference FILE] [--json]
                                 the large-scale simulation; writes results.json and figures/ beside this file
run.py --summary                 the README's tables, from results.json
run.py --skyline                 a plan as a picture
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deeppool_comparison import MODELS, bar_cell, cluster, compare
from line_plot import line_plot
from scaling import cluster as scaled_cluster
from scaling import scaling
from summary import summary

from burstpool.plan import data
from burstpool.plan.burst import plan, search
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.skyline import describe_burst
from burstpool.profiling.importers import import_profile
from burstpool.profiling.profile import Profile
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate as simulate_schedule
from sharing import Measured, Sharing

HERE = Path(__file__).parent
FIGURES = HERE / "figures"
DATA = Path(os.environ.get("BURSTPOOL_PUBLIC_DATA", HERE.parents[2] / "shared" / "data")) / "deeppool_a100"
BATCHES = (256, 1024, 4096)
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)
REPEATS = 5
BAR_SPEEDUP = 3.0
"""Over DeepPool's rule, VGG-16 on 64 devices at batch 64 and limit 2."""


def main() -> None:
    arguments = _arguments()
    if arguments.skyline:
        print(picture())
        return
    if arguments.summary:
        print(summary(json.loads((HERE / "results.json").read_text())))
        return
    if not DATA.is_dir() and (arguments.deeppool or arguments.times or not arguments.profiles):
        raise SystemExit(
            f"DeepPool's profiles, A100_vgg.prof and others of its artifact, are not in {DATA}; set "
            "BURSTPOOL_PUBLIC_DATA to the folder above, or give --profiles with profiles of your own"
        )
    task = deeppool if arguments.deeppool else times if arguments.times else simulate
    result, text = task(arguments)
    print(json.dumps(result) if arguments.json else text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deeppool", action="store_true", help="compare with DeepPool's planner")
    parser.add_argument("--times", action="store_true", help="measure planning times")
    parser.add_argument("--skyline", action="store_true", help="draw a plan")
    parser.add_argument("--summary", action="store_true", help="the README's tables, from results.json")
    parser.add_argument("--json", action="store_true", help="one JSON line on standard output")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="of DeepPool's")
    parser.add_argument("--device-time", choices=["busy", "held"], default="busy", help="what the comparison counts")
    parser.add_argument("--profiles", type=Path, help="folder of profile.json files to simulate too")
    parser.add_argument("--interference", type=Path, help="a table that burstpool interference measured")
    parser.add_argument("--background", type=Path, default=HERE / "profiles" / "vgg16.h200.json", help="its profile")
    parser.add_argument("--background-batch", type=int, default=8)
    parser.add_argument("--slowdown", type=float, default=1.10, help="of the foreground, at most")
    parser.add_argument("--in-reductions", action="store_true", help="background work also while devices reduce")
    parser.add_argument("--burst-limit", type=float, default=2.0)
    parser.add_argument("--devices", type=int, nargs="*", default=list(SCALES))
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    return parser.parse_args()


def deeppool(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """All cells, the worst and the best of them, and the cell with a bar of its own in every variant."""
    rows = list(compare(DATA, arguments.device_time, arguments.models))
    by_speedup = sorted(rows, key=lambda row: float(row["speedup"]))
    bar = bar_cell(DATA)
    result = {
        "never_slower": all(row["burst_ms"] <= row["rule_ms"] * (1 + 1e-9) for row in rows),
        "num_cells": len(rows),
        "device_time": arguments.device_time,
        "worst": by_speedup[0],
        "best": by_speedup[-1],
        "bar": {**bar[0], "wanted_speedup": BAR_SPEEDUP, "reached": bar[0]["speedup"] >= BAR_SPEEDUP},
        "bar_in_other_variants": bar[1:],
        "cells": rows,
    }
    return result, f"{_table(rows)}\n\nthe cell of the bar, in all variants:\n{_table(bar)}"


def _table(rows: list[dict[str, Any]]) -> str:
    keys = list(rows[0])
    return "\n".join("  ".join(_short(row[key] if row else key) for key in keys) for row in [{}, *rows])


def _short(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)
    return f"{text:>12}"


def times(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The best of some repeats, in wall-clock and in CPU seconds: other work on the machine disturbs the first."""
    profiles = {name: import_profile(DATA / MODELS[name]) for name in arguments.models}
    if "vgg16" in profiles:
        profiles["chain of 1000"] = _long_chain(profiles["vgg16"])
    on = cluster(1024, "overlapped")
    rows = []
    for name, profile in profiles.items():

        def planned(profile: Profile = profile) -> None:
            found = search(profile, on, batch=1024, extrapolate=True)
            found.within(arguments.burst_limit * found.one_device_seconds)

        def simulated(profile: Profile = profile) -> None:
            plan(profile, on, batch=1024, extrapolate=True, burst_limit=arguments.burst_limit)

        wall_s, cpu_s = _best_of(planned)
        row = {"model": name, "num_devices": 1024, "batch": 1024, "planning_s": wall_s, "planning_cpu_s": cpu_s}
        rows.append(row | {"with_simulation_s": _best_of(simulated)[0] if name in MODELS else None})
    return {"planning": rows}, _table(rows)


def _best_of(task: Callable[[], None]) -> tuple[float, float]:
    found = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        task()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in found), min(cpu for _, cpu in found)


def _long_chain(profile: Profile) -> Profile:
    """VGG-16's convolutions over and over, no two alike."""
    body = profile.layers[:19]
    layers = []
    for index in range(1000):
        layer = body[index % len(body)]
        factor = 0.5 + (index * 7919 % 1000) / 1000
        layers.append(
            replace(
                layer,
                name=f"layer{index}",
                inputs=(f"layer{index - 1}",) if index else ("input",),
                forward_s={batch: factor * seconds for batch, seconds in layer.forward_s.items()},
                backward_s={batch: factor * seconds for batch, seconds in layer.backward_s.items()},
            )
        )
    return replace(profile, model="chain", layers=tuple(layers))


def picture() -> str:
    """A burst plan, its gaps, and data parallelism beside it."""
    profile = import_profile(HERE / "profiles" / "vgg16.h200.json")
    on = scaled_cluster(profile.device, 16)
    planned = plan(profile, on, batch=64, burst_limit=2.0)
    flow = dataflow(planned, profile)
    timeline = simulate_schedule(lower(planned, flow), CostModel(profile, on), flow)
    return describe_burst(
        planned,
        timeline,
        data_parallel=data.plan(profile, on, batch=64),
        one_device_seconds=search(profile, on, batch=64).one_device_seconds,
    )


def simulate(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """All models, batches and scales; results and plots are written beside this file."""
    sharing = _sharing(arguments)
    if sharing is None:
        print("no --interference table: no background jobs on shared devices (nothing is free)", file=sys.stderr)
    profiles = [import_profile(DATA / MODELS[name]) for name in arguments.models] if DATA.is_dir() else []
    if arguments.profiles:
        profiles += [import_profile(path) for path in sorted(arguments.profiles.glob("*.json"))]
    rows: list[dict[str, Any]] = []
    for profile in profiles:
        for batch in arguments.batches:
            print(f"{profile.model} on {profile.device}, batch {batch}", file=sys.stderr)
            cell = list(scaling(profile, batch, arguments.devices, arguments.burst_limit, sharing))
            rows += cell
            _plot(cell, f"{profile.model}-{profile.device}-{batch}")
    plans = [row for row in rows if row["strategy"] == "burst"]
    errors = [abs(row["planner_error"]) for row in plans if row["planner_error"] is not None]
    result = {
        "burst_limit": arguments.burst_limit,
        "background": sharing is not None,
        "planner_error_median": statistics.median(errors) if errors else None,
        "planner_error_most": max(errors, default=None),
        "rows": rows,
    }
    (HERE / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    return result, _table(rows) + _errors(errors)


def _sharing(arguments: argparse.Namespace) -> Sharing | None:
    if not arguments.interference:
        return None
    found = Measured.load(
        arguments.interference,
        arguments.background,
        batch=arguments.background_batch,
        slowdown=arguments.slowdown,
    )
    return replace(found, in_reductions=arguments.in_reductions)


def _errors(errors: list[float]) -> str:
    if not errors:
        return ""
    return (
        f"\n\nplanner's cost against the simulator, {len(errors)} burst plans: {statistics.median(errors):.1%} in the "
        f"median, {max(errors):.1%} at most"
    )


def _plot(rows: list[dict[str, Any]], stem: str) -> None:
    """Step time and device-time of the foreground alone; what the cluster gets done in all."""
    first = rows[0]
    title = f"{first['model']} on {first['device']}, global batch {first['batch']}"
    alone = [row for row in rows if row["strategy"] in ("data", "burst", "static")]
    pictures = [
        ("step", alone, "step_ms", "ms a step"),
        ("device-time", alone, "device_ms", "device-ms a step"),
        ("total", rows, "total_devices", "devices' worth of work, foreground and background"),
    ]
    FIGURES.mkdir(exist_ok=True)
    for name, shown, key, label in pictures:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in shown:
            series.setdefault(row["strategy"], []).append((row["num_devices"], row[key]))
        picture = line_plot(series, title=title, x_label="devices", y_label=label)
        (FIGURES / f"{stem}-{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
