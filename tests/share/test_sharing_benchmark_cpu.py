"""`benchmarks/sharing/cpu.py`: what it says that a gate costs is what it costs."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burstpool.engine.base import phrase
from burstpool.job import load_job
from burstpool.run.even import even_plan
from burstpool.run.setup import trace_job

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "sharing"))

import cpu_ways


class Heard:
    """An announcer and what it wraps, which note what each of them was told."""

    def __init__(self) -> None:
        self.inner, self.told = Inner(self), list[tuple[str, Any]]()

    def begin_step(self, step: int) -> None:
        self.told.append(("announced", step))

    def say(self, words: bytes) -> None:
        self.told.append(("announced", words.rstrip(b"\0")))


class Inner:
    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def begin_step(self, step: int) -> None:
        self._heard.told.append(("plain", step))

    def say(self, words: bytes) -> None:
        self._heard.told.append(("plain", words.rstrip(b"\0")))


SLOWER_S = 0.0005


class Slow:
    """A slow announcer."""

    def __init__(self, announcer: Any) -> None:
        self._announcer, self.inner = announcer, announcer.inner

    def begin_step(self, step: int) -> None:
        until_s = time.perf_counter() + SLOWER_S / 2  # it is called twice a step
        while time.perf_counter() < until_s:
            pass
        self._announcer.begin_step(step)

    def say(self, words: bytes) -> None:
        self._announcer.say(words)


def slow_in_turns(work: Any, place: Any, task: Any) -> Any:
    return work(replace(place, doing=cpu_ways.Turns(Slow(place.doing))), task)  # type: ignore[arg-type]


def test_steps_are_announced_and_not_in_turns_and_the_last_of_a_turn_ends_with_it() -> None:
    heard = Heard()
    turns = cpu_ways.Turns(heard)  # type: ignore[arg-type]
    for step in range(cpu_ways.WARM_UP + 3 * cpu_ways.TURN):
        turns.begin_step(step)
        turns.say(phrase("computing"))
    by = {words: who for who, words in heard.told if isinstance(words, int)}
    first = cpu_ways.WARM_UP + cpu_ways.TURN
    assert [step for step in by if by[step] == "plain"] == list(range(first, first + cpu_ways.TURN))
    ended = heard.told.index(("announced", b"writing a checkpoint"))
    assert heard.told[ended + 1] == ("plain", first)
    assert sum(who == "plain" for who, words in heard.told if words == b"computing") == cpu_ways.TURN


@pytest.mark.alone
def test_what_a_gate_costs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate that takes half a millisecond more at every step; workers are started with this process's code."""
    monkeypatch.setattr(cpu_ways, "in_turns", slow_in_turns)
    job = load_job("zoo:tiny_mlp", {})
    plan = even_plan(trace_job(job).graph, num_devices=1, batch=32, name=job.name)
    case = cpu_ways.Case(
        foreground="zoo:tiny_mlp", settings={}, plan=plan, backgrounds=(), steps=800, folder=tmp_path / "case"
    )
    found = cpu_ways.measured("no background", case)
    assert 1e3 * SLOWER_S < found["overhead"] * found["step_ms"] < 1e3 * SLOWER_S + 0.5
