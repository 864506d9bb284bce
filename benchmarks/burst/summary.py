"""The README's tables of the simulation at scale, from `results.json`.

Takes the rows that `run.py` wrote. Returns Markdown. Computes nothing but ratios and extremes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

NAMES = {
    "vgg16": "VGG-16",
    "wide_resnet101_2": "WideResNet-101-2",
    "inception_v3": "Inception-v3",
    "bert_medium": "BERT-medium",
}
STRATEGIES = ("data", "data+background", "static", "burst", "burst+background")
SHOWN_BATCH = 256
SHOWN_SCALES = (8, 32, 128, 1024)
RATIO_SCALES = (32, 64, 128, 256, 1024)
LEAST_SCALE = 32
"""From here on a cluster's throughput is compared."""

Row = Mapping[str, Any]


def summary(results: Mapping[str, Any]) -> str:
    """All tables."""
    rows = results["rows"]
    parts = [f"Step ms / device-ms, data parallelism → burst, global batch {SHOWN_BATCH}:", _steps(rows)]
    parts += [
        f"Work of the whole cluster over data parallelism's alone, {LEAST_SCALE} devices or more, all batches, "
        "least to most:",
        _totals(rows),
    ]
    if any(row["strategy"] == "burst+background" for row in rows):
        parts += [
            "Work of the whole cluster with background jobs over data parallelism's alone: burst+background "
            "(data+background, static):",
            _by_scale(rows),
        ]
    if results["planner_error_median"] is not None:
        parts.append(
            f"Planner's cost against the simulator: {results['planner_error_median']:.1%} in the median, "
            f"{results['planner_error_most']:.1%} at most."
        )
    return "\n\n".join(parts)


def _models(rows: Sequence[Row]) -> list[tuple[str, str]]:
    return sorted(dict.fromkeys((row["device"], row["model"]) for row in rows), reverse=True)


def _steps(rows: Sequence[Row]) -> str:
    cells = {
        (
            row["device"],
            row["model"],
            row["num_devices"],
            row["strategy"],
        ): f"{row['step_ms']:.1f}/{row['device_ms']:.0f}"
        for row in rows
        if row["batch"] == SHOWN_BATCH
    }
    scales = [scale for scale in SHOWN_SCALES if any(key[2] == scale for key in cells)]
    lines = ["| | " + " | ".join(f"{scale} devices" for scale in scales) + " |", "| --- |" + " --- |" * len(scales)]
    for device, model in _models(rows):
        ways = [
            " → ".join(cells.get((device, model, scale, strategy), "–") for strategy in ("data", "burst"))
            for scale in scales
        ]
        lines.append(f"| {NAMES.get(model, model)}, {device} | " + " | ".join(ways) + " |")
    return "\n".join(lines)


def _by_scale(rows: Sequence[Row]) -> str:
    """A line a model and batch."""
    ratios = {
        (row["device"], row["model"], row["batch"], row["num_devices"], row["strategy"]): row["total_over_data"]
        for row in rows
    }
    scales = sorted({key[3] for key in ratios if key[3] >= LEAST_SCALE and key[3] in RATIO_SCALES})
    lines = [
        "| | batch | " + " | ".join(f"{scale} devices" for scale in scales) + " |",
        "| --- | --- |" + " --- |" * len(scales),
    ]
    for device, model in _models(rows):
        for batch in sorted({row["batch"] for row in rows}):
            cells = [
                "{:.2f} ({:.2f}, {:.2f})".format(
                    *(
                        ratios[device, model, batch, scale, way]
                        for way in ("burst+background", "data+background", "static")
                    )
                )
                for scale in scales
            ]
            lines.append(f"| {NAMES.get(model, model)}, {device} | {batch} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _totals(rows: Sequence[Row]) -> str:
    large = [row for row in rows if row["num_devices"] >= LEAST_SCALE]
    shown = [strategy for strategy in STRATEGIES[1:] if any(row["strategy"] == strategy for row in large)]
    lines = ["| | " + " | ".join(shown) + " |", "| --- |" + " --- |" * len(shown)]
    for device, model in _models(rows):
        own = [row for row in large if (row["device"], row["model"]) == (device, model)]
        spans = []
        for strategy in shown:
            ratios = [row["total_over_data"] for row in own if row["strategy"] == strategy]
            spans.append(f"{min(ratios):.2f}–{max(ratios):.2f}" if ratios else "–")
        lines.append(f"| {NAMES.get(model, model)}, {device} | " + " | ".join(spans) + " |")
    return "\n".join(lines)
