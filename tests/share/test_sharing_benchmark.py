"""`benchmarks/sharing/cuda.py`: which lines it measures, in which processes; the jobs and the GPU are stand-ins."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "sharing"))

import cuda


class Started:
    """A process that was started, and what it was asked for."""

    all: list["Started"]

    def __init__(self, which: Any, backgrounds: Any = (), *, mps_percent: int | None = None) -> None:
        self.which, self.backgrounds, self.mps_percent = str(which), [str(each) for each in backgrounds], mps_percent
        self.asked: list[Any] = []
        self.pipe = self.process = self
        Started.all.append(self)

    def wait(self) -> None: ...

    def send(self, order: str) -> None:
        assert order == "calibrate"

    def go(self, seconds: float) -> None:
        self.asked.append(seconds)

    def result(self) -> dict[str, Any]:
        return {"times": [0.5]}

    def do(self, way: str, background: Any, budget: float, seconds: float, own_s: float | None) -> dict[str, Any]:
        self.asked.append((way, str(background), budget, seconds, own_s))
        return {"slowdown": 1.1, "took_s": seconds}

    def kill(self) -> None: ...

    def join(self) -> None: ...


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Started.all = []
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
    rows = json.loads(out.read_text()) if out.exists() else []
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
    done += json.loads((tmp_path / "first").read_text())
    (tmp_path / "done").write_text(json.dumps({"rows": done}))
    Started.all = []
    assert lines(monkeypatch, *given, "--out", str(tmp_path / "second")) == []
    assert Started.all == []
