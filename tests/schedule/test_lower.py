"""Lowering: what travels, in which order things run, and that the result trains the same model as one device."""

import pytest
from hypothesis import given, settings
from schedule_cases import block, chain, graph, layer, on, plan, planned, profile, value
from schedule_interpreter import trains_the_same

from burstpool.errors import PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan, Share
from burstpool.schedule.actions import Kind, Schedule
from burstpool.schedule.lower import deliveries, lower, orders
from burstpool.schedule.text import format_action
from burstpool.schedule.validate import validate


def lines(schedule: Schedule, device: int) -> list[str]:
    return [format_action(action) for action in schedule.devices[device]]


def passes(schedule: Schedule, device: int) -> str:
    """`F0 F1 B0`: forwards and backwards with their minibatches."""
    short = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
    return " ".join(f"{short[a.kind]}{a.minibatch}" for a in schedule.devices[device] if a.kind in short)


@settings(max_examples=300, deadline=None)
@given(planned())
def test_every_plan_lowers_to_a_sound_schedule_that_trains_the_same_model(case: tuple[Plan, LayerGraph]) -> None:
    found, model = case
    schedule = lower(found, model)
    validate(schedule, found, model)
    assert trains_the_same(schedule, found, model)


def test_one_device_runs_forward_backward_and_steps() -> None:
    schedule = lower(plan(block("a", on(4, 0)), block("b", on(4, 0))), chain(2))
    assert lines(schedule, 0) == [
        "forward a 0:4",
        "forward b 0:4",
        "backward b 0:4",
        "backward a 0:4",
        "step b",
        "step a",
    ]


def test_data_parallel_reduces_each_block_right_after_its_backward() -> None:
    schedule = lower(plan(block("a", on(4, 0, 1)), block("b", on(4, 0, 1))), chain(2))
    assert lines(schedule, 1) == [
        "forward a 2:4",
        "forward b 2:4",
        "backward b 2:4",
        "reduce b among=0..1",
        "backward a 2:4",
        "reduce a among=0..1",
        "step b",
        "step a",
    ]


def test_samples_travel_only_where_they_are_not_yet() -> None:
    case = plan(block("a", on(8, 0, 1)), block("b", on(8, 0, 1, 2, 3)))
    moves = deliveries(case, dataflow(case, chain(2)))
    assert [(x.source, x.destination, x.start, x.stop) for x in moves] == [(0, 1, 2, 4), (1, 2, 4, 6), (1, 3, 6, 8)]


def test_a_value_that_two_blocks_of_a_device_take_travels_once() -> None:
    model = graph(layer("a", "input"), layer("b", "a"), layer("c", "a", "b"))
    case = plan(block("a", on(4, 0)), block("b", on(4, 1)), block("c", on(4, 1)))
    schedule = lower(case, model)
    assert lines(schedule, 1) == [
        "receive a 0:4 value=a from=0",
        "forward b 0:4",
        "forward c 0:4",
        "backward c 0:4",
        "backward b 0:4",
        "send a 0:4 gradient=a to=0",
        "step c",
        "step b",
    ]


def test_a_later_block_gets_only_the_samples_an_earlier_one_did_not_need() -> None:
    model = graph(layer("a", "input"), layer("b", "a"), layer("c", "a", "b"))
    shares = (Share(device=1, start=0, stop=2), Share(device=0, start=2, stop=4))
    case = plan(block("a", on(4, 0)), block("b", shares), block("c", on(4, 1)))
    moves = deliveries(case, dataflow(case, model))
    assert [(x.value, x.destination, x.start, x.stop, x.first_taker) for x in moves] == [
        ("a", 1, 0, 2, "b"),
        ("a", 1, 2, 4, "c"),
        ("b", 1, 2, 4, "c"),
    ]


def test_gradients_leave_before_the_reduction_starts() -> None:
    schedule = lower(plan(block("a", on(4, 2)), block("b", on(4, 0, 1))), chain(2))
    assert lines(schedule, 0)[-4:] == ["backward b 0:2", "send a 0:2 gradient=a to=2", "reduce b among=0..1", "step b"]


def test_values_without_gradient_send_none_back() -> None:
    model = graph(layer("a", "input", outputs=(value("a", differentiable=False),)), layer("b", "a"))
    schedule = lower(plan(block("a", on(2, 0)), block("b", on(2, 1))), model)
    assert not any(action.gradient for actions in schedule.devices for action in actions)


def test_what_the_model_returns_goes_to_the_last_block_for_the_loss() -> None:
    model = graph(layer("a", "input"), layer("b", "a"), outputs=("a", "b"))
    case = plan(block("a", on(2, 0)), block("b", on(2, 1)))
    assert dataflow(case, model).values["a"].takers == ("b",)
    branch = graph(layer("a", "input"), layer("b", "input"), outputs=("a", "b"))
    assert "receive a 0:2 value=a from=0" in lines(lower(case, branch), 1)


def test_a_shared_parameter_is_reduced_and_stepped_once_with_the_first_block() -> None:
    tied = {"tied": 4}
    model = graph(layer("a", "input", parameters=tied), layer("b", "a"), layer("c", "b", parameters=tied))
    case = plan(*(block(name, on(2, 0, 1)) for name in "abc"))
    assert [line for line in lines(lower(case, model), 0) if line.startswith(("reduce", "step"))] == [
        "reduce b among=0..1",
        "reduce a among=0..1",
        "step b",
        "step a",
    ]


def test_accumulation_runs_one_minibatch_after_the_other() -> None:
    case = plan(block("a", on(2, 0, 1)), block("b", on(2, 0, 1)), num_minibatches=2)
    schedule = lower(case, chain(2))
    assert passes(schedule, 0) == "F0 F0 B0 B0 F1 F1 B1 B1"
    assert lines(schedule, 0)[-5:] == [
        "reduce b among=0..1",
        "backward a minibatch=1 0:1",
        "reduce a among=0..1",
        "step b",
        "step a",
    ]


def test_a_pipeline_runs_one_forward_one_backward() -> None:
    case = plan(*(block(name, on(1, place)) for place, name in enumerate("abcd")), num_minibatches=6)
    schedule = lower(case, chain(4))
    assert [passes(schedule, device) for device in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_devices_that_share_blocks_run_them_in_the_same_order() -> None:
    stages = [(0,), (0, 1, 2, 3), (1, 2), (0,)]
    case = plan(*(block(n, on(8, *d)) for n, d in zip("abcd", stages, strict=True)), num_minibatches=3)
    turns = orders(case, dataflow(case, chain(4)))
    for name, devices in enumerate(stages):
        assert len({tuple(t for t in turns[device] if t.block == name) for device in devices}) == 1
    common = [tuple(t for t in turns[device] if t.block in (1, 2)) for device in (1, 2)]
    assert common[0] == common[1]


def test_branches_on_other_devices_wait_only_for_their_own_inputs() -> None:
    model = graph(layer("a", "input"), layer("b", "a"), layer("c", "a"), layer("d", "b", "c"))
    case = plan(block("a", on(2, 0)), block("b", on(2, 0)), block("c", on(2, 1)), block("d", on(2, 0)))
    assert lines(lower(case, model), 1)[0] == "receive a 0:2 value=a from=0"
    assert lines(lower(case, model), 0)[:3] == ["forward a 0:2", "send a 0:2 value=a to=1", "forward b 0:2"]


def test_a_device_without_samples_has_nothing_to_do() -> None:
    schedule = lower(plan(block("a", on(1, 0, 1)), num_devices=3), chain(1))
    assert [len(actions) for actions in schedule.devices] == [3, 0, 0]


def test_a_profile_lowers_like_the_graph_it_was_measured_on() -> None:
    case = plan(block("a", on(8, 0, 1)), block("b", on(8, 0, 1, 2, 3)), block("c", on(8, 2)), num_minibatches=2)
    measured = profile(("a", ("input",)), ("b", ("a",)), ("c", ("b",)))
    assert lower(case, measured) == lower(case, chain(3))


def test_layers_nobody_takes_from_go_to_the_last_block_of_a_profile() -> None:
    case = plan(block("a", on(2, 0)), block("b", on(2, 1)))
    assert "send a 0:2 value=a to=1" in lines(lower(case, profile(("a", ("x",)), ("b", ("x",)))), 0)


@pytest.mark.parametrize(
    ("bytes_per_sample", "shares", "message"),
    [
        (0, on(4, 0), "must run on the same devices"),
        (8, on(4, 1, 0), "must run on the same samples of the same devices"),
    ],
)
def test_values_that_cannot_be_cut_stay_on_their_devices(
    bytes_per_sample: int, shares: tuple[Share, ...], message: str
) -> None:
    positions = value("a:1", sample_dim=None, bytes_per_sample=bytes_per_sample)
    model = graph(layer("a", "input", outputs=(value("a"), positions)), layer("b", "a", "a:1"))
    lower(plan(block("a", on(4, 0, 1)), block("b", on(4, 0, 1))), model)
    with pytest.raises(PlanError, match=f"'a:1' cannot be cut along samples.*{message}"):
        lower(plan(block("a", on(4, 0, 1)), block("b", shares)), model)


def test_blocks_that_share_parameters_must_share_devices() -> None:
    tied = {"tied": 4}
    model = graph(layer("a", "input", parameters=tied), layer("b", "a", parameters=tied))
    with pytest.raises(PlanError, match="'a' and 'b' share parameter 'tied' and run on different devices"):
        lower(plan(block("a", on(4, 0)), block("b", on(4, 1))), model)


def test_plans_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(PlanError, match="no block of the plan runs layer 'b'"):
        lower(plan(block("a", on(2, 0))), chain(2))
    with pytest.raises(PlanError, match="names layer 'z', which the model does not have"):
        lower(plan(block("a", on(2, 0)), block("z", on(2, 0))), chain(1))
    with pytest.raises(PlanError, match="runs layer 'b' before 'a'"):
        lower(plan(block("b", on(2, 0)), block("a", on(2, 0))), chain(2))
    with pytest.raises(PlanError, match="agreement='waves' cannot be lowered yet"):
        lower(plan(block("a", on(2, 0)), agreement="waves"), chain(1))


def test_independent_layers_may_be_planned_in_another_order() -> None:
    model = graph(layer("a", "input"), layer("b", "input"), layer("c", "a", "b"))
    case = plan(block("b", on(2, 0)), block("a", on(2, 1)), block("c", on(2, 0)))
    validate(lower(case, model), case, model)
