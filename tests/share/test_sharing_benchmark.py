"""`benchmarks/sharing/cuda.py`: which lines it measures, in which processes; the jobs and the GPU are stand-ins."""

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeFeeder, FakeSteps, Stream, fake_cuda

from burstpool.share.gpu.at_work import BackgroundWork, JobAtWork
from burstpool.share.gpu.loop import Idle

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "sharing"))

import budget_tables
import cuda
import measured_rows
import players
import sharers


class Started:
    """A process that was started, and what it was asked for."""

    all: list["Started"]
    broken: dict[str, str]
    """Job → why its process fails."""
    now_s: float

    def __init__(
        self, which: Any, backgrounds: Any = (), *, mps_percent: int | None = None, until_s: float = math.inf
    ) -> None:
        self.which, self.backgrounds, self.mps_percent = str(which), [str(each) for each in backgrounds], mps_percent
        self.asked: list[Any] = []
        self.failed = ""
        self.calibrated = False
        self.process = self
        Started.all.append(self)

    def wait(self) -> None:
        Started.now_s += 5
        self.failed = Started.broken.get(self.which, "")

    def calibrate(self) -> None:
        self.calibrated = True

    def play(self, seconds: float) -> dict[str, Any]:
        self.asked.append(seconds)
        return {"failed": self.failed} if self.failed else {"times": [0.5]}

    def do(self, way: str, background: Any, budget: float, seconds: float, own_s: float | None) -> dict[str, Any]:
        self.asked.append((way, str(background), budget, seconds, own_s))
        if self.failed:
            return {"failed": self.failed}
        Started.now_s += seconds + 12
        return {"slowdown": 1.1, "took_s": seconds - 0.1}

    def kill(self) -> None: ...

    def join(self) -> None: ...


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Started.all, Started.broken, Started.now_s = [], {}, 1000.0
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic=lambda: Started.now_s))
    monkeypatch.setattr(cuda, "Sharer", Started)
    monkeypatch.setattr(cuda, "Player", Started)
    monkeypatch.setattr(cuda, "two_processes", lambda first, second, seconds, own: {"slowdown": 2.0, "own": own})
    monkeypatch.setattr(cuda, "start_mps", lambda: True)
    monkeypatch.setattr(cuda.subprocess, "run", lambda *given, **options: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it sets for its processes


def lines(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[tuple[str, str, str]]:
    """Of the rows that it writes."""
    monkeypatch.setattr(sys, "argv", ["cuda.py", *arguments])
    cuda.main()
    out = Path(arguments[arguments.index("--out") + 1])
    rows = measured_rows.all_rows(out) if out.exists() else []
    return [(row["foreground"], row["background"], row["way"]) for row in rows]


def test_every_way_of_every_pair_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ["--foregrounds", "vgg16:1,vgg16:4", "--backgrounds", "resnet18:8,array:16", "--out", str(tmp_path / "a")]
    found = lines(monkeypatch, *given)
    ways = ["streams", "priority", "ours 1.05", "ours 1.10", "ours 1.20", "ours 1.10, gaps", "processes"]
    ways += ["MPS 100%", "MPS 50%", "MPS 30%", "MPS 10%"]
    assert found == [(f, b, way) for f in ("vgg16:1", "vgg16:4") for b in ("resnet18:8", "array:16") for way in ways]
    sharers = [each for each in Started.all if each.backgrounds]
    assert [(each.which, each.backgrounds) for each in sharers] == [
        ("vgg16:1", ["resnet18:8", "array:16"]),
        ("vgg16:4", ["resnet18:8", "array:16"]),
    ]
    assert sharers[0].asked[2:6] == [
        ("ours", "resnet18:8", 1.05, 2.0, 0.5),
        ("ours", "resnet18:8", 1.10, 2.0, 0.5),
        ("ours", "resnet18:8", 1.20, 2.0, 0.5),
        ("gaps", "resnet18:8", 1.10, 2.0, 0.5),
    ]
    players = sorted((each.which, each.mps_percent or 0) for each in Started.all if not each.backgrounds)
    own = [(which, percent) for which in ("array:16", "resnet18:8") for percent in (0, 10, 30, 50, 100)]
    assert players == sorted([*own, *((which, percent) for which in ("vgg16:1", "vgg16:4") for percent in (0, 100))])


def test_lines_that_are_named_are_measured_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = "vgg16:4+array:16+1.2,vgg16:1+resnet18:8+gaps,vgg16:4+resnet18:8+1.05"
    found = lines(monkeypatch, "--lines", named, "--out", str(tmp_path / "a"))
    first = [("vgg16:4", "array:16", "ours 1.20"), ("vgg16:1", "resnet18:8", "ours 1.10, gaps")]
    assert found == [*first, ("vgg16:4", "resnet18:8", "ours 1.05")]
    assert [(each.which, each.backgrounds) for each in Started.all] == [
        ("vgg16:4", ["array:16", "resnet18:8"]),
        ("vgg16:1", ["resnet18:8"]),
    ]
    assert lines(monkeypatch, "--lines", f"{named},vgg16:4+array:16+1.1", "--out", str(tmp_path / "a"))[3:] == [
        ("vgg16:4", "array:16", "ours 1.10")
    ]


def test_a_plan_without_gaps_has_no_line_with_gaps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would be its line at the same budget once more."""
    given = ["--foregrounds", "vgg16:4,vgg16:16", "--backgrounds", "resnet18:8", "--budgets", "1.1"]
    found = lines(monkeypatch, *given, "--ways", "ours,gaps", "--out", str(tmp_path / "rows"))
    ways = {"vgg16:4": ["ours 1.10", "ours 1.10, gaps"], "vgg16:16": ["ours 1.10"]}
    assert found == [(foreground, "resnet18:8", way) for foreground, some in ways.items() for way in some]


def test_a_table_of_ways_that_hold_nothing_back_shows_them_all_and_sums_nothing_up() -> None:
    figures = {"slowdown": 2.0, "slowdown_p95": 2.1, "kept": 0.4, "sum_of_shares": 0.9}
    rows = [
        {"foreground": "vgg16:4", "background": "array:16", "way": way, **figures} for way in ("streams", "processes")
    ]
    heads, _, line = budget_tables.table(rows).splitlines()
    assert heads.endswith("| two streams of one priority | two processes |")
    assert line == "| VGG-16, 4 | array of 16 | 2.000, 2.10, 0.40, 0.90 | 2.000, 2.10, 0.40, 0.90 |"
    assert budget_tables.summary(rows) == []


def test_a_table_is_in_order_whatever_was_measured_first() -> None:
    def row(foreground: str, background: str, way: str, p95: float, **more: float) -> dict[str, Any]:
        line = {"foreground": foreground, "background": background, "way": way}
        return {**line, "slowdown": 1.1, "slowdown_p95": p95, "kept": 0.2, **more}

    rows = [
        row("vgg16:16", "array:16", "ours 1.20", 1.26),
        row("tiny_vgg:32", "tiny_mlp ×8", "ours 1.10", 1.34, alone_p95=1.3),
        row("vgg16:4", "array:16", "ours 1.10, gaps", 1.1, sum_of_shares=1.2, gap_share=0.3),
        row("vgg16:4", "resnet50:32", "ours 1.05", 1.0),
    ]
    heads, _, *cells = budget_tables.table(rows).splitlines()
    assert heads.split(" | ")[2:5] == ["ours, 1.05", "ours, 1.10", "ours, 1.20"]
    names = [line.split(" | ")[:2] for line in cells]
    assert names == [
        ["| VGG-16, 4", "ResNet-50, 32"], ["| ", "array of 16"], ["| VGG-16, 16", "array of 16"],
        ["| tiny_vgg, 32", "tiny_mlp ×8"],
    ]  # fmt: skip
    assert budget_tables.summary(rows) == [
        "4 lines: mean within 0.01 above the budget in 3, p95 within 0.05 in 3; at most 0.050 and 0.060 above it"
    ]


def test_what_was_measured_for_as_long_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = {"foreground": "vgg16:1", "background": "array:16"}
    done = [
        {**pair, "way": "ours 1.05", "slowdown": 1.05, "took_s": 61.0, "run": 1},
        {**pair, "way": "ours 1.10", "slowdown": 1.1, "took_s": 15.0, "run": 2},
        {**pair, "way": "ours 1.20", "failed": "no memory"},
    ]
    (tmp_path / "done").write_text(json.dumps({"rows": done}))
    given = ["--pairs", "vgg16:1+array:16", "--ways", "ours", "--seconds", "60", "--done", str(tmp_path / "done")]
    found = lines(monkeypatch, *given, "--out", str(tmp_path / "first"))
    assert [way for _, _, way in found] == ["ours 1.10", "ours 1.20"]
    done += measured_rows.all_rows(tmp_path / "first")
    (tmp_path / "done").write_text(json.dumps({"rows": done}))
    Started.all = []
    assert lines(monkeypatch, *given, "--out", str(tmp_path / "second")) == []
    assert Started.all == []


LONG = ("--foregrounds", "vgg16:1,vgg16:4", "--ways", "ours,gaps", "--seconds", "60")


def test_a_run_goes_on_where_the_last_one_ended_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two foregrounds, three backgrounds, four lines a pair: seven lines of 60 s fit in 540 s."""
    given = [*LONG, "--within", "540", "--out", str(tmp_path / "folder" / "rows")]
    counts, ended_s = [], []
    for _ in range(5):
        begun_s = Started.now_s
        counts.append(len(lines(monkeypatch, *given)))
        ended_s.append(Started.now_s - begun_s)
    assert counts == [7, 14, 21, 24, 24]
    assert max(ended_s) < 540
    found = lines(monkeypatch, *given)
    assert len(set(found)) == len(found) == 24
    # Jobs that a run has no time for are not built, and nothing is captured twice where nobody else is there.
    assert [(each.which, each.backgrounds) for each in Started.all] == [
        ("vgg16:1", ["resnet50:32", "resnet18:8"]),
        ("vgg16:1", ["resnet18:8", "array:16"]),
        ("vgg16:4", ["resnet50:32"]),
        ("vgg16:4", ["resnet50:32", "resnet18:8", "array:16"]),
        ("vgg16:4", ["array:16"]),
    ]
    assert [each.calibrated for each in Started.all] == [False, True, True, False, False]


def test_a_run_that_is_killed_loses_the_line_it_was_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = [*LONG, "--out", str(tmp_path / "rows")]
    plain = Started.do

    def stopped(self: Started, *order: Any) -> dict[str, Any]:
        if len(self.asked) == 3:
            raise KeyboardInterrupt
        return plain(self, *order)

    with monkeypatch.context() as patch:
        patch.setattr(Started, "do", stopped)
        with pytest.raises(KeyboardInterrupt):
            lines(monkeypatch, *given)
    assert len(measured_rows.all_rows(tmp_path / "rows")) == 3
    found = lines(monkeypatch, *given)
    assert len(set(found)) == len(found) == 24


def test_short_lines_are_not_measured_again_either(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = ["--pairs", "vgg16:1+array:16", "--ways", "streams,processes,mps", "--out", str(tmp_path / "rows")]
    found = lines(monkeypatch, *given)
    assert len(found) == 6
    Started.all = []
    assert lines(monkeypatch, *given, "--seconds", "60") == found
    assert Started.all == []
    rows = [row for row in measured_rows.all_rows(tmp_path / "rows") if row["way"] != "MPS 30%"]
    (tmp_path / "rows").write_text(json.dumps(rows))
    lines(monkeypatch, *given)
    (again,) = (row for row in measured_rows.all_rows(tmp_path / "rows") if row["way"] == "MPS 30%")
    assert again["own"] == 2.0  # the background's speed alone, with all threads
    assert sorted((each.which, each.mps_percent) for each in Started.all) == [
        ("array:16", 30), ("array:16", 100), ("vgg16:1", 100),
    ]  # fmt: skip


def test_what_failed_is_tried_again_after_all_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = [*LONG, "--backgrounds", "array:16", "--budgets", "1.1", "--out", str(tmp_path / "rows")]
    Started.broken = {"vgg16:1": "no memory"}
    lines(monkeypatch, *given)
    rows = measured_rows.all_rows(tmp_path / "rows")
    assert [row["foreground"] for row in rows if "slowdown" in row] == ["vgg16:4", "vgg16:4"]
    assert [row["failed"] for row in rows if "failed" in row] == ["no memory", "no memory"]
    Started.broken = {}
    (tmp_path / "rows").write_text(json.dumps(rows[:3]))
    assert [line[0] for line in lines(monkeypatch, *given)[3:]] == ["vgg16:4", "vgg16:1", "vgg16:1"]
    read = measured_rows.read_rows(tmp_path / "rows")
    assert len(read) == 4
    assert all("slowdown" in row for row in read)


@pytest.mark.parametrize(("until_s", "words"), [(math.inf, "ended with status 1"), (0.0, "no answer in time")])
def test_a_process_that_dies_or_is_silent_says_so(until_s: float, words: str) -> None:
    process = players.Process(os._exit, until_s=until_s)  # which takes no pipe
    process.wait()
    assert words in process.failed
    process.tell("an order")
    assert process.answer() == {"failed": process.failed}
    process.process.kill()
    process.process.join()


@pytest.mark.parametrize("gaps", [False, True])
def test_a_line_of_ours_takes_the_seconds_that_were_asked_for(gaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_cuda(monkeypatch, sharers)
    foreground = JobAtWork("f", FakeSteps(clock, 2e-3, 2e-3, stream=Stream(clock, cost=0.4)), FakeFeeder(clock))
    background = BackgroundWork(JobAtWork("b", FakeSteps(clock, *[3e-4] * 5), FakeFeeder(clock)))
    program = [0, Idle(length_s=1e-3), 1] if gaps else None
    found = sharers.ours(foreground, background, 1.2, 1.0, program)
    assert 1.0 <= found["took_s"] < 1.1
    assert 1.05 < found["slowdown"] < 1.21
    assert found["slowdown_p95"] < 1.25
    assert 0 < found["kept"] < 1
    assert found["steps"] + 20 == pytest.approx(  # the first ones do not count
        1.0 / (4e-3 + gaps * 1e-3) / found["slowdown"], rel=0.05
    )
    json.dumps(found)
