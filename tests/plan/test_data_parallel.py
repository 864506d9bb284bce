"""The data-parallel planner against brute force, and what it does with odd batches, unequal devices and big models."""

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec, DeviceCount, DeviceFigures, NodeGroup
from burstpool.errors import PlanError, ProfileError
from burstpool.model.graph import Layer, LayerGraph, Value
from burstpool.plan import data
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan, PlannedBlock
from burstpool.profiling.profile import LayerProfile, Profile
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import predict
from burstpool.schedule.validate import validate

FAST_LINK = Link(bytes_per_s=1e9, latency_s=1e-6)


def profile(
    device: str = "one",
    *,
    sizes: tuple[int, ...] = (100, 100, 100),
    sample_s: float = 1.0,
    start_s: float = 0.0,
    batches: tuple[int, ...] = (1, 64),
) -> Profile:
    layers = tuple(
        LayerProfile(
            name=f"l{place}",
            inputs=(f"l{place - 1}" if place else "x",),
            parameter_bytes=size,
            output_bytes_per_sample=10,
            forward_s={batch: start_s + sample_s * batch for batch in batches},
            backward_s={batch: 2 * (start_s + sample_s * batch) for batch in batches},
        )
        for place, size in enumerate(sizes)
    )
    return Profile(model="tiny", device=device, source="made up", layers=layers)


def cluster(*types: str, link: Link = FAST_LINK) -> ClusterSpec:
    devices = tuple(DeviceCount(type=name) for name in types)
    figures = tuple(
        DeviceFigures(name=name, memory_bytes=10**9, memory_bytes_per_s=1e12, flops_per_s={"fp32": 1.0})
        for name in dict.fromkeys(types)
    )
    return ClusterSpec(
        name="test", node_groups=(NodeGroup(name="all", devices=devices, link=link),), device_types=figures
    )


def counts(found: Plan) -> list[int]:
    """Samples of each device."""
    shares = {share.device: share.num_samples for share in found.blocks[0].shares}
    return [shares.get(device, 0) for device in range(found.num_devices)]


@pytest.mark.parametrize(("batch", "expected"), [(12, [4, 4, 4]), (17, [6, 6, 5]), (2, [1, 1, 0]), (1, [1, 0, 0])])
def test_equal_devices_get_even_shares(batch: int, expected: list[int]) -> None:
    found = data.plan(profile(), cluster("one", "one", "one"), batch=batch)
    assert counts(found) == expected
    flow = dataflow(found, profile())
    validate(lower(found, flow), found, flow)


def test_faster_devices_get_more_samples() -> None:
    profiles = [profile("fast", sample_s=1.0), profile("slow", sample_s=3.0)]
    assert counts(data.plan(profiles, cluster("fast", "slow"), batch=16)) == [12, 4]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 12),
    st.tuples(st.sampled_from([1.0, 1.5, 4.0]), st.sampled_from([0.0, 2.0, 30.0])),
    st.tuples(st.sampled_from([1.0, 2.0, 7.0]), st.sampled_from([0.0, 5.0])),
)
def test_unequal_shares_are_as_good_as_any(batch: int, fast: tuple[float, float], slow: tuple[float, float]) -> None:
    profiles = [
        profile("fast", sample_s=fast[0], start_s=fast[1]),
        profile("slow", sample_s=slow[0], start_s=slow[1]),
    ]
    kinds = ("fast", "slow", "slow")
    cost = CostModel(profiles, cluster(*kinds), extrapolate=True)

    def slowest_s(split: tuple[int, ...]) -> float:
        return max(cost.compute_times(kind, [n])[0] if n else 0.0 for kind, n in zip(kinds, split, strict=True))

    shares = {share.device: share.num_samples for share in data.fastest_shares(cost, batch)}
    found = tuple(shares.get(device, 0) for device in range(3))
    assert sum(found) == batch
    splits = (split for split in product(range(batch + 1), repeat=3) if sum(split) == batch)
    assert slowest_s(found) == pytest.approx(min(map(slowest_s, splits)))


def test_unequal_shares_keep_to_the_measured_batches() -> None:
    profiles = [profile("fast", batches=(2, 8)), profile("slow", sample_s=10.0, batches=(2, 8))]
    assert counts(data.plan(profiles, cluster("fast", "slow"), batch=10)) == [8, 2]
    with pytest.raises(PlanError, match="no split of 17 samples over 2 devices keeps to the measured batches"):
        data.plan(profiles, cluster("fast", "slow"), batch=17)
    with pytest.raises(PlanError, match="no split of 1 samples over 2 devices keeps to"):
        data.plan(profiles, cluster("fast", "slow"), batch=1)
    assert sum(counts(data.plan(profiles, cluster("fast", "slow"), batch=17, extrapolate=True))) == 17


def test_a_share_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ProfileError, match="no measurement for batch 65"):
        data.plan(profile(), cluster("one", "one"), batch=130)
    assert data.plan(profile(), cluster("one", "one"), batch=130, extrapolate=True).batch == 130


def step_time_s(cuts: list[int], measured: Profile, where: ClusterSpec) -> float:
    cost = CostModel(measured, where)
    names, edges = cost.layers, [0, *cuts, len(cost.layers)]
    shares = data.fastest_shares(cost, 4)
    blocks = tuple(
        PlannedBlock(name=names[a], layers=names[a:b], shares=shares)
        for a, b in zip(edges, edges[1:], strict=False)  # noqa: RUF007 -- reads like the formula
    )
    plan = Plan(model="tiny", strategy="test", num_devices=where.num_devices, batch=4, blocks=blocks)
    found = predict(plan, cost, dataflow(plan, measured)).step_time_s
    assert found is not None
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0, 10, 100, 1000]), min_size=1, max_size=6),
    st.sampled_from([Link(bytes_per_s=10.0, latency_s=1.0), Link(bytes_per_s=100.0, latency_s=20.0)]),
)
def test_cuts_are_within_a_hundredth_of_the_best_of_all(sizes: list[int], link: Link) -> None:
    measured, where = profile(sizes=tuple(sizes)), cluster("one", "one", link=link)
    found = data.plan(measured, where, batch=4)
    assert found.step_time_s is not None
    places = range(1, len(sizes))
    ways = [list(cuts) for number in range(len(sizes)) for cuts in combinations(places, number)]
    assert found.step_time_s <= 1.01 * min(step_time_s(cuts, measured, where) for cuts in ways) * (1 + 1e-9)


def test_one_device_needs_no_cut() -> None:
    found = data.plan(profile(), cluster("one"), batch=4)
    assert len(found.blocks) == 1
    assert found.step_time_s == pytest.approx(36, rel=1e-6)  # 3 layers × (4 + 8) s, and next to nothing for the update
    assert found.device_seconds == pytest.approx(36, rel=1e-6)


def test_slow_links_are_overlapped_with_backward() -> None:
    # 1000 bytes at 100 bytes/s a layer: 10 s and latency, hidden behind 8 s of backward a layer but for the last.
    measured, where = profile(sizes=(1000,) * 4), cluster("one", "one", link=Link(bytes_per_s=100.0, latency_s=0.1))
    found = data.plan(measured, where, batch=8)
    whole = data.plan(measured, where, batch=8, bucket_bytes=10**9)
    assert len(found.blocks) > 1
    assert len(whole.blocks) == 1
    assert found.step_time_s is not None
    assert whole.step_time_s is not None
    assert found.step_time_s < whole.step_time_s - 20


def test_buckets_fill_from_the_last_layer_like_ddp() -> None:
    assert data.bucket_cuts([10, 10, 30, 0, 20], 25) == [0, 2, 5]
    assert data.bucket_cuts([10, 10, 30, 0, 20], 10**6) == [0, 5]
    assert data.bucket_cuts([10, 10, 30, 0, 20], 1) == [0, 1, 2, 4, 5]
    assert data.bucket_cuts([0, 10], 1) == [0, 1, 2]


def test_shared_parameters_count_once_where_the_graph_tells() -> None:
    def layer(name: str, before: str, parameters: dict[str, int]) -> Layer:
        value = Value(name=name, shape=("batch",), dtype="float32", sample_dim=0, bytes_per_sample=10)
        return Layer(name=name, kind="linear", inputs=(before,), outputs=(value,), parameters=parameters)

    value = Value(name="x", shape=("batch",), dtype="float32", sample_dim=0, bytes_per_sample=10)
    graph = LayerGraph(
        model="tiny",
        training=True,
        inputs=(value,),
        layers=(layer("l0", "x", {"tied": 1000}), layer("l1", "l0", {"w": 10}), layer("l2", "l1", {"tied": 1000})),
        outputs=("l2",),
    )
    where = cluster("one", "one", link=Link(bytes_per_s=10.0, latency_s=1.0))
    measured = profile(sizes=(1000, 10, 1000))
    twice, once = (data.plan(measured, where, batch=4, graph=given) for given in (None, graph))
    assert twice.step_time_s is not None
    assert once.step_time_s is not None
    assert once.step_time_s < twice.step_time_s - 50  # 1000 bytes less at 10 bytes/s, of which some was hidden


def test_a_thousand_devices_are_planned_in_a_moment() -> None:
    where = ClusterSpec.uniform("A100", devices_per_node=8, num_nodes=125, link="nvlink3", network="infiniband-hdr")
    measured = profile("A100", sizes=(10**6,) * 100, sample_s=1e-3)
    found = data.plan(measured, where, batch=4096)
    assert found.num_devices == 1000
    assert len(found.blocks[0].shares) == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [({"batch": 0}, "batch=0 must be at least 1"), ({"batch": 1, "bucket_bytes": 0}, "bucket_bytes=0 must be")],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        data.plan(profile(), cluster("one"), **options)
