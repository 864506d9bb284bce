"""Training a job by a plan: the public way to run.

Takes a job and a plan (or a number of devices). Lowers the plan, writes a run folder, starts one worker a device,
watches them, and returns losses, times and the measured timeline. Failures end in one RunError that names the worker,
what it was doing and, if the user's code raised, its line; no process is left behind, whatever happens. On Ctrl-C the
workers write a checkpoint and end; a second Ctrl-C ends them at once.
"""

import contextlib
import datetime
import logging
import math
import pickle
import platform
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from burstpool.artifact import write_whole
from burstpool.cluster.detect import check_workers
from burstpool.engine.base import Engine, Workers
from burstpool.engine.failure import WorkerError
from burstpool.engine.local import LocalEngine, refuse_while_imported
from burstpool.errors import ArtifactError, JobError, RunError
from burstpool.job import Job, as_recorded, from_anywhere, load_job
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan
from burstpool.run.checkpoint import CheckpointState, latest_checkpoint
from burstpool.run.even import even_plan
from burstpool.run.folder import RunFolder, RunRecord, held, new_run_path
from burstpool.run.options import RunOptions
from burstpool.run.order import check_enough
from burstpool.run.outcome import Result, WorkerResult, write_outcome
from burstpool.run.progress import Observer, RunLog
from burstpool.run.setup import trace_job
from burstpool.run.worker import JobSource, Task, work
from burstpool.schedule.lower import lower
from burstpool.schedule.validate import validate
from burstpool.version import __version__

_LOG = logging.getLogger(__name__)
_POLL_S = 0.25
_ONE_INTERRUPT_S = 0.3
"""Signals within so long of each other are one."""


class InterruptedRun(KeyboardInterrupt):
    """Ctrl-C, or SIGTERM, ended a run; it can be gone on with."""

    def __init__(self, folder: Path, step: int | None) -> None:
        super().__init__(f"stopped after step {step}" if step is not None else "stopped")
        self.folder, self.step = folder, step


def train(
    job: Job | str,
    plan: Plan | int,
    *,
    steps: int,
    run_folder: str | Path | None = None,
    resume: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
    inputs: PlanInputs | None = None,
    engine: Engine | None = None,
    observer: Observer | None = None,
) -> Result:
    """Trains up to step `steps` and returns what came of it.

    `job` is a Job that can be pickled, or `"job.py"` or `"zoo:NAME"` with `settings`, which every worker loads for
    itself. `plan` may be a number of devices: the samples are then split evenly. The run folder is made under `runs/`
    unless given. `resume` names a run folder to go on with from its newest checkpoint, also on another plan; what is
    trained is then written there too, unless `run_folder` says otherwise. `inputs` is what the plan was made from, for
    reports that compare the run with its prediction.
    """
    task, start = prepare(
        job, plan, steps=steps, run_folder=run_folder, resume=resume, settings=settings, options=options, inputs=inputs
    )
    return run_prepared(task, start, engine=engine, observer=observer)


def run_prepared(
    task: Task, start: "Start", *, engine: Engine | None = None, observer: Observer | None = None
) -> Result:
    """Runs what `prepare` prepared; its other arguments are those of `train`."""
    with held(start.folder.path):
        watch = _Watch(task, start, engine or LocalEngine(), observer)
        results = watch.run()
        return write_outcome(start.folder, task.schedule, watch.log.losses, results)


def run_for_others(task: Task, start: "Start", *, engine: Engine, observer: Observer | None = None) -> None:
    """The same, but leaves losses and checkpoints only: whoever has the time for it makes weights of these."""
    with held(start.folder.path):
        _Watch(task, start, engine, observer).run()


def resumed(task: Task, folder: RunFolder) -> "tuple[Task, Start]":
    """The same task from the newest checkpoint of its folder on, or from the beginning where there is none."""
    checkpoint = latest_checkpoint(folder.checkpoints)
    step = CheckpointState.load(checkpoint / "state.json").step if checkpoint is not None else 0
    folder.cut_losses(step)
    again = replace(task, resume_from=None if checkpoint is None else str(checkpoint.resolve()))
    return again, Start(folder=folder, checkpoint=checkpoint, step=step)


def prepare(
    job: Job | str,
    plan: Plan | int,
    *,
    steps: int,
    run_folder: str | Path | None = None,
    resume: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    options: RunOptions | None = None,
    inputs: PlanInputs | None = None,
) -> "tuple[Task, Start]":
    """Writes the run folder that `train` would, and starts nothing; its arguments are those of `train`."""
    refuse_while_imported()
    options = options or RunOptions()
    source = JobSource(source=job, settings=dict(settings or {})) if isinstance(job, str) else None
    loaded = job if isinstance(job, Job) else load_job(job, settings)
    if isinstance(plan, int):
        check_workers(plan)
    graph = trace_job(loaded, fallback=options.fallback).graph
    chosen = even_plan(graph, num_devices=plan, batch=loaded.batch, name=loaded.name) if isinstance(plan, int) else plan
    check_enough(len(loaded.data), samples_per_step=chosen.batch * chosen.num_minibatches)  # type: ignore[arg-type]
    schedule = lower(chosen, graph)
    validate(schedule, chosen, graph)
    start = _start_of(resume, run_folder, loaded, steps)
    task = Task(
        job=source or loaded,
        plan=chosen,
        schedule=schedule,
        options=options,
        steps=steps,
        checkpoints=str(start.folder.checkpoints.resolve()),
        resume_from=None if start.checkpoint is None else str(start.checkpoint.resolve()),
    )
    _check_picklable(task)
    with held(start.folder.path):  # somebody else may train there, from what lies there
        write_artifacts(start.folder, task, loaded, source.source if source else "")
        if inputs is not None:
            inputs.save(PlanInputs.path(start.folder.plan))
        start.folder.cut_losses(start.step)
    return task, start


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From where a run starts."""

    folder: RunFolder
    checkpoint: Path | None
    step: int


class _Watch:
    """Watches the workers of one run."""

    def __init__(self, task: Task, start: Start, engine: Engine, observer: Observer | None) -> None:
        self.task, self.start, self.engine, self.observer = task, start, engine, observer
        self.log = RunLog(task.plan, steps=task.steps, first_step=start.step)

    def run(self) -> list[WorkerResult]:
        """Until all workers have ended; what they returned, by rank."""
        workers = self.engine.start(
            work, self.task, num_workers=self.task.plan.num_devices, silence_s=self.task.options.timeout_s
        )
        try:
            with counted_interrupts() as count:
                results = self._watch(workers, count)
        except WorkerError as error:
            raise RunError(self._explained(error)) from None
        finally:
            workers.terminate()
        if results[0].step < self.task.steps:
            raise InterruptedRun(self.start.folder.path, results[0].step)
        return results

    def _watch(self, workers: Workers, interrupts: Callable[[], int]) -> list[WorkerResult]:
        asked = False
        while (results := workers.results()) is None:
            self._take(workers)
            if interrupts() > 1:
                raise InterruptedRun(self.start.folder.path, None)
            if interrupts() and not asked:
                asked = True
                _LOG.warning("stopping: the workers write a checkpoint; press Ctrl-C again to end them at once")
                workers.ask_to_stop()
        return results

    def _take(self, workers: Workers) -> None:
        new = False
        for report in workers.poll(_POLL_S):
            whole = self.log.add(report.rank, report.content)
            self.start.folder.add_losses(whole)
            new = new or bool(whole)
        progress = self.log.progress() if new and self.observer else None
        if progress is not None and self.observer is not None:
            self.observer(progress)

    def _explained(self, error: WorkerError) -> str:
        folder = self.start.folder
        text = "\n".join(f"rank {rank}:\n{trace}" for rank, trace in sorted(error.traces.items()))
        where = ""
        if text:
            with contextlib.suppress(ArtifactError):  # a full disk may be what it failed of
                where = f"; tracebacks in {write_whole(folder.error, text)}"
        newest = latest_checkpoint(folder.checkpoints)
        if newest is not None and str(newest.resolve()) in str(error):
            newest = None  # it is what cannot be read
        again = f"burstpool train --resume {shlex.quote(str(folder.path))}"
        how = again if isinstance(self.task.job, JobSource) else f"train(…, resume=…) with {folder.path}"
        go_on = f"; {how} goes on from {newest.name}" if newest is not None else ""
        return f"{error}{go_on}{where}"


@contextlib.contextmanager
def counted_interrupts(*, most: int | None = None) -> Iterator[Callable[[], int]]:
    """Counts SIGINT and SIGTERM instead of letting them break into whatever runs; only the main thread can.

    One that is sent to a process and to its group, as `timeout` does, counts once. With `most`, those after so many do
    break in.
    """
    count, counted_s = 0, -math.inf

    def note(*_: Any) -> None:
        nonlocal count, counted_s
        if time.monotonic() - counted_s < _ONE_INTERRUPT_S:
            return
        count, counted_s = count + 1, time.monotonic()
        if most is not None and count > most:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: count
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start_of(resume: str | Path | None, run_folder: str | Path | None, job: Job, steps: int) -> Start:
    if steps < 1:
        raise RunError(f"steps={steps} must be at least 1")
    if resume is None:
        path = Path(run_folder) if run_folder is not None else new_run_path(job.name, Path("runs"))
        return Start(folder=RunFolder.create(path), checkpoint=None, step=0)
    earlier = RunFolder.open(Path(resume))
    checkpoint = latest_checkpoint(earlier.checkpoints)
    same = run_folder is None or Path(run_folder).resolve() == earlier.path.resolve()
    folder = earlier if same else RunFolder.create(Path(run_folder or ""))
    if checkpoint is None:
        return Start(folder=folder, checkpoint=None, step=0)
    step = CheckpointState.load(checkpoint / "state.json").step
    if step >= steps:
        raise RunError(f"{earlier.path} has trained {step} steps already; pass more than that as the number of steps")
    return Start(folder=folder, checkpoint=checkpoint, step=step)


def _check_picklable(task: Task) -> None:
    if isinstance(task.job, JobSource):
        return
    try:
        pickle.dumps(task.job)
    except Exception as error:
        raise JobError(
            f"job {task.job.name!r} cannot be sent to worker processes ({error}); write it as a function in a file and "
            'pass "job.py", or build it from functions and classes of a module, without lambdas'
        ) from None


def write_artifacts(folder: RunFolder, task: Task, job: Job, source: str) -> None:
    """What a run folder says of a run that begins; `source` is "" for a job that was made in a program."""
    task.plan.save(folder.plan)
    task.schedule.save(folder.schedule)
    task.options.save(folder.options)
    RunRecord(
        job=job.name,
        source=from_anywhere(source) if source else "",
        settings={name: as_recorded(value) for name, value in job.settings.items()},
        steps=task.steps,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"burstpool": __version__, "torch": torch.__version__, "python": platform.python_version()},
    ).save(folder.record)
