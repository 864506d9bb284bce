"""One process that shares its GPU between a foreground and backgrounds: ours, and streams with nothing held back."""

import collections
import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from gaps import gaps_of
from jobs import Which, at_work, compared, prepare
from players import Process

CALIBRATE = "calibrate"
LEAST_STEPS = 80
LONGEST_ALONE_S = 3.0
"""For which the foreground runs alone before a line of ours, and after it."""
LONG_STEP_S = 0.03
"""Of steps longer than that, half as many are the least."""


def share(which: Which, backgrounds: Sequence[Which], pipe: Connection) -> None:
    """Builds all jobs, then does what it is told; a background that cannot be built fails its own lines only."""
    from burstpool.share.gpu.loop import alone_in_a_group

    prepare()
    with alone_in_a_group() as control:
        try:
            sharing = Sharing(which, backgrounds, control)
        except Exception as error:
            pipe.send(failure(error))
            return
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            try:
                answer = sharing.calibrate() if order == CALIBRATE else sharing.measure(*order)
            except Exception as error:
                answer = failure(error)
            pipe.send(answer)


def failure(error: Exception) -> dict[str, Any]:
    """A row of what went wrong."""
    return {"failed": f"{type(error).__name__}: {error}"[:300]}


class Sharing:
    """A foreground and backgrounds in this process, captured once for all lines."""

    def __init__(self, which: Which, backgrounds: Sequence[Which], control: Any) -> None:
        from burstpool.share.gpu.loop import streams
        from burstpool.share.gpu.pieces import piece_length_s

        self.which = which
        self.high, self.low = streams(torch.device("cuda", 0))
        self.foreground = at_work(which, control, self.high, 6e-4)
        self.works: dict[str, Any] = {}
        self.broken: dict[str, dict[str, Any]] = {}
        """Backgrounds that could not be built."""
        self.widths: dict[str, Any] = {}
        self.unranked: tuple[Any, list[Any]] | None = None
        """A stream of the background's priority, and the foreground's pieces for it."""
        for name in backgrounds:
            try:
                self.works[str(name)] = at_work(name, control, self.low, piece_length_s(self.foreground.steps.alone_s))
            except Exception as error:
                self.broken[str(name)] = failure(error)
        self.show()

    def show(self) -> None:
        """How long all steps and pieces take alone."""
        for work in (self.foreground, *self.works.values()):
            lengths = [round(1e3 * time_s, 3) for time_s in work.steps.piece_times_s]
            words = f"{work.name}: {1e3 * work.steps.alone_s:.3f} ms, pieces {lengths}"
            print(words[:400], file=sys.stderr, flush=True)

    def calibrate(self) -> str:
        """Cuts and times all steps again."""
        for work in (self.foreground, *self.works.values()):
            work.steps.alone_s = math.nan
            work.steps.capture()
        self.show()
        return "ready"

    def measure(self, way: str, name: str, budget: float, seconds: float, own_s: float | None) -> dict[str, Any]:
        """A line; `own_s` is a step of the background alone, if it is known better than from here."""
        from burstpool.share.gpu.at_work import BackgroundWork, move

        if name in self.broken:
            return self.broken[name]
        foreground, work = self.foreground, self.works[name]
        work.losses.clear()
        work.steps.alone_s = own_s or work.steps.alone_s
        program = gaps_of(self.which, foreground) if way == "gaps" else None
        self.cut(work, program)
        if way == "ours":
            return self.on_a_part(name, budget, seconds)
        if work.steps.stream != self.low:
            move(work.steps, self.low)
        if way == "gaps":
            return ours(foreground, BackgroundWork(work), budget, seconds, program)
        if way == "priority":
            return free(foreground, work, seconds)
        if self.unranked is None:
            plain = torch.cuda.Stream()
            self.unranked = plain, on_plain_stream(foreground, plain)
        stream, pieces = self.unranked
        return free(foreground, work, seconds, stream=stream, pieces=pieces)

    def cut(self, work: Any, program: Any) -> None:
        """Into pieces as long as the foreground and its gaps want them."""
        from burstpool.share.gpu.at_work import move
        from burstpool.share.gpu.loop import Idle
        from burstpool.share.gpu.pieces import piece_length_s

        gaps_s = [part.length_s for part in program or () if isinstance(part, Idle)]
        piece_s = piece_length_s(self.foreground.steps.alone_s, gaps_s)
        if work.steps.piece_s != piece_s or not work.steps.pieces:
            work.steps.piece_s = piece_s
            move(work.steps, self.low)

    def on_a_part(self, name: str, budget: float, seconds: float) -> dict[str, Any]:
        """Ours, on the part of the GPU that keeps most; parts are tried once for all budgets."""
        from burstpool.share.gpu.at_work import BackgroundWork
        from burstpool.share.gpu.width import Widths

        work = self.works[name]
        widths = self.widths[name] = self.widths.get(name) or Widths(self.foreground.steps, work.steps)
        part = widths.take(slowdown=budget)
        return {
            **ours(self.foreground, BackgroundWork(work), budget, seconds, None),
            "multiprocessors": part,
            "tried": {share: [found.slowdown, found.kept] for share, found in widths.tried.items()},
            "left_out": widths.left_out,
        }


def ours(foreground: Any, background: Any, budget: float, seconds: float, program: Any) -> dict[str, Any]:
    """Held by the controller, next to the foreground alone before and after."""
    from burstpool.share.budget import Budget
    from burstpool.share.gpu.loop import Idle, SharedGpu

    def alone() -> list[float]:
        gpu = SharedGpu(foreground, (), Budget(slowdown=budget), program=program)
        gpu.run(max(int(min(0.15 * seconds, LONGEST_ALONE_S) / step_s), least_steps // 3))
        return gpu.measured.step_s[5:]

    idle_s = sum(part.length_s for part in program or () if isinstance(part, Idle))
    step_s = foreground.steps.alone_s + idle_s
    least_steps = LEAST_STEPS if step_s < LONG_STEP_S else LEAST_STEPS // 2
    plain_s = plain_loop(foreground.steps, foreground.feeder, 40) if program is None else 0.0
    before = alone()
    begun = time.monotonic()
    gpu = SharedGpu(foreground, (background,), Budget(slowdown=budget), program=program)
    # By the clock: so many steps would take longer by the slowdown.
    gpu.run(
        sys.maxsize,
        stop=lambda: time.monotonic() - begun >= seconds and len(gpu.measured.step_s) >= least_steps,
    )
    took_s = time.monotonic() - begun
    after = alone()
    alone_s = statistics.mean(before + after)
    times = gpu.measured.step_s[20:]
    work_s = sum(gpu.measured.background_s[20:])
    kept = work_s / sum(times) * background.work.steps.alone_s / sum(background.work.steps.piece_times_s)
    return {
        **compared(times, alone_s, kept),
        "own_s": background.work.steps.alone_s,
        "steps": len(times),
        "took_s": took_s,
        "background_steps": background.steps_done,
        "piece_s": background.work.steps.piece_s,
        "gap_share": idle_s / step_s,
        "launch_overhead": alone_s / plain_s - 1 if plain_s else None,
        "overlap_cost": gpu.controller.overlap_cost.value,
        "base_error": (gpu.controller.alone_s or alone_s) / alone_s - 1,
    }


def plain_loop(steps: Any, feeder: Any, count: int) -> float:
    """Seconds of a step in the usual training loop over the same graphs: no events, no controller."""
    marks = []
    losses: collections.deque[Any] = collections.deque()
    for _ in range(count):
        steps.begin(feeder.take())
        with torch.cuda.stream(steps.stream):
            for piece in steps.pieces:
                piece()
        loss = steps.end()
        with torch.cuda.stream(steps.stream):
            losses.append(torch.empty(loss.shape, dtype=loss.dtype, pin_memory=True).copy_(loss, non_blocking=True))
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record(steps.stream)
        if len(marks) > 2:
            marks[-2].synchronize()
    torch.cuda.synchronize()
    return statistics.mean(a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks[5:]))


def on_plain_stream(work: Any, plain: Any) -> list[Any]:
    """The same step captured on a stream of the background's priority: a graph keeps that of its capture."""
    steps = work.steps
    kept = steps.stream, steps.pieces, steps.piece_times_s, steps.alone_s, steps._graphs, steps._cut
    steps.stream = plain
    steps.capture()
    pieces = [*steps.pieces]
    work.unranked = steps._graphs, steps._cut
    steps.stream, steps.pieces, steps.piece_times_s, steps.alone_s, steps._graphs, steps._cut = kept
    return pieces


def free(foreground: Any, work: Any, seconds: float, **unranked: Any) -> dict[str, float]:
    """Two streams, nothing held back."""
    from burstpool.share.gpu.width import together

    found = together(foreground.steps, work.steps, seconds=seconds, **unranked)
    return compared(found.step_s[5:], found.alone_s, found.kept)


class Sharer(Process):
    """The sharing process, from outside."""

    def __init__(self, which: Which, backgrounds: Sequence[Which], *, until_s: float = math.inf) -> None:
        super().__init__(share, which, backgrounds, until_s=until_s)

    def calibrate(self) -> None:
        """Has it cut and time its jobs again."""
        self.tell(CALIBRATE)
        self.wait()

    def do(self, way: str, background: Which, budget: float, seconds: float, own_s: float | None) -> dict[str, Any]:
        """`own_s`: a step of the background in a process of its own, where there is one: the most it could have."""
        self.tell((way, str(background), budget, seconds, own_s))
        return self.answer()
