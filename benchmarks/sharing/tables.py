"""Tables of the GPU benchmark's rows: ours beside MPS at the same slowdown, and how often the budget was held.

    python benchmarks/sharing/cuda.py --out rows.json
    python benchmarks/sharing/tables.py rows.json

A cell of ours is slowdown, p95, kept; in brackets what MPS keeps at that slowdown: on straight lines between its four
shares of the threads, and to nothing at a slowdown of 1, although it cannot be held at what lies between.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
GAPS = ", gaps"
MEAN_OVER, P95_OVER = 0.01, 0.05
"""What the mean and the p95 may be above the budget."""


def mps_kept(points: Sequence[tuple[float, float]], slowdown: float) -> float | None:
    """What MPS keeps at a slowdown; None beyond its last point, or where it was not measured."""
    for (low, kept), (high, more) in pairwise([(1.0, 0.0), *sorted(points)]):
        if low <= slowdown <= high and low < high:
            return kept + (more - kept) * (slowdown - low) / (high - low)
    return None


def table(rows: Rows) -> str:
    """One line a pair of jobs."""
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way.startswith("ours")]
    lines = ["| foreground | background | " + " | ".join(ways) + " |", "| --- " * (len(ways) + 2) + "|"]
    for pair in dict.fromkeys((row["foreground"], row["background"]) for row in rows):
        found = {row["way"]: row for row in rows if (row["foreground"], row["background"]) == pair}
        points = _points(rows, pair)
        lines.append(f"| {pair[0]} | {pair[1]} | " + " | ".join(_cell(found.get(way), points) for way in ways) + " |")
    return "\n".join(lines)


def _cell(row: Mapping[str, Any] | None, points: Sequence[tuple[float, float]]) -> str:
    if row is None or "slowdown" not in row:
        return "–"
    text = f"{row['slowdown']:.3f}, {row['slowdown_p95']:.2f}, {row['kept']:.2f}"
    if row["way"].endswith(GAPS):
        return f"{text}; sum {row['sum_of_shares']:.2f} (gaps {row['gap_share']:.0%})"
    part = row.get("multiprocessors", 1.0)
    where = f" on {part:.0%}" if part < 1 else ""
    beside = mps_kept(points, row["slowdown"])
    return text + where + (f" ({beside:.2f})" if beside is not None else "")


def summary(rows: Rows) -> list[str]:
    """How often the budget held, and how often more was kept than by MPS."""
    ours = [row for row in rows if row["way"].startswith("ours") and "slowdown" in row]
    budgets = [float(row["way"].removesuffix(GAPS).split()[1]) for row in ours]
    mean = sum(row["slowdown"] <= budget + MEAN_OVER for row, budget in zip(ours, budgets, strict=True))
    p95 = sum(row["slowdown_p95"] <= budget + P95_OVER for row, budget in zip(ours, budgets, strict=True))
    more = [
        row["kept"] / beside
        for row in ours
        if not row["way"].endswith(GAPS)
        and (beside := mps_kept(_points(rows, (row["foreground"], row["background"])), row["slowdown"])) is not None
        and beside > 0
    ]
    lines = [f"{len(ours)} lines: mean within {MEAN_OVER} above the budget in {mean}, p95 within {P95_OVER} in {p95}"]
    if more:
        ahead = sum(ratio > 1 for ratio in more)
        lines.append(f"kept over MPS's at the same slowdown: more in {ahead} of {len(more)}, {min(more):.2f} at least")
    return lines


def _points(rows: Rows, pair: tuple[str, str]) -> list[tuple[float, float]]:
    """Slowdown and kept of MPS's lines; those that failed have none."""
    same = (row for row in rows if (row["foreground"], row["background"]) == pair)
    return [(row["slowdown"], row["kept"]) for row in same if row["way"].startswith("MPS") and "slowdown" in row]


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    rows = found["rows"] if isinstance(found, dict) else found
    print(table(rows))
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    main()
