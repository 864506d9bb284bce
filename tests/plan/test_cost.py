"""The cost model: its formulas by hand, and that the fast ways give what the slow ones do."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec, DeviceCount, DeviceFigures, NodeGroup
from burstpool.errors import PlanError, ProfileError
from burstpool.plan.cost import CostModel, by_device_type
from burstpool.profiling.profile import LayerProfile, Profile


def layer(name: str, before: str, scale: float = 1.0) -> LayerProfile:
    return LayerProfile(
        name=name,
        inputs=(before,),
        parameter_bytes=100,
        output_bytes_per_sample=10,
        forward_s={1: scale, 4: 4 * scale, 8: 8 * scale},
        backward_s={1: 2 * scale, 4: 8 * scale, 8: 16 * scale},
        activation_bytes={1: 5, 4: 20, 8: 40},
    )


def profile(device: str = "unit", scale: float = 1.0, **changes: Any) -> Profile:
    layers = (layer("a", "x", scale), layer("b", "a", 10 * scale), layer("c", "b", 100 * scale))
    return replace(Profile(model="tiny", device=device, source="made up", layers=layers), **changes)


def cluster(num_nodes: int = 1, devices_per_node: int = 4, **changes: Any) -> ClusterSpec:
    unit = DeviceFigures(name="unit", memory_bytes=1000, memory_bytes_per_s=500.0, flops_per_s={"fp32": 1.0})
    group = NodeGroup(
        name="all",
        count=num_nodes,
        devices=(DeviceCount(type="unit", count=devices_per_node),),
        link=Link(bytes_per_s=10.0, latency_s=1.0),
    )
    fields: dict[str, Any] = {
        "name": "test",
        "node_groups": (group,),
        "network": Link(bytes_per_s=5.0, latency_s=2.0),
        "device_types": (unit,),
    }
    return ClusterSpec(**(fields | changes))


COST = CostModel(profile(), cluster())


def test_a_block_takes_the_sum_of_its_layers() -> None:
    assert COST.forward_s(("a", "b"), 0, 4) == pytest.approx(4 + 40)
    assert COST.backward_s(range(1, 3), 0, 2) == pytest.approx(40 + 400)
    assert COST.forward_s(range(0), 0, 2) == 0


@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 8))
def test_prefix_sums_agree_with_the_profile(start: int, stop: int, samples: int) -> None:
    measured = profile()
    names = [some.name for some in measured.layers[start:stop]]
    assert COST.forward_s(range(start, max(start, stop)), 0, samples) == pytest.approx(
        sum(measured.forward_s(name, samples) for name in names)
    )


def test_all_at_once_agrees_with_one_by_one() -> None:
    cost = CostModel(
        profile(loss_forward_s={1: 0.5, 4: 1.0, 8: 2.0}, loss_backward_s={1: 0.1, 4: 0.2, 8: 0.3}), cluster()
    )
    samples = [1, 2, 3, 8]
    forward, backward = cost.layer_times("unit", samples)
    whole = cost.compute_times("unit", samples)
    for place, number in enumerate(samples):
        assert cost.forward_s(range(3), 0, number) == pytest.approx(forward[:, place].sum())
        assert cost.backward_s(range(3), 0, number) == pytest.approx(backward[:, place].sum())
        loss_s = cost.loss_forward_s(0, number) + cost.loss_backward_s(0, number)
        assert whole[place] == pytest.approx(forward[:, place].sum() + backward[:, place].sum() + loss_s)


def test_a_loss_that_was_not_measured_costs_nothing() -> None:
    assert COST.loss_forward_s(0, 4) == COST.loss_backward_s(0, 4) == 0


def test_a_message_takes_latency_and_bytes() -> None:
    cost = CostModel(profile(), cluster(2, 2))
    assert cost.transfer_s(20, 0, 1) == 1 + 2  # inside a node
    assert cost.transfer_s(20, 1, 2) == 2 + 4  # between nodes
    assert cost.transfer_s(20, 1, 1) == 0


def test_a_reduction_inside_a_node_is_a_ring_or_a_tree() -> None:
    # 4 devices, 1000 bytes. Ring: 6 messages of 250 bytes, 6 × (1 + 25) = 156. Tree: 4 × 1 + 2 × 100 = 204.
    assert COST.reduce_s(1000, (0, 1, 2, 3)) == pytest.approx(156)
    # 1 byte. Ring: 6 × (1 + 0.025) = 6.15. Tree: up and down two levels, 4 × 1 + 2 × 0.1 = 4.2.
    assert COST.reduce_s(1, (0, 1, 2, 3)) == pytest.approx(4.2)
    assert COST.reduce_s(1000, (2,)) == 0


def test_a_reduction_between_nodes_has_three_parts() -> None:
    # 2 nodes of 2, 100 bytes: 1 + 5 inside, 2 × (2 + 10) between, 1 + 5 inside.
    assert CostModel(profile(), cluster(2, 2)).reduce_s(100, (0, 1, 2, 3)) == pytest.approx(36)
    # One device a node: only the middle part.
    assert CostModel(profile(), cluster(2, 2)).reduce_s(100, (0, 2)) == pytest.approx(24)
    # Two and one: the node of two decides inside.
    assert CostModel(profile(), cluster(2, 2)).reduce_s(100, (0, 1, 3)) == pytest.approx(36)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=5))
def test_many_reductions_at_once_agree_with_one_by_one(sizes: list[int]) -> None:
    collective = CostModel(profile(), cluster(2, 2)).collective((0, 1, 2, 3))
    assert collective.reduces_s(np.array(sizes, dtype=np.float64)) == pytest.approx(
        [collective.reduce_s(size) for size in sizes]
    )


def test_an_update_is_bound_by_memory() -> None:
    # Momentum: reads parameter, gradient, state; writes parameter, state: 5 × 100 bytes at 500 bytes/s.
    assert COST.step_s(100, 0) == pytest.approx(1)
    assert CostModel(profile(), cluster(), optimizer_slots=0).step_s(100, 0) == pytest.approx(3 / 5)
    assert CostModel(profile(), cluster(), optimizer_slots=2, step_latency_s=4.0).step_s(100, 0) == pytest.approx(5.4)
    assert COST.step_s(0, 0) == 0


def test_memory_can_be_asked_for() -> None:
    assert COST.activation_bytes(("b", "c"), 0, 4) == 40
    assert COST.memory_bytes(3) == 1000


def test_batches_beyond_the_measured_ones_are_refused_unless_asked_for() -> None:
    with pytest.raises(ProfileError, match="no measurement for batch 16"):
        COST.forward_s(range(3), 0, 16)
    assert CostModel(profile(), cluster(), extrapolate=True).forward_s(range(1), 0, 16) == pytest.approx(16)


def test_profiles_come_alone_in_a_list_or_by_type() -> None:
    one, other = profile(), profile("fast")
    assert by_device_type(one) == {"unit": one}
    assert by_device_type([one, other]) == by_device_type({"unit": one, "fast": other})
    with pytest.raises(ProfileError, match="two profiles are of device type 'unit'"):
        by_device_type([one, one])
    with pytest.raises(ProfileError, match="no profile was given"):
        by_device_type([])


def test_every_device_type_needs_a_profile_of_the_same_layers() -> None:
    with pytest.raises(ProfileError, match="devices of type 'unit', but profiles are of fast; measure one there, or"):
        CostModel(profile("fast"), cluster())
    other = Profile(model="tiny", device="fast", source="made up", layers=(layer("z", "x"),))
    with pytest.raises(ProfileError, match="profiles of unit and fast have different layers"):
        CostModel([profile(), other], cluster())


def test_layers_and_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(PlanError, match="no layer 'z'"):
        COST.forward_s(("z",), 0, 1)
    with pytest.raises(PlanError, match="'a' to 'c' are not consecutive"):
        COST.forward_s(("a", "c"), 0, 1)
    with pytest.raises(PlanError, match="there is no device 9; the cluster has 4"):
        COST.forward_s(("a",), 9, 1)
