"""Worker: what one process of a run does, from joining the others to handing back its result.

Started by an engine (`work`), or by torchrun with a run folder that `burstpool train … --prepare` made or that holds a
run to be gone on with:

    torchrun --nproc-per-node 4 -m burstpool.run.worker RUN_FOLDER
"""

import contextlib
import gc
import logging
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from burstpool.cluster.cores import calm_gloo, claim_core
from burstpool.cluster.heap import keep_freed_memory
from burstpool.engine.base import Place, phrase
from burstpool.errors import RunError
from burstpool.job import Job, load_job
from burstpool.plan.plan import Plan
from burstpool.run.checkpoint import held_tensors, load_checkpoint, save_checkpoint, state_of
from burstpool.run.executor import Executor
from burstpool.run.loading import Loader
from burstpool.run.losses import LossReader
from burstpool.run.options import RunOptions
from burstpool.run.outcome import WorkerResult
from burstpool.run.progress import Reporter
from burstpool.run.recorder import RecordedStep, clock_offset_ns
from burstpool.run.setup import Seat, set_up
from burstpool.run.voting import Vote
from burstpool.schedule.actions import Schedule

_LOG = logging.getLogger(__name__)
_LOADING = phrase("loading samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """Where every worker loads the job from."""

    source: str
    settings: dict[str, object]

    def load(self) -> Job:
        """The job."""
        return load_job(self.source, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What all workers of a run are told; picklable."""

    job: Job | JobSource
    plan: Plan
    schedule: Schedule
    options: RunOptions
    steps: int
    """At which step the run ends."""
    checkpoints: str
    """Folder for checkpoints."""
    resume_from: str | None = None
    """A checkpoint."""


def work(place: Place, task: Task) -> WorkerResult:
    """Trains; what every worker process runs."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with joined(place, task.options, idle=idle_ranks(task)) as seat:
        return train_at(seat, place, task)


def train_at(seat: Seat, place: Place, task: Task) -> WorkerResult:
    """The same, among workers that have met."""
    result = _trained(seat, place, task)
    # What a run leaves refers to itself in circles. Until those are gone its process groups keep their threads, which
    # wake now and then, and one that lets go of a tensor while the interpreter ends takes the process down.
    gc.unfreeze()
    gc.collect()
    return result


def _trained(seat: Seat, place: Place, task: Task) -> WorkerResult:
    job = task.job.load() if isinstance(task.job, JobSource) else task.job
    place.doing.say(phrase("tracing the model"))
    executor, loader = set_up(job, task.plan, task.schedule, task.options, seat)
    result = _Training(place, task, job, executor, loader).run()
    executor.part.groups.close()
    return result


class _Training:
    """The steps of one worker."""

    def __init__(self, place: Place, task: Task, job: Job, executor: Executor, loader: Loader) -> None:
        self.place, self.task, self.job, self.executor, self.loader = place, task, job, executor, loader
        self.control = executor.part.groups.control
        self.holdings, self.model = executor.part.holdings, executor.part.traced.model
        self.tensors = held_tensors(self.model, self.holdings, place.rank)
        self.step = 0
        self.saved_step: int | None = None
        self.checkpoint = ""

    def run(self) -> WorkerResult:
        """To the last step, or until asked to stop; ends with a checkpoint."""
        self._resume()
        options, place = self.task.options, self.place
        vote = Vote(self.control, first_step=self.step)
        reporter = Reporter(place.report, first_step=self.step)
        losses = LossReader(self.executor.part.on, allow_nan=options.allow_nan)
        gc.collect()
        gc.freeze()  # what is there now stays: looking through it again and again would stall steps
        begun = time.perf_counter()
        while self.step < self.task.steps:
            if vote.is_due(self.step) and vote.stops(self.step, asked=place.stop_asked()):
                break
            place.doing.begin_step(self.step)
            place.doing.say(_LOADING)
            known = losses.read(self.step, self.executor.run(self.step, self.loader.load()))
            self.step += 1
            ended = time.perf_counter()
            reporter.add(known, ended - begun, self._busy_s())
            begun = ended
            if options.checkpoint_every and self.step % options.checkpoint_every == 0:
                reporter.flush(losses.finish())
                self._save()
                begun = time.perf_counter()  # a checkpoint is no part of a step
        reporter.flush(losses.finish())
        self._save()
        return self._result()

    def _resume(self) -> None:
        if self.task.resume_from is None:
            return
        self.place.doing.say(phrase("reading a checkpoint"))
        self.checkpoint = self.task.resume_from
        path = Path(self.task.resume_from)
        state = load_checkpoint(path, tensors=self.tensors, update=self.executor.update, control=self.control)
        if state.seed != self.job.seed:
            raise RunError(f"checkpoint {path} was trained with seed {state.seed}, the job has {self.job.seed}")
        self.step = self.saved_step = state.step
        self.loader.start_at(state.position)

    def _save(self) -> None:
        if self.saved_step == self.step:
            return
        self.place.doing.say(phrase("writing a checkpoint"))
        self.executor.links.flush()
        state = state_of(
            model=self.model,
            holdings=self.holdings,
            step=self.step,
            position=self.loader.position,
            seed=self.job.seed,
            scale=self.executor.update.scale,
        )
        path = save_checkpoint(
            Path(self.task.checkpoints),
            state,
            tensors=self.tensors,
            update=self.executor.update,
            control=self.control,
            keep=self.task.options.keep_checkpoints,
        )
        self.checkpoint, self.saved_step = str(path), self.step

    def _busy_s(self) -> float | None:
        if not self.executor.times_compute:
            return None
        busy_ns, self.executor.recorder.busy_ns = self.executor.recorder.busy_ns, 0
        return busy_ns / 1e9

    def _result(self) -> WorkerResult:
        offset = clock_offset_ns()
        recorded = [
            RecordedStep(
                step=step.step,
                starts_ns=[time_ns + offset for time_ns in step.starts_ns],
                stops_ns=[time_ns + offset if time_ns else 0 for time_ns in step.stops_ns],
            )
            for step in self.executor.recorder.recorded()
        ]
        return WorkerResult(step=self.step, checkpoint=self.checkpoint, recorded=recorded)


def idle_ranks(task: Task) -> set[int]:
    """Workers that the plan gives nothing to do."""
    return {rank for rank, actions in enumerate(task.schedule.devices) if not actions}


@contextlib.contextmanager
def joined(place: Place, options: RunOptions, *, idle: Collection[int] = ()) -> Iterator[Seat]:
    """Meets the other workers; leaves them at the end. `idle`: those that do no more than that, and need no core."""
    place.doing.say(phrase("joining the other workers"))
    on, backend = _device(place, options)
    if place.host in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks the host's name, which may not resolve
    if options.device == "cpu" and torch.get_num_threads() == 1 and place.rank not in idle:
        first = place.rank - place.local_rank
        claim_core(num_workers=sum(rank not in idle for rank in range(first, first + place.num_local)))
    if options.device == "cpu":
        keep_freed_memory()
    with calm_gloo():
        _meet(place, timedelta(seconds=options.timeout_s))
    try:
        control = dist.group.WORLD
        assert control is not None
        yield Seat(device=place.rank, on=on, backend=backend, control=control, doing=place.doing)
    finally:
        dist.destroy_process_group()


def _meet(place: Place, timeout: timedelta) -> None:
    if place.port:
        store = dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.num_workers, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)  # by the environment variables that torchrun sets


def _device(place: Place, options: RunOptions) -> tuple[torch.device, Literal["gloo", "nccl"]]:
    if options.device == "cpu":
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if count == 0:
        raise RunError("there is no CUDA device here; pass device='cpu'")
    device = torch.device("cuda", place.local_rank % count)
    torch.cuda.set_device(device)
    if place.num_local <= count:
        return device, "nccl"
    if place.rank == 0:
        _LOG.warning("%d workers share %d GPUs: they talk over gloo, by way of the host", place.num_local, count)
    return device, "gloo"


if __name__ == "__main__":
    from burstpool.run.torchrun import main

    main()
