"""Measured times: how they are taken, what is kept on disk, and for whom."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burstpool import fuse
from burstpool.fusion import timing
from burstpool.fusion.lowering import Choices
from burstpool.fusion.rules.concurrent import in_turn
from burstpool.fusion.timing import NO_MEMORY_S

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))


def learnt(times_s: dict[str, float], kept_in: Path | None = None) -> Choices:
    """What another process finds."""
    choices = Choices(CPU, kept_in)
    assert choices.learn("it", times_s) == "fast"
    choices.save()
    return Choices(CPU, kept_in)


def test_what_was_measured_once_is_known_to_all() -> None:
    assert learnt({"fast": 1.0, "slow": 2.0, "cannot": math.inf}).known("it", ["fast", "slow", "cannot"]) == "fast"


def test_what_found_no_memory_is_known_to_the_array_alone(tmp_path: Path) -> None:
    times_s = {"fast": 1.0, "large": NO_MEMORY_S}
    assert learnt(times_s).known("it", times_s) is None
    assert learnt(times_s, tmp_path / "own.json").known("it", times_s) == "fast"


def test_choices_for_members_in_turn_are_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def ever_faster(function: Callable[[], None], device: torch.device) -> float:
        function()
        return 1 / next(measured)

    measured = itertools.count(1)
    monkeypatch.setattr("burstpool.fusion.lowering.timed", ever_faster)
    x = torch.zeros(2, 3, 8, 8)
    array = fuse([torch.nn.Conv2d(3, 4, 3) for _ in range(3)], x, mode="measured")
    array(x)
    before = Choices(CPU).times_s
    assert len(before) == 2  # the convolution's own, and the step's as a whole
    with in_turn():
        array(x)
    after = Choices(CPU).times_s
    assert {key: after[key] for key in before} == before
    assert sorted("in turn" in key for key in after if key.startswith("aten")) == [False, True]
    assert len(after) == 4
    array(x)
    assert Choices(CPU).times_s == after


def test_where_memory_does_not_hold_what_measuring_needs_the_rules_own_choices_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(value: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    models, x = [torch.nn.Conv2d(3, 4, 3) for _ in range(3)], torch.randn(2, 3, 8, 8)
    monkeypatch.setattr("burstpool.fusion.lowering._copied", full)
    array = fuse(models, x, mode="fastest")
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))
    [plan] = [plan for plan in array.mode.plans() if plan.choice]
    assert plan.choice == "rules"
    assert {step.chosen for step in plan.steps} == {""}
    assert not Choices(CPU).times_s


@pytest.mark.parametrize("fails", ["_loop", "_grouped"])
def test_a_way_that_fails_is_not_taken_unless_it_is_the_rules_own(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> object:
        def kernel(*arguments: object) -> object:
            raise ValueError("out of resource: shared memory")

        return kernel

    monkeypatch.setattr(f"burstpool.fusion.rules.convolution.{fails}", broken)
    models = [torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3)) for _ in range(3)]
    x = torch.randn(2, 3, 8, 8)
    array = fuse(models, x, mode="measured")
    if fails == "_grouped":
        with pytest.raises(ValueError, match="shared memory"):
            array(x)
        return
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))
    [times_s] = [found for found in Choices(CPU).times_s.values() if "loop" in found]
    assert times_s["loop"] == math.inf


@pytest.mark.parametrize(("free", "emptied"), [(29, True), (30, False)])
def test_unused_memory_is_given_back_where_a_recording_might_not_find_as_much(
    free: int, emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    timing._make_room()
    assert calls == ["emptied"] * emptied


class Clock:
    """Stands for a device on which a graph's replay takes its own time, for a while as long again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, disturbed: range = range(0)) -> None:
        clock = self
        self.now_s, self.replays, self.disturbed = 0.0, 0, disturbed

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_s = clock.now_s

            def elapsed_time(self, end: "Event") -> float:
                return 1e3 * (end.at_s - self.at_s)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def graph(self, replay_s: float) -> Any:
        class Graph:
            count = 0

            def replay(graph) -> None:  # noqa: N805 -- the clock is self
                graph.count += 1
                self.now_s += replay_s * (2 if self.replays in self.disturbed else 1)
                self.replays += 1

        return Graph()


@pytest.mark.parametrize(("replay_s", "replays"), [(0.0, 200), (1e-3, 10), (5e-3, 6), (0.1, 2)])
def test_short_replays_are_timed_for_a_while_and_none_without_end(
    replay_s: float, replays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Clock(monkeypatch).graph(replay_s)
    assert timing.replay_times([graph], CPU) == [pytest.approx(replay_s)]
    assert graph.count == pytest.approx(replays, abs=1)  # sums of times are rounded


@pytest.mark.parametrize("disturbed", [range(0), range(18), range(12, 100), range(100)])
def test_replays_take_turns_so_that_other_work_does_not_choose_between_them(
    disturbed: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, disturbed=disturbed)
    first, second = timing.replay_times([clock.graph(1e-3), clock.graph(0.9e-3)], CPU)
    assert second / first == pytest.approx(0.9)
