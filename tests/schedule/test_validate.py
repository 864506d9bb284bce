"""The validator: what it accepts trains right, what it refuses would not; and it says which action is wrong."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from schedule_cases import block, chain, graph, layer, on, plan, planned, value
from schedule_interpreter import trains_the_same

from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import ProfileError, ScheduleError
from burstpool.model.graph import LayerGraph
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.schedule.actions import Action, Kind, Schedule
from burstpool.schedule.lower import lower
from burstpool.schedule.memory import peak_memory_bytes
from burstpool.schedule.text import parse
from burstpool.schedule.validate import validate


def sound(schedule: Schedule, plan_: Plan, model: LayerGraph) -> bool:
    message = ""
    try:
        validate(schedule, plan_, model)
    except ScheduleError as error:
        message = str(error)
        assert message.startswith("device ")
        assert "\n" not in message
    return not message


def edited(schedule: Schedule, device: int, actions: list[Action]) -> Schedule:
    devices = list(schedule.devices)
    devices[device] = tuple(actions)
    return Schedule(devices=tuple(devices))


@st.composite
def places(draw: st.DrawFn) -> tuple[Plan, LayerGraph, Schedule, int, int]:
    """A random schedule, and one of its actions: device and place."""
    found, model = draw(planned())
    schedule = lower(found, model)
    kinds = sorted({action.kind for actions in schedule.devices for action in actions})
    kind = draw(st.sampled_from(kinds))  # as many sends as forwards, though there are fewer
    ours = [(d, p) for d, actions in enumerate(schedule.devices) for p, a in enumerate(actions) if a.kind is kind]
    return found, model, schedule, *draw(st.sampled_from(ours))


@settings(max_examples=200, deadline=None)
@given(places())
def test_no_action_can_be_left_out(case: tuple[Plan, LayerGraph, Schedule, int, int]) -> None:
    found, model, schedule, device, place = case
    actions = list(schedule.devices[device])
    del actions[place]
    assert not sound(edited(schedule, device, actions), found, model)


@settings(max_examples=100, deadline=None)
@given(places(), st.data())
def test_no_action_can_be_there_twice(case: tuple[Plan, LayerGraph, Schedule, int, int], data: st.DataObject) -> None:
    found, model, schedule, device, place = case
    actions = list(schedule.devices[device])
    actions.insert(data.draw(st.integers(0, len(actions))), actions[place])
    assert not sound(edited(schedule, device, actions), found, model)


@settings(max_examples=300, deadline=None)
@given(places(), st.data())
def test_no_action_can_be_altered(case: tuple[Plan, LayerGraph, Schedule, int, int], data: st.DataObject) -> None:
    found, model, schedule, device, place = case
    actions = list(schedule.devices[device])
    changes: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.sampled_from(Kind),
        "block": st.sampled_from([*(x.name for x in found.blocks), "nowhere"]),
        "minibatch": st.integers(-1, found.num_minibatches),
        "start": st.integers(-1, found.batch),
        "stop": st.integers(-1, found.batch + 1),
        "value": st.sampled_from(["", *model.values()]),
        "gradient": st.booleans(),
        "peer": st.integers(-1, found.num_devices),
        "group": st.lists(st.integers(0, found.num_devices), max_size=3).map(tuple),
    }
    field = data.draw(st.sampled_from(sorted(changes)))
    altered = replace(actions[place], **{field: data.draw(changes[field])})
    assume(altered != actions[place])
    actions[place] = altered
    assert not sound(edited(schedule, device, actions), found, model)


@settings(max_examples=600, deadline=None)
@given(places(), st.data())
def test_an_action_moved_is_accepted_exactly_where_the_result_stays_right(
    case: tuple[Plan, LayerGraph, Schedule, int, int], data: st.DataObject
) -> None:
    found, model, schedule, device, place = case
    actions = list(schedule.devices[device])
    action = actions.pop(place)
    actions.insert(data.draw(st.integers(max(0, place - 3), min(len(actions), place + 3))), action)
    moved = edited(schedule, device, actions)
    right = trains_the_same(moved, found, model)
    event(f"{action.kind} moved, {'right' if right else 'wrong'}")
    assert sound(moved, found, model) == right


@settings(max_examples=200, deadline=None)
@given(places(), st.data())
def test_a_shuffled_device_is_accepted_exactly_where_the_result_stays_right(
    case: tuple[Plan, LayerGraph, Schedule, int, int], data: st.DataObject
) -> None:
    found, model, schedule, device, _ = case
    moved = edited(schedule, device, data.draw(st.permutations(schedule.devices[device])))
    assert sound(moved, found, model) == trains_the_same(moved, found, model)


PAIR = plan(block("a", on(4, 0)), block("b", on(4, 1)))
"""Two blocks on two devices."""
BOTH = plan(block("a", on(4, 0, 1)), block("b", on(4, 0, 1)))
"""Two blocks on the same two devices."""


def refusal(text: str, plan_: Plan, model: LayerGraph) -> str:
    with pytest.raises(ScheduleError) as caught:
        validate(parse(text), plan_, model)
    return str(caught.value)


def test_messages_that_cross_in_the_wrong_order_deadlock() -> None:
    model = graph(layer("a", "input"), layer("b", "input"), layer("c", "a", "b"), layer("d", "a", "b"))
    case = plan(block("a", on(2, 0)), block("b", on(2, 1)), block("c", on(2, 0)), block("d", on(2, 1)))
    schedule = lower(case, model)
    actions = [list(device) for device in schedule.devices]
    for device in actions:  # each first waits for the other's value, then makes its own
        receive = next(a for a in device if a.kind is Kind.RECEIVE)
        device.remove(receive)
        device.insert(0, receive)
    with pytest.raises(ScheduleError, match=r"device 0, action 0 \(receive b 0:2 value=b from=1\): it waits forever"):
        validate(Schedule(devices=tuple(map(tuple, actions))), case, model)


def test_reductions_started_in_different_orders_deadlock() -> None:
    schedule = lower(BOTH, chain(2))
    first = list(schedule.devices[0])
    reduces = [place for place, action in enumerate(first) if action.kind is Kind.REDUCE]
    first.insert(reduces[1], first.pop(reduces[0]))  # a's before b's, on device 0 only
    with pytest.raises(ScheduleError, match=r"device 0, action 6 \(step b\): it waits forever"):
        validate(edited(schedule, 0, first), BOTH, chain(2))


def test_batch_norm_over_two_devices_needs_the_same_order_on_both() -> None:
    loose = graph(layer("a", "input"), layer("b", "input"), layer("c", "a", "b"))
    norms = [layer(name, "input", mixes_samples=True) for name in "ab"]
    joint = graph(*norms, layer("c", "a", "b"))
    three = plan(*(block(name, on(4, 0, 1)) for name in "abc"))
    schedule = lower(three, loose)
    actions = list(schedule.devices[0])
    actions[0], actions[1] = actions[1], actions[0]
    validate(edited(schedule, 0, actions), three, loose)
    with pytest.raises(ScheduleError, match="waits forever"):
        validate(edited(schedule, 0, actions), three, joint)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  forward b 0:4\n", "", "device 1 lacks an action: forward of block 'b', minibatch 0"),
        ("  step a\n", "", "device 0 lacks an action: step of block 'a'"),
        ("forward b 0:4", "forward b 0:3", "device 1, action 1 (forward b 0:3): the device's share is 0:4"),
        ("forward b", "forward c", "device 1, action 1 (forward c 0:4): the plan has no such block"),
        ("forward a 0:4", "forward b 0:4", "device 0, action 0 (forward b 0:4): device 0 has no share of the block"),
        ("  send a 0:4 value=a to=1\n", "", "(receive a 0:4 value=a from=0): device 0 has no send that matches it"),
        ("value=a to=1", "value=a to=0", "its peer must be another of devices 0 to 1"),
        ("a 0:4 value=a to=1", "a 0:5 value=a to=1", "device 0 does not make these samples"),
        ("value=a to=1", "value=b to=1", "block 'a' hands on no value 'b'"),
        ("step a", "push a", "it belongs to a plan with waves"),
        ("step a", "step a 0:4", "it names a minibatch or samples"),
        ("step a", "step a among=0", "it has no group"),
        ("step a", "reduce a among=0", "the block is on one device only"),
        ("backward b 0:4\n", "backward b 0:4\n  backward b 0:4\n", "(backward b 0:4): it is there twice; remove one"),
        ("  forward a 0:4\n  send", "  send", "device 0 lacks an action: forward of block 'a', minibatch 0"),
    ],
)
def test_it_says_which_action_of_which_device_is_wrong(old: str, new: str, message: str) -> None:
    text = """schedule 1
device 0
  forward a 0:4
  send a 0:4 value=a to=1
  receive a 0:4 gradient=a from=1
  backward a 0:4
  step a
device 1
  receive a 0:4 value=a from=0
  forward b 0:4
  backward b 0:4
  send a 0:4 gradient=a to=0
  step b
"""
    validate(parse(text), PAIR, chain(2))
    assert message in refusal(text.replace(old, new, 1), PAIR, chain(2))


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ((0, 1), "device 0, action 0 (send a 0:4 value=a to=1): the value is made only after it"),
        ((2, 3), "device 0, action 2 (backward a 0:4): gradients of value 'a' have not come back from all devices"),
        ((3, 4), "device 0, action 3 (step a): a backward of block 'a' comes after it"),
    ],
)
def test_it_says_what_comes_too_early(swap: tuple[int, int], message: str) -> None:
    schedule = lower(PAIR, chain(2))
    actions = list(schedule.devices[0])
    actions[swap[0]], actions[swap[1]] = actions[swap[1]], actions[swap[0]]
    with pytest.raises(ScheduleError) as caught:
        validate(edited(schedule, 0, actions), PAIR, chain(2))
    assert str(caught.value) == message


def test_samples_nobody_takes_are_refused() -> None:
    case = plan(block("a", on(4, 0)), block("b", on(4, 0, 1)))
    schedule = lower(case, chain(2))
    wider = [
        tuple(replace(a, start=1) if a.kind in (Kind.SEND, Kind.RECEIVE) else a for a in actions)
        for actions in schedule.devices
    ]
    with pytest.raises(ScheduleError, match="no block of device 1 takes sample 1"):
        validate(Schedule(devices=tuple(wider)), case, chain(2))


def test_a_value_without_gradient_cannot_send_one() -> None:
    model = graph(layer("a", "input", outputs=(value("a", differentiable=False),)), layer("b", "a"))
    with pytest.raises(ScheduleError, match="the value has no gradient"):
        validate(lower(PAIR, chain(2)), PAIR, model)


def test_the_plan_must_have_as_many_devices() -> None:
    with pytest.raises(ScheduleError, match="the schedule has 1 devices, its plan 2"):
        validate(Schedule(devices=((),)), PAIR, chain(2))


# --- Memory ------------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> CostModel:
    fields: dict[str, Any] = {
        "parameter_bytes": 100,
        "output_bytes_per_sample": 8,
        "forward_s": {1: 1.0, 4: 4.0},
        "backward_s": {1: 2.0, 4: 8.0},
        "activation_bytes": {1: 50, 4: 200},
    }
    layers = tuple(
        LayerProfile(name=name, inputs=(before,), **(fields | changes)) for before, name in (("x", "a"), ("a", "b"))
    )
    cluster = ClusterSpec.uniform("A100", devices_per_node=2, link="nvlink3")
    return CostModel(Profile(model="tiny", device="A100", source="made up", layers=layers), cluster)


def test_peak_memory_counts_parameters_activations_and_received_values() -> None:
    cost = measured()
    source = cost.profile("A100")
    # Device 0: 3 × 100 of parameters, gradients and momentum, and 200 kept. Device 1: also 4 samples of 8 received.
    assert peak_memory_bytes(lower(PAIR, source), cost, dataflow(PAIR, source)) == (500, 532)
    # Both blocks, 2 samples each: 6 × 100, and 2 × 100 kept at once.
    assert peak_memory_bytes(lower(BOTH, source), cost, dataflow(BOTH, source)) == (800, 800)


def test_minibatches_in_flight_are_held_together() -> None:
    cost = measured()
    source = cost.profile("A100")
    case = replace(PAIR, num_minibatches=3)
    # Device 0 runs two forwards ahead, device 1 one at a time; the next minibatch's input arrives only when asked for.
    assert peak_memory_bytes(lower(case, source), cost, dataflow(case, source)) == (700, 532)


def test_a_step_that_does_not_fit_is_refused() -> None:
    cost = measured(activation_bytes={1: 50, 4: 50_000_000_000})
    source = cost.profile("A100")
    validate(lower(PAIR, source), PAIR, source)
    with pytest.raises(ScheduleError, match=r"device 0 would need 46\.6 GiB and has 37\.3 GiB; use more devices"):
        validate(lower(PAIR, source), PAIR, source, memory=cost)


def test_memory_that_was_not_measured_is_no_guess() -> None:
    cost = measured(activation_bytes={})
    source = cost.profile("A100")
    with pytest.raises(ProfileError, match="has no activation_bytes"):
        validate(lower(PAIR, source), PAIR, source, memory=cost)
