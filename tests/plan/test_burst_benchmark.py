"""The large-scale simulation of `benchmarks/burst`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from burst_cases import layer, profile

from burstpool.profiling.importers import import_profile
from burstpool.profiling.profile import Profile
from burstpool.report.timeline import Event, Timeline
from burstpool.share.budget import Budget
from burstpool.share.interference.table import InterferenceTable, Pair

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "burst"


class FixedRates:
    """A `Sharing`: 1.1 slower, nine tenths of the gaps and a fifth of the compute are the background's."""

    def predict(self, timeline: Timeline, profile: Profile) -> SimpleNamespace:
        busy_s = sum(timeline.all_busy_s())
        gap_s = timeline.num_devices * timeline.step_time_s - busy_s
        return SimpleNamespace(foreground_slowdown=1.1, background_device_s=1.1 * (0.9 * gap_s + 0.2 * busy_s))


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import scaling

    return scaling


@pytest.fixture
def sharing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import sharing

    return sharing


@pytest.fixture
def model() -> Profile:
    costs = {"seconds": 1e-3, "fixed_s": 2e-3, "parameters": 10**7, "size": 10**5}
    end = {"seconds": 1e-6, "fixed_s": 1e-3, "parameters": 10**9, "size": 4}
    return profile([layer("a", ("input",), **costs), layer("b", ("a",), **costs), layer("end", ("b",), **end)])


def test_without_measurements_nothing_is_said_of_background_jobs_beside(scaling: ModuleType, model: Profile) -> None:
    rows = list(scaling.scaling(model, 12, [8, 16], 2.0, None))
    assert {row["strategy"] for row in rows} == {"data", "burst", "static"}
    assert all((row["background_devices"] is None) == (row["strategy"] != "static") for row in rows)


def test_background_jobs_get_the_gaps_and_slow_the_foreground(scaling: ModuleType, model: Profile) -> None:
    rows = {row["strategy"]: row for row in scaling.scaling(model, 12, [8], 2.0, FixedRates())}
    alone, both = rows["data"], rows["data+background"]
    assert both["step_ms"] == pytest.approx(1.1 * alone["step_ms"])
    assert both["foreground_devices"] == pytest.approx(alone["foreground_devices"] / 1.1)
    # All of eight devices' time is a gap or is shared.
    busy = alone["device_ms"] / (8 * alone["step_ms"])
    assert both["background_devices"] == pytest.approx(8 * (busy * 0.2 + (1 - busy) * 0.9))
    assert both["total_over_data"] == pytest.approx(both["total_devices"] / alone["total_devices"])


def test_a_static_partition_keeps_up_with_burst_on_as_few_devices_as_can(scaling: ModuleType, model: Profile) -> None:
    rows = {row["strategy"]: row for row in scaling.scaling(model, 12, [8], 2.0, None)}
    static, burst = rows["static"], rows["burst"]
    fastest = min(
        row["step_ms"]
        for n in (1, 2, 4, 8)
        for row in scaling.scaling(model, 12, [n], 2.0, None)
        if row["strategy"] == "data"
    )
    assert static["step_ms"] <= max(burst["step_ms"], fastest) * (1 + 1e-9)
    assert static["total_devices"] == pytest.approx(static["foreground_devices"] + static["background_devices"])
    assert 8 - static["background_devices"] in (1, 2, 4, 8)


def test_burst_steps_are_the_simulators_unless_that_takes_too_long(
    scaling: ModuleType, model: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = next(row for row in scaling.scaling(model, 12, [8], 2.0, None) if row["strategy"] == "burst")
    assert simulated["step_by"] == "simulator"
    monkeypatch.setattr(scaling, "MOST_ACTIONS", 0)
    guessed = next(row for row in scaling.scaling(model, 12, [8], 2.0, None) if row["strategy"] == "burst")
    assert guessed["step_by"] == "planner"
    assert guessed["step_ms"] == pytest.approx(simulated["step_ms"], rel=0.2)
    assert simulated["planner_error"] is not None
    assert guessed["planner_error"] is None


def test_the_summary_has_a_line_a_model(scaling: ModuleType, model: Profile) -> None:
    import summary

    rows = list(scaling.scaling(model, 256, [8, 32], 2.0, FixedRates()))
    text = summary.summary({"rows": rows, "planner_error_median": 0.01, "planner_error_most": 0.2})
    assert text.count("| random, A100 |") == 3  # steps, totals, and with background jobs
    assert "1.0% in the median, 20.0% at most" in text
    best = max(row["total_over_data"] for row in rows if (row["strategy"], row["num_devices"]) == ("static", 32))
    assert f"{best:.2f}–{best:.2f}" in text


def test_devices_with_the_same_gaps_are_alike(sharing: ModuleType) -> None:
    """Of four devices two have a gap of 2 s each, one has two of 1 s, one is never busy."""
    spans = {0: [(0.0, 1.0), (3.0, 4.0)], 1: [(0.0, 0.5), (1.5, 3.0)], 2: [(0.0, 2.0)]}
    events = tuple(
        Event(device=device, lane="compute", kind="forward", block="a", start_s=start, stop_s=stop)
        for device, own in spans.items()
        for start, stop in own
    )
    timeline = Timeline(source="predicted", num_devices=4, step_time_s=5.0, events=events)
    assert sharing.alike_devices(timeline) == {0: 2, 1: 1, 3: 1}  # when a gap is does not matter


def test_alike_devices_get_the_same_and_reductions_are_left_alone(sharing: ModuleType, model: Profile) -> None:
    """Three devices compute for 2 of 4 s, then one waits for a message and two for a reduction."""
    pairs = (
        Pair(foreground="pointwise", background="linear", slowdown=2.0, kept=0.5),
        Pair(foreground="communication", background="linear", slowdown=1.0, kept=1.0),
    )
    measured = sharing.Measured(
        table=InterferenceTable(device="GPU", source="", pairs=pairs),
        background={"linear": 1.0},
        budget=Budget(slowdown=1.1),
        slice_s=0.0,
    )
    compute = [Event(device=d, lane="compute", kind="forward", block="a", start_s=0, stop_s=2.0) for d in range(3)]
    reduce = [Event(device=d, lane="communication", kind="reduce", block="a", start_s=2.0, stop_s=4.0) for d in (1, 2)]
    timeline = Timeline(source="predicted", num_devices=3, step_time_s=4.0, events=(*compute, *reduce))
    # Background work beside 0.4 s of compute lengthens it to 0.8 s; half of that is background work.
    alone = measured.predict(timeline, model)
    assert alone.foreground_slowdown == pytest.approx(1.1)
    assert alone.background_device_s == pytest.approx(2.0 + 3 * 0.4)
    everywhere = replace(measured, in_reductions=True).predict(timeline, model)
    assert everywhere.background_device_s == pytest.approx(3 * 2.0 + 3 * 0.4)


def test_measured_profiles_can_be_planned_with(scaling: ModuleType, tmp_path: Path) -> None:
    words = ["--device", "cpu", "--out", str(tmp_path), "--small", "--models", "vgg16", "--batches", "1", "2", "--json"]
    command = [sys.executable, str(BENCHMARK / "measure_profiles.py"), *words]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    (row,) = json.loads(printed)["profiles"]
    assert row["batches"] == [1, 2]
    found = import_profile(row["path"])
    assert {row["strategy"] for row in scaling.scaling(found, 8, [8], 2.0, None)} == {"data", "burst", "static"}
