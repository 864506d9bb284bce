"""What burst plans promise: budget, memory, devices, data parallelism as the floor, and the simulator's word."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from burst_cases import chains, cluster, forks, graphs, layer, profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec, DeviceCount, NodeGroup
from burstpool.errors import PlanError, ProfileError
from burstpool.model.graph import Layer, LayerGraph, Value
from burstpool.plan import burst, data
from burstpool.plan.branches import Fork, Stage, layers_of, model_row
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan
from burstpool.plan.widths import find_widths
from burstpool.profiling.importers import import_profile
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.schedule.lower import lower
from burstpool.schedule.validate import validate

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def growing(num_layers: int = 4, *, parameters: int = 10**6, size: int = 10**4) -> Profile:
    """A chain whose layers pay for many devices."""
    return profile(
        [
            layer(
                f"l{i}", (f"l{i - 1}" if i else "input",), seconds=1e-3, fixed_s=1e-5, parameters=parameters, size=size
            )
            for i in range(num_layers)
        ]
    )


def with_small_end(num_layers: int = 4) -> Profile:
    """As VGG: the last layer has many parameters and little to compute."""
    whole = growing(num_layers)
    end = layer("end", (f"l{num_layers - 1}",), seconds=1e-6, fixed_s=1e-4, parameters=4 * 10**9, size=4)
    return replace(whole, layers=(*whole.layers, end))


@quick
@given(case=st.one_of(chains(5), forks(6)), num_devices=st.integers(2, 6), limit=st.floats(1.0, 4.0))
def test_plans_are_sound_and_keep_to_the_budget(case: Profile, num_devices: int, limit: float) -> None:
    on = cluster(num_devices)
    found = burst.search(case, on, batch=12)
    plan = burst.plan(case, on, batch=12, burst_limit=limit)
    assert plan.device_seconds is not None
    assert plan.device_seconds <= limit * found.one_device_seconds * (1 + 1e-9)
    assert max(plan.devices) < num_devices
    validate(lower(plan, case), plan, case)


@quick
@given(model=graphs(), num_devices=st.integers(2, 6), limit=st.sampled_from([1.0, 1.3, 2.0, None]))
def test_any_graph_is_planned_soundly(model: Profile, num_devices: int, limit: float | None) -> None:
    assert sorted(layers_of(model_row(model).row)) == list(range(len(model.layers)))
    plan = burst.plan(model, cluster(num_devices), batch=12, burst_limit=limit)
    validate(lower(plan, model), plan, model)


@quick
@given(case=st.one_of(chains(6), forks(7)), num_devices=st.integers(1, 6))
def test_burst_plans_are_never_slower_than_data_parallel(case: Profile, num_devices: int) -> None:
    on = cluster(num_devices)
    whole = data.plan(case, on, batch=12)
    unit = burst.search(case, on, batch=12).one_device_seconds
    assert whole.step_time_s is not None
    assert whole.device_seconds is not None
    for limit in (None, whole.device_seconds / unit, 1.5 * whole.device_seconds / unit):
        plan = burst.plan(case, on, batch=12, burst_limit=limit)
        assert plan.step_time_s is not None
        assert plan.step_time_s <= whole.step_time_s * (1 + 1e-9)


@quick
@given(case=chains(6), num_devices=st.integers(1, 6), limit=st.floats(1.0, 4.0))
def test_the_simulator_agrees_with_the_cost_on_chains(case: Profile, num_devices: int, limit: float) -> None:
    """Device-time exactly. Step time: the cost counts reductions by layer, the plan makes them by bucket, and a
    regrouping's messages share links with them; all differences are bounded by all there is to move and to start."""
    on = cluster(num_devices)
    cost = CostModel(case, on)
    found = burst.search(case, on, batch=12)
    point = found.within(limit * found.one_device_seconds)
    plan = burst.predicted_plan(cost, found, point)
    assert plan.step_time_s is not None
    assert plan.device_seconds == pytest.approx(point.device_seconds, rel=1e-9)
    places = [found.cost.widths.values.index(width) for width in point.widths]
    reduce_s = sum(found.cost.reduce_s[index, place] for index, place in enumerate(places))
    moved = [found.cost.regrouping(x.output_bytes_per_sample) for x in case.layers]
    moved_s = sum(ops.compute_s[a, b] for ops, (a, b) in zip(moved, pairwise(places), strict=False))
    starts_s = sum(cost.reduce_s(0, tuple(sorted(block.devices))) for block in plan.blocks if len(block.shares) > 1)
    allowed_s = reduce_s + moved_s + starts_s + found.cost.updates_s + 1e-9
    assert abs(plan.step_time_s - point.step_time_s) <= allowed_s


@pytest.mark.parametrize("name", ["vgg", "wrn", "inception"])
@pytest.mark.parametrize("limit", [1.2, 2.0])
def test_the_simulator_agrees_with_the_cost_on_known_models(shared_data: Path, name: str, limit: float) -> None:
    """Within 3% on chains; 15% where branches run beside each other and their messages wait for one another."""
    model = import_profile(shared_data / "deeppool_a100" / f"A100_{name}.prof")
    link = Link(bytes_per_s=266e9, latency_s=12e-6)
    on = ClusterSpec.uniform("A100", devices_per_node=16, link=link)
    cost = CostModel(model, on)
    found = burst.search(model, on, batch=32)
    point = found.within(limit * found.one_device_seconds)
    plan = burst.predicted_plan(cost, found, point)
    assert plan.device_seconds == pytest.approx(point.device_seconds, rel=1e-9)
    assert plan.step_time_s == pytest.approx(point.step_time_s, rel=0.15 if any(point.offsets) else 0.03)


def test_where_the_simulator_is_slower_than_the_cost_other_plans_are_simulated(shared_data: Path) -> None:
    """Inception-v3 on many devices: messages of branches beside each other wait in an order the cost does not know."""
    model = import_profile(shared_data / "deeppool_a100" / "A100_inception.prof")
    link, network = Link(bytes_per_s=266e9, latency_s=12e-6), Link(bytes_per_s=25e9, latency_s=18e-6)
    on = ClusterSpec.uniform("A100", devices_per_node=8, num_nodes=16, link=link, network=network)
    cost = CostModel(model, on, extrapolate=True)
    found = burst.search(model, on, batch=256, extrapolate=True)
    costed = burst.predicted_plan(cost, found, found.within(2 * found.one_device_seconds))
    plan = burst.plan(model, on, batch=256, extrapolate=True, burst_limit=2.0)
    assert plan.step_time_s is not None
    assert costed.step_time_s is not None
    assert plan.step_time_s < 0.99 * costed.step_time_s
    assert plan.device_seconds is not None
    assert plan.device_seconds <= 2 * found.one_device_seconds * (1 + 1e-9)


def test_a_budget_that_no_other_plan_keeps_to_ends_no_search() -> None:
    found = burst.search(with_small_end(), cluster(4), batch=12)
    least = found.front()[0]
    beside = replace(least, device_seconds=least.device_seconds / 2, offsets=(1,) * len(least.offsets))
    with pytest.raises(PlanError):
        found.within(beside.device_seconds)
    assert list(burst._more_certain(found, beside, beside.device_seconds, 0.0)) == []


def test_a_layer_that_does_not_pay_for_devices_gets_few() -> None:
    plan = burst.plan(with_small_end(), cluster(4), batch=12)
    whole = data.plan(with_small_end(), cluster(4), batch=12)
    assert plan.blocks[0].devices != plan.blocks[-1].devices
    assert len(plan.blocks[0].shares) == 4
    assert len(plan.blocks[-1].shares) == 1
    assert plan.step_time_s is not None
    assert whole.step_time_s is not None
    assert plan.step_time_s < 0.8 * whole.step_time_s


def test_widths_need_not_be_powers_of_two() -> None:
    plan = burst.plan(growing(), cluster(3), batch=12)
    assert {len(block.shares) for block in plan.blocks} == {3}


def test_a_larger_budget_is_never_slower_and_more_devices_never_hurt() -> None:
    steps = []
    for num_devices in (2, 4, 6):
        found = burst.search(with_small_end(), cluster(num_devices), batch=12)
        times = [found.within(limit * found.one_device_seconds).step_time_s for limit in (1.0, 1.2, 1.5, 2.0, 4.0)]
        assert all(b <= a * (1 + 1e-12) for a, b in pairwise(times))
        steps.append(times[-1])
    assert steps == sorted(steps, reverse=True)


def test_the_front_rises_in_device_time_and_falls_in_step_time() -> None:
    points = burst.search(with_small_end(), cluster(4), batch=12).front()
    assert len(points) > 2
    assert all(a.device_seconds < b.device_seconds and a.step_time_s > b.step_time_s for a, b in pairwise(points))


def test_a_weight_picks_from_the_front() -> None:
    cheap = burst.plan(with_small_end(), cluster(4), batch=12, device_time_weight=100.0)
    fast = burst.plan(with_small_end(), cluster(4), batch=12, device_time_weight=0.0)
    assert cheap.device_seconds is not None
    assert fast.device_seconds is not None
    assert cheap.device_seconds < fast.device_seconds


def heavy(activation_bytes: int) -> Profile:
    layers = [replace(x, activation_bytes={b: b * activation_bytes for b in x.forward_s}) for x in growing(3).layers]
    small = replace(layers[2], activation_bytes=dict.fromkeys(layers[2].forward_s, 10), backward_s=layers[2].forward_s)
    return profile([*layers[:2], small])


def test_no_device_gets_more_than_its_memory() -> None:
    memory_bytes = CostModel(growing(), cluster(4)).memory_bytes(0)
    model = heavy(int(0.99 * memory_bytes / 2 / 6))  # two heavy layers of six samples a device fill it
    plan = burst.plan(model, cluster(4), batch=12, device_time_weight=1e6)
    assert [len(block.shares) for block in plan.blocks for _ in block.layers][:2] == [2, 2]
    validate(lower(plan, model), plan, model, memory=CostModel(model, cluster(4)))


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(PlanError, match="does not fit on device 0"):
        burst.plan(heavy(40 * 2**30), cluster(4), batch=12)


def unequal() -> tuple[list[Profile], ClusterSpec]:
    fast = growing()
    slow = replace(
        fast,
        device="V100",
        layers=tuple(
            replace(
                x,
                forward_s={b: 2 * s for b, s in x.forward_s.items()},
                backward_s={b: 2 * s for b, s in x.backward_s.items()},
            )
            for x in fast.layers
        ),
    )
    link = Link(bytes_per_s=1e11, latency_s=1e-6)
    group = NodeGroup(
        name="mixed", devices=(DeviceCount(type="V100", count=2), DeviceCount(type="A100", count=2)), link=link
    )
    return [fast, slow], ClusterSpec(name="mixed", node_groups=(group,))


def test_faster_devices_get_more_samples() -> None:
    profiles, on = unequal()
    plan = burst.plan(profiles, on, batch=12)
    samples = {share.device: share.num_samples for share in plan.blocks[0].shares}
    assert samples == {0: 2, 1: 2, 2: 4, 3: 4}
    alone = burst.plan(profiles, on, batch=12, burst_limit=1.0)
    assert alone.devices == (2,)


def test_regrouping_stays_inside_a_node_where_that_is_faster() -> None:
    # Large values between layers: leaving the node costs more than four more devices bring.
    plan = burst.plan(growing(size=3 * 10**7, parameters=10**8), cluster(4, num_nodes=2), batch=12)
    assert plan.devices == (0, 1, 2, 3)
    far = burst.plan(growing(size=10, parameters=10), cluster(4, num_nodes=2), batch=12)
    assert len(far.devices) > 4


def test_twice_as_many_devices_keep_half_of_what_they_had() -> None:
    widths = find_widths(CostModel(growing(), cluster(8), extrapolate=True), 16)
    device, node = widths.moved()
    one, two, four, eight = (widths.values.index(width) for width in (1, 2, 4, 8))
    assert device[one, two] == 8
    assert device[two, four] == device[four, two] == 4
    assert device[four, eight] == 2
    assert not node.any()
    held = [{s.device: (s.start, s.stop) for s in widths.shares(place)} for place in (four, eight)]
    assert all(held[0][d][0] <= held[1][d][0] < held[1][d][1] <= held[0][d][1] for d in held[0])


def test_of_widths_with_the_same_busiest_device_only_the_narrowest_is_considered() -> None:
    widths = find_widths(CostModel(growing(), cluster(12)), 12)
    assert widths.values == (1, 2, 3, 4, 6, 12)


def test_branches_run_beside_each_other_where_that_is_faster() -> None:
    # Two branches that gain nothing from more devices: a device each.
    costs = {"seconds": 1e-6, "fixed_s": 5e-3, "parameters": 0, "size": 10}
    layers = [
        layer("in", ("input",), **{**costs, "fixed_s": 1e-5}),
        layer("a", ("in",), **costs),
        layer("b", ("in",), **costs),
    ]
    model = profile([*layers, layer("join", ("a", "b"), **{**costs, "fixed_s": 1e-5})])
    plan = burst.plan(model, cluster(2), batch=12)
    by_layer = {name: block.devices for block in plan.blocks for name in block.layers}
    assert set(by_layer["a"]).isdisjoint(by_layer["b"])
    assert plan.step_time_s == pytest.approx(13.6e-3, rel=0.02)
    alone = burst.plan(model, cluster(1), batch=12)
    assert alone.step_time_s == pytest.approx(27.1e-3, rel=0.02)


def diamond_net() -> Profile:
    """Not series-parallel: b takes from a and c, d from c only."""
    costs = {"seconds": 1e-4, "fixed_s": 1e-5, "parameters": 10, "size": 10}
    takes = {"s": ("input",), "a": ("s",), "c": ("s",), "b": ("a", "c"), "d": ("c",), "t": ("b", "d")}
    return profile([layer(name, inputs, **costs) for name, inputs in takes.items()])


def test_graphs_that_are_not_series_parallel_become_one_stage() -> None:
    row = model_row(diamond_net()).row
    assert [part.layers for part in row if isinstance(part, Stage)] == [(0,), (1, 2, 3, 4), (5,)]
    plan = burst.plan(diamond_net(), cluster(4), batch=12)
    validate(lower(plan, diamond_net()), plan, diamond_net())


def test_inception_is_a_row_of_forks(shared_data: Path) -> None:
    model = import_profile(shared_data / "deeppool_a100" / "A100_inception.prof")
    row = model_row(model).row
    found = [part for part in row if isinstance(part, Fork)]
    assert [len(fork.branches) for fork in found] == [4, 4, 4, 3, 4, 4, 4, 4, 3, 4, 4]
    assert sorted(layers_of(row)) == list(range(len(model.layers)))


def test_a_residual_has_a_shortcut() -> None:
    costs = {"seconds": 1e-4, "fixed_s": 1e-5, "parameters": 10, "size": 10}
    model = profile([layer("x", ("input",), **costs), layer("f", ("x",), **costs), layer("add", ("x", "f"), **costs)])
    fork = next(part for part in model_row(model).row if isinstance(part, Fork))
    assert [layers_of(branch) for branch in fork.branches] == [(1,), ()]
    assert fork.shortcut_bytes == 10


def traced(*, shared: bool = False, folded: bool = False) -> LayerGraph:
    """The chain of `with_small_end(3)`, with what only a traced model can tell."""
    model = with_small_end(3)
    layers = []
    for index, each in enumerate(model.layers):
        keeps_samples = not (folded and index == 1)
        value = Value(
            name=each.name,
            shape=("batch", 4),
            dtype="float32",
            sample_dim=0 if keeps_samples else None,
            bytes_per_sample=each.output_bytes_per_sample,
        )
        key = "tied" if shared and index in (0, 3) else each.name
        taken = (model.layers[index - 1].name,) if index else ("x",)
        parameters = {key: each.parameter_bytes}
        layers.append(Layer(name=each.name, kind="", inputs=taken, outputs=(value,), parameters=parameters))
    given = Value(name="x", shape=("batch",), dtype="float32", sample_dim=0, bytes_per_sample=4)
    return LayerGraph(model="m", training=True, inputs=(given,), layers=tuple(layers), outputs=("end",))


def test_layers_that_share_a_parameter_have_one_width() -> None:
    graph, model = traced(shared=True), with_small_end(3)
    assert [part.layers for part in model_row(graph).row if isinstance(part, Stage)] == [(0, 1, 2, 3)]
    plan = burst.plan(model, cluster(4), batch=12, graph=graph)
    assert len({block.shares for block in plan.blocks}) == 1
    validate(lower(plan, graph), plan, graph)


def test_a_value_that_cannot_be_cut_stays_on_its_devices() -> None:
    graph, model = traced(folded=True), with_small_end(3)
    assert [part.layers for part in model_row(graph).row if isinstance(part, Stage)] == [(0,), (1, 2), (3,)]
    plan = burst.plan(model, cluster(4), batch=12, graph=graph)
    assert len({block.shares for block in plan.blocks}) > 1
    validate(lower(plan, graph), plan, graph)


def test_a_graph_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="other layers than the profile"):
        burst.plan(growing(), cluster(2), batch=12, graph=traced())


def test_layers_with_the_same_devices_are_one_block() -> None:
    plan = burst.plan(growing(6, parameters=0), cluster(4), batch=12)
    assert len(plan.blocks) == 1


def test_wrong_questions_are_refused() -> None:
    model, on = growing(), cluster(2)
    with pytest.raises(PlanError, match="give one"):
        burst.plan(model, on, batch=12, burst_limit=2, device_time_weight=1)
    with pytest.raises(PlanError, match="must be more than 0"):
        burst.plan(model, on, batch=12, burst_limit=0)
    with pytest.raises(PlanError, match="the least is"):
        burst.plan(model, on, batch=12, burst_limit=0.5)
    with pytest.raises(PlanError, match="must be at least 1"):
        burst.plan(model, on, batch=0)
    with pytest.raises(PlanError, match="not among the measured batches"):
        burst.plan(model, on, batch=100)
    assert isinstance(burst.plan(model, on, batch=100, extrapolate=True), Plan)


def test_a_layer_without_a_time_is_refused() -> None:
    with pytest.raises(ProfileError, match="has no forward_s"):
        LayerProfile(name="x", inputs=(), parameter_bytes=0, output_bytes_per_sample=0, forward_s={}, backward_s={})


def test_planning_is_deterministic() -> None:
    assert burst.plan(with_small_end(), cluster(4), batch=12) == burst.plan(with_small_end(), cluster(4), batch=12)


def test_a_thousand_layers_are_planned_within_the_bound() -> None:
    """The labels of a long chain are thinned; the result stays close to the lower bound."""
    sizes = np.random.default_rng(0).uniform(0.5, 2, 1000)
    layers = [
        layer(f"l{i}", (f"l{i - 1}" if i else "input",), seconds=1e-4 * k, fixed_s=1e-4, parameters=10**6, size=10**4)
        for i, k in enumerate(sizes)
    ]
    model = profile(layers)
    found = burst.search(model, cluster(12), batch=12)
    point = found.within(1.5 * found.one_device_seconds)
    assert point.bound_s <= point.step_time_s <= 1.01 * point.bound_s
    assert dataflow(burst.predicted_plan(CostModel(model, cluster(12)), found, point), model).last.layers[-1] == "l999"
