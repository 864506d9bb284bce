"""The ways in which a background can share this machine's cores with a foreground, each measured beside it alone.

Takes a case, returns figures: the foreground's `slowdown` and `slowdown_p95` over its mean step alone, `alone_p95`, its
own noise, and `kept`, the background's steps a second over those alone. Steps alone are of ours those that ran so in
between; of the others a run before and one after, since such a machine drifts; ours has `beside_runs` by these, too.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from burstpool.engine.base import Doing, Place, phrase
from burstpool.engine.local import LocalWorkers
from burstpool.plan.plan import Plan
from burstpool.run.options import RunOptions
from burstpool.run.progress import Observer, Progress
from burstpool.run.trainer import train
from burstpool.share.base import Background, ShareRequest
from burstpool.share.budget import Budget, Gap
from burstpool.share.cpu import share_on_cpu
from burstpool.share.gates.announce import Announcer
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper
from burstpool.share.gates.workers import SharingEngine
from burstpool.share.step_log import SHARING, StepLog, p95

OPTIONS = RunOptions(timeline_steps=0, checkpoint_every=0)
WARM_UP = 10
TURN = 40
"""Steps in a row that are announced at a gate, or are not, where the overhead is measured."""
SETTLING = 5
"""Of these at the beginning that do not count: work begun in the turn before ends in them."""
BEFORE_AND_AFTER = 12
"""A run of the foreground alone, before or after, is this much shorter than the line."""
UNGATED = 4
"""A line of a way that holds nothing back is this much shorter: it has no promise to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What runs beside what, and for how long."""

    foreground: str
    settings: Mapping[str, str]
    plan: Plan
    backgrounds: Sequence[Background]
    """One for each device that has work."""
    steps: int
    folder: Path

    def in_folder(self, name: str) -> "Case":
        """The same elsewhere: a run folder is used once."""
        return replace(self, folder=self.folder / name)

    def for_a_part(self, part: int, least: int = 5 * WARM_UP) -> "Case":
        """The same for one of so many parts of the steps."""
        return replace(self, steps=max(self.steps // part, least))

    def request(self, budget: Budget, backgrounds: Sequence[Background]) -> ShareRequest:
        """What is asked of sharing; how long a plan's gaps are is left to it to learn."""
        return ShareRequest(
            foreground=self.foreground,
            settings=self.settings,
            plan=self.plan,
            steps=self.steps,
            backgrounds=tuple(backgrounds),
            budget=budget,
            options=OPTIONS,
            run_folder=self.folder,
            gaps=(Gap(length_s=0.0),) if len(self.plan.devices) > 1 else (),
        )


def measured(way: str, case: Case) -> dict[str, Any]:
    """The figures of a way, by its name."""
    kind, *budget = way.split()
    if way == "no background":
        return overhead(case.for_a_part(1, 20 * TURN))
    held = kind in ("ours", "controller")
    found = ours(case, float(budget[0])) if held else ungated(case.for_a_part(UNGATED, 10 * WARM_UP))
    return found | {"sum_of_shares": 1 / found["slowdown"] + (found["kept"] or 0.0)}


def steps_alone(case: Case, engine: Any = None, observer: Observer | None = None) -> list[float]:
    """Seconds of each step, warmed up."""
    result = train(
        case.foreground,
        case.plan,
        steps=case.steps,
        run_folder=case.folder,
        options=OPTIONS,
        engine=engine,
        settings=case.settings,
        observer=observer,
    )
    return [loss.step_time_s for loss in result.losses][WARM_UP:]


def ours(case: Case, budget: float) -> dict[str, Any]:
    """Gated; also beside runs alone, as the others: a step alone between shared ones may be unlike one of those."""
    around = case.for_a_part(BEFORE_AND_AFTER)
    base = steps_alone(around.in_folder("before"))
    shared_case = case.in_folder("run")
    found = share_on_cpu(shared_case.request(Budget(slowdown=budget), case.backgrounds))
    base += steps_alone(around.in_folder("after"))
    log = StepLog.load(shared_case.folder / SHARING)
    shared = log.times_s[log.alone.index(False) :] if False in log.alone else []
    base_s = sum(base) / len(base)
    return {
        "slowdown": found.slowdown,
        "slowdown_p95": found.slowdown_p95,
        "alone_p95": found.alone_p95,
        "beside_runs": sum(shared) / len(shared) / base_s if shared else None,
        "beside_runs_p95": p95(shared) / base_s if shared else None,
        "runs_p95": p95(base) / base_s,
        "kept": found.background_kept,
        "step_ms": 1e3 * base_s,
    }


def ungated(case: Case) -> dict[str, Any]:
    """Both run as they please."""
    around = case.for_a_part(BEFORE_AND_AFTER)
    base = steps_alone(around.in_folder("before"))
    with running(case.backgrounds, case.folder) as keepers:
        alone = rate(keepers, 2.0)
        seen: list[tuple[float, int]] = []  # while the foreground trains, and neither starts nor ends

        def observe(progress: Progress) -> None:
            if progress.step >= WARM_UP:
                seen.append((time.monotonic(), _steps_of(keepers)))

        shared = steps_alone(case.in_folder("shared"), observer=observe)
        kept = None  # of a run too short to be seen twice
        if len(seen) > 1:
            (begun_s, counted), (ended_s, count) = seen[0], seen[-1]
            kept = (count - counted) / (ended_s - begun_s) / alone
    base += steps_alone(around.in_folder("after"))
    base_s = sum(base) / len(base)
    return {
        "slowdown": sum(shared) / len(shared) / base_s,
        "slowdown_p95": p95(shared) / base_s,
        "alone_p95": p95(base) / base_s,
        "kept": kept,
        "step_ms": 1e3 * base_s,
    }


def overhead(case: Case) -> dict[str, Any]:
    """Steps announced at a gate at which nobody waits, against steps that are not, turn about in the same processes.

    Two runs of one program differ by more than what is looked for.
    """
    case.folder.mkdir(parents=True, exist_ok=True)
    gates = [[Gate.create(case.folder / f"gate-{device}")] for device in range(case.plan.num_devices)]
    engine = TurnsEngine(case.request(Budget(), ()), gates, case.folder / "log.json")
    times = steps_alone(case.in_folder("run"), engine)
    turns = [median(times[begin + SETTLING : begin + TURN]) for begin in range(0, len(times) - TURN + 1, TURN)]
    around = [(before + after) / 2 for before, after in zip(turns[1::2], turns[3::2], strict=False)]
    ratios = [announced / plain for announced, plain in zip(turns[2::2], around, strict=False)]
    return {
        "overhead": fmean(ratios) - 1,
        "overhead_error": stdev(ratios) / math.sqrt(len(ratios)),
        "step_ms": 1e3 * median(turns[1::2]),
    }


class TurnsEngine(SharingEngine):
    """One whose workers announce their steps in turns."""

    def start(self, work: Callable[[Place, Any], Any], task: Any, **options: Any) -> LocalWorkers:
        """See `Engine`."""
        return super().start(partial(in_turns, work), task, **options)


def in_turns(work: Callable[[Place, Any], Any], place: Place, task: Any) -> Any:
    """What such a worker runs."""
    assert isinstance(place.doing, Announcer)
    return work(replace(place, doing=Turns(place.doing)), task)


class Turns:
    """A `Doing` that announces so many steps, and then as many not."""

    def __init__(self, announcer: Announcer) -> None:
        self._announced, self._plain = announcer, announcer.inner
        self._now: Doing = announcer

    def begin_step(self, step: int) -> None:
        """See `Doing`."""
        turn, place = divmod(step - WARM_UP, TURN)
        if place == 0:
            if turn % 2:
                self._announced.say(phrase("writing a checkpoint"))  # the last announced step ends here
            self._now = self._plain if turn % 2 else self._announced
        self._now.begin_step(step)

    def say(self, phrase: bytes) -> None:
        """See `Doing`."""
        self._now.say(phrase)


@contextmanager
def running(backgrounds: Sequence[Background], folder: Path) -> Iterator[list[Keeper]]:
    """Ungated background jobs, after their first steps."""
    keepers = [Keeper(b, Gate.create(folder / f"gate-{i}"), folder / str(i)) for i, b in enumerate(backgrounds)]
    try:
        for keeper in keepers:
            keeper.start()
        for keeper in keepers:
            keeper.wait_until_prepared(60.0)
        while any(keeper.gate.done().steps < 3 for keeper in keepers):
            time.sleep(0.01)
        yield keepers
    finally:
        threads = [threading.Thread(target=keeper.stop) for keeper in keepers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def rate(keepers: Sequence[Keeper], window_s: float) -> float:
    """Steps a second of all of them together."""
    before, begun_s = _steps_of(keepers), time.monotonic()
    time.sleep(window_s)
    return (_steps_of(keepers) - before) / (time.monotonic() - begun_s)


def _steps_of(keepers: Sequence[Keeper]) -> int:
    return sum(keeper.gate.done().steps for keeper in keepers)
