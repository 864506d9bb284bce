"""What pieces cost is found out, and evens out the foreground's steps."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from fake_cuda import Clock, FakeFeeder, FakeSteps, fake_cuda
from hypothesis import given
from hypothesis import strategies as st

from burstpool.share.budget import Budget
from burstpool.share.gpu.at_work import BackgroundWork, JobAtWork
from burstpool.share.gpu.loop import Idle, SharedGpu
from burstpool.share.prices import PieceName, Prices

LENGTH_S, STEP_S = 3e-4, 4e-3
UNEQUAL = (0.2, 1.0, 2.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return fake_cuda(monkeypatch)


def named(places: Sequence[int]) -> list[PieceName]:
    return [(0, place) for place in places]


def learnt(true: Sequence[float], *, cost: float, steps: int, each: int, noise: float = 0.02) -> list[float]:
    """Factors after so many steps with `each` pieces, some of them more than once."""
    draw, prices = random.Random(0), Prices()
    for _ in range(steps):
        places = [draw.randrange(len(true)) for _ in range(each)]
        for place in range(len(true)):
            prices.meet((0, place), LENGTH_S)
        added_s = cost * sum(true[place] * LENGTH_S for place in places) * draw.gauss(1, noise)
        prices.learn(named(places), added_s, error_s=noise * cost * each * LENGTH_S)
    return [prices.meet((0, place), LENGTH_S) for place in range(len(true))]


@pytest.mark.parametrize("each", [2, 12])
@pytest.mark.parametrize("cost", [0.1, 0.5, 3.0])
def test_what_pieces_cost_is_found_out_whatever_work_costs_on_average(cost: float, each: int) -> None:
    true = [0.4, 1.0, 1.6, 0.7, 1.3]
    assert learnt(true, cost=cost, steps=600, each=each) == pytest.approx(true, abs=0.12)


def test_where_work_costs_nothing_no_piece_is_thought_to_cost_less_than_another() -> None:
    assert learnt([1.0] * 20, cost=0.001, steps=400, each=3) == [1.0] * 20


def test_noise_alone_teaches_little() -> None:
    found = learnt([1.0] * 20, cost=0.3, steps=2000, each=2, noise=2.0)
    assert sum((x - 1) ** 2 for x in found) / len(found) < 0.4**2


@pytest.mark.parametrize("true", [[1.0], [0.0, 4.0], [0.0] * 5 + [4.0] * 2, [1.0] * 7])
def test_prices_stay_right_however_long_a_foreground_with_hiccups_runs(true: list[float]) -> None:
    draw, prices = random.Random(0), Prices()
    for step in range(20_000):
        place = step % len(true)
        prices.meet((0, place), LENGTH_S)
        hiccup_s = 5 * LENGTH_S if draw.random() < 0.03 else 0.0
        prices.learn([(0, place)], 0.5 * true[place] * LENGTH_S + hiccup_s, error_s=0.01 * LENGTH_S)
    mean = sum(true) / len(true)
    found = [prices.meet((0, place), LENGTH_S) for place in range(len(true))]
    assert found == pytest.approx([max(x / mean, 0.2) for x in true], rel=0.25)
    assert prices._mean == pytest.approx(1.0)


def test_a_background_that_has_ended_is_forgotten() -> None:
    prices = Prices()
    for _ in range(40):
        for owner, true in ((0, 0.5), (1, 1.5)):
            prices.meet((owner, 0), LENGTH_S)
            prices.learn([(owner, 0)], true * LENGTH_S, error_s=0)
    assert prices.meet((1, 0), LENGTH_S) > 1.2 > 0.8 > prices.meet((0, 0), LENGTH_S)
    prices.forget(0)
    assert prices.meet((1, 0), LENGTH_S) == pytest.approx(1)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.floats(-1e-2, 1e-2)), max_size=80),
    st.floats(0, 1e-2),
    st.sampled_from([0.0, 1e-4]),
)
def test_prices_stay_within_bounds(steps: list[tuple[list[int], float]], error_s: float, first_s: float) -> None:
    prices = Prices()
    lengths = [first_s, *(1e-4 * (1 + place) for place in range(1, 7))]
    for places, added_s in steps:
        for place, length_s in enumerate(lengths):
            prices.meet((0, place), length_s)
        prices.learn(named(places), added_s, error_s=error_s)
    assert all(0.2 <= prices.meet((0, place), length_s) <= 5 for place, length_s in enumerate(lengths))


class Beside:
    """The loop over a simulated GPU on which pieces slow the foreground down, each by its own cost."""

    def __init__(
        self, clock: Clock, slowdown: float, *, cost: float, spread: Sequence[float], hiccups: float = 0.0, **loop: Any
    ) -> None:
        draw = random.Random(1)
        self.delay_s, costs = 0.0, [cost * draw.choice(spread) * LENGTH_S for _ in range(28)]
        foreground, background = (self._job(clock, *lengths) for lengths in ([STEP_S], [LENGTH_S] * 28))
        background.steps.pieces = [self._costly(*each) for each in zip(background.steps.pieces, costs, strict=True)]
        self.gpu = SharedGpu(foreground, [BackgroundWork(background)], Budget(slowdown=slowdown), **loop)
        launch = self.gpu.launches.allow

        def delayed(step: int, windows: Any, allowance: Any) -> None:
            launch(step, windows, allowance)
            late_s = self.delay_s + STEP_S * abs(draw.gauss(0, 0.003)) + (STEP_S / 2 if draw.random() < hiccups else 0)
            self.delay_s = 0.0
            steps: Any = foreground.steps
            steps.works[-1].left_s += late_s  # it has not ended: background work waits for its beginning

        self.gpu.launches.allow = delayed  # type: ignore[method-assign]

    def _job(self, clock: Clock, *lengths: float) -> JobAtWork:
        fed: Any = FakeFeeder(clock)
        return JobAtWork("job", FakeSteps(clock, *lengths), fed)

    def _costly(self, piece: Any, cost_s: float) -> Any:
        def run() -> None:
            piece()
            self.delay_s += cost_s

        return run

    def run(self, steps: int = 1200) -> tuple[float, float, float]:
        """Mean and p95 of the slowdown, and background work a step."""
        self.gpu.run(steps)
        times, work = sorted(self.gpu.measured.step_s[200:]), self.gpu.measured.background_s[200:]
        return (
            sum(times) / len(times) / STEP_S,
            times[int(0.95 * len(times))] / STEP_S,
            sum(work) / len(work) / STEP_S,
        )

    def factors(self) -> list[float]:
        owner = id(self.gpu.backgrounds[0])
        return [self.gpu.launches.prices.meet((owner, place), LENGTH_S) for place in range(28)]


@pytest.mark.parametrize("slowdown", [1.05, 1.10, 1.20])
def test_prices_let_the_background_do_more_within_the_same_promises(
    clock: Clock, slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mean, p95, work = Beside(clock, slowdown, cost=0.5, spread=UNEQUAL).run()
    assert mean < slowdown + 0.01
    assert p95 < slowdown + 0.05
    monkeypatch.setattr(Prices, "meet", lambda *_: 1.0)
    monkeypatch.setattr(Prices, "learn", lambda *_, **__: None)
    assert work > 1.04 * Beside(clock, slowdown, cost=0.5, spread=UNEQUAL).run()[2]


def test_pieces_that_cost_the_same_have_the_same_price(clock: Clock) -> None:
    even = Beside(clock, 1.10, cost=0.5, spread=[1.0])
    even.run()
    assert even.factors() == pytest.approx([1.0] * 28, abs=0.15)


def test_hiccups_of_the_foreground_do_not_make_prices(clock: Clock) -> None:
    disturbed = Beside(clock, 1.10, cost=0.5, spread=[1.0], hiccups=0.02)
    disturbed.run()
    assert disturbed.factors() == pytest.approx([1.0] * 28, abs=0.3)


def test_a_background_that_costs_nothing_gets_no_more_than_there_is_time_for(clock: Clock) -> None:
    gap_s = 9 * STEP_S
    free = Beside(clock, 1.10, cost=0.0, spread=[1.0], program=[0, Idle(length_s=gap_s)])
    free.run(300)
    assert max(free.gpu.measured.background_s[20:]) < 1.1 * STEP_S + gap_s + 5 * LENGTH_S
