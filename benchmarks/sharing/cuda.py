"""A foreground and a background job on one GPU, in every way there is: slowdown of the one, speed kept by the other.

    python benchmarks/sharing/cuda.py                                              all pairs
    python benchmarks/sharing/cuda.py --foregrounds vgg16:4 --backgrounds resnet18:8 --seconds 5
    python benchmarks/sharing/cuda.py --pairs vgg16:4+resnet50:32,vgg16:1+array:16 --ways ours --seconds 60

Ways: two processes (the driver's time slices); two processes under MPS, the background with a share of the threads;
one process with two streams, of the same and of different priority, nothing held back; ours at several budgets; ours
with the gaps of an 8-device burst plan replayed in the foreground. In all of them both jobs' steps are CUDA graphs of
the same kernels and their samples are on the device already. Every way is measured next to the foreground alone, and
compared with it: `slowdown` and `slowdown_p95` over the mean step alone, `kept` over the background's steps a second
alone. Prints one JSON object on standard output, lines on standard error as they come.
"""

import argparse
import functools
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
from players import Player, mps_environment, start_mps, two_processes
from sharers import Sharer

FOREGROUNDS = (
    "vgg16:1,vgg16:4,vgg16:16,wide_resnet101_2:1,wide_resnet101_2:4,wide_resnet101_2:16,inception_v3:4,bert_medium:8"
)
BACKGROUNDS = "resnet50:32,resnet18:8,array:16"
BUDGETS = (1.05, 1.10, 1.20)
MPS_PERCENT = (100, 50, 30, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foregrounds", default=FOREGROUNDS)
    parser.add_argument("--backgrounds", default=BACKGROUNDS)
    parser.add_argument("--pairs", default="", help="instead of all of these with all of those: vgg16:4+resnet50:32,…")
    parser.add_argument("--ways", default="ours,gaps,streams,priority,processes,mps")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--at-once", type=int, default=4, help="foregrounds whose processes fit in the GPU's memory")
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
    foregrounds = list(dict.fromkeys(foreground for foreground, _ in pairs))
    ways, budgets = set(args.ways.split(",")), [float(text) for text in args.budgets.split(",")]
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []

    def note(foreground: Which, background: Which, way: str, figures: dict[str, Any]) -> None:
        rows.append({"foreground": str(foreground), "background": str(background), "way": way, **figures})
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
        print(f"{foreground} + {background}, {way}: {short}", file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows))

    with_mps = "mps" in ways and start_mps()
    measure = functools.partial(measure_some, ways=ways, budgets=budgets, seconds=args.seconds, mps=with_mps, note=note)
    for first in range(0, len(foregrounds), args.at_once):
        some = foregrounds[first : first + args.at_once]
        measure([pair for pair in pairs if pair[0] in some])
    if with_mps:
        environment = {**os.environ, **mps_environment()}
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


def measure_some(
    pairs: Sequence[tuple[Which, Which]],
    *,
    ways: set[str],
    budgets: Sequence[float],
    seconds: float,
    mps: bool,
    note: Callable[[Which, Which, str, dict[str, Any]], None],
) -> None:
    """All ways for pairs of a few foregrounds: their processes are started at once, and ended."""
    foregrounds = list(dict.fromkeys(foreground for foreground, _ in pairs))
    backgrounds = list(dict.fromkeys(background for _, background in pairs))
    sharers = {}
    if ways & {"ours", "gaps", "streams", "priority"}:
        beside = {
            which: [background for foreground, background in pairs if foreground == which] for which in foregrounds
        }
        sharers = {str(which): Sharer(which, backgrounds) for which, backgrounds in beside.items()}
    players = {}
    if "processes" in ways:
        players = {("process", str(which)): Player(which) for which in {*foregrounds, *backgrounds}}
    if mps:
        players.update({("mps", str(which)): Player(which, mps_percent=100) for which in foregrounds})
        for percent in MPS_PERCENT:
            players.update({(percent, str(w)): Player(w, mps_percent=percent) for w in backgrounds})
    for player in (*sharers.values(), *players.values()):
        player.wait()
    for sharer in sharers.values():
        sharer.pipe.send("calibrate")
        sharer.wait()
    free, total = torch.cuda.mem_get_info()
    print(f"all processes are ready; {(total - free) >> 30} GiB in use", file=sys.stderr, flush=True)
    rates = {}
    for (kind, name), player in players.items():
        if kind in ("process", 100):
            player.go(0.5)
            rates[kind, name] = 1 / statistics.mean(player.result()["times"])
    for foreground, background in pairs:
        sharer = sharers.get(str(foreground))
        own_s = min((1 / rate for (_, name), rate in rates.items() if name == str(background)), default=None)
        if sharer is not None:
            for way in ("streams", "priority"):
                if way in ways:
                    note(foreground, background, way, sharer.do(way, background, 0, min(seconds, 0.4), own_s))
            for budget in budgets if "ours" in ways else ():
                note(
                    foreground, background, f"ours {budget:.2f}", sharer.do("ours", background, budget, seconds, own_s)
                )
            if "gaps" in ways:
                note(foreground, background, "ours 1.10, gaps", sharer.do("gaps", background, 1.10, seconds, own_s))
        if "processes" in ways:
            pair = players["process", str(foreground)], players["process", str(background)]
            own = rates["process", str(background)]
            note(foreground, background, "processes", two_processes(*pair, min(seconds, 0.4), own))
        for percent in MPS_PERCENT if mps else ():
            pair = players["mps", str(foreground)], players[percent, str(background)]
            own = rates[100, str(background)]
            note(foreground, background, f"MPS {percent}%", two_processes(*pair, min(seconds, 0.4), own))
    for process in (*sharers.values(), *players.values()):
        process.process.kill()
        process.process.join()


if __name__ == "__main__":
    main()
