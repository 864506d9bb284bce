"""The part of a GPU that a background gets: the choice, by what was tried."""

import pytest

from burstpool.share.width import Together, best_width


def tried(slowdown: float, kept: float) -> Together:
    return Together(step_s=(slowdown * 2e-3, slowdown * 2e-3), alone_s=2e-3, kept=kept)


def test_a_background_that_is_held_back_keeps_what_its_cost_leaves() -> None:
    free = tried(1.5, 0.6)
    assert free.slowdown == pytest.approx(1.5)
    cost = 0.5 / (1.5 * 0.6)  # foreground seconds lost for each second of the background's work
    kept = free.kept_within(1.10)
    assert kept * 1.10 * cost == pytest.approx(0.10)
    assert free.kept_within(1.5) == pytest.approx(0.6)


def test_a_background_within_the_budget_keeps_all_it_can_and_no_more() -> None:
    assert tried(1.05, 0.3).kept_within(1.10) == 0.3
    assert tried(0.99, 0.3).kept_within(1.10) == 0.3
    assert tried(1.3, 0.0).kept_within(1.10) == 0.0
    assert tried(1.1001, 0.3).kept_within(1.10) <= 0.3


def test_a_part_is_taken_where_it_keeps_clearly_more() -> None:
    assert best_width({1.0: 0.15, 0.5: 0.19, 0.3: 0.21}) == 0.3
    assert best_width({1.0: 0.20, 0.5: 0.205, 0.3: 0.1}) == 1.0
    assert best_width({1.0: 0.20}) == 1.0
    assert best_width({1.0: 0.0, 0.5: 0.01}) == 0.5


def test_a_larger_budget_may_want_a_larger_part() -> None:
    found = {1.0: tried(1.38, 0.48), 0.5: tried(1.20, 0.34), 0.3: tried(1.11, 0.23)}
    parts = [best_width({k: v.kept_within(budget) for k, v in found.items()}) for budget in (1.05, 1.10, 1.20, 1.5)]
    assert parts == [0.3, 0.3, 0.5, 1.0]
