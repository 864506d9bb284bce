"""Rows of the benchmarks, as cuda.py and cpu.py write them and tables, pictures and comparisons read them."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
GAPS = ", gaps"
"""What the name of a way with a plan's gaps ends in."""


def all_rows(path: Path) -> Rows:
    """What they wrote."""
    found = json.loads(path.read_text())
    rows: Rows = found["rows"] if isinstance(found, dict) else found
    return rows


def write_rows(path: Path, found: Mapping[str, Any]) -> None:
    """Whole or not at all: whoever is killed meanwhile has what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(json.dumps(found))
    os.replace(aside, path)


def read_rows(path: Path) -> Rows:
    """Where a file holds several runs, a pair's rows of the last run that has it; of a line the last that went well."""
    rows = [row for row in all_rows(path) if "slowdown" in row]
    last: dict[tuple[str, str], int] = {}
    for row in rows:
        pair = row["foreground"], row["background"]
        last[pair] = max(last.get(pair, 0), row.get("run", 0))
    lines = {
        (row["foreground"], row["background"], row["way"]): row
        for row in rows
        if row.get("run", 0) == last[row["foreground"], row["background"]]
    }
    return list(lines.values())
