"""Pieces of a step are about as long as asked for, and can run one after the other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstpool.model.graph_nodes import sorted_nodes
from burstpool.share.gpu.pieces import cut_after, looked_into, parts_of, piece_length_s


def lengths(times: list[float], ends: list[int]) -> list[float]:
    starts = [0, *(end + 1 for end in ends)]
    stops = [*(end + 1 for end in ends), len(times)]
    return [sum(times[a:b]) for a, b in zip(starts, stops, strict=True)]


@pytest.mark.parametrize(
    ("step_s", "gaps_s", "wanted_s"),
    [
        (4e-3, (), 2e-4),
        (1e-1, (), 3e-4),
        (1e-4, (), 1e-4),
        (math.nan, (), 3e-4),
        (1e-1, (1e-2, 1e-4, 1e-4), 3e-4),  # short gaps that are little of the time do not count
        (1e-1, (2e-4,) * 9 + (1e-3,), 1e-4),
        (1e-1, (8e-4,) * 9 + (1e-2,), 3e-4),
        (1e-1, (8e-4,) * 9 + (1e-3,), 2e-4),
    ],
)
def test_pieces_are_short_beside_steps_and_gaps(step_s: float, gaps_s: tuple[float, ...], wanted_s: float) -> None:
    assert piece_length_s(step_s, gaps_s) == pytest.approx(wanted_s)


def test_pieces_end_where_they_are_nearest_to_the_target() -> None:
    assert cut_after([1.0, 1.0, 1.0, 1.0, 1.0], 2.0) == [1, 3]
    assert cut_after([5.0, 0.1, 0.1, 5.0], 1.0) == [0, 2]
    assert cut_after([0.1, 0.1], 1.0) == []


@given(st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=60), st.floats(1e-5, 1e-2))
def test_no_piece_of_several_is_longer_than_it_must_be(times: list[float], target: float) -> None:
    ends = cut_after(times, target)
    assert ends == sorted(set(ends))
    for length in lengths(times, ends):
        assert length <= target + max(times)
    # A cut is only made where going on would lead further away from the target.
    assert len(ends) <= sum(times) / (target / 2) + sum(time > target / 2 for time in times) + 1


@given(st.sets(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(lambda edge: edge[0] < edge[1])))
def test_nodes_come_after_what_they_need(edges: set[tuple[int, int]]) -> None:
    shuffled = sorted(range(21), key=lambda node: node * 8 % 21)
    order = sorted_nodes(shuffled, sorted(edges))
    assert sorted(order) == list(range(21))
    assert all(order.index(before) < order.index(after) for before, after in edges)


@given(st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=60), st.floats(0.0, 1e-4))
def test_what_launching_adds_to_each_stretch_is_taken_off(times: list[float], launch: float) -> None:
    found = parts_of(sum(times), [time + launch for time in times])
    assert found == pytest.approx(times, rel=1e-6, abs=1e-9)


def test_stretches_that_are_all_launching_are_told_apart_as_they_were() -> None:
    assert parts_of(0.0, [2.0, 2.0]) == [2.0, 2.0]
    assert parts_of(3.0, [1.0, 1.0]) == [1.5, 1.5]
    assert parts_of(1.0, [0.1, 0.1, 3.0]) == pytest.approx([0.0, 0.0, 1.0])


def test_long_stretches_are_looked_into_node_by_node() -> None:
    assert looked_into([0, 4, 8, 10], [0.1, 2.0, 0.5], 1.0) == [0, 4, 5, 6, 7, 8, 10]
    assert looked_into([0, 4, 8, 10], [0.1, 0.2, 0.5], 1.0) == [0, 4, 8, 10]
    assert looked_into([0, 1, 2], [9.0, 9.0], 1.0) == [0, 1, 2]
