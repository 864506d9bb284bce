"""The burst planner finds what brute force finds, on chains and on branches."""

import pytest
from burst_brute_force import brute_force
from burst_cases import chains, cluster, forks, graphs, layer, nested, profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burstpool.errors import PlanError
from burstpool.plan.burst import search
from burstpool.plan.burst_cost import BurstOptions
from burstpool.plan.pareto import front
from burstpool.profiling.profile import Profile

OPTIONS = [
    BurstOptions(),
    BurstOptions(reduction="added", updates=False, regroup_latency_s=2.4e-4),
]
CLOSE = 1e-9
"""Sums of the same some ten numbers in another order."""


def check(case: Profile, options: BurstOptions, num_devices: int, part: float) -> None:
    found = search(case, cluster(num_devices), batch=12, options=options)
    steps, device_s = brute_force(found.cost, found.model)
    best = front(steps, device_s)
    points = found.front()
    assert all(point.proven for point in points)
    # Of two plans that differ by rounding only either may stand in a front: compare what each budget buys.
    for seconds in device_s[best] * (1 + CLOSE):
        bought = min(p.step_time_s for p in points if p.device_seconds <= seconds)
        assert bought == pytest.approx(steps[device_s <= seconds].min(), rel=CLOSE)
    least, most = device_s[best].min(), device_s[best].max()
    budget = least + part * (most - least)
    point = found.within(budget)
    assert point.proven
    assert point.device_seconds <= budget * (1 + CLOSE)
    assert point.step_time_s == pytest.approx(steps[device_s <= budget * (1 + CLOSE)].min(), rel=CLOSE)
    weighed = found.weighted(part)
    assert weighed.step_time_s + part * weighed.device_seconds == pytest.approx(
        (steps + part * device_s).min(), rel=CLOSE
    )
    with pytest.raises(PlanError, match="the least is"):
        found.within(least * 0.99)


@pytest.mark.parametrize("options", OPTIONS, ids=["overlapped", "added"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=chains(), num_devices=st.integers(1, 4), part=st.floats(0, 1))
def test_chains_of_8_layers_and_4_widths_are_planned_like_brute_force(
    case: Profile, options: BurstOptions, num_devices: int, part: float
) -> None:
    check(case, options, num_devices, part)


@pytest.mark.parametrize("options", OPTIONS, ids=["overlapped", "added"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=forks(), num_devices=st.integers(1, 4), part=st.floats(0, 1))
def test_branches_are_planned_like_brute_force(
    case: Profile, options: BurstOptions, num_devices: int, part: float
) -> None:
    check(case, options, num_devices, part)


@pytest.mark.parametrize("options", OPTIONS, ids=["overlapped", "added"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=st.one_of(nested(), graphs(8, min_layers=5)), num_devices=st.sampled_from([4, 3, 2]), part=st.floats(0, 1))
def test_any_graph_of_8_layers_and_4_widths_is_planned_like_brute_force(
    case: Profile, options: BurstOptions, num_devices: int, part: float
) -> None:
    check(case, options, num_devices, part)


def test_six_branches_are_put_into_groups_like_brute_force() -> None:
    """More branches than large forks are searched with, no two alike."""
    costs = {"fixed_s": 3e-4, "parameters": 10**4, "size": 10**4}
    branches = [layer(f"b{i}", ("in",), seconds=1e-5 * 3**i, **costs) for i in range(6)]
    join = layer("join", tuple(branch.name for branch in branches), seconds=1e-5, **costs)
    check(profile([layer("in", ("input",), seconds=1e-5, **costs), *branches, join]), BurstOptions(), 4, 0.7)


def test_layers_that_are_alike_are_planned_like_brute_force() -> None:
    """Thousands of ways through a fork inside of a fork differ by rounding, or not at all."""
    inputs = {"l0": ("input",), "l1": ("l0",), "l2": ("l1",), "l3": ("l2",), "l4": ("l1",), "l5": ("l3", "l4")}
    inputs |= {"l6": ("l0",), "l7": ("l5", "l6")}
    wide = ("l2", "l5")
    layers = [
        layer(name, given, seconds=1e-5, fixed_s=1e-5, parameters=400_000_000 if name in wide else 0, size=4)
        for name, given in inputs.items()
    ]
    check(profile(layers), OPTIONS[0], num_devices=4, part=0.0)
