"""The benchmark's picture: for each workload, how many times as fast as serial eager each way is; a logarithmic scale.

python benchmarks/fusion/plot.py results.json [more.json] [--runs 5,2] -o docs/pictures/fusion.svg     as tables.py
"""

import argparse
import math
from pathlib import Path

from tables import Rates, chosen, with_rows

from burstpool.report.svg import label, line, picture, rect, standalone

WAYS = {
    "serial_graph": ("one model, CUDA graph", "#9aa5b1"),
    "serial_compiled": ("one model, compiled, graph", "#7b8794"),
    "streams": ("graphs on streams", "#62a0ea"),
    "processes": ("8 processes, MPS", "#3584e4"),
    "vmap": ("vmap, graph", "#c0a36e"),
    "vmap_compiled": ("vmap compiled, graph", "#986a44"),
    "hfta": ("HFTA", "#e5a50a"),
    "hfta_graph": ("HFTA in a graph", "#c64600"),
    "ours": ("Burstpool", "#2ec27e"),
}
"""Way → its words and colour, in the order they are drawn."""
WIDTH, LEFT, BAR, GAP = 1120.0, 190.0, 9.0, 14.0


def drawn(rates: Rates) -> str:
    """The picture, as a file of its own."""
    ratios = {
        workload: {
            way: row["samples_per_s"] / ways["serial_eager"]["samples_per_s"]
            for way, row in ways.items()
            if way in WAYS and "samples_per_s" in row
        }
        for workload, ways in rates.items()
        if "samples_per_s" in ways.get("serial_eager", {})
    }
    top = max(max(found.values(), default=1.0) for found in ratios.values())
    decades = math.ceil(math.log10(top))
    scale = (WIDTH - LEFT - 90) / decades
    parts, y = [label(0, 14, "times as fast as serial eager, best number of members", class_="strong")], 30.0
    for place, (_, (words, colour)) in enumerate(WAYS.items()):
        x = (place % 5) * 215.0
        parts.append(rect(x, y + 18 * (place // 5), 10, 10, fill=colour))
        parts.append(label(x + 15, y + 9 + 18 * (place // 5), words))
    y += 50
    begin = y
    for workload, found in ratios.items():
        parts.append(label(0, y + BAR * len(found) / 2 + 4, workload))
        for way in (way for way in WAYS if way in found):
            length = max(1.0, math.log10(max(found[way], 1.0)) * scale)
            parts.append(rect(LEFT, y, length, BAR - 1, fill=WAYS[way][1], title=f"{workload}, {WAYS[way][0]}"))
            parts.append(label(LEFT + length + 4, y + BAR - 1, f"{found[way]:,.1f}", style="font-size:9px"))
            y += BAR
        y += GAP
    for decade in range(decades + 1):
        x = LEFT + decade * scale
        parts.insert(0, line(x, begin - 6, x, y, class_="rule"))
        parts.append(label(x, y + 12, f"{10**decade:,}×", class_="faint middle"))
    height = y + 20
    return standalone(picture(*parts, width=WIDTH, height=height, title="fusion"), width=WIDTH, height=height)


def main() -> None:
    parser = with_rows(argparse.ArgumentParser(description="Draw the benchmark's results."))
    parser.add_argument("-o", "--output", default="fusion.svg")
    options = parser.parse_args()
    Path(options.output).write_text(drawn(chosen(options)))


if __name__ == "__main__":
    main()
