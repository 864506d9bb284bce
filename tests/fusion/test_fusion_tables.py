"""Tables of `benchmarks/fusion/tables.py`: which run a figure is of, and that the README shows these figures."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fusion"
sys.path.append(str(BENCHMARK))

from tables import OURS, Rates, best_rates, merged, of_runs  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

WAYS = (
    "serial_eager",
    "serial_graph",
    "serial_compiled",
    "streams",
    "processes",
    "vmap",
    "vmap_compiled",
    "hfta",
    "hfta_graph",
    "ours",
)
"""The README's columns, in order."""
SHOWN = {"bf16": ((7, 6, 2, 4, 1, 0), ()), "fp32": ((9, 8, 5), ())}
"""What is shown of each results file: the runs, first ones first, and ways of which the fastest of all runs counts."""


def row(way: str, run: int, rate: float | None, members: int = 1) -> dict[str, Any]:
    found = {"samples_per_s": rate} if rate is not None else {"error": "skipped"}
    return {"workload": "one", "way": way, "run": run, "members": members, **found}


def rates(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    return {way: found.get("samples_per_s") for way, found in best_rates(rows)["one"].items()}


def test_a_figure_is_of_the_first_run_that_has_one_even_where_a_later_one_is_faster() -> None:
    rows = [row("ours", 1, 9.0), row("ours", 4, 5.0), row("ours", 5, 7.0), row("vmap", 4, None), row("vmap", 5, 3.0)]
    assert rates(of_runs(rows, [4, 5])) == {"ours": 5.0, "vmap": 3.0}
    assert rates(of_runs(rows, [5, 4])) == {"ours": 7.0, "vmap": 3.0}


def test_of_the_first_run_the_fastest_number_of_members_counts() -> None:
    rows = [row("ours", 4, 5.0, members=8), row("ours", 4, 6.0, members=16), row("ours", 5, 7.0)]
    assert rates(of_runs(rows, [4, 5])) == {"ours": 6.0}


def test_a_way_may_be_of_the_fastest_of_all_runs() -> None:
    rows = [row("serial_eager", 1, 4.0), row("serial_eager", 5, 2.0), row("ours", 1, 9.0), row("ours", 5, 8.0)]
    assert rates(of_runs(rows, [5, 1], fastest=["serial_eager"])) == {"serial_eager": 4.0, "ours": 8.0}
    assert rates(of_runs(rows, [5, 1], fastest=["others"])) == {"serial_eager": 4.0, "ours": 8.0}


def test_what_no_run_measured_keeps_its_reason() -> None:
    found = of_runs([row("vmap", 4, None), row("vmap", 5, None)], [4, 5])
    assert [one["error"] for one in found] == ["skipped"]


def lines_of(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the README, its own heading left out."""
    text = (BENCHMARK / "README.md").read_text().split(f"\n## {heading}\n")[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def ratios(ways: dict[str, dict[str, Any]]) -> list[str]:
    """Ours over the best other way, and over HFTA where it has the model."""
    found = {way: one["samples_per_s"] for way, one in ways.items() if "samples_per_s" in one}
    others = {way: rate for way, rate in found.items() if way not in OURS}
    over = [max(others.values())]
    over += [max(rate for way, rate in others.items() if way.startswith("hfta"))] if "hfta" in others else []
    return [f"{found['ours'] / rate:.2f}" for rate in over]


@pytest.mark.parametrize("dtype", SHOWN)
def test_the_figures_of_the_readme_are_those_of_the_results(dtype: str) -> None:
    runs, fastest = SHOWN[dtype]
    shown: Rates = best_rates(
        of_runs(merged([str(BENCHMARK / "results" / f"h200-{dtype}.json")]), runs, fastest=fastest)
    )
    lines = lines_of(f"CUDA, {dtype}")
    assert len(lines) == len(WORKLOADS)
    for workload, (_, *cells, over) in zip(WORKLOADS, lines, strict=True):
        ways = shown[workload]
        for way, cell in zip(WAYS, cells, strict=True):
            rate = ways.get(way, {}).get("samples_per_s")
            figure = re.match(r"\**([\d,]+)", cell)
            assert (figure and figure[1]) == (None if rate is None else f"{rate:,.0f}"), (workload, way)
            if bracket := re.search(r"\((\d+)", cell):
                assert int(bracket[1]) == ways[way]["members"], (workload, way)
        times = ways["ours"]["samples_per_s"] / ways["serial_eager"]["samples_per_s"]
        assert f" {times:,.0f}×)" in cells[-1] or f" {times:.1f}×)" in cells[-1], workload
        assert over.rstrip(" |").split(", ") == ratios(ways), workload
