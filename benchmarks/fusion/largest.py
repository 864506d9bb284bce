"""The largest array that trains in a GPU's memory: one JSON object and a table.

    python benchmarks/fusion/largest.py --device cuda --dtype bf16 [--only resnet18] [--hfta PATH] [--out FILE]
    python benchmarks/fusion/largest.py --limit-bytes 3000000 --only tiny_mlp     on the CPU, memory pretended

First all workloads at once, each in a process of its own: the peak memory of a step at two small sizes, and a line
through them. Then, one workload after another with the GPU to itself, in a fresh process: a step of an array of about
the size that the line says fits; smaller where memory runs out, larger where it does not, `--tries` times. `largest`
was seen to train, `smallest_not` was seen not to. How many separate models would fit with a recorded step each, which
is what streams could hold, is by the line alone; HFTA's own array is tried as ours is. What is measured is said in
memory_use.py, which size is tried next in search_size.py.

`--seconds` ends it all; what was not reached says so. A workload gets at most twice its share of the time that is left.
`--out` is written anew with each finding, so that a run that is cut short leaves what it found.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import hfta_code
import torch
from memory_use import serve
from search_size import Tried, bounds, line_through, search
from workers import Crew, Worker, allocator
from workloads import CPU_WORKLOADS, WORKLOADS

_MEASURING = 0.4
"""Share of the time after which small sizes are measured no more."""
_OF_WHAT_IS_LEFT, _LEAST_TRY_S = 0.6, 15.0
"""Share of a workload's time that one try may take, and how long it may in any case: a process of its own has to import
torch and capture the model first."""
_GIB = 2**30
Key = tuple[str, str]
"""A workload and a way."""


def main() -> None:
    options = parsed()
    if options.worker:
        serve(options)
        return
    deadline = time.monotonic() + options.seconds
    with contextlib.ExitStack() as stack:
        crew = Crew(options, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(crew.close)
        report = Report(options, deadline)
        measure_all(crew, report, until=time.monotonic() + _MEASURING * options.seconds)
        waiting = [((name, "ours"), options.tries) for name in options.only]
        waiting += [((name, "hfta"), options.tries) for name in options.only if options.hfta and hfta_code.known(name)]
        while waiting:
            left_s, share = deadline - time.monotonic(), waiting[0][1] / sum(tries for _, tries in waiting)
            key, tries = waiting.pop(0)
            verify(crew, report, key, tries=tries, until=time.monotonic() + left_s * min(1.0, 2 * share))
    print(json.dumps(report.result()))
    print(report.table(), file=sys.stderr)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The largest array that trains in a GPU's memory.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--only", default="", help="workloads, by commas")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all of it")
    parser.add_argument(
        "--tries", type=int, choices=range(1, 10), default=4, help="sizes of our array that are tried, a workload"
    )
    parser.add_argument("--limit-bytes", type=int, default=0, help="the memory that is pretended on the CPU")
    parser.add_argument("--hfta", default="", help="a checkout of UofT-EcoSystem/hfta, to be tried beside")
    parser.add_argument("--out", default="", help="where to write the JSON object")
    parser.add_argument("--log", default="", help="where to write what the processes had to say")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.known = CPU_WORKLOADS if options.device == "cpu" else WORKLOADS
    options.only = options.only.split(",") if options.only else list(options.known)
    if unknown := set(options.only) - options.known.keys():
        parser.error(f"--only: there is no {sorted(unknown)[0]!r}; there are {', '.join(options.known)}")
    if options.device == "cpu" and options.limit_bytes <= 0:
        parser.error("--limit-bytes: say how much memory to pretend on the CPU")
    if options.device == "cpu" and options.hfta:
        parser.error("--hfta: HFTA's models are workloads of --device cuda")
    if options.hfta and not (Path(options.hfta) / "hfta" / "ops").is_dir():
        parser.error(f"--hfta: {options.hfta} is no checkout of UofT-EcoSystem/hfta")
    return options


class Report:
    """What was found so far."""

    def __init__(self, options: argparse.Namespace, deadline: float) -> None:
        self.options, self.deadline = options, deadline
        self.measured: dict[Key, list[Tried]] = {}
        self.tried: dict[Key, list[Tried]] = {}
        self.notes: dict[Key, str] = {}
        self.build_bytes: dict[str, float] = {}
        """Of a member, where models and array are both alive."""
        self.device = options.device
        self.limit_bytes = 0
        """The GPU's memory less what CUDA itself takes in a process; 0 before it is known."""
        self._lock = threading.Lock()

    def sizes(self, key: Key) -> tuple[int, int]:
        """The two small sizes."""
        workload = self.options.known[key[0]]
        largest = workload.small if key[1] == "separate" else max(4, workload.members[0] // 2)
        return max(1, largest // 2), max(2, largest)

    def add(self, kept: dict[Key, list[Tried]], key: Key, members: int, answer: Mapping[str, Any]) -> Tried:
        """Writes an answer down."""
        given = {
            name: answer[name] for name in ("peak_bytes", "error", "by_memory", "late", "seconds") if name in answer
        }
        found = Tried(members=members, fits="error" not in answer, **given)
        with self._lock:
            kept.setdefault(key, []).append(found)
            if found.fits and "build_bytes" in answer:
                self.build_bytes[key[0]] = answer["build_bytes"] / members
            if self.options.out:
                Path(self.options.out).write_text(json.dumps(self.result(), indent=1))
        return found

    def result(self) -> dict[str, Any]:
        """All of it as one object."""
        ways = ("ours", "separate", *(("hfta",) if self.options.hfta else ()))
        return {
            "device": self.device,
            "torch": torch.__version__,
            "dtype": self.options.dtype,
            "allocator": allocator(),
            "limit_bytes": self.limit_bytes,
            "rows": [self.row((name, way)) for name in self.options.only for way in ways],
        }

    def row(self, key: Key) -> dict[str, Any]:
        """A workload and a way: what was seen, what the line says."""
        measured, tried = self.measured.get(key, []), self.tried.get(key, [])
        line = line_through(measured)
        fits, fails = bounds([*measured, *(one for one in tried if not one.late)])
        row: dict[str, Any] = {"workload": key[0], "way": key[1], "largest": fits or None, "smallest_not": fails}
        row["peak_bytes"] = next((one.peak_bytes for one in (*tried, *measured) if one.fits and one.members == fits), 0)
        if line is not None:
            row |= {"member_bytes": round(line.member_bytes), "fixed_bytes": round(line.fixed_bytes)}
        if line is not None and self.limit_bytes:
            row["predicted"] = line.largest(self.limit_bytes)
        by_building = self.limit_bytes // self.build_bytes[key[0]] if key[0] in self.build_bytes else None
        if key[1] == "ours" and by_building is not None and by_building < fits:
            row["largest_by_building"] = int(by_building)
        row["verified"] = any(one.fits for one in tried)
        row["note"] = self.notes.get(key) or ("" if measured else "not reached")
        return row | {"measured": [asdict(one) for one in measured], "tried": [asdict(one) for one in tried]}

    def table(self) -> str:
        """One line a workload."""
        rows = {(row["workload"], row["way"]): row for row in self.result()["rows"]}
        heads = ["workload", "ours", "peak, GiB", "did not fit", "predicted", "MiB a member", "separate, predicted"]
        heads += ["HFTA's code", "predicted"] if self.options.hfta else []
        lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
        for name in self.options.only:
            lines.append(f"| {name} | " + " | ".join(self._cells(name, rows)) + " |")
        notes = [f"{name}, {way}: {row['note']}" for (name, way), row in rows.items() if row["note"]]
        building = [
            f"{name}: building it from models on the device ends at {row['largest_by_building']:,}"
            for (name, _), row in rows.items()
            if "largest_by_building" in row
        ]
        return "\n".join([*lines, f"memory: {self.limit_bytes / _GIB:.4g} GiB", *notes, *building])

    def _cells(self, name: str, rows: Mapping[Key, Mapping[str, Any]]) -> Iterator[str]:
        mine = rows[name, "ours"]
        yield seen(mine)
        yield f"{mine['peak_bytes'] / _GIB:.3g}" if mine["verified"] else "–"
        yield number(mine["smallest_not"])
        yield number(mine.get("predicted"))
        yield f"{mine['member_bytes'] / 2**20:,.1f}" if "member_bytes" in mine else "–"
        yield number(rows[name, "separate"].get("predicted"))
        if (name, "hfta") in rows:
            yield seen(rows[name, "hfta"])
            yield number(rows[name, "hfta"].get("predicted"))


def seen(row: Mapping[str, Any]) -> str:
    """The largest size that was seen to train, where more than the small ones were tried."""
    return number(row["largest"]) if row["verified"] else "–"


def number(value: int | None) -> str:
    """A size, or a dash."""
    return "–" if value is None else f"{value:,}"


def measure_all(crew: Crew, report: Report, *, until: float) -> None:
    """The small sizes of all workloads, at once; the processes end with it."""
    ways = ("ours", "separate", *(("hfta",) if report.options.hfta else ()))

    def one(name: str) -> None:
        worker = crew.take()
        for way in ways:
            if way == "hfta" and not hfta_code.known(name):
                report.notes[name, way] = "HFTA has no such model"
                continue
            worker = crew.usable(worker)
            measure(worker, report, (name, way), until=until)
        worker.close()

    with ThreadPoolExecutor(len(report.options.only)) as pool:
        list(pool.map(one, report.options.only))


def measure(worker: Worker, report: Report, key: Key, *, until: float) -> None:
    """The small sizes that are missing."""
    for members in missing(report, key):
        answer = worker.ask(*key, members, runs=2 if key[1] == "ours" else 1, until=until)
        if "error" in answer:
            report.notes[key] = f"{members} members: {answer['error']}"
            return
        report.add(report.measured, key, members, answer)
    report.notes.pop(key, None)


def missing(report: Report, key: Key) -> Iterable[int]:
    """Small sizes that were not measured: where all run at once, one may miss the memory that others hold."""
    known = {one.members for one in report.measured.get(key, [])}
    return [members for members in report.sizes(key) if members not in known]


def verify(crew: Crew, report: Report, key: Key, *, tries: int, until: float) -> None:
    """Tries large sizes, alone on the GPU."""
    if until - time.monotonic() < 1.0:
        report.notes[key] = "no large size was tried: the time was up"
        return
    worker = crew.take()
    limit = worker.ask(key[0], "limit", until=until)
    # Of a process that has just ended, some memory may not be back yet.
    report.limit_bytes = max(report.limit_bytes, limit.get("limit_bytes", 0))
    report.device = limit.get("device", report.device)
    if not report.limit_bytes:
        report.notes[key] = f"how much memory there is could not be asked: {limit.get('error')}"
        worker.close()
        return
    worker = crew.usable(worker)
    measure(worker, report, key, until=until)
    measured = report.measured.get(key, [])

    def attempt(members: int) -> Tried | None:
        nonlocal worker
        last_s = max((one.seconds for one in report.tried.get(key, [])), default=0.0)
        now = time.monotonic()
        if now + last_s > until:
            report.notes[key] = f"{members:,} members were not tried: the time was up"
            return None
        worker = crew.usable(worker)
        # One that takes too long leaves time for a smaller one.
        ends = min(now + max((until - now) * _OF_WHAT_IS_LEFT, _LEAST_TRY_S), report.deadline)
        answer = worker.ask(*key, members, until=ends)
        if answer.get("late") and ends - now < _LEAST_TRY_S:
            report.notes[key] = f"{members:,} members were not tried to the end: the time was up"
            return None
        return report.add(report.tried, key, members, answer)

    tried = search(attempt, measured, limit_bytes=report.limit_bytes, tries=tries)
    explain(report, key, tried)
    worker.close()


def explain(report: Report, key: Key, tried: Sequence[Tried]) -> None:
    """A note where it was not memory that ended it."""
    fits, fails = bounds([*report.measured.get(key, []), *tried])
    for one in tried:
        if one.late:
            report.notes[key] = f"{one.members:,} members: {one.error}"
        elif one.members == fails and not one.by_memory:
            report.notes[key] = f"{fails:,} members fail by something else than memory: {one.error}"
    if tried and not any(one.fits for one in tried):
        report.notes.setdefault(key, f"no size that was tried fitted; {fits} members, measured before, did")


if __name__ == "__main__":
    main()
