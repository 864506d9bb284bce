"""A sweep: many trials of one job, fused into arrays, each as if it were trained alone.

    result = burstpool.sweep("job.py", {"lr": "log:1e-3..1e-1", "width": [32, 64]}, search="asha", trials=64)
    result.best.settings, result.weights

The main flow: check the space, measure the array size, write the run folder, run, export.
"""

import contextlib
import datetime
import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from burstpool.errors import BurstpoolError, RunError
from burstpool.fusion.array import Execution
from burstpool.job import Job, fingerprint, from_anywhere, in_words, job_function, model_arguments
from burstpool.limits import LARGEST_BATCH, MOST_THREADS
from burstpool.run.folder import held, new_run_path
from burstpool.sweeping.feed import moved
from burstpool.sweeping.floor import Builder, Floor
from burstpool.sweeping.folder import SweepFolder, SweepRecord, SweepState
from burstpool.sweeping.objective import HELD_OUT, TRAINING, held_out_samples
from burstpool.sweeping.options import Autocast, StepOptions
from burstpool.sweeping.outcome import SweepResult, write_outcome
from burstpool.sweeping.runner import Observer, Runner, SweepProgress
from burstpool.sweeping.search import Search, SearchSetting, make_search, number_of_trials
from burstpool.sweeping.sizing import Sizing, measure_sizing
from burstpool.sweeping.space import checked_space
from burstpool.sweeping.trials import Trial
from burstpool.version import __version__

_LOG = logging.getLogger(__name__)
_MOST = {"batch": LARGEST_BATCH, "threads": MOST_THREADS}


def sweep(
    job: str | Path | Callable[..., Any] | None,
    space: Mapping[str, Any] | None = None,
    *,
    search: str = "grid",
    trials: int | None = None,
    steps: int = 100,
    seed: int = 0,
    eta: int = 3,
    first_rung: int | None = None,
    array_size: int | None = None,
    mode: Execution = "fastest",
    device: str = "cpu",
    threads: int | None = None,
    batch: int | None = None,
    autocast: Autocast | None = None,
    clip_norm: float | None = None,
    compiled: bool = False,
    keep_all: bool = False,
    checkpoint_every_s: float = 30.0,
    run_folder: str | Path | None = None,
    resume: str | Path | None = None,
    observer: Observer | None = None,
) -> SweepResult:
    """Trains the trials that a search asks for, `steps` steps each, and returns them all and the best.

    `job` is `"job.py"`, `"zoo:NAME"` or a function that returns a Job; `space` says which values its arguments take:
    a list, a `Range`, or a text as `--set` takes it. `search` is grid, random, asha or optuna. `seed` is the search's;
    a trial's own is its job's. `array_size` is measured unless given; `threads` are torch's on the CPU. `autocast`
    is bf16 or fp16, `clip_norm` the most that the norm of a trial's gradients may be, as `train` has them. With
    `compiled` steps made by torch.compile are tried, too. `resume` names a run folder to go on with: all else is then
    as it was, and only a function must be passed again.
    """
    begin_s = time.perf_counter()
    if resume is not None:
        return _resumed(job, Path(resume), checkpoint_every_s, observer)
    if job is None:
        raise RunError("say which job to sweep: burstpool sweep job.py --set lr=0.1,0.03")
    builder = _builder(job)
    checked = checked_space(space or {}, builder.function, source=builder.source)
    if not checked.axes:
        raise RunError("there is nothing to search; give at least one --set name=a,b,c")
    _check(mode, device, {"steps": steps, "array-size": array_size, "batch": batch, "threads": threads, "seed": seed})
    step_options = StepOptions(autocast=autocast, clip_norm=clip_norm, compiled=compiled)
    count = number_of_trials(search, checked, trials)
    setting = SearchSetting(space=checked, num_trials=count, steps=steps, seed=seed, eta=eta, first_rung=first_rung)
    asked = make_search(search, setting)

    watching = _Watching(observer, num_trials=count, steps=steps, begin_s=begin_s)

    def measure(job: Job) -> Sizing:
        with step_options.autocasting(torch.device(device)):
            _try_out(job, torch.device(device), batch or job.batch)
        return measure_sizing(
            job,
            most=count,
            places=array_size,
            device=torch.device(device),
            mode=mode,
            batch=batch,
            options=step_options,
            tell=watching.measures,
        )

    with _threads(threads):
        first, sizing = _first_measured(builder, asked, count, measure)
    if watching.error is not None:
        raise watching.error
    path = Path(run_folder) if run_folder is not None else new_run_path(f"{builder.name}-sweep", Path("runs"))
    folder = SweepFolder.create(path)
    record = SweepRecord(
        job=builder.name,
        source=from_anywhere(job) if isinstance(job, str | Path) else "",
        source_fingerprint=fingerprint(job) if isinstance(job, str | Path) else "",
        space=checked,
        search=search,
        num_trials=count,
        steps=steps,
        seed=seed,
        eta=eta,
        first_rung=first_rung,
        mode=mode,
        device=device,
        threads=threads or torch.get_num_threads(),
        batch=batch,
        step_options=step_options,
        keep_all=keep_all,
        objective=TRAINING if first.evaluation is None else HELD_OUT,
        sizing=sizing,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        versions={"burstpool": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )
    with held(folder.path), _threads(record.threads):
        record.save(folder.record)
        floor = Floor(folder, record, builder)
        floor.begin_s = begin_s
        runner = Runner(floor, asked, checkpoint_every_s=checkpoint_every_s, observer=observer)
        return write_outcome(folder, record, runner.run())


def _resumed(
    job: str | Path | Callable[..., Any] | None, path: Path, checkpoint_every_s: float, observer: Observer | None
) -> SweepResult:
    folder = SweepFolder.open(path)
    record = SweepRecord.load(folder.record)
    if job is None and not record.source:
        raise RunError(f"{path} is a sweep of a function; go on with it in Python: burstpool.sweep(function, resume=…)")
    if not callable(job):
        job = _same_job(job, record, path)
    with held(folder.path):
        return _gone_on(job, folder, record, checkpoint_every_s, observer)


def _same_job(job: str | Path | None, record: SweepRecord, folder: Path) -> str:
    """The job that a sweep began with; it may be named again where its file lies elsewhere by now."""
    named = from_anywhere(job or record.source)
    found = fingerprint(named)
    moved_only = found == record.source_fingerprint != "" and _function_name(named) == _function_name(record.source)
    if named != from_anywhere(record.source) and not moved_only:
        raise RunError(f"{folder} is a sweep of {record.source or 'a function'}, not of {job}; leave the job out")
    if found and record.source_fingerprint not in ("", found):
        _LOG.warning("%s was changed since the sweep began: trials that are made from now on may differ", named)
    return named


def _function_name(source: str) -> str:
    return source.partition(".py:")[2] or "job"


def _gone_on(
    job: str | Callable[..., Any],
    folder: SweepFolder,
    record: SweepRecord,
    checkpoint_every_s: float,
    observer: Observer | None,
) -> SweepResult:
    state = folder.load_state()
    if state.finished:
        return write_outcome(folder, record, state)
    _check(record.mode, record.device, {})
    builder = _builder(job)
    space = checked_space(record.space.axes, builder.function, source=builder.source)
    setting = SearchSetting(
        space=space,
        num_trials=record.num_trials,
        steps=record.steps,
        seed=record.seed,
        eta=record.eta,
        first_rung=record.first_rung,
    )
    search = make_search(record.search, setting)
    with _threads(record.threads):
        runner = Runner(
            Floor(folder, record, builder), search, checkpoint_every_s=checkpoint_every_s, observer=observer
        )
        return write_outcome(folder, record, runner.run())


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _builder(job: str | Path | Callable[..., Any]) -> Builder:
    if callable(job):
        name = getattr(job, "__name__", "job")
        return Builder(job, source=name, name=name)
    name, function = job_function(job)
    return Builder(function, source=str(job), name=name)


def _first_measured(
    builder: Builder, search: Search, count: int, measure: Callable[[Job], Sizing]
) -> tuple[Job, Sizing]:
    """The first trial's job that can be made and trained, and the sizes measured with it."""
    tried: list[Trial] = []
    reason = ""
    while len(tried) < count and (found := search.next(tried)) is not None:
        try:
            job = builder.job(found.settings)
            return job, measure(job)
        except Exception as error:
            reason = reason or (str(error) if isinstance(error, BurstpoolError) else in_words(error))
            tried.append(Trial(number=len(tried), settings=found.settings, state="failed", until=found.until))
    raise RunError(f"no trial of {builder.source} can be trained; the first fails: {reason}")


def _try_out(job: Job, device: torch.device, batch: int) -> None:
    """Makes all that a job describes and takes one loss of each of its data; raises whatever the user's code raises."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # dropout must not move the user's stream
        model = job.build_model().to(device)
        optimizer = job.optimizer(model.parameters())
        if job.scheduler is not None:
            job.scheduler(optimizer)
        _take_loss(job, model, moved(job.samples(batch), device))
        if job.evaluation is not None:
            samples, count = held_out_samples(job, job.evaluation)
            _take_loss(job, model.eval(), moved(samples.collated(range(min(batch, count)), 0), device))


def _take_loss(job: Job, model: torch.nn.Module, batch: tuple[Any, Any]) -> None:
    args, kwargs = model_arguments(batch[0])
    job.loss(model(*args, **kwargs), batch[1])


class _Watching:
    """Tells an observer what is measured; what it raises is kept, as it is no trial's fault."""

    def __init__(self, observer: Observer | None, *, num_trials: int, steps: int, begin_s: float) -> None:
        self._observer, self._num_trials, self._steps, self._begin_s = observer, num_trials, steps, begin_s
        self.error: Exception | None = None

    def measures(self, size: int) -> None:
        """An array of so many members."""
        if self._observer is None or self.error is not None:
            return
        wall_time_s = time.perf_counter() - self._begin_s
        try:
            self._observer(
                SweepProgress(
                    num_trials=self._num_trials, steps=self._steps, wall_time_s=wall_time_s, measured_size=size
                )
            )
        except Exception as error:
            self.error = error


def _check(mode: str, device: str, counts: Mapping[str, int | None]) -> None:
    for name, value in counts.items():
        least = 0 if name == "seed" else 1
        if value is not None and value < least:
            raise RunError(f"--{name} {value} must be at least {least}")
        if value is not None and value > (most := _MOST.get(name, value)):
            raise RunError(f"--{name} {value} must be at most {most}")
    if mode not in get_args(Execution):
        raise RunError(f"--mode {mode} is unknown; give one of {', '.join(get_args(Execution))}")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise RunError(f"--device {device} is unknown; give cpu or cuda")
    try:
        index = torch.device(device).index
    except RuntimeError:
        raise RunError(f"--device {device} is no device; give cpu, cuda or cuda:1") from None
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RunError(f"--device {device}: there is no CUDA device here")
    if device.startswith("cuda") and (index or 0) >= torch.cuda.device_count():
        raise RunError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices here, counted from 0")


__all__ = ["SweepResult", "SweepState", "sweep"]
