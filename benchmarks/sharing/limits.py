"""What memory bandwidth and arithmetic allow a pair of jobs on one GPU, against what was reached.

    python benchmarks/sharing/cuda.py --out rows.json                      on the GPU
    python benchmarks/sharing/limits.py rows.json [--budget 1.10] [--json] [--cache-bytes 50e6]

A job that takes a share of a resource alone takes as much less of it as it is slower. At a slowdown s of the foreground
the background can keep, of its own speed,

    kept ≤ (1 - share of the foreground / s) / share of the background,    for each resource; and at most 1

Resources: bytes to and from memory and bf16 operations a second, at the peaks of the catalogue, which no kernel reaches
quite. What a step asks of them is counted (`traffic.py`); how long it takes alone is measured. Multiprocessors, caches
and the time that small kernels wait for each other are limits too, which this does not know. What they leave is seen in
the best of all measured ways: the highest sum of shares at any slowdown, and, with its background held back until the
foreground's slowdown is the budget, the most that any way would keep there. Ways with gaps do not count.

Prints a line a pair; as JSON also the limits at every budget of the rows.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measured_rows import GAPS, Rows, read_rows
from prediction import DEVICE
from traffic import CACHE_BYTES, StepWork, step_work

from burstpool.cluster.catalogue import device_type
from burstpool.share.budget import Budget
from burstpool.share.gpu.width import Together

DROPPED_STEPS = 21
"""Of the foreground's steps beside ours, those that cuda.py leaves out of `steps`: the first 20, and one between
two ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a job alone uses of the GPU, 0 to 1."""

    memory: float
    """Of the memory bandwidth."""
    arithmetic: float
    """Of the bf16 rate."""

    @classmethod
    def of(cls, work: StepWork, step_s: float) -> "Shares":
        device = device_type(DEVICE)
        return cls(
            memory=work.memory_bytes / step_s / device.memory_bytes_per_s,
            arithmetic=work.operations / step_s / device.peak_flops_per_s("bf16"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most that a background can keep at a slowdown of the foreground."""

    kept: float
    by: str
    """What sets it: `memory`, `arithmetic`, or `itself` where it could have its full speed."""
    sum_of_shares: float


def limit(foreground: Shares, background: Shares, slowdown: float) -> Limit:
    """By the scarcer resource."""
    bounds = {
        "itself": 1.0,
        "memory": (1 - foreground.memory / slowdown) / background.memory,
        "arithmetic": (1 - foreground.arithmetic / slowdown) / background.arithmetic,
    }
    by = min(bounds, key=bounds.__getitem__)
    kept = max(bounds[by], 0.0)
    return Limit(kept=kept, by=by, sum_of_shares=1 / slowdown + kept)


def used_together(foreground: Shares, background: Shares, row: Mapping[str, Any]) -> Shares:
    """What both use at once, as measured."""
    return Shares(
        memory=foreground.memory / row["slowdown"] + background.memory * row["kept"],
        arithmetic=foreground.arithmetic / row["slowdown"] + background.arithmetic * row["kept"],
    )


def held_back(row: Mapping[str, Any], budget: float) -> float:
    """The sum of shares if a way's background were held back to a budget, each second of it costing what it does."""
    as_measured = Together(step_s=(row["slowdown"] * row["alone_s"],), alone_s=row["alone_s"], kept=row["kept"])
    return 1 / min(row["slowdown"], budget) + as_measured.kept_within(budget)


def own_step_s(rows: Rows) -> float:
    """A pair's background's step with the GPU to itself; older rows do not say it, but ours without gaps imply it.

    In those, `kept` is steps a second times that time. Steps are counted over the whole run, in which the foreground's
    first ones are alone; the last one that has begun is ended, half a step more than was kept, on average.
    """
    ours = [row for row in rows if _budget(row) is not None]
    if said := [row["own_s"] for row in ours if "own_s" in row]:
        return min(said)
    kept_s = sum(row["kept"] * row["slowdown"] * row["alone_s"] * _shared_steps(row) for row in ours)
    return kept_s / sum(row["background_steps"] - 0.5 for row in ours)


def _shared_steps(row: Mapping[str, Any]) -> int:
    return row["steps"] + DROPPED_STEPS - Budget(slowdown=1.1).alone_first


def _budget(row: Mapping[str, Any]) -> float | None:
    """Of ours without gaps; None for other ways, and for rows that failed."""
    ours = row["way"].startswith("ours ") and not row["way"].endswith(GAPS) and "slowdown" in row
    return float(row["way"].split()[1]) if ours else None


def pairs(rows: Rows, cache_bytes: int) -> list[dict[str, Any]]:
    """One entry a pair that has lines of ours."""
    names = dict.fromkeys((row["foreground"], row["background"]) for row in rows if _budget(row) is not None)
    found = (_rows_of(rows, *both) for both in names)
    return [pair(both, own_step_s(both), cache_bytes) for both in found]


def _rows_of(rows: Rows, foreground: str, background: str) -> Rows:
    same = (row for row in rows if (row["foreground"], row["background"]) == (foreground, background))
    return [row for row in same if "slowdown" in row and not row["way"].endswith(GAPS)]


def pair(rows: Rows, own_s: float, cache_bytes: int) -> dict[str, Any]:
    """Shares of both, limits and what was reached at each budget, and the best of all ways."""
    ours = {budget: row for row in rows if (budget := _budget(row)) is not None}
    first = next(iter(ours.values()))
    foreground = Shares.of(step_work(first["foreground"], cache_bytes), first["alone_s"])
    background = Shares.of(step_work(first["background"], cache_bytes), own_s)
    highest = max(rows, key=lambda row: row["sum_of_shares"])
    return {
        "foreground": first["foreground"],
        "background": first["background"],
        "alone_s": first["alone_s"],
        "background_alone_s": own_s,
        "foreground_shares": asdict(foreground),
        "background_shares": asdict(background),
        "budgets": {
            budget: {
                "limit": asdict(limit(foreground, background, budget)),
                "used": asdict(used_together(foreground, background, row)),
                "slowdown": row["slowdown"],
                "kept": row["kept"],
                "sum_of_shares": row["sum_of_shares"],
                "best_held_back": max((held_back(one, budget), one["way"]) for one in rows),
            }
            for budget, row in ours.items()
        },
        "highest": {name: highest[name] for name in ("way", "slowdown", "kept", "sum_of_shares")},
    }


def table(found: Sequence[Mapping[str, Any]], budget: float) -> str:
    """Markdown."""
    heads = (
        "foreground",
        "background",
        "foreground's step, memory, arithmetic",
        "background's",
        f"limit at {budget:.2f}: kept, sum (set by)",
        "reached: kept, sum; memory, arithmetic used",
        "reached / limit",
        f"best way held back to {budget:.2f}",
        "highest sum of any way",
    )
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    lines += ["| " + " | ".join(_cells(one, budget)) + " |" for one in found if budget in one["budgets"]]
    return "\n".join(lines)


def _cells(one: Mapping[str, Any], budget: float) -> list[str]:
    at, highest = one["budgets"][budget], one["highest"]
    most, used, (held_sum, held_way) = at["limit"], at["used"], at["best_held_back"]
    return [
        one["foreground"],
        one["background"],
        _used(one["alone_s"], one["foreground_shares"]),
        _used(one["background_alone_s"], one["background_shares"]),
        f"{most['kept']:.2f}, {most['sum_of_shares']:.2f} ({most['by']})",
        f"{at['kept']:.2f}, {at['sum_of_shares']:.2f}; {used['memory']:.0%}, {used['arithmetic']:.0%}",
        f"{at['sum_of_shares'] / most['sum_of_shares']:.2f}",
        f"{held_sum:.2f} ({held_way})",
        f"{highest['sum_of_shares']:.2f} ({highest['way']}, at {highest['slowdown']:.2f})",
    ]


def _used(step_s: float, shares: Mapping[str, float]) -> str:
    return f"{1e3 * step_s:.1f} ms, {shares['memory']:.0%}, {shares['arithmetic']:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="what cuda.py --out wrote")
    parser.add_argument("--budget", type=float, default=1.10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cache-bytes", type=float, default=CACHE_BYTES, help="0: every operator goes to memory")
    arguments = parser.parse_args()
    found = pairs(read_rows(arguments.rows), int(arguments.cache_bytes))
    report = json.dumps({"benchmark": "limits of sharing", "device": DEVICE, "pairs": found})
    sys.stdout.write((report if arguments.json else table(found, arguments.budget)) + "\n")


if __name__ == "__main__":
    main()
