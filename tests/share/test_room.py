"""Who leaves a GPU's memory and who comes back: the rule alone."""

from hypothesis import given
from hypothesis import strategies as st

from burstpool.share.room import FLOOR, RESERVE, Move, Tenant, next_move, stays_away_s

TOTAL = 1000
LONG_S = 1e6

tenants = st.lists(
    st.builds(
        Tenant,
        held_bytes=st.integers(0, TOTAL),
        here=st.booleans(),
        over=st.booleans(),
        away_s=st.floats(0, 1e4),
        pause_s=st.floats(0, 2),
        evictions=st.integers(0, 20),
    ),
    max_size=6,
)


def here(held_bytes: int, *, over: bool = False) -> Tenant:
    return Tenant(held_bytes=held_bytes, here=True, over=over)


def away(held_bytes: int, away_s: float = LONG_S, *, pause_s: float = 0.0, evictions: int = 1) -> Tenant:
    return Tenant(held_bytes=held_bytes, here=False, away_s=away_s, pause_s=pause_s, evictions=evictions)


def move(free_bytes: int, *of: Tenant, slowdown: float = 1.1) -> Move | None:
    return next_move(free_bytes, TOTAL, of, slowdown=slowdown)


@given(free_bytes=st.integers(0, TOTAL), of=tenants)
def test_nobody_leaves_while_enough_is_free_and_nobody_comes_back_to_leave_again(
    free_bytes: int, of: list[Tenant]
) -> None:
    found = move(free_bytes, *of)
    if found is None:
        assert free_bytes >= FLOOR * TOTAL or not any(tenant.here for tenant in of)
        return
    mover = of[found.tenant]
    assert mover.here is found.leaves
    if found.leaves:
        assert free_bytes < FLOOR * TOTAL
    else:
        assert not mover.over
        after = free_bytes - mover.held_bytes
        assert after >= RESERVE * TOTAL
        assert move(after, *(here(tenant.held_bytes) for tenant in of)) is None


def test_the_largest_leaves_first_and_before_it_one_that_is_over() -> None:
    assert move(49, here(10), here(300), away(900), here(20)) == Move(tenant=1, leaves=True)
    assert move(49, here(10), here(300), here(5, over=True)) == Move(tenant=2, leaves=True)
    assert move(50, here(300)) is None
    assert move(0, away(300)) is None


def test_the_one_that_was_away_longest_comes_back_first_if_it_fits() -> None:
    assert move(400, away(100, 50), away(200, 90), away(350, LONG_S)) == Move(tenant=1, leaves=False)
    assert move(299, away(200)) is None
    assert move(300, away(200)) == Move(tenant=0, leaves=False)


def test_each_time_it_stays_away_longer_and_pauses_are_a_fifth_of_the_budget_at_most() -> None:
    often = [stays_away_s(away(1, evictions=count), slowdown=1.1) for count in (1, 2, 3, 30)]
    assert often == [1, 2, 4, 120]
    assert stays_away_s(away(1, pause_s=0.3), slowdown=1.1) == 0.3 / (0.2 * (1.1 - 1))
    assert move(900, away(1, away_s=14, pause_s=0.3)) is None
    assert move(900, away(1, away_s=16, pause_s=0.3)) == Move(tenant=0, leaves=False)
