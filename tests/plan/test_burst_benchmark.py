"""The large-scale simulation of `benchmarks/burst`."""

import json
from pathlib import Path
from types import ModuleType

import pytest
from burst_cases import layer, profile

from burstpool.profiling.profile import Profile

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "burst"
TABLE = {"background_samples_per_s": 100.0, "gap_rate": 0.9, "beside_rate": 0.2, "foreground_slowdown": 1.1}


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import scaling

    return scaling


@pytest.fixture
def model() -> Profile:
    costs = {"seconds": 1e-3, "fixed_s": 2e-3, "parameters": 10**7, "size": 10**5}
    end = {"seconds": 1e-6, "fixed_s": 1e-3, "parameters": 10**9, "size": 4}
    return profile([layer("a", ("input",), **costs), layer("b", ("a",), **costs), layer("end", ("b",), **end)])


def test_without_a_table_nothing_is_said_of_background_jobs(scaling: ModuleType, model: Profile) -> None:
    rows = list(scaling.scaling(model, 16, [8, 16], 2.0, None))
    assert {row["strategy"] for row in rows} == {"data", "burst", "static"}
    assert all(row["background_samples_per_s"] is None for row in rows)


def test_background_jobs_get_the_gaps_and_slow_the_foreground(
    scaling: ModuleType, model: Profile, tmp_path: Path
) -> None:
    (tmp_path / "table.json").write_text(json.dumps(TABLE))
    shared = scaling.Interference.load(tmp_path / "table.json")
    rows = {row["strategy"]: row for row in scaling.scaling(model, 16, [8], 2.0, shared)}
    alone, both = rows["data"], rows["data+background"]
    assert both["step_ms"] == pytest.approx(1.1 * alone["step_ms"])
    assert both["foreground_samples_per_s"] == pytest.approx(alone["foreground_samples_per_s"] / 1.1)
    # All of eight devices' time is a gap or is shared.
    assert 8 * 100 * 0.2 <= both["background_samples_per_s"] <= 8 * 100 * 0.9
    static = rows["static"]
    assert static["step_ms"] <= alone["step_ms"] / 0.9
    assert static["background_samples_per_s"] % 100 == 0


def test_a_table_that_lacks_a_number_is_refused(scaling: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps({"gap_rate": 1}))
    with pytest.raises(SystemExit, match="lacks background_samples_per_s"):
        scaling.Interference.load(tmp_path / "table.json")
