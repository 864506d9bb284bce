"""What pieces cost is found out, and evens out the foreground's steps."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstpool.share.budget import Budget, Controller, Credit, StepTaken
from burstpool.share.prices import Prices

LENGTH_S, ALONE_S, COST = 3e-4, 4e-3, 0.45


def test_what_pieces_cost_is_found_out() -> None:
    draw, true, prices = random.Random(0), [0.4, 1.0, 1.6, 0.7, 1.3], Prices()
    for _ in range(400):
        pieces = draw.sample(range(5), 2)
        for piece in range(5):
            prices.of(piece, LENGTH_S)
        amounts_to_s = sum(true[piece] * LENGTH_S for piece in pieces) * draw.gauss(1, 0.02)
        prices.learn(pieces, amounts_to_s, error_s=0.02 * LENGTH_S)
    for piece, factor in enumerate(true):
        assert prices.of(piece, LENGTH_S) / LENGTH_S == pytest.approx(factor, abs=0.08)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True), st.floats(-1e-2, 1e-2)), max_size=60
    ),
    st.floats(0, 1e-2),
)
def test_prices_stay_positive_and_1_on_average(steps: list[tuple[list[int], float]], error_s: float) -> None:
    prices = Prices()
    lengths = [1e-4 * (1 + piece) for piece in range(7)]
    for pieces, amounts_to_s in steps:
        for piece, length_s in enumerate(lengths):
            prices.of(piece, length_s)
        prices.learn(pieces, amounts_to_s, error_s=error_s)
    found = [prices.of(piece, length_s) for piece, length_s in enumerate(lengths)]
    assert min(found) > 0
    assert sum(found) == pytest.approx(sum(lengths))


def test_noise_alone_teaches_little() -> None:
    draw, prices = random.Random(0), Prices()
    error_s = 5 * LENGTH_S
    for step in range(2000):
        pieces = [step % 20, (step + 1) % 20]
        for piece in pieces:
            prices.of(piece, LENGTH_S)
        prices.learn(pieces, 2 * LENGTH_S + draw.gauss(0, error_s), error_s=error_s)
    off = [prices.of(piece, LENGTH_S) / LENGTH_S - 1 for piece in range(20)]
    assert sum(x * x for x in off) / len(off) < 0.4**2


def shared(slowdown: float, *, priced: bool, steps: int = 1500) -> tuple[float, float, float]:
    """Mean and p95 of the slowdown, and what the background got through, in seconds a step."""
    draw, prices, controller, credit = random.Random(1), Prices(), Controller(Budget(slowdown=slowdown)), Credit()
    true = [draw.choice([0.2, 1.0, 2.2]) for _ in range(28)]
    place, times, work_s = 0, [], 0.0
    for step in range(steps):
        allowance, pieces, spent_s = controller.allowance, [], 0.0
        credit.add(allowance.overlapped_s, piece_s=LENGTH_S)
        while not allowance.alone:
            price_s = prices.of(place, LENGTH_S) if priced else LENGTH_S
            if not credit.covers(price_s):
                break
            credit.spend(price_s)
            spent_s += price_s
            pieces.append(place)
            place = (place + 1) % len(true)
        added_s = COST * sum(true[piece] * LENGTH_S for piece in pieces)
        time_s = ALONE_S * draw.gauss(1, 0.003) + added_s
        controller.observe(StepTaken(time_s=time_s, overlapped_s=spent_s))
        if priced and pieces and step > 40:
            cost = controller.overlap_cost.value
            error_s = controller.base.noise * ALONE_S / cost
            prices.learn(pieces, (time_s - controller.base.median_s) / cost, error_s=error_s)
        if step >= 200:
            times.append(time_s / ALONE_S)
            work_s += len(pieces) * LENGTH_S / (steps - 200)
    times.sort()
    return sum(times) / len(times), times[int(0.95 * len(times))], work_s


@pytest.mark.parametrize("slowdown", [1.05, 1.10, 1.20])
def test_known_prices_let_the_background_do_more_within_the_same_promises(slowdown: float) -> None:
    _, _, before_s = shared(slowdown, priced=False)
    mean, p95, work_s = shared(slowdown, priced=True)
    assert mean < slowdown + 0.01
    assert p95 < slowdown + 0.05
    assert work_s > 1.05 * before_s
