"""DeepPool's rule as a baseline, and the burst planner against it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from burst_cases import cluster, layer, profile

from burstpool.errors import PlanError
from burstpool.plan.burst_cost import BurstOptions
from burstpool.plan.deeppool_rule import plan_by_rule
from burstpool.profiling.profile import Profile

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "burst"
HELD = BurstOptions(reduction="added", device_time="held", updates=False, regroup_latency_s=2.4e-4)


@pytest.fixture
def comparison(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    import deeppool_comparison

    return deeppool_comparison


def chain(*fixed_s: float, seconds: float = 1e-4) -> Profile:
    return profile(
        [
            layer(f"l{i}", (f"l{i - 1}" if i else "input",), seconds=seconds, fixed_s=fixed, parameters=0, size=10)
            for i, fixed in enumerate(fixed_s)
        ]
    )


def test_widths_are_powers_of_two() -> None:
    point = plan_by_rule(chain(1e-5, 1e-5, 1e-5), cluster(7), batch=12, limit=100, options=HELD)
    assert set(point.widths) == {4}


def test_a_predecessor_over_the_limit_is_passed_by_and_the_last_layer_never_checked() -> None:
    # One device: 2.7 × (5 + 1.2) ms; four: 2.7 × (5 + 0.3): amplification 3.4.
    model = chain(5e-3, 5e-3, 5e-3)
    assert plan_by_rule(model, cluster(4), batch=12, limit=4, options=HELD).widths == (4, 4, 4)
    assert plan_by_rule(model, cluster(4), batch=12, limit=2, options=HELD).widths == (2, 2, 4)
    assert plan_by_rule(model, cluster(4), batch=12, limit=1.5, options=HELD).widths == (1, 1, 4)


def test_layers_of_300_microseconds_are_never_limited() -> None:
    model = chain(5e-5, 5e-5, 5e-5, seconds=2e-6)
    assert model.step_time_s(12) / 3 < 300e-6
    point = plan_by_rule(
        model, cluster(4), batch=12, limit=1.01, options=BurstOptions(reduction="added", regroup_latency_s=0.0)
    )
    assert point.widths == (4, 4, 4)


def test_activations_stay_with_the_layer_before() -> None:
    model = chain(5e-3, 5e-3)
    cheap = layer("act", ("l1",), seconds=1e-3, fixed_s=1e-6, parameters=0, size=10)
    free = plan_by_rule(profile([*model.layers, cheap]), cluster(4), batch=12, limit=1.5, options=HELD)
    assert free.widths == (1, 1, 4)
    follows = profile([*model.layers, replace(cheap, kind="relu")])
    assert plan_by_rule(follows, cluster(4), batch=12, limit=1.5, options=HELD).widths == (1, 1, 1)


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="must be more than 0"):
        plan_by_rule(chain(1e-3), cluster(2), batch=12, limit=0)


@pytest.mark.parametrize("variant", ["added", "overlapped"])
@pytest.mark.parametrize("model", ["vgg16", "wide_resnet101_2", "inception_v3"])
def test_burst_plans_are_never_slower_than_the_rule_at_equal_device_time(
    comparison: ModuleType, shared_data: Path, model: str, variant: str
) -> None:
    operators = comparison.read(shared_data / "deeppool_a100" / comparison.MODELS[model])
    for num_devices, batch in comparison.CELLS:
        for row in comparison.cell(operators, num_devices, batch, variant):
            assert row["burst_device_ms"] <= row["rule_device_ms"] * (1 + 1e-9), row
            assert row["burst_ms"] <= row["rule_ms"] * (1 + 1e-9), row


@pytest.mark.parametrize("variant", ["added", "overlapped"])
def test_vgg16_on_64_devices_is_three_times_faster_than_the_rule(
    comparison: ModuleType, shared_data: Path, variant: str
) -> None:
    operators = comparison.read(shared_data / "deeppool_a100" / comparison.MODELS["vgg16"])
    row = next(row for row in comparison.cell(operators, 64, 64, variant) if row["limit"] == 2.0)
    assert row["speedup"] >= 3
    assert row["proven"]


def test_the_benchmark_prints_one_json_line(shared_data: Path) -> None:
    command = [sys.executable, str(BENCHMARK / "run.py"), "--deeppool", "--json", "--models", "vgg16"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    (line,) = printed.splitlines()
    result = json.loads(line)
    assert result["never_slower"] is True
    assert result["worst"]["speedup"] >= 1 - 1e-9
    assert result["bar"]["reached"] is True
    assert (result["bar"]["layers"], result["bar"]["device_time"]) == ("operators", "busy")
    assert len(result["bar_in_other_variants"]) == 7
    assert np.isfinite([row["rule_ms"] for row in result["cells"]]).all()
