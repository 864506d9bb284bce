"""Tables of the benchmark's rows: the best size of each way, and ratios.

    python benchmarks/fusion/tables.py results.json [more.json]            several files: later ones first
    python benchmarks/fusion/tables.py results.json --runs 4,5             run 4, and run 5 for what it has no figure of
    python benchmarks/fusion/tables.py results.json --runs 5,2 --fastest others    and of ways not ours the fastest

Where rows name the run that they are of and `--runs` is not given, the fastest of all runs counts.
"""

import argparse
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Rates = dict[str, dict[str, dict[str, Any]]]
"""Workload → way → its fastest row, or one with the reason why there is none."""
OURS = ("ours", "fused_fastest", "fused")


def best_rates(rows: Sequence[Mapping[str, Any]]) -> Rates:
    """Each way at the number of members it is fastest with."""
    found: Rates = {}
    for row in rows:
        ways = found.setdefault(row["workload"], {})
        old = ways.get(row["way"])
        if old is None or row.get("samples_per_s", 0.0) > old.get("samples_per_s", 0.0):
            ways[row["way"]] = dict(row)
    return found


def table(rates: Rates) -> str:
    """One line a workload: samples/s, members in brackets, the ratio to serial eager."""
    names = list(dict.fromkeys(way for ways in rates.values() for way in ways))
    lines = ["| workload | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for workload, ways in rates.items():
        base = ways.get("serial_eager", {}).get("samples_per_s")
        lines.append(f"| {workload} | " + " | ".join(_cell(ways.get(name), base) for name in names) + " |")
    return "\n".join([*lines, *_summary(rates)])


def _cell(row: Mapping[str, Any] | None, base: float | None) -> str:
    if row is None or "samples_per_s" not in row:
        return "–"
    ratio = f", {row['samples_per_s'] / base:.1f}×" if base else ""
    return f"{row['samples_per_s']:,.0f} ({row['members']}{ratio})"


def _summary(rates: Rates) -> Iterator[str]:
    """Ours over the best other way, each and the geometric mean; ours over HFTA; reasons for what is missing."""
    ratios = {}
    for workload, ways in rates.items():
        mine = max((ways[w]["samples_per_s"] for w in OURS if "samples_per_s" in ways.get(w, {})), default=0.0)
        others = {w: r["samples_per_s"] for w, r in ways.items() if w not in OURS and "samples_per_s" in r}
        if not mine or not others:
            continue
        best = max(others, key=others.__getitem__)
        ratios[workload] = mine / others[best]
        hfta = max((others[w] for w in ("hfta", "hfta_graph") if w in others), default=None)
        beside = f"; over HFTA {mine / hfta:.2f}" if hfta else ""
        yield f"{workload}: {ratios[workload]:.2f} × the best other way ({best}){beside}"
    if ratios:
        yield f"geometric mean: {math.exp(sum(map(math.log, ratios.values())) / len(ratios)):.2f}"
    for workload, ways in rates.items():
        for way, row in ways.items():
            if "samples_per_s" not in row:
                yield f"{workload}, {way}: {row.get('error', '')}"


def merged(files: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of several files; where two measured the same workload and way, those of the later file."""
    return _first([json.loads(Path(file).read_text())["rows"] for file in reversed(files)])


def of_runs(
    rows: Sequence[dict[str, Any]], runs: Sequence[int], *, fastest: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Of each workload and way the rows of the first of these runs that has a figure; `fastest` ways of all runs.

    "others" are all ways but ours.
    """
    free = {row["way"] for row in rows if row["way"] in fastest or ("others" in fastest and row["way"] not in OURS)}
    kept = [row for row in rows if row["way"] in free]
    return kept + _first([[row for row in rows if row.get("run") == run and row["way"] not in free] for run in runs])


def _first(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each workload and way the rows of the first run that has a figure, or else that has a reason why not."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for rows in runs:
        new: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            new.setdefault((row["workload"], row["way"]), []).append(row)
        for key, its_rows in new.items():
            if key not in found or (not _measured(found[key]) and _measured(its_rows)):
                found[key] = its_rows
    return [row for its_rows in found.values() for row in its_rows]


def _measured(rows: Sequence[Mapping[str, Any]]) -> bool:
    return any("samples_per_s" in row for row in rows)


def with_rows(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The options that `chosen` reads."""
    parser.add_argument("files", nargs="+")
    parser.add_argument("--runs", default="", help="by commas: a figure is of the first of these that has one")
    parser.add_argument("--fastest", default="", help="ways, by commas, or others: the fastest of all runs")
    return parser


def chosen(options: argparse.Namespace) -> Rates:
    """What the options ask for."""
    rows = merged(options.files)
    if options.runs:
        runs = [int(run) for run in options.runs.split(",")]
        rows = of_runs(rows, runs, fastest=options.fastest.split(","))
    return best_rates(rows)


if __name__ == "__main__":
    print(table(chosen(with_rows(argparse.ArgumentParser(description="Tables of results.")).parse_args())))
