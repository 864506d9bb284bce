"""What the interference model predicts for pairs of jobs on one GPU, against what was measured.

    python benchmarks/sharing/cuda.py --out rows.json                      on the GPU
    python benchmarks/sharing/prediction.py rows.json [--interference table.json] [--profiles folder]

Predicts slowdown and kept background speed of every row whose way the model knows (the two streams of different
priority, ours at a budget, ours with gaps) from the interference table of layer kinds alone; no measurement of the pair
goes in but the foreground's step alone, which only sets the scale of gaps. The parts of the kinds come from the jobs'
profiles; a job without one (the backgrounds) is estimated by its layers' floating-point operations and bytes, and the
optimizer's part by the bytes it moves. Prints lines on standard error and one JSON object on standard output.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from measured_rows import read_rows

from burstpool.cluster.catalogue import device_type
from burstpool.job import load_job
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.report.timeline import Event, Timeline
from burstpool.run.setup import trace_job
from burstpool.share.budget import Budget
from burstpool.share.interference.predict import SharingPrediction, predict_sharing
from burstpool.share.interference.table import InterferenceTable, mix_of

HERE = Path(__file__).parent
DEVICE = "H200"
EFFICIENCY = 0.5
"""Share of the peak rate that a convolution or matrix product reaches, and of the bandwidth that the rest does."""
LAUNCH_S = 3e-6
"""No kernel is shorter."""
UPDATE_PASSES = 5
"""How often an update in one kernel goes over the parameters' bytes: reads weights, gradients and momentum, writes
weights and momentum."""
ARRAY_MEMBERS = 16
ARRAY_SETTINGS = {"image_size": 32, "num_classes": 10}
"""As in cuda.py: what `array:16` is made of."""
PIECE_S = 3e-4
UNHELD = 100.0
"""A budget that holds nothing back."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what cuda.py --out wrote")
    parser.add_argument("--interference", type=Path, default=HERE / "interference.h200.json")
    parser.add_argument("--profiles", type=Path, default=HERE.parent / "burst" / "profiles")
    arguments = parser.parse_args()
    table = InterferenceTable.load(arguments.interference)
    rows = [row for row in read_rows(arguments.rows) if "slowdown" in row]
    found = []
    for row in rows:
        budget = budget_of(row["way"])
        if budget is None:
            continue
        foreground = mix(row["foreground"], arguments.profiles)
        background = mix(row["background"], arguments.profiles)
        prediction = predicted(row, foreground, background, table, budget)
        found.append(compared(row, prediction))
        sys.stderr.write(line(found[-1]) + "\n")
    report = {"benchmark": "interference prediction", "table": table.source, "rows": found, "errors": errors(found)}
    for way, figures in report["errors"].items():
        sys.stderr.write(f"{way}: {figures}\n")
    sys.stdout.write(json.dumps(report) + "\n")


def budget_of(way: str) -> float | None:
    """What a way holds the foreground to; None for ways that the model says nothing of."""
    if way == "priority":
        return UNHELD
    return float(way.removeprefix("ours ").split(",")[0]) if way.startswith("ours ") else None


def predicted(
    row: Mapping[str, Any],
    foreground: Mapping[str, float],
    background: Mapping[str, float],
    table: InterferenceTable,
    budget: float,
) -> SharingPrediction:
    """On one device: a step of compute, with the gaps that were replayed."""
    gap_share = row.get("gap_share") or 0.0
    step_s = row["alone_s"]
    busy_s = (1 - gap_share) * step_s
    events = [Event(device=0, lane="compute", kind="forward", block="step", start_s=0.0, stop_s=busy_s)]
    if gap_share:
        events.append(Event(device=0, lane="compute", kind="step", block="step", start_s=step_s, stop_s=step_s))
    timeline = Timeline(source="predicted", num_devices=1, step_time_s=step_s, events=tuple(events))
    return predict_sharing(
        timeline,
        foreground,
        background,
        table,
        Budget(slowdown=budget),
        slice_s=row.get("piece_s", PIECE_S) if gap_share else 0.0,
    )


def compared(row: Mapping[str, Any], prediction: SharingPrediction) -> dict[str, Any]:
    return {
        "foreground": row["foreground"],
        "background": row["background"],
        "way": row["way"],
        "predicted_slowdown": prediction.slowdown,
        "measured_slowdown": row["slowdown"],
        "slowdown_error": prediction.slowdown / row["slowdown"] - 1,
        "predicted_kept": prediction.background_kept,
        "measured_kept": row["kept"],
        "kept_error": prediction.background_kept - row["kept"],
        "predicted_sum": prediction.sum_of_shares,
        "measured_sum": 1 / row["slowdown"] + row["kept"],
    }


def line(found: Mapping[str, Any]) -> str:
    return (
        f"{found['foreground']} + {found['background']}, {found['way']}: slowdown {found['predicted_slowdown']:.3f} "
        f"predicted, {found['measured_slowdown']:.3f} measured ({found['slowdown_error']:+.1%}); kept "
        f"{found['predicted_kept']:.2f} predicted, {found['measured_kept']:.2f} measured ({found['kept_error']:+.2f})"
    )


def errors(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By way: median and largest."""
    ways = dict.fromkeys(row["way"] for row in found)
    return {way: _errors([row for row in found if row["way"] == way]) for way in ways}


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    slowdown, kept = ([abs(row[name]) for row in rows] for name in ("slowdown_error", "kept_error"))
    signed = [row["kept_error"] for row in rows]
    return {
        "pairs": len(rows),
        "slowdown_median": round(statistics.median(slowdown), 4),
        "slowdown_largest": round(max(slowdown), 4),
        "kept_median": round(statistics.median(kept), 4),
        "kept_largest": round(max(kept), 4),
        "kept_bias": round(statistics.fmean(signed), 4),
    }


@cache
def mix(which: str, profiles: Path) -> dict[str, float]:
    """Kind → its part of a step's compute, the optimizer's included."""
    name, batch_text = which.split(":")
    batch, members, settings = int(batch_text), 1, {}
    if name == "array":
        name, members, settings = "resnet18", ARRAY_MEMBERS, ARRAY_SETTINGS
    measured = profiles / f"{name}.{DEVICE.lower()}.json"
    if measured.is_file() and members == 1:
        profile = Profile.load(measured)
    else:
        profile = by_roofline(name, settings, batch * members)
        batch *= members
    layers_s = sum(row.forward_s + row.backward_s for row in profile.rows(batch))
    parameters_bytes = members * profile.parameter_bytes
    update_s = UPDATE_PASSES * parameters_bytes / (EFFICIENCY * device_type(DEVICE).memory_bytes_per_s)
    found = {kind: part * layers_s / (layers_s + update_s) for kind, part in mix_of(profile, batch).items()}
    return found | {"optimizer": update_s / (layers_s + update_s)}


def by_roofline(name: str, settings: Mapping[str, Any], batch: int) -> Profile:
    """A job's layers as long as their operations and bytes make them, both ways."""
    graph = trace_job(load_job(f"zoo:{name}", dict(settings))).graph
    device = device_type(DEVICE)
    sizes = {value.name: value.bytes_at(batch) for value in graph.values().values()}
    layers = []
    for layer in graph.layers:
        moved = sum(sizes[x] for x in (*layer.inputs, *(value.name for value in layer.outputs))) / 2  # bf16
        compute_s = layer.flops_per_sample * batch / device.flops_per_s["bf16"]
        time_s = max(compute_s, (moved + layer.parameter_bytes) / device.memory_bytes_per_s) / EFFICIENCY + LAUNCH_S
        layers.append(
            LayerProfile(
                name=layer.name,
                inputs=tuple(layer.inputs),
                parameter_bytes=layer.parameter_bytes,
                output_bytes_per_sample=sum(value.bytes_per_sample for value in layer.outputs),
                kind=layer.kind,
                forward_s={batch: time_s},
                backward_s={batch: 2 * time_s},
            )
        )
    return Profile(model=name, device=DEVICE, source="roofline", layers=tuple(layers))


if __name__ == "__main__":
    main()
