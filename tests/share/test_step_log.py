"""What sharing cost a foreground, by the log of its steps."""

import random

import pytest

from burstpool.share.step_log import StepLog, p95, slowdowns


def test_slowdowns_compare_with_the_alone_steps_in_between() -> None:
    log = StepLog(
        times_s=[9.0, 1.0, 1.0] + [1.2, 1.2, 1.2, 1.0] * 10, alone=[True] * 3 + [False, False, False, True] * 10
    )
    found = slowdowns(log)
    assert found["slowdown"] == pytest.approx(1.15)
    assert found["slowdown_p95"] == pytest.approx(1.2)
    assert found["alone_p95"] == 1.0
    assert slowdowns(StepLog(times_s=[1.0], alone=[True]))["slowdown"] == 1.0
    assert p95([1.0] * 95 + [2.0] * 5) == 1.0


def test_slowdowns_are_not_made_smaller_by_more_steps_alone_where_the_machine_is_slow() -> None:
    """A tenth longer for hundreds of steps at a time, whoever runs; looked at there with eight steps alone in a row."""
    rng, log = random.Random(0), StepLog()
    for step in range(20_000):
        is_slow = step // 500 % 2 == 1
        is_alone = step % 25 == 0 or (is_slow and step % 100 < 8)
        own_s = rng.gauss(1.1 if is_slow else 1.0, 0.02)
        log.times_s.append(own_s * (1.0 if is_alone else 1.1))
        log.alone.append(is_alone)
    found = slowdowns(log)
    told = sum(log.times_s) / sum(
        time_s / (1.0 if alone else 1.1) for time_s, alone in zip(log.times_s, log.alone, strict=True)
    )
    assert found["slowdown"] == pytest.approx(told, abs=0.004)
    alone = [time_s for time_s, is_alone in zip(log.times_s, log.alone, strict=True) if is_alone]
    assert sum(log.times_s) / len(log.times_s) / (sum(alone) / len(alone)) < told - 0.02  # where all count alike
    assert found["alone_p95"] == pytest.approx((1.1 + 1.28 * 0.02) / 1.05, abs=0.01)


def test_a_background_that_was_away_for_long_counts_for_as_long_as_it_was() -> None:
    times_s = [1.0] * 100 + [1.2] * 100
    alone = [False, *[True] * 99, *[step % 10 == 0 for step in range(100)]]
    for step in range(100, 200):
        times_s[step] = 1.0 if alone[step] else 1.2
    assert slowdowns(StepLog(times_s=times_s, alone=alone))["slowdown"] == pytest.approx(1.09, abs=0.002)


def test_p95_is_what_one_in_twenty_passes_also_of_values_that_stand_for_several() -> None:
    assert p95([1.0, 3.0, 2.0], [90, 4, 6]) == 2.0
    assert p95([1.0, 3.0, 2.0], [90, 6, 4]) == 3.0
    assert p95(range(1, 101)) == 95
