"""A foreground and a background job on one GPU, in every way there is: slowdown of the one, speed kept by the other.

    python benchmarks/sharing/cuda.py                                              all pairs
    python benchmarks/sharing/cuda.py --foregrounds vgg16:4 --backgrounds resnet18:8 --seconds 5
    python benchmarks/sharing/cuda.py --pairs vgg16:4+resnet50:32,vgg16:1+array:16 --ways ours --seconds 60
    python benchmarks/sharing/cuda.py --ways ours,gaps --seconds 60 --done long.json        what is not in long.json

Ways: two processes (the driver's time slices); two processes under MPS, the background with a share of the threads;
one process with two streams, of the same and of different priority, nothing held back; ours at several budgets; ours
with the gaps of an 8-device burst plan replayed in the foreground. In all of them both jobs' steps are CUDA graphs of
the same kernels and their samples are on the device already. Every way is measured next to the foreground alone, and
compared with it: `slowdown` and `slowdown_p95` over the mean step alone, `kept` over the background's steps a second
alone. Prints one JSON object on standard output, lines on standard error as they come.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jobs import Which
from measured_rows import GAPS, Rows, all_rows
from players import Player, mps_environment, start_mps, two_processes
from sharers import Sharer

FOREGROUNDS = (
    "vgg16:1,vgg16:4,vgg16:16,wide_resnet101_2:1,wide_resnet101_2:4,wide_resnet101_2:16,inception_v3:4,bert_medium:8"
)
BACKGROUNDS = "resnet50:32,resnet18:8,array:16"
BUDGETS = (1.05, 1.10, 1.20)
GAPS_BUDGET = 1.10
MPS_PERCENT = (100, 50, 30, 10)
OURS, MPS = "ours ", "MPS "
ALONE = ("processes", "MPS 100%")
"""Processes in which a background's speed alone is measured, without MPS and under it."""
SHORT_S = 0.4
"""For which ways with nothing held back are measured at most."""
Line = tuple[Which, Which, str]
"""Foreground, background, way."""
Side = tuple[str, Which, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foregrounds", default=FOREGROUNDS)
    parser.add_argument("--backgrounds", default=BACKGROUNDS)
    parser.add_argument("--pairs", default="", help="instead of all of these with all of those: vgg16:4+resnet50:32,…")
    parser.add_argument("--ways", default="ours,gaps,streams,priority,processes,mps")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--at-once", type=int, default=4, help="foregrounds whose processes fit in the GPU's memory")
    parser.add_argument("--done", type=Path, help="rows of an earlier run, to be left out where they took as long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs = [
        (Which.parse(foreground), Which.parse(background))
        for foreground, background in (
            (text.split("+") for text in args.pairs.split(","))
            if args.pairs
            else itertools.product(args.foregrounds.split(","), args.backgrounds.split(","))
        )
    ]
    ways, budgets = args.ways.split(","), [float(text) for text in args.budgets.split(",")]
    lines = missing(pairs, names(ways, budgets), all_rows(args.done) if args.done else [], args.seconds)
    foregrounds = list(dict.fromkeys(foreground for foreground, _, _ in lines))
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []

    def note(foreground: Which, background: Which, way: str, figures: dict[str, Any]) -> None:
        rows.append({"foreground": str(foreground), "background": str(background), "way": way, **figures})
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
        print(f"{foreground} + {background}, {way}: {short}", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows))

    with_mps = "mps" in ways and start_mps()
    lines = [line for line in lines if with_mps or not line[2].startswith(MPS)]
    for first in range(0, len(foregrounds), args.at_once):
        some = foregrounds[first : first + args.at_once]
        measure_some([line for line in lines if line[0] in some], seconds=args.seconds, note=note)
    if with_mps:
        environment = {**os.environ, **mps_environment()}
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


def names(ways: Sequence[str], budgets: Sequence[float]) -> list[str]:
    """What the ways' lines are called, in the order in which they are measured."""
    found = [way for way in ("streams", "priority") if way in ways]
    found += [f"{OURS}{budget:.2f}" for budget in budgets if "ours" in ways]
    found += [f"{OURS}{GAPS_BUDGET:.2f}{GAPS}"] * ("gaps" in ways)
    found += ["processes"] * ("processes" in ways)
    return found + [f"{MPS}{percent}%" for percent in MPS_PERCENT if "mps" in ways]


def missing(pairs: Sequence[tuple[Which, Which]], ways: Sequence[str], done: Rows, seconds: float) -> list[Line]:
    """Lines that were not measured for so long, or failed."""
    known = {
        (row["foreground"], row["background"], row["way"])
        for row in done
        if "slowdown" in row and row.get("took_s", 0.0) >= seconds
    }
    return [(*pair, way) for pair in pairs for way in ways if (str(pair[0]), str(pair[1]), way) not in known]


def measure_some(
    lines: Sequence[Line], *, seconds: float, note: Callable[[Which, Which, str, dict[str, Any]], None]
) -> None:
    """Lines of a few foregrounds: the processes that they need are started at once, and ended."""
    sharers = {
        str(foreground): Sharer(
            foreground, list(dict.fromkeys(b for f, b, way in lines if f == foreground and in_one_process(way)))
        )
        for foreground in dict.fromkeys(f for f, _, way in lines if in_one_process(way))
    }
    players: dict[tuple[str, str], Player] = {}
    for foreground, background, way in lines:
        if not in_one_process(way):
            for key, which, percent in sides(foreground, background, way):
                if (key, str(which)) not in players:
                    players[key, str(which)] = Player(which, mps_percent=percent) if percent else Player(which)
    for player in (*sharers.values(), *players.values()):
        player.wait()
    for sharer in sharers.values():
        sharer.pipe.send("calibrate")
        sharer.wait()
    free, total = torch.cuda.mem_get_info()
    print(f"all processes are ready; {(total - free) >> 30} GiB in use", file=sys.stderr, flush=True)
    rates = {}
    for (key, name), player in players.items():
        if key in ALONE:
            player.go(0.5)
            rates[key, name] = 1 / statistics.mean(player.result()["times"])
    for foreground, background, way in lines:
        if in_one_process(way):
            own_s = min((1 / rate for (_, name), rate in rates.items() if name == str(background)), default=None)
            note(foreground, background, way, shared(sharers[str(foreground)], background, way, seconds, own_s))
        else:
            first, second = (players[key, str(which)] for key, which, _ in sides(foreground, background, way))
            own = rates[ALONE[way.startswith(MPS)], str(background)]
            note(foreground, background, way, two_processes(first, second, min(seconds, SHORT_S), own))
    for process in (*sharers.values(), *players.values()):
        process.process.kill()
        process.process.join()


def in_one_process(way: str) -> bool:
    """Whether both jobs run in one process."""
    return way.startswith(OURS) or way in ("streams", "priority")


def sides(foreground: Which, background: Which, way: str) -> tuple[Side, Side]:
    """The two processes of a way: what they are called, their jobs, the background's share of the threads."""
    if way == "processes":
        return (way, foreground, 0), (way, background, 0)
    return ("MPS", foreground, 100), (way, background, int(way.removeprefix(MPS).removesuffix("%")))


def shared(sharer: Sharer, background: Which, way: str, seconds: float, own_s: float | None) -> dict[str, Any]:
    """A line of the sharing process."""
    if not way.startswith(OURS):
        return sharer.do(way, background, 0, min(seconds, SHORT_S), own_s)
    budget = float(way.removeprefix(OURS).removesuffix(GAPS))
    return sharer.do("gaps" if way.endswith(GAPS) else "ours", background, budget, seconds, own_s)


if __name__ == "__main__":
    main()
