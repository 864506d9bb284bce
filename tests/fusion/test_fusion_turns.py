"""Processes of `benchmarks/fusion/turns.py`: who waits for whom, and who is stopped."""

import sys
import time
from itertools import pairwise
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "fusion"
sys.path.append(str(BENCHMARK))

from turns import Ended, run_all  # noqa: E402

PROCESS = """
import sys, time
sys.path.append({folder!r})
from turns import all_are_built, turn
time.sleep({build_s})
print(time.time(), flush=True)
all_are_built()
with turn():
    print(time.time(), flush=True)
    time.sleep({turn_s})
    print(time.time(), flush=True)
"""


def ran(
    builds_s: list[float], turns_s: list[float], *, seconds: float = 30.0, build_s: float = 20.0, at_once: int = 8
) -> list[Ended]:
    commands = {
        str(number): [sys.executable, "-c", PROCESS.format(folder=str(BENCHMARK), build_s=one_s, turn_s=turn_s)]
        for number, (one_s, turn_s) in enumerate(zip(builds_s, turns_s, strict=True))
    }
    until = time.monotonic() + seconds
    limits = {"build_s": build_s, "longest_turn_s": 1.0, "until": until}
    return [*run_all(commands, at_once=at_once, environment={}, **limits).values()]


def times(ended: Ended) -> list[float]:
    return [float(line) for line in ended.output.splitlines()]


def test_nobody_measures_before_all_are_built_and_no_two_at_once() -> None:
    found = [times(one) for one in ran([0.0, 0.4, 0.1], [0.2, 0.2, 0.2])]
    assert min(begin for _, begin, _ in found) >= max(built for built, _, _ in found)
    in_order = sorted((begin, end) for _, begin, end in found)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(in_order))


def test_one_that_stays_in_its_turn_is_stopped_and_the_others_get_theirs() -> None:
    stays, *others = ran([0.0, 0.1, 0.1], [60.0, 0.0, 0.0])
    assert "its turn took more than 1 s" in stays.why
    assert [(len(times(one)), one.why) for one in others] == [(3, ""), (3, "")]


def test_one_that_builds_too_long_is_not_waited_for() -> None:
    slow, quick = ran([60.0, 0.0], [0.0, 0.0], seconds=3.0, build_s=0.5)
    assert (len(times(quick)), quick.why) == (3, "")
    assert "the time was up before it was measured" in slow.why


def test_those_that_there_is_no_room_for_wait_and_one_that_never_began_says_so() -> None:
    first, second = ran([0.0, 0.0], [0.1, 0.1], at_once=1)
    assert times(second)[0] >= times(first)[-1]
    first, second = ran([60.0, 0.0], [0.0, 0.0], at_once=1, seconds=1.0)
    assert "before it began" in second.why
