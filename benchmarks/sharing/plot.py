"""The GPU benchmark's picture: what a background keeps at which slowdown of the foreground, ours beside MPS.

    python benchmarks/sharing/plot.py benchmarks/sharing/results/h200.json -o docs/pictures/sharing-h200.svg

A panel a foreground, a colour a background. Ours: a line through its budgets; MPS: a dashed one through its shares of
the threads; both from nothing kept at a slowdown of 1. What lies higher keeps more at the same slowdown.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from budget_tables import FOREGROUNDS
from measured_rows import GAPS, Rows, read_rows

from burstpool.report.svg import element, label, line, path, picture, rect, standalone

COLOURS = {
    "resnet50:32": ("ResNet-50, batch 32", "#3584e4"),
    "resnet18:8": ("ResNet-18, batch 8", "#2ec27e"),
    "array:16": ("16 small ResNet-18, fused", "#c64600"),
}
"""Background → its words and colour."""
COLUMNS, PANEL, HEIGHT, LEFT, TOP = 4, 270.0, 190.0, 34.0, 76.0
SLOWDOWN, KEPT = 0.25, 0.6
"""What a panel shows: slowdowns up to 1 + 0.25, kept up to 0.6."""
INNER_WIDTH, INNER_HEIGHT = PANEL - 60, HEIGHT - 54

Points = Sequence[tuple[float, float]]


def drawn(rows: Rows) -> str:
    """The picture, as a file of its own."""
    names = list(dict.fromkeys(row["foreground"] for row in rows))
    parts = [label(0, 14, "what a background keeps of its speed, by the foreground's slowdown; H200", class_="strong")]
    for place, (words, colour) in enumerate(COLOURS.values()):
        parts.append(rect(190.0 * place, 30, 10, 10, fill=colour))
        parts.append(label(190.0 * place + 15, 39, words))
    parts += _key(620, 35)
    for place, name in enumerate(names):
        x, y = LEFT + place % COLUMNS * PANEL, TOP + place // COLUMNS * HEIGHT
        parts += _panel(x, y, name, [row for row in rows if row["foreground"] == name and "slowdown" in row])
    width, height = LEFT + COLUMNS * PANEL, TOP + -(-len(names) // COLUMNS) * HEIGHT
    return standalone(picture(*parts, width=width, height=height, title="sharing"), width=width, height=height)


def _key(x: float, y: float) -> list[str]:
    return [
        line(x, y, x + 30, y, style="stroke:#5e5c64;stroke-width:2"),
        label(x + 36, y + 4, "Burstpool at 1.05, 1.10, 1.20"),
        line(x + 230, y, x + 260, y, style="stroke:#5e5c64;stroke-width:1.2;stroke-dasharray:4 3"),
        label(x + 266, y + 4, "MPS, 10 to 100% of the threads"),
    ]


def _panel(x: float, y: float, name: str, rows: Rows) -> list[str]:
    model, batch = name.split(":")
    parts = [label(x, y - 8, f"{FOREGROUNDS.get(model, model)}, batch {batch}", class_="strong")]
    for kept in (0.0, 0.2, 0.4, 0.6):
        at = _at(x, y, 1.0, kept)[1]
        parts.append(line(x, at, x + INNER_WIDTH, at, class_="rule"))
        parts.append(label(x - 6, at + 4, f"{kept:.1f}", class_="faint", style="text-anchor:end"))
    for slowdown in (1.0, 1.05, 1.1, 1.2):
        at = _at(x, y, slowdown, 0.0)[0]
        parts.append(line(at, y, at, y + INNER_HEIGHT, class_="rule"))
        parts.append(label(at, y + INNER_HEIGHT + 14, f"{slowdown:g}", class_="faint middle"))
    for background, (_, colour) in COLOURS.items():
        same = [row for row in rows if row["background"] == background]
        mps = _points(same, "MPS")
        ours = _points([row for row in same if not row["way"].endswith(GAPS)], "ours")
        parts.append(_curve(x, y, mps, f"stroke:{colour};stroke-width:1.2;stroke-dasharray:4 3;fill:none"))
        parts.append(_curve(x, y, ours, f"stroke:{colour};stroke-width:2;fill:none"))
        for slowdown, kept in ours[1:]:
            across, down = _at(x, y, slowdown, kept)
            parts.append(element("circle", cx=across, cy=down, r=3, fill=colour))
    return parts


def _points(rows: Sequence[Mapping[str, float]], way: str) -> Points:
    found = sorted((row["slowdown"], row["kept"]) for row in rows if str(row["way"]).startswith(way))
    return [(1.0, 0.0), *found]


def _curve(x: float, y: float, points: Points, style: str) -> str:
    """As far as the panel goes: the last stretch is cut at its edge."""
    shown: list[tuple[float, float]] = []
    for point in points:
        if point[0] > 1 + SLOWDOWN and shown:
            (low, kept), (high, more) = shown[-1], point
            part = (1 + SLOWDOWN - low) / (high - low)
            shown.append((1 + SLOWDOWN, kept + part * (more - kept)))
            break
        shown.append(point)
    return path([_at(x, y, *point) for point in shown], style=style)


def _at(x: float, y: float, slowdown: float, kept: float) -> tuple[float, float]:
    return x + INNER_WIDTH * (slowdown - 1) / SLOWDOWN, y + INNER_HEIGHT * (1 - kept / KEPT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the benchmark's rows.")
    parser.add_argument("rows", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("sharing-h200.svg"))
    options = parser.parse_args()
    options.output.write_text(drawn(read_rows(options.rows)))


if __name__ == "__main__":
    main()
