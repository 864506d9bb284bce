"""The simulator against cases worked out by hand, and its promises: exact classes of devices, steady state.

How fast it is: test_simulate_speed.py.

Unless a case says otherwise: a layer takes 1 s forward and 2 s backward a sample, has 100 bytes of parameters and hands
on 10 bytes a sample. Inside a node a message takes 1 s + bytes / 10, between nodes 2 s + bytes / 5. An update moves
5 × 100 bytes at 500 bytes/s: 1 s. A reduction of 100 bytes between two devices of a node is a ring of two messages of
50 bytes: 2 × (1 + 5) = 12 s.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from schedule_cases import block, chain, cluster, graph, layer, on, plan, planned, profile, run, units, value

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import ScheduleError
from burstpool.model.graph import LayerGraph
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan, Share
from burstpool.report.timeline import Timeline
from burstpool.schedule.actions import Action, Kind, Schedule
from burstpool.schedule.event_loop import EventLoop
from burstpool.schedule.lower import lower
from burstpool.schedule.program import DeviceClass, compile_program
from burstpool.schedule.simulate import predict, simulate


def spans(timeline: Timeline, device: int, lane: str = "compute", step: int = 0) -> list[tuple[str, float, float]]:
    """`("forward a", 0, 2)` in order of start."""
    return [
        (f"{e.kind} {e.block}", pytest.approx(e.start_s), pytest.approx(e.stop_s))
        for e in timeline.events
        if (e.device, e.lane, e.step) == (device, lane, step)
    ]


# --- Worked out by hand ------------------------------------------------------------------------------------------


def test_one_device_adds_up() -> None:
    # 2 samples: forward 2, backward 4, update 1.
    timeline = run(plan(block("a", on(2, 0))))
    assert spans(timeline, 0) == [("forward a", 0, 2), ("backward a", 2, 6), ("step a", 6, 7)]
    assert timeline.step_time_s == pytest.approx(7)


def test_data_parallel_waits_for_its_reduction() -> None:
    # 2 samples each: forward 2, backward 4, reduction 12 from 6 to 18, update 1.
    timeline = run(plan(block("a", on(4, 0, 1))))
    for device in (0, 1):
        assert spans(timeline, device) == [("forward a", 0, 2), ("backward a", 2, 6), ("step a", 18, 19)]
        assert spans(timeline, device, "communication") == [("reduce a", 6, 18)]
    assert timeline.step_time_s == pytest.approx(19)


def on_cores(**changes: Any) -> ClusterSpec:
    """Four devices whose own compute moves the bytes."""
    link = Link(bytes_per_s=10.0, latency_s=1.0, shares_compute=True, **changes)
    return replace(cluster(), node_groups=(replace(cluster().node_groups[0], link=link),))


def test_nothing_hides_behind_compute_where_links_share_it() -> None:
    # 2 samples each: two blocks forward 4, backward 8; then the reductions of b and of a, each with its update.
    case = plan(block("a", on(4, 0, 1)), block("b", on(4, 0, 1)))
    timeline = run(case, where=on_cores())
    assert spans(timeline, 0, "communication") == [("reduce b", 12, 24), ("reduce a", 25, 37)]
    assert timeline.step_time_s == pytest.approx(38)


def test_measured_reductions_count_instead_of_the_links_rate() -> None:
    # 100 bytes lie between 0 bytes, 1 s, and 200 bytes, 5 s: 3 s.
    timeline = run(plan(block("a", on(4, 0, 1))), where=on_cores(reduce_s={2: {0: 1.0, 200: 5.0}}))
    assert spans(timeline, 0, "communication") == [("reduce a", 6, 9)]
    assert timeline.step_time_s == pytest.approx(10)


def test_a_send_keeps_its_device_where_links_share_compute() -> None:
    # 2 samples of 10 bytes: 2 s on the link and of the sender's, 1 s later they are there.
    timeline = run(plan(block("a", on(2, 0)), block("b", on(2, 1))), where=on_cores())
    assert spans(timeline, 1)[0] == ("forward b", 5, 7)
    # Forward and backward of b end at 11, its gradients arrive at 14; nothing held device 0 meanwhile.
    assert spans(timeline, 0) == [("forward a", 0, 2), ("backward a", 14, 18), ("step a", 18, 19)]
    assert spans(timeline, 1)[-1] == ("step b", 13, 14)


def test_starting_to_send_keeps_the_sender_and_not_the_message() -> None:
    # Half a second more than the 2 s of its bytes before device 0 computes on; device 1 has its samples at 7 as before.
    case = plan(block("a", on(4, 0)), block("b", on(4, 0, 1)))
    starts = {}
    for send_s in (0.0, 0.5):
        timeline = run(case, where=on_cores(send_s=send_s))
        starts[send_s] = [spans(timeline, device)[place][1].expected for device, place in ((0, 1), (1, 0))]
    assert starts[0.0] == [pytest.approx(6), pytest.approx(7)]
    assert starts[0.5] == [pytest.approx(6.5), pytest.approx(7)]


def test_the_host_takes_its_time_once_a_step_and_in_every_block() -> None:
    # 2 samples: 1 s a step first, then half of 3 s with each block's forward and half with its backward.
    where = cluster()
    figures = tuple(replace(each, host_step_s=1.0, host_block_s=3.0) for each in where.device_types)
    timeline = run(plan(block("a", on(2, 0)), block("b", on(2, 0))), where=replace(where, device_types=figures))
    assert spans(timeline, 0)[:4] == [
        ("forward a", 1, 4.5),
        ("forward b", 4.5, 8),
        ("backward b", 8, 13.5),
        ("backward a", 13.5, 19),
    ]
    assert timeline.step_time_s == pytest.approx(21)


def test_loading_comes_first_and_the_measured_optimizer_steps() -> None:
    # 2 samples are loaded in 2 s; the optimizer changes 50 bytes a second: 2 s for 100.
    measured = replace(units("a"), load_s={1: 1.0, 100: 100.0}, update_bytes_per_s=50.0)
    timeline = run(plan(block("a", on(2, 0))), profiles=measured)
    assert spans(timeline, 0) == [("forward a", 2, 4), ("backward a", 4, 8), ("step a", 8, 10)]
    assert timeline.step_time_s == pytest.approx(10)


def test_reductions_overlap_backward_and_follow_each_other() -> None:
    # Forwards to 4, b's backward to 8; its reduction 8 to 20 beside a's backward 8 to 12; a's must wait: 20 to 32.
    # The update of b comes as soon as it can, at 20; that of a at 32.
    timeline = run(plan(block("a", on(4, 0, 1)), block("b", on(4, 0, 1))))
    assert spans(timeline, 0)[2:4] == [("backward b", 4, 8), ("backward a", 8, 12)]
    assert spans(timeline, 0)[4:] == [("step b", 20, 21), ("step a", 32, 33)]
    assert spans(timeline, 0, "communication") == [("reduce b", 8, 20), ("reduce a", 20, 32)]
    assert timeline.step_time_s == pytest.approx(33)
    assert timeline.gaps()[0] == ((pytest.approx(12), pytest.approx(20)), (pytest.approx(21), pytest.approx(32)))
    assert timeline.utilisation()[0] == pytest.approx(14 / 33)


def test_a_reduction_starts_when_the_last_member_does() -> None:
    # 3 samples: 3 + 6 = 9. One sample: 1 + 2 = 3, then it waits. Reduction 9 to 21, update to 22.
    shares = (Share(device=0, start=0, stop=3), Share(device=1, start=3, stop=4))
    timeline = run(plan(block("a", shares)))
    assert spans(timeline, 1) == [("forward a", 0, 1), ("backward a", 1, 3), ("step a", 21, 22)]
    assert spans(timeline, 0, "communication") == [("reduce a", 9, 21)]


def test_a_message_takes_latency_and_bytes() -> None:
    # a's forward to 1; 10 bytes: 1 s on the link, 1 s latency, there at 3; b's forward to 4, backward to 6; the
    # gradient is back at 8; a's backward to 10, update to 11. Device 1 updates at 6, then has nothing to do.
    timeline = run(plan(block("a", on(1, 0)), block("b", on(1, 1))))
    assert spans(timeline, 0) == [("forward a", 0, 1), ("backward a", 8, 10), ("step a", 10, 11)]
    assert spans(timeline, 1) == [("forward b", 3, 4), ("backward b", 4, 6), ("step b", 6, 7)]
    assert spans(timeline, 1, "communication") == [("receive a", 1, 3), ("send a", 6, 8)]
    assert timeline.step_time_s == pytest.approx(11)


def test_messages_out_of_one_device_queue() -> None:
    # a's forward to 4. 20 bytes to device 1: link 4 to 6, there at 7; to device 2: link 6 to 8, there at 9.
    # Device 1: forward 7 to 9, backward to 13; its gradient leaves 13 to 15. Device 2: forward 9 to 11, backward to 15;
    # its gradient leaves 15 to 17 and is there at 18. a's backward 18 to 26, update to 27.
    # Both have started b's reduction at 15, but device 2's gradient is on its link until 17: 17 to 29, update to 30.
    timeline = run(plan(block("a", on(4, 0)), block("b", on(4, 1, 2))))
    assert spans(timeline, 0) == [("forward a", 0, 4), ("backward a", 18, 26), ("step a", 26, 27)]
    assert spans(timeline, 1) == [("forward b", 7, 9), ("backward b", 9, 13), ("step b", 29, 30)]
    assert spans(timeline, 2) == [("forward b", 9, 11), ("backward b", 11, 15), ("step b", 29, 30)]
    assert ("reduce b", 17, 29) in spans(timeline, 1, "communication")


def test_messages_into_one_device_queue() -> None:
    # Forwards of a to 2. Both messages of 20 bytes leave at 2 for device 2: 2 to 4, there at 5; 4 to 6, there at 7.
    # b: forward 7 to 11, backward to 19. Gradients leave device 2 at 19 to 21, there at 22, and 21 to 23, there at 24.
    # a's backwards: 22 to 26, 24 to 28. Reduction 28 to 40, update to 41.
    timeline = run(plan(block("a", on(4, 0, 1)), block("b", on(4, 2))))
    assert spans(timeline, 2) == [("forward b", 7, 11), ("backward b", 11, 19), ("step b", 19, 20)]
    assert spans(timeline, 0)[1:] == [("backward a", 22, 26), ("step a", 40, 41)]
    assert spans(timeline, 1)[1:] == [("backward a", 24, 28), ("step a", 40, 41)]
    assert timeline.step_time_s == pytest.approx(41)


def test_devices_of_a_node_share_its_network() -> None:
    # a's forwards to 1. 10 bytes between nodes: 2 s on the network, 2 s latency. Both messages leave node 0:
    # 1 to 3, there at 5; 3 to 5, there at 7.
    timeline = run(plan(block("a", on(2, 0, 1)), block("b", on(2, 2, 3))), where=cluster(2, 2))
    assert spans(timeline, 2)[0] == ("forward b", 5, 6)
    assert spans(timeline, 3)[0] == ("forward b", 7, 8)


def test_a_reduction_over_nodes_is_hierarchical() -> None:
    # 100 bytes. Inside: each device sends half, 1 + 5 = 6, before and after. Between: two messages of 50 bytes,
    # 2 × (2 + 10) = 24. Together 36, from 3 (forward 1, backward 2).
    timeline = run(plan(block("a", on(4, 0, 1, 2, 3))), where=cluster(2, 2))
    assert spans(timeline, 3, "communication") == [("reduce a", 3, 39)]
    assert timeline.step_time_s == pytest.approx(40)


def test_a_message_goes_before_a_reduction_and_pauses_it() -> None:
    # a's forward to 4; samples 2:4, 20 bytes, are with device 1 at 4 + 2 + 1 = 7.
    # Device 0: forwards of b and c to 8, backward of c to 12, of b to 16. Device 1: forwards to 11, backward of c to
    # 15, of b to 19. c's reduction would be 15 to 27. The gradient of a leaves device 1 at 19 to 21, there at 22, and
    # pauses the reduction for 2 s: it ends at 29. b's follows from 29 to 41.
    # Device 0: a's backward 22 to 30; updates of c at 30, of b at 41, of a at 42.
    timeline = run(plan(block("a", on(4, 0)), block("b", on(4, 0, 1)), block("c", on(4, 0, 1))))
    assert spans(timeline, 1, "communication") == [
        ("receive a", 4, 7),
        ("reduce c", 15, 29),
        ("send a", 19, 22),
        ("reduce b", 29, 41),
    ]
    assert spans(timeline, 0)[-4:-2] == [("backward a", 22, 30), ("step c", 30, 31)]
    assert spans(timeline, 0)[-2:] == [("step b", 41, 42), ("step a", 42, 43)]
    assert timeline.step_time_s == pytest.approx(43)


def test_two_groups_share_the_network_one_after_the_other() -> None:
    # Blocks a and b are apart (both take the input), a on devices 0 and 2, b on 1 and 3: one device a node each. Both
    # reductions are ready at 3 and need both nodes' networks. The LayerGraph's parameters have 4 bytes:
    # 2 × (2 + 2 / 5) = 4.8 s each, one after the other.
    model = graph(layer("a", "input"), layer("b", "input", outputs=(value("b", differentiable=False),)), outputs=("b",))
    case = plan(block("a", on(2, 0, 2)), block("b", on(2, 1, 3)))
    timeline = run(case, where=cluster(2, 2), source=model, profiles=units("ab"))
    reduced = sorted((e.start_s, e.stop_s) for e in timeline.events if e.kind == "reduce")
    assert reduced == [(pytest.approx(3), pytest.approx(7.8))] * 2 + [(pytest.approx(7.8), pytest.approx(12.6))] * 2


def test_a_pipeline_of_two_minibatches() -> None:
    # Device 0: forwards 0 to 1 and 1 to 2; messages there at 3 and 4. Device 1: forward 3 to 4, backward 4 to 6,
    # forward 6 to 7, backward 7 to 9, update to 10; gradients there at 8 and 11. Device 0: backwards 8 to 10 and 11 to
    # 13, update to 14.
    timeline = run(plan(block("a", on(1, 0)), block("b", on(1, 1)), num_minibatches=2))
    assert spans(timeline, 0)[2:] == [("backward a", 8, 10), ("backward a", 11, 13), ("step a", 13, 14)]
    assert spans(timeline, 1)[2:] == [("forward b", 6, 7), ("backward b", 7, 9), ("step b", 9, 10)]
    assert timeline.step_time_s == pytest.approx(14)


def test_accumulation_reduces_once() -> None:
    # Two minibatches of 1 sample: 2 × (1 + 2) = 6, reduction to 18, update to 19.
    timeline = run(plan(block("a", on(2, 0, 1)), num_minibatches=2))
    assert [e.start_s for e in timeline.events if e.kind == "reduce"] == [pytest.approx(6)] * 2
    assert timeline.step_time_s == pytest.approx(19)


def test_the_loss_belongs_to_the_last_block() -> None:
    # Loss: 0.5 forward, 0.25 backward. Forwards 1 + (1 + 0.5), backwards (2 + 0.25) + 2, updates 2.
    measured = replace(units("ab"), loss_forward_s={1: 0.5, 100: 0.5}, loss_backward_s={1: 0.25, 100: 0.25})
    timeline = run(plan(block("a", on(1, 0)), block("b", on(1, 0))), profiles=measured)
    assert spans(timeline, 0)[1:3] == [("forward b", 1, 2.5), ("backward b", 2.5, 4.75)]
    assert timeline.step_time_s == pytest.approx(8.75)


def test_unequal_devices_take_their_own_times() -> None:
    # The slow device takes twice as long: 2 + 4 = 6 against 3; reduction 6 to 18, update at 18 on both.
    fast = units("a", forward_s={1: 1.0}, backward_s={1: 2.0})
    slow = replace(units("a", forward_s={1: 2.0}, backward_s={1: 4.0}), device="slow")
    timeline = run(plan(block("a", on(2, 0, 2))), where=cluster(types=("unit", "slow")), profiles=[fast, slow])
    assert spans(timeline, 0)[:2] == [("forward a", 0, 1), ("backward a", 1, 3)]
    assert spans(timeline, 2)[:2] == [("forward a", 0, 2), ("backward a", 2, 6)]
    assert timeline.step_time_s == pytest.approx(19)


# --- Steady state ------------------------------------------------------------------------------------------------


def test_steps_overlap_where_nothing_holds_them_back() -> None:
    # No gradient comes back to device 0: with 4 bytes of parameters it needs 1 + 2 + 0.04 s a step and runs on. Device
    # 1 gets its first input at 3 and ends its first step at 6.04; then every step takes 3.04 s on both.
    index = value("a", differentiable=False, bytes_per_sample=10)
    model = graph(layer("a", "input", outputs=(index,)), layer("b", "a"))
    timeline = run(plan(block("a", on(1, 0)), block("b", on(1, 1))), source=model, steps=2)
    assert timeline.step_time_s == pytest.approx(3.04)
    assert spans(timeline, 1)[-1] == ("step b", 6, 6.04)
    assert spans(timeline, 1, step=1)[0] == ("forward b", 6.04, 7.04)


def test_more_steps_are_more_of_the_same() -> None:
    timeline = run(plan(block("a", on(4, 0, 1)), block("b", on(4, 0, 1))), steps=3)
    assert timeline.num_steps == 3
    assert timeline.step_time_s == pytest.approx(33)
    first, third = spans(timeline, 0), spans(timeline, 0, step=2)
    assert [(a, pytest.approx(b.expected + 66), pytest.approx(c.expected + 66)) for a, b, c in first] == third
    assert timeline.utilisation()[0] == pytest.approx(14 / 33)


def test_devices_that_never_meet_keep_their_own_rhythm() -> None:
    # 1 s of updates on device 0, 2 s on device 1, step after step: the slower one decides.
    case = plan(block("a", on(1, 0)), block("b", on(1, 1)))
    a, b = (Action(kind=Kind.STEP, block=name) for name in "ab")
    timeline = simulate(
        Schedule(devices=((a,), (a, b))), CostModel(units("ab"), cluster()), dataflow(case, units("ab"))
    )
    assert timeline.step_time_s == pytest.approx(2)


def test_an_idle_device_is_one_gap() -> None:
    timeline = run(plan(block("a", on(2, 0)), num_devices=3))
    assert timeline.gaps()[2] == ((0.0, pytest.approx(7)),)
    assert timeline.utilisation() == (pytest.approx(1), 0, 0)
    assert "device 0     100.0% busy, 0 gaps" in str(timeline)


def test_predict_agrees_with_the_timeline() -> None:
    case = plan(block("a", on(4, 0)), block("b", on(4, 0, 1)), block("c", on(4, 0, 1)))
    cost = CostModel(units("abc"), cluster())
    flow = dataflow(case, units("abc"))
    found, timeline = predict(case, cost, flow), simulate(lower(case, flow), cost, flow)
    assert found.step_time_s == timeline.step_time_s
    assert found.device_seconds == pytest.approx(sum(timeline.busy_s(device) for device in range(4)))


# --- Promises ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(planned())
def test_every_plan_runs_to_its_end_in_order(case: tuple[Plan, LayerGraph]) -> None:
    found, model = case
    layers = tuple((some.name, ("input",)) for some in model.layers)
    cost = CostModel(profile(*layers, device="unit"), cluster(2, 2))
    flow = dataflow(found, model)
    schedule = lower(found, flow)
    timeline = simulate(schedule, cost, flow, steps=2)
    assert len(timeline.events) == 2 * sum(map(len, schedule.devices))
    assert [e.start_s for e in timeline.events] == sorted(e.start_s for e in timeline.events)
    for device in range(found.num_devices):
        busy = [(e.start_s, e.stop_s) for e in timeline.events if e.device == device and e.lane == "compute"]
        assert all(stop <= start + 1e-9 for (_, stop), (start, _) in pairwise(busy))
    assert max(timeline.all_busy_s()) / 2 <= timeline.step_time_s * (1 + 1e-9)
    assert Timeline.from_json(timeline.to_json()) == timeline


@settings(max_examples=100, deadline=None)
@given(planned())
def test_classes_of_devices_change_no_time(case: tuple[Plan, LayerGraph]) -> None:
    found, model = case
    cost = CostModel(profile(*((x.name, ("input",)) for x in model.layers), device="unit"), cluster(2, 2))
    flow = dataflow(found, model)
    program = compile_program(lower(found, flow), cost, flow)
    apart = replace(program, classes=tuple(DeviceClass((d,), c.operations) for c in program.classes for d in c.members))
    together, each = EventLoop(program, 3).run(), EventLoop(apart, 3).run()
    for one, other in zip(together.finishes, each.finishes, strict=True):
        assert [t for t, c in zip(one, program.classes, strict=True) for _ in c.members] == other


def test_a_thousand_data_parallel_devices_collapse_into_two_classes() -> None:
    shares = on(1500, *range(1000))
    case = plan(block("a", shares), block("b", shares))
    cost = CostModel(units("ab"), cluster(125, 8))
    program = compile_program(lower(case, units("ab")), cost, dataflow(case, units("ab")))
    assert sorted(len(some.members) for some in program.classes) == [500, 500]


def test_what_cannot_be_simulated_is_refused() -> None:
    case = plan(block("a", on(2, 0)), block("b", on(2, 1)))
    cost, flow = CostModel(units("ab"), cluster()), dataflow(case, units("ab"))
    schedule = lower(case, flow)
    with pytest.raises(ScheduleError, match="steps=0 must be at least 1"):
        simulate(schedule, cost, flow, steps=0)
    deaf = Schedule(devices=(schedule.devices[0], ()))
    with pytest.raises(ScheduleError, match="device 0 waits forever at action 2, receive of block 'a', minibatch 0"):
        simulate(deaf, cost, flow)
    with pytest.raises(ScheduleError, match="device 0 has to push 'a'; waves are not simulated yet"):
        simulate(Schedule(devices=((Action(kind=Kind.PUSH, block="a"),),)), cost, flow)
    with pytest.raises(ScheduleError, match="for 5 devices, the cluster has 4"):
        simulate(Schedule(devices=((),) * 5), cost, flow)
    with pytest.raises(ScheduleError, match="block 'z', which the plan does not have"):
        simulate(Schedule(devices=((Action(kind=Kind.STEP, block="z"),),)), cost, flow)


def test_nothing_to_do_takes_no_time() -> None:
    cost = CostModel(units("a"), cluster())
    flow = dataflow(plan(block("a", on(1, 0))), chain(1))
    assert simulate(Schedule(devices=((), ())), cost, flow).step_time_s == 0
