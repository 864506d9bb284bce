"""Sharing among workers: background jobs in processes of their own, behind gates that the foreground holds.

Each device of the foreground is a worker process; a background job is one more process beside it, on the same core or
GPU. The background first trains a few steps alone, so that its own speed is known; then the foreground starts,
announces what it does, and one controller allows all devices what the budget leaves. So each worker's gaps are filled
by its own background, and the controller knows their lengths from the schedule.

On GPUs both processes' kernels run side by side where an MPS server runs, else the driver gives the GPU to one after
the other. Workers say what they do when their device gets to it, and background steps run eagerly, slice by slice.
"""

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine, LocalWorkers
from burstpool.limits import available_bytes
from burstpool.report.timeline import Event, Timeline
from burstpool.run.folder import RunFolder
from burstpool.run.outcome import Result
from burstpool.run.progress import Progress
from burstpool.run.trainer import counted_interrupts, run_prepared
from burstpool.schedule.actions import Kind
from burstpool.share.base import (
    BackgroundOutcome,
    ShareOutcome,
    ShareProgress,
    ShareRequest,
    background_path,
    refuse_fp16,
)
from burstpool.share.budget import Budget, Gap
from burstpool.share.claim import claimed, gate_folder, terminable
from burstpool.share.gates.announce import Announcer, Pace
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper
from burstpool.share.gates.on_device import WhenReached, cuda_mark
from burstpool.share.memory import MemoryWatch, reserve_bytes
from burstpool.share.preparing import prepare_foreground
from burstpool.share.room import FLOOR
from burstpool.share.step_log import SHARING, StepLog, slowdowns

_LOG = logging.getLogger(__name__)

_CALIBRATION_STEPS, _LEAST_CALIBRATION_S, _CALIBRATION_S = 20, 0.3, 2.0
"""A background's own speed is taken from so many steps and so much time at least, and from no more than so much where
steps are long. The first 20 steps of 4 ms, on a core that had idled, took a tenth less than those that followed."""
_WARM_UP_STEPS = 3
_STARTING_S, _FIRST_STEPS_S = 60.0, 10.0
"""How long all backgrounds together may take to their first steps before they are left out of the calibration, and each
of them where others have used that up."""
_QUIETLY_S = 3.0
"""How long background jobs may take to end until it is said that one waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForegroundTask:
    """A worker's task, and the gates that it holds; picklable."""

    work: Callable[[Place, Any], Any]
    task: Any
    gates: tuple[tuple[str, ...], ...]
    """By device."""
    budget: Budget
    gaps: tuple[Gap, ...]
    log: str
    on_gpu: bool


def foreground_work(place: Place, task: ForegroundTask) -> Any:
    """What a foreground worker runs: its work, announced."""
    gates = [[Gate(path) for path in paths] for paths in task.gates]
    devices = task.task.schedule.devices
    first = next(device for device, actions in enumerate(devices) if actions)
    pace = Pace(task.budget, task.gaps, gates) if place.rank == first else None
    reduces = any(action.kind is Kind.REDUCE for action in devices[place.rank])
    tells = bool(gates[place.rank]) or pace is not None
    gpu = _own_gpu(place) if task.on_gpu else 0
    when = WhenReached(cuda_mark) if task.on_gpu and tells else None
    memory = partial(_gpu_memory, gpu) if task.on_gpu else None
    announcer = Announcer(place.doing, gates[place.rank], pace=pace, reduces=reduces, when=when, memory=memory)
    try:
        return task.work(replace(place, doing=announcer), task.task)
    finally:
        if when is not None:
            when.finish()
        announcer.end()
        if pace is not None:
            pace.save(Path(task.log))


def _own_gpu(place: Place) -> int:
    """The worker's GPU, made the current one: marks would else go to the first."""
    import torch

    gpu = place.local_rank % max(torch.cuda.device_count(), 1)
    torch.cuda.set_device(gpu)
    return gpu


def _gpu_memory(gpu: int) -> tuple[int, int]:
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info(gpu)
    return free_bytes, total_bytes


class SharingEngine:
    """The local engine, with workers that hold gates."""

    def __init__(self, request: ShareRequest, gates: Sequence[Sequence[Gate]], log: Path) -> None:
        self._request, self._gates, self.log = request, gates, log
        self.workers: LocalWorkers | None = None

    def start(
        self, work: Callable[[Place, Any], Any], task: Any, *, num_workers: int, silence_s: float
    ) -> LocalWorkers:
        """See `Engine`."""
        shared = ForegroundTask(
            work=work,
            task=task,
            gates=tuple(tuple(str(gate.path) for gate in gates) for gates in self._gates),
            budget=self._request.budget,
            gaps=self._request.gaps,
            log=str(self.log),
            on_gpu=self._request.options.device == "cuda",
        )
        self.workers = LocalEngine().start(foreground_work, shared, num_workers=num_workers, silence_s=silence_s)
        return self.workers

    def first_event_s(self) -> float:
        """When the measured timeline begins, by the machine's clock."""
        results = (self.workers.results() if self.workers is not None else None) or []
        recorded = [{step.step: step for step in result.recorded} for result in results if result.recorded]
        common = sorted(set.intersection(*map(set, recorded))) if recorded else []
        return (
            min((time_ns for steps in recorded for time_ns in steps[common[0]].starts_ns if time_ns), default=0) / 1e9
        )


def share_among_workers(
    request: ShareRequest, *, observer: Callable[[ShareProgress], None] | None = None
) -> ShareOutcome:
    """See `ShareFunction`."""
    refuse_fp16(request.options)
    # What is declared first is cleared away last: keepers write to their gates until their processes are gone.
    with (
        terminable(),
        claimed(request.run_folder) as begin,
        gate_folder(_shared_memory()) as folder,
    ):
        # First, so that a foreground that cannot be trained is told of before anything else is.
        task, start = prepare_foreground(request)
        with _kept(request, folder) as kept:
            alone_s = _started(kept)
            begin()
            before = [keeper.gate.done().steps for keeper in kept]
            engine = SharingEngine(request, _gates(request, kept), folder / SHARING)
            backgrounds: list[BackgroundOutcome] = []
            try:
                result = run_prepared(task, start, engine=engine, observer=_observer(observer, kept))
            finally:  # what backgrounds have learnt is kept whatever became of the foreground
                with counted_interrupts() as interrupts:
                    _stop(kept, interrupts)
                    became = _what_became(request, kept, engine.log, alone_s, before)
                for keeper, background in zip(kept, became, strict=True):  # last, as that may take a while
                    backgrounds.append(keeper.folder.keep(keeper.background, background))
            return _what_came(request, result, engine, kept, backgrounds)


def _started(keepers: Sequence[Keeper]) -> list[float | None]:
    """Starts all background jobs and lets each train alone; seconds a step, None for one that does not get so far."""
    for keeper in keepers:
        keeper.gate.close()
        keeper.start()
    deadline_s = time.monotonic() + _STARTING_S
    are_prepared = [keeper.wait_until_prepared(max(deadline_s - time.monotonic(), 0)) for keeper in keepers]
    return [
        _calibrated(keeper, timeout_s=max(deadline_s - time.monotonic(), _FIRST_STEPS_S)) if is_prepared else None
        for keeper, is_prepared in zip(keepers, are_prepared, strict=True)
    ]


def _gates(request: ShareRequest, keepers: Sequence[Keeper]) -> list[list[Gate]]:
    """Of each device; all is allowed until the foreground begins."""
    gates: list[list[Gate]] = [[] for _ in range(request.plan.num_devices)]
    for device, keeper in _placed(request, keepers):
        gates[device].append(keeper.gate)
        keeper.gate.free()
    return gates


def _what_became(
    request: ShareRequest,
    keepers: Sequence[Keeper],
    path: Path,
    alone_s: Sequence[float | None],
    before: Sequence[int],
) -> list[BackgroundOutcome]:
    """Of the backgrounds, which have ended; noted in their folders. `before`: steps that they had trained by then."""
    log = StepLog.load(path) if path.exists() else StepLog()  # workers that were killed leave none
    found = []
    for (device, keeper), alone, first in zip(_placed(request, keepers), alone_s, before, strict=True):
        steps = log.background_steps.get(str(keeper.gate.path), keeper.gate.done().steps - first)
        found.append(_outcome(keeper, device, log, alone_s=alone, steps=steps))
        keeper.folder.note(keeper.background, found[-1])
    return found


def _what_came(
    request: ShareRequest,
    result: Result,
    engine: SharingEngine,
    keepers: Sequence[Keeper],
    backgrounds: Sequence[BackgroundOutcome],
) -> ShareOutcome:
    log = StepLog.load(engine.log)
    log.save(result.folder / SHARING)
    timeline = _with_background(result.timeline, _placed(request, keepers), engine.first_event_s())
    if timeline is not None:
        timeline.save(RunFolder(result.folder).timeline)
    return ShareOutcome(
        folder=result.folder,
        losses=tuple(loss.loss for loss in result.losses),
        step_time_s=result.step_time_s,
        backgrounds=tuple(backgrounds),
        timeline=timeline,
        **slowdowns(log),
    )


def _placed(request: ShareRequest, keepers: Sequence[Keeper]) -> list[tuple[int, Keeper]]:
    return [(_beside(request, i), keeper) for i, keeper in enumerate(keepers)]


def _beside(request: ShareRequest, number: int) -> int:
    """The i-th background runs beside device i, counted round the devices that have work."""
    devices = request.plan.devices
    return devices[number % len(devices)]


@contextmanager
def _kept(request: ShareRequest, folder: Path) -> Iterator[list[Keeper]]:
    """Keepers of all background jobs; whatever happens, no process is left."""
    on_gpu = request.options.device == "cuda"
    share_bytes = (available_bytes() - reserve_bytes()) // (2 * max(len(request.backgrounds), 1))
    keepers = [
        Keeper(
            background,
            Gate.create(folder / f"gate-{i}"),
            background_path(request.run_folder, i),
            memory_bytes=None if on_gpu else max(share_bytes, 64 << 20),
            autocast=request.options.autocast,
            gpu=_beside(request, i) if on_gpu else None,
            gpu_share=0.5 / _num_beside(request, _beside(request, i)),
        )
        for i, background in enumerate(request.backgrounds)
    ]
    watches = [MemoryWatch(keepers)]
    for device in request.plan.devices if on_gpu else ():
        here = [keeper for beside, keeper in _placed(request, keepers) if beside == device]
        watches += [MemoryWatch(here, memory=partial(_told_memory, here[0].gate))] if here else []
    try:
        for watch in watches:
            watch.start()
        yield keepers
    finally:
        for watch in watches:
            watch.stop()
        for keeper in keepers:  # those that have not ended by now have learnt for nobody
            keeper.hurry()
        _stop(keepers)


def _stop(keepers: Sequence[Keeper], interrupts: Callable[[], int] = lambda: 0) -> None:
    """All at once, as each may take a while; those that have ended are asked in vain. Ctrl-C has them killed."""
    stopping = [threading.Thread(target=keeper.stop, daemon=True) for keeper in keepers]
    for thread in stopping:
        thread.start()
    told_s = time.monotonic() + _QUIETLY_S
    while waiting := [thread for thread in stopping if thread.is_alive()]:
        waiting[0].join(0.1)
        if interrupts():
            for keeper in keepers:
                keeper.hurry()
        elif time.monotonic() > told_s:
            told_s = math.inf
            _LOG.warning("background jobs write what they have learnt; press Ctrl-C to end them at once")


def _num_beside(request: ShareRequest, device: int) -> int:
    """Background jobs on a device."""
    return sum(1 for i in range(len(request.backgrounds)) if _beside(request, i) == device)


def _told_memory(gate: Gate) -> tuple[int, int]:
    """(free, reserve) of a GPU as its worker tells; plenty before."""
    told = gate.told_memory()
    return (told[0], int(FLOOR * told[1])) if told is not None else (1, 0)


def _calibrated(keeper: Keeper, *, timeout_s: float) -> float | None:
    """Lets a background train alone for a little; seconds a step, None where it does not get so far."""
    keeper.gate.open()
    try:
        if not _reaches(keeper, _WARM_UP_STEPS, timeout_s):
            return None
        begun_s, first = time.monotonic(), keeper.gate.done().steps
        _reaches(keeper, first + _CALIBRATION_STEPS, _CALIBRATION_S)
        time.sleep(max(begun_s + _LEAST_CALIBRATION_S - time.monotonic(), 0.0))
        count = keeper.gate.done().steps - first
        return (time.monotonic() - begun_s) / count if count else None
    finally:
        keeper.gate.close()


def _reaches(keeper: Keeper, steps: int, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s and keeper.kept.state in ("starting", "running"):
        if keeper.gate.done().steps >= steps:
            return True
        time.sleep(0.001)
    return False


def _outcome(keeper: Keeper, device: int, log: StepLog, *, alone_s: float | None, steps: int) -> BackgroundOutcome:
    kept = keeper.kept
    until_s = log.stopped_s if kept.last_step_s is None else min(log.stopped_s, kept.last_step_s)
    span_s = until_s - log.started_s
    return BackgroundOutcome(
        name=kept.name,
        device=device,
        steps=steps,
        kept=steps * alone_s / span_s if alone_s is not None and span_s > 0 else None,
        alone_step_s=alone_s,
        state=kept.state,
        reason=kept.reason,
        restarts=kept.restarts,
        evictions=kept.evictions,
        losses=kept.losses,
    )


def _observer(
    observer: Callable[[ShareProgress], None] | None, keepers: Sequence[Keeper]
) -> Callable[[Progress], None] | None:
    if observer is None:
        return None
    since_s, before = time.monotonic(), sum(keeper.gate.done().steps for keeper in keepers)

    def observe(progress: Progress) -> None:
        told = next((told for keeper in keepers if (told := keeper.gate.told())[0]), None)
        count = sum(keeper.gate.done().steps for keeper in keepers) - before
        observer(
            ShareProgress(
                step=progress.step,
                steps=progress.steps,
                samples_per_s=progress.samples_per_s,
                slowdown=told[1] / told[0] if told else None,
                background_steps=count,
                background_steps_per_s=count / (time.monotonic() - since_s),
            )
        )

    return observe


def _with_background(
    timeline: Timeline | None, placed: Sequence[tuple[int, Keeper]], begin_s: float
) -> Timeline | None:
    """The measured timeline with the slices that ran in its time."""
    if timeline is None or not timeline.events:
        return timeline
    last_s = timeline.stop_s
    begins: dict[int, float] = {}
    for event in timeline.events:
        begins.setdefault(event.step, event.start_s)  # events come in order of their start
    steps = sorted(begins)
    starts_s = [begins[step] for step in steps]
    slices = [
        Event(
            device=device,
            lane="background",
            kind="background",
            block=keeper.background.name,
            start_s=max(start_s - begin_s, 0.0),
            stop_s=min(stop_s - begin_s, last_s),
            step=steps[max(bisect_right(starts_s, start_s - begin_s) - 1, 0)],
        )
        for device, keeper in placed
        for start_s, stop_s in keeper.gate.slices()
        if stop_s > begin_s and start_s - begin_s < last_s
    ]
    return replace(timeline, events=tuple(sorted((*timeline.events, *slices), key=lambda event: event.start_s)))


def _shared_memory() -> str | None:
    """Where files lie in memory, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
