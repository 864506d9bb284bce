"""A foreground and a background job on one GPU, in every way there is: slowdown of the one, speed kept by the other.

    python benchmarks/sharing/cuda.py                                              all pairs
    python benchmarks/sharing/cuda.py --foregrounds vgg16:4 --backgrounds resnet18:8 --seconds 5
    python benchmarks/sharing/cuda.py --pairs vgg16:4+resnet50:32,vgg16:1+array:16 --ways ours --seconds 60
    python benchmarks/sharing/cuda.py --ways ours,gaps --seconds 60 --within 540 --out long.json      again, to go on
    python benchmarks/sharing/cuda.py --lines vgg16:4+resnet50:32+1.20,vgg16:1+array:16+gaps --seconds 60     only these

Ways: two processes (the driver's time slices); two processes under MPS, the background with a share of the threads;
one process with two streams, of the same and of different priority, nothing held back; ours at several budgets; ours
with the gaps of an 8-device burst plan replayed in the foreground. In all of them both jobs' steps are CUDA graphs of
the same kernels and their samples are on the device already. Every way is measured next to the foreground alone, and
compared with it: `slowdown` and `slowdown_p95` over the mean step alone, `kept` over the background's steps a second
alone. Prints one JSON object on standard output, lines on standard error as they come.

A run may end at any moment and be gone on with: rows are written to `--out` as they come, and lines that it holds
already are not measured again. With `--within` it ends by itself, and starts only the processes of lines that fit.
"""

import argparse
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from gaps import gaps_of_plan
from jobs import Which
from measured_rows import GAPS, Rows, all_rows, write_rows
from players import Player, mps_environment, start_mps, two_processes
from sharers import LONGEST_ALONE_S, Sharer

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
SETUP_S = 30.0
"""What starting processes, building jobs and capturing them takes, about."""
AROUND_S = 4.0
"""What a line takes besides its seconds and the foreground alone, about: trying parts of the GPU, capturing there."""
SLACK_S = 30.0
"""How much later than it should it may end, where these were longer."""
Note = Callable[[Which, Which, str, dict[str, Any]], None]
Line = tuple[Which, Which, str]
"""Foreground, background, way."""
Side = tuple[str, Which, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foregrounds", default=FOREGROUNDS)
    parser.add_argument("--backgrounds", default=BACKGROUNDS)
    parser.add_argument("--pairs", default="", help="instead of all of these with all of those: vgg16:4+resnet50:32,…")
    parser.add_argument("--lines", default="", help="only these, each a pair and a budget, or gaps: see above")
    parser.add_argument("--ways", default="ours,gaps,streams,priority,processes,mps")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument(
        "--within", type=float, default=math.inf, help="seconds in which it ends by itself, give or take 30"
    )
    parser.add_argument("--at-once", type=int, default=4, help="foregrounds whose processes fit in the GPU's memory")
    parser.add_argument("--done", type=Path, help="rows of an earlier run: such lines of as many seconds are left out")
    parser.add_argument("--out", type=Path, help="where rows are added as they come; what it holds is left out, too")
    args = parser.parse_args()
    until_s = time.monotonic() + args.within
    wanted = named_lines(args.lines) if args.lines else all_lines(args)
    rows = [dict(row) for row in all_rows(args.out)] if args.out and args.out.exists() else []
    done = [*rows, *(all_rows(args.done) if args.done else ())]
    lines = missing(wanted, done, args.seconds)
    os.environ["OMP_NUM_THREADS"] = "1"
    if args.out and lines:
        write_rows(args.out, {"rows": rows})  # what cannot be written is found out before anything is measured

    def found() -> dict[str, Any]:
        return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}

    def note(foreground: Which, background: Which, way: str, figures: dict[str, Any]) -> None:
        line = {"foreground": str(foreground), "background": str(background), "way": way}
        rows.append({**line, **figures, "seconds": asked_s(way, args.seconds)})
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
        print(f"{foreground} + {background}, {way}: {short}", file=sys.stderr, flush=True)
        if args.out:
            write_rows(args.out, found())

    with_mps = any(way.startswith(MPS) for _, _, way in lines) and start_mps()
    lines = [line for line in lines if with_mps or not line[2].startswith(MPS)]
    try:
        while some := fitting(lines, args.at_once, until_s - time.monotonic(), args.seconds):
            measure_some(some, seconds=args.seconds, until_s=until_s, note=note)
            lines = [line for line in lines if line not in some]
    finally:
        if with_mps:
            environment = {**os.environ, **mps_environment()}
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=environment, check=False)
    print(f"{len(missing(wanted, [*done, *rows], args.seconds))} lines left", file=sys.stderr)
    print(json.dumps(found()))


def all_lines(args: argparse.Namespace) -> list[Line]:
    """Every pair in every way that was asked for."""
    pairs = (
        (text.split("+") for text in args.pairs.split(","))
        if args.pairs
        else itertools.product(args.foregrounds.split(","), args.backgrounds.split(","))
    )
    ways = names(args.ways.split(","), [float(text) for text in args.budgets.split(",")])
    found = [(Which.parse(first), Which.parse(second), way) for first, second in pairs for way in ways]
    return [line for line in found if not line[2].endswith(GAPS) or has_gaps(line[0])]


@functools.cache
def has_gaps(foreground: Which) -> bool:
    """Whether its burst plan leaves any; if not, its line with gaps would be that without."""
    return bool(gaps_of_plan(foreground)[1])


def named_lines(text: str) -> list[Line]:
    """`"vgg16:4+resnet50:32+1.20,vgg16:1+array:16+gaps"`: lines of ours."""
    found: list[Line] = []
    for first, second, how in (line.split("+") for line in text.split(",")):
        (way,) = names(["gaps"], []) if how == "gaps" else names(["ours"], [float(how)])
        found.append((Which.parse(first), Which.parse(second), way))
    return found


def names(ways: Sequence[str], budgets: Sequence[float]) -> list[str]:
    """What the ways' lines are called, in the order in which they are measured."""
    found = [way for way in ("streams", "priority") if way in ways]
    found += [f"{OURS}{budget:.2f}" for budget in budgets if "ours" in ways]
    found += [f"{OURS}{GAPS_BUDGET:.2f}{GAPS}"] * ("gaps" in ways)
    found += ["processes"] * ("processes" in ways)
    return found + [f"{MPS}{percent}%" for percent in MPS_PERCENT if "mps" in ways]


def missing(lines: Sequence[Line], done: Rows, seconds: float) -> list[Line]:
    """Lines that were not measured for so long, or failed; those that failed last, so as not to be in others' way."""
    known = {
        name_of(row)
        for row in done
        if "slowdown" in row and row.get("seconds", row.get("took_s", 0.0)) >= asked_s(row["way"], seconds)
    }
    failed = {name_of(row) for row in done if "slowdown" not in row}
    named = {line: (str(line[0]), str(line[1]), line[2]) for line in lines}
    return sorted((line for line in lines if named[line] not in known), key=lambda line: named[line] in failed)


def name_of(row: Any) -> tuple[str, str, str]:
    """Which line a row is of."""
    return row["foreground"], row["background"], row["way"]


def asked_s(way: str, seconds: float) -> float:
    """For how long a way is measured."""
    return seconds if way.startswith(OURS) else min(seconds, SHORT_S)


def needed_s(way: str, seconds: float) -> float:
    """How long that takes with all that belongs to it."""
    if way.startswith(OURS):
        return seconds + 2 * min(0.15 * seconds, LONGEST_ALONE_S) + AROUND_S
    return 3 * asked_s(way, seconds) + 1.0


def fitting(lines: Sequence[Line], at_once: int, left_s: float, seconds: float) -> list[Line]:
    """The first lines, of a few foregrounds, that are measured in this time, with their set-up."""
    foregrounds = list(dict.fromkeys(foreground for foreground, _, _ in lines))[:at_once]
    wanted = [line for line in lines if line[0] in foregrounds]
    ends_s = itertools.accumulate((needed_s(way, seconds) for _, _, way in wanted), initial=SETUP_S)
    return [line for line, end_s in zip(wanted, itertools.islice(ends_s, 1, None), strict=True) if end_s <= left_s]


def measure_some(lines: Sequence[Line], *, seconds: float, until_s: float, note: Note) -> None:
    """Lines of a few foregrounds, as far as there is time: the processes that they need are started at once, and ended.

    A process that dies, or does not answer in time, fails its own lines only.
    """
    last_s = until_s + SLACK_S
    sharers = {
        str(foreground): Sharer(
            foreground,
            list(dict.fromkeys(b for f, b, way in lines if f == foreground and in_one_process(way))),
            until_s=last_s,
        )
        for foreground in dict.fromkeys(f for f, _, way in lines if in_one_process(way))
    }
    players: dict[tuple[str, str], Player] = {}
    for key, which, percent in needed(lines):
        if (key, str(which)) not in players:
            players[key, str(which)] = Player(which, mps_percent=percent or None, until_s=last_s)
    processes: list[Any] = [*sharers.values(), *players.values()]
    try:
        for process in processes:
            process.wait()
        # Once more, now that no other process uses the GPU: pieces are cut and compared by how long they take.
        for sharer in sharers.values() if len(processes) > 1 else ():
            sharer.calibrate()
        free, total = torch.cuda.mem_get_info()
        print(f"all processes are ready; {(total - free) >> 30} GiB in use", file=sys.stderr, flush=True)
        rates = {}
        for (key, name), player in players.items():
            if key in ALONE and (times := player.play(0.5).get("times")):
                rates[key, name] = 1 / statistics.mean(times)
        for foreground, background, way in lines:
            if until_s - time.monotonic() < needed_s(way, seconds):
                continue
            if in_one_process(way):
                own_s = min((1 / rate for (_, name), rate in rates.items() if name == str(background)), default=None)
                figures = shared(sharers[str(foreground)], background, way, seconds, own_s)
            else:
                first, second = (players[key, str(which)] for key, which, _ in sides(foreground, background, way))
                own = rates.get((ALONE[way.startswith(MPS)], str(background)))
                figures = apart(first, second, asked_s(way, seconds), own)
            note(foreground, background, way, figures)
    finally:
        for process in processes:
            process.process.kill()
            process.process.join()


def needed(lines: Iterable[Line]) -> list[Side]:
    """Processes of one job each; under MPS also the background's with all threads, which its speed is taken from."""
    found: list[Side] = []
    for foreground, background, way in lines:
        if not in_one_process(way):
            found += sides(foreground, background, way)
            found += sides(foreground, background, ALONE[1]) if way.startswith(MPS) else ()
    return found


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
        return sharer.do(way, background, 0, asked_s(way, seconds), own_s)
    budget = float(way.removeprefix(OURS).removesuffix(GAPS))
    return sharer.do("gaps" if way.endswith(GAPS) else "ours", background, budget, seconds, own_s)


def apart(foreground: Player, background: Player, seconds: float, own: float | None) -> dict[str, Any]:
    """A line of two processes; `own`: the background's steps a second alone."""
    if own is None:
        return {"failed": background.failed or "the background's speed alone is not known"}
    return two_processes(foreground, background, seconds, own)


if __name__ == "__main__":
    main()
