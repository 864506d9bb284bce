"""Tables of rows of either benchmark: how well the budget was held; of GPUs, ours beside MPS at the same slowdown.

    python benchmarks/sharing/cuda.py --out rows.json          # or cpu.py
    python benchmarks/sharing/budget_tables.py rows.json

A cell of ours is slowdown, p95, kept; in brackets what MPS keeps at that slowdown: on straight lines between its four
shares of the threads, and to nothing at a slowdown of 1, although it cannot be held at what lies between. Rows may name
their `run`; of a pair the last one counts. Rows without ours are shown as they are: slowdown, p95, kept, sum of shares.
On CPUs the foreground's own p95 stands behind its p95, which may be 0.05 above that where it is above the budget.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from measured_rows import GAPS, Rows, read_rows

MEAN_OVER, P95_OVER = 0.01, 0.05
"""What the mean and the p95 may be above the budget."""


FOREGROUNDS = {
    "vgg16": "VGG-16",
    "wide_resnet101_2": "WideResNet-101-2",
    "inception_v3": "Inception-v3",
    "bert_medium": "Transformer (BERT-medium)",
}
BACKGROUNDS = {"resnet50:32": "ResNet-50, 32", "resnet18:8": "ResNet-18, 8", "array:16": "array of 16"}
"""Jobs by their words."""
UNHELD = {
    "processes": "two processes",
    "streams": "two streams of one priority",
    "priority": "two streams of different priority",
}
"""Ways that hold nothing back, by theirs."""
UNGATED = {"two processes": "two processes", "niced": "at the lowest priority, ungated"}
"""Those of CPUs."""


def foreground_words(name: str) -> str:
    """`"vgg16:4"` → `"VGG-16, 4"`."""
    model, batch = name.split(":")
    return f"{FOREGROUNDS.get(model, model)}, {batch}"


def mps_kept(points: Sequence[tuple[float, float]], slowdown: float) -> float | None:
    """What MPS keeps at a slowdown; None beyond its last point, or where it was not measured."""
    for (low, kept), (high, more) in pairwise([(1.0, 0.0), *sorted(points)]):
        if low <= slowdown <= high and low < high:
            return kept + (more - kept) * (slowdown - low) / (high - low)
    return None


def table(rows: Rows) -> str:
    """One line a pair of jobs, whichever was measured first."""
    all_ways = list(dict.fromkeys(row["way"] for row in rows))
    ours = sorted((way for way in all_ways if way.startswith("ours")), key=lambda way: (way.endswith(GAPS), way))
    ways = [*ours, *(way for way in all_ways if way in UNGATED)] or all_ways
    titles = ["foreground, batch", "background, batch", *(_title(way) for way in ways)]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    before = ""
    for pair in _pairs(rows):
        found = {row["way"]: row for row in rows if (row["foreground"], row["background"]) == pair}
        points = _points(rows, pair)
        words = "" if pair[0] == before else foreground_words(pair[0])
        cells = [words, BACKGROUNDS.get(pair[1], pair[1]), *(_cell(found.get(way), points) for way in ways)]
        lines.append("| " + " | ".join(cells) + " |")
        before = pair[0]
    return "\n".join(lines)


def _pairs(rows: Rows) -> list[tuple[str, str]]:
    """By models in the order of the words above, those without words last, and by batches."""
    found = list(dict.fromkeys((row["foreground"], row["background"]) for row in rows))
    models = list(dict.fromkeys([*FOREGROUNDS, *(foreground.split(":")[0] for foreground, _ in found)]))
    beside = list(dict.fromkeys([*BACKGROUNDS, *(background for _, background in found)]))

    def place(pair: tuple[str, str]) -> tuple[int, int, int]:
        model, batch = pair[0].split(":")
        return models.index(model), int(batch), beside.index(pair[1])

    return sorted(found, key=place)


def _title(way: str) -> str:
    words = (UNHELD | UNGATED).get(way, way.removesuffix(GAPS).replace("ours ", "ours, "))
    return f"{words}, with the gaps of an 8-device burst plan replayed" if way.endswith(GAPS) else words


def _cell(row: Mapping[str, Any] | None, points: Sequence[tuple[float, float]]) -> str:
    if row is None or "slowdown" not in row:
        return "–"
    own = f" ({row['alone_p95']:.2f})" if "alone_p95" in row else ""
    text = f"{row['slowdown']:.3f}, {row['slowdown_p95']:.2f}{own}, {row['kept']:.2f}"
    if not row["way"].startswith("ours"):
        return f"{text}, {row['sum_of_shares']:.2f}"
    if row["way"].endswith(GAPS):
        return f"{text}; sum {row['sum_of_shares']:.2f} (gaps {row['gap_share']:.0%})"
    part = row.get("multiprocessors", 1.0)
    where = f" on {part:.0%}" if part < 1 else ""
    beside = mps_kept(points, row["slowdown"])
    return text + where + (f" ({beside:.2f})" if beside is not None else "")


def summary(rows: Rows) -> list[str]:
    """How often the budget held, and how often more was kept than by MPS."""
    ours = [row for row in rows if row["way"].startswith("ours") and "slowdown" in row]
    if not ours:
        return []
    budgets = [float(row["way"].removesuffix(GAPS).split()[1]) for row in ours]
    mean = sum(row["slowdown"] <= budget + MEAN_OVER for row, budget in zip(ours, budgets, strict=True))
    own = [max(row.get("alone_p95", 0.0), budget) for row, budget in zip(ours, budgets, strict=True)]
    p95 = sum(row["slowdown_p95"] <= limit + P95_OVER for row, limit in zip(ours, own, strict=True))
    more: dict[str, list[float]] = {}
    for row in ours:
        beside = mps_kept(_points(rows, (row["foreground"], row["background"])), row["slowdown"])
        if beside and not row["way"].endswith(GAPS):
            more.setdefault(row["way"], []).append(row["kept"] / beside)
    most = max(row["slowdown"] - budget for row, budget in zip(ours, budgets, strict=True))
    most_p95 = max(row["slowdown_p95"] - limit for row, limit in zip(ours, own, strict=True))
    lines = [
        f"{len(ours)} lines: mean within {MEAN_OVER} above the budget in {mean}, p95 within {P95_OVER} in {p95}; "
        f"at most {most:.3f} and {most_p95:.3f} above it"
    ]
    for way, ratios in more.items():
        ahead = f"more in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
        lines.append(
            f"{way}, kept over MPS's at the same slowdown: {ahead}, "
            f"median {statistics.median(ratios):.2f}, least {min(ratios):.2f}"
        )
    return lines


def _points(rows: Rows, pair: tuple[str, str]) -> list[tuple[float, float]]:
    """Slowdown and kept of MPS's lines; those that failed have none."""
    same = (row for row in rows if (row["foreground"], row["background"]) == pair)
    return [(row["slowdown"], row["kept"]) for row in same if row["way"].startswith("MPS") and "slowdown" in row]


def main() -> None:
    rows = read_rows(Path(sys.argv[1]))
    print(table(rows), *summary(rows), sep="\n")


if __name__ == "__main__":
    main()
