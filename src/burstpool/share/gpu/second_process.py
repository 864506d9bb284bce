"""A background job that CUDA graphs cannot hold: a process of its own on the same GPU, let go one step at a time.

Its steps run eagerly and are not cut; the foreground's process gives a permit for each and sees when it has ended.
Where an MPS server runs, both processes' kernels run side by side on the GPU, else the driver gives the GPU to one
process after the other, and the controller finds out what that costs. Whatever happens to the process, the foreground's
has nothing to do with it but a counter in shared memory. To leave the GPU it writes a checkpoint and ends; to come back
another process goes on from that, which takes as long as starting does but holds up nobody.
"""

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing

from burstpool.engine.local import die_with, kill_at_exit, kill_running, leave_signals_to_the_parent
from burstpool.errors import RunError, ShareError, in_a_line
from burstpool.job import Job
from burstpool.run.checkpoint import (
    CheckpointState,
    held_tensors,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    state_of,
)
from burstpool.run.even import even_plan
from burstpool.run.folder import RunFolder
from burstpool.run.options import RunOptions
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.run.torchrun import Silent
from burstpool.run.trainer import write_artifacts
from burstpool.run.worker import JobSource, Task
from burstpool.schedule.lower import lower
from burstpool.share.base import ENDLESS
from burstpool.share.gpu.at_work import LAST_STEP
from burstpool.share.gpu.evictions import Where
from burstpool.share.gpu.loop import alone_in_a_group

_LOG = logging.getLogger(__name__)
_WARM_UP_STEPS = 3
_CALIBRATION_STEPS = 5
_START_S = 300.0
"""How long the process may take to its first steps."""
_LEAVE_S, _SAVE_S = 5.0, 60.0
"""How long it may take to write a checkpoint and end before it is killed: where memory is wanted, and after its last
step or the foreground's. One that is pushed in the midst of that has as long from then as where memory is wanted."""

_QUIETLY_S = 3.0
"""How long it may be waited for at the end until that is said."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A step that was permitted."""

    process: "SecondProcess"
    number: int

    def query(self) -> bool:
        """Whether it has ended; those of a process that is gone have."""
        return self.process.finished >= self.number or bool(self.process.ended) or self.process.where == "away"


class SecondProcess:
    """A `Filler` (see `at_work.py`) whose pieces are whole steps of another process."""

    leaves_by_itself = True

    def __init__(
        self,
        name: str,
        source: JobSource | Job,
        *,
        checkpoints: Path,
        autocast: Literal["bf16"] | None = None,
        memory_bytes: int | None = None,
        hang_s: float = 60.0,
        device: Literal["cpu", "cuda"] = "cuda",
        most_steps: int = ENDLESS,
        is_in_a_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until the process has trained some steps, with the GPU its own, so that its speed alone is known.

        `most_steps`: at which step it has ended, these included. `is_in_a_hurry`: whether whoever waits for its end
        waits no longer; what is not written by then is lost.
        """
        self.name, self.ended, self.done_s, self.steps_done = name, "", 0.0, 0
        self.last_step_s: float | None = None
        self.where: Where = "here"
        self.losses: list[list[float]] = []
        self.steps_before = 0
        """Of `losses`, how many are of steps that told its speed, before any was let go."""
        self._source, self._checkpoints, self._autocast = source, checkpoints, autocast
        self._memory_bytes, self._hang_s, self._device = memory_bytes, hang_s, device
        self._most_steps, self._is_in_a_hurry = most_steps, is_in_a_hurry
        self._times_s: list[float] = []
        self._context = torch.multiprocessing.get_context("spawn")
        # Without a lock: there is one writer, and it may be killed at any moment.
        self._finished = self._context.RawValue("q", 0)
        self._process: Any = None
        self._given = 0
        """Steps that were permitted."""
        self._start()
        try:
            self.alone_s = self._calibrated()
            self.steps_before = self.steps_done
        except BaseException:  # also where somebody is tired of waiting: nobody else knows of the process yet
            self.close()
            raise

    @property
    def finished(self) -> int:
        """Steps that have ended."""
        return int(self._finished.value)

    @property
    def next_s(self) -> float:
        """See `Filler`."""
        return self.alone_s

    @property
    def next_place(self) -> int:
        """See `Filler`: a whole step is one piece."""
        return 0

    @property
    def queue(self) -> None:
        """See `Filler`."""

    def launch(self, gate: torch.cuda.Event | None) -> Posted | None:
        """See `Filler`; a step begins at once, whatever the gate: its process does not know the other's events."""
        if self._given > self.finished:  # one at a time
            return None
        self._read()  # the last step may have been its last
        if self.ended or self.where != "here":
            return None
        self._given += 1
        self.done_s += self.alone_s
        self._heard = time.monotonic()
        self._permits.release()
        return Posted(self, self._given)

    def look_after(self) -> None:
        """See `Filler`."""
        self._read()
        if self.ended or self.where in ("leaving", "away"):
            return
        if not self._process.is_alive():
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            self._end(f"its process {how}")
        elif self._given > self.finished and time.monotonic() - self._heard > self._hang_s:
            self._end(f"a step has taken more than {self._hang_s:g} s")

    def leave(self, *, at_once: bool = False) -> None:
        """See `Evictable`; a process that does not leave in time is killed, and goes on from an older checkpoint."""
        self._ask_to_leave()
        deadline_s = self._heard + (_SAVE_S if self.ended else _LEAVE_S)
        if at_once:
            deadline_s = min(deadline_s, time.monotonic() + _LEAVE_S)
        while not self._has_left(deadline_s) and at_once:
            time.sleep(1e-3)

    def come_back(self) -> None:
        """See `Evictable`."""
        if self.where == "away":
            try:
                self._start()
            except OSError as error:  # no memory, or no number, for another process
                self._end(f"its process could not be started: {error}")
                return
            self.where = "returning"
            return
        self._read()
        if not self.ended and time.monotonic() - self._heard > _START_S:
            self._end(f"it did not come back within {_START_S:g} s")

    def finish(self) -> None:
        """See `Filler`."""
        deadline = time.monotonic() + self._hang_s

        def is_over() -> bool:
            if self._given > self.finished:
                self.look_after()
            waits_in_vain = self._is_in_a_hurry() or time.monotonic() > deadline
            return self._given <= self.finished or bool(self.ended) or waits_in_vain

        self._wait(is_over, "has not ended its step")
        self._read()

    def save(self) -> None:
        """At the end: it writes a checkpoint, where it is not away with one. RunError where the last step's is missing.

        One that has failed writes none; that one is missing which nobody waited for is no error.
        """
        if self.ended and self.last_step_s is None:
            return
        was_away = self.where in ("away", "returning")
        if not was_away:
            self._ask_to_leave()
            doing = "writes what it has learnt; press Ctrl-C to end it at once"
            self._wait(lambda: self._has_left(self._heard + _SAVE_S), doing)
        if (self.ended and self.last_step_s is None) or self._is_in_a_hurry():  # it failed while it wrote
            return
        newest = latest_checkpoint(self._checkpoints)
        step = CheckpointState.load(newest / "state.json").step if newest is not None else 0
        if step < len(self.losses) and (not was_away or self.ended):
            raise RunError(
                f"its process was gone, or was killed as it took too long; a checkpoint of step {step} is there"
            )

    def close(self) -> None:
        """See `Filler`."""
        if self._process is not None:
            kill_running([self._process])
            self._process = None

    def _ask_to_leave(self) -> None:
        if self.where == "here":
            self.where, self._heard = "leaving", time.monotonic()
            self._wants_out.value = 1
            self._permits.release()
        elif self.where == "returning":  # it has nothing that is not in its checkpoint
            self._heard = -math.inf

    def _has_left(self, deadline_s: float) -> bool:
        """Whether it has, or has failed; it is killed after the deadline."""
        if self.where == "away":
            return True
        over = not self._process.is_alive() or time.monotonic() > deadline_s or self._is_in_a_hurry()
        self._read()  # also what it said last
        if over and not (self.ended and self.last_step_s is None):
            self.close()
            self.where, self._given = "away", self.finished
        return self.where == "away"

    def _wait(self, is_over: Callable[[], bool], doing: str) -> None:
        told_s = time.monotonic() + _QUIETLY_S
        while not is_over():
            if time.monotonic() > told_s:
                told_s = math.inf
                _LOG.warning("background %s %s", self.name, doing)
            time.sleep(1e-3)

    def _start(self) -> None:
        """Another process, from the newest checkpoint if there is one."""
        self._permits, self._wants_out = self._context.Semaphore(0), self._context.RawValue("b", 0)
        self._answers, theirs = self._context.Pipe(duplex=False)
        self._given, self._heard = self.finished, time.monotonic()
        task = _Task(
            source=self._source,
            checkpoints=str(self._checkpoints),
            autocast=self._autocast,
            memory_bytes=self._memory_bytes,
            device=self._device,
            parent=os.getpid(),
        )
        process = self._context.Process(
            target=_train, args=(task, self._permits, self._finished, self._wants_out, theirs), daemon=True
        )
        process.start()
        self._process = process
        kill_at_exit(self, [process])
        theirs.close()

    def _calibrated(self) -> float:
        for _ in range(min(_WARM_UP_STEPS + _CALIBRATION_STEPS, self._most_steps)):
            self._permits.release()
            self._given += 1
        deadline = time.monotonic() + _START_S
        while len(self.losses) < self._given:
            self.look_after()
            if (self.ended and self.last_step_s is None) or time.monotonic() > deadline:
                reason = self.ended or f"it did not come to its first steps within {_START_S:g} s"
                raise ShareError(f"background {self.name} cannot be run: {reason}")
            time.sleep(1e-3)
        times_s = sorted(self._times_s[-_CALIBRATION_STEPS:])
        return times_s[len(times_s) // 2]

    def _read(self) -> None:
        """Takes in what the process has said, unless it has failed."""
        if self.ended and self.last_step_s is None:
            return
        with contextlib.suppress(EOFError, OSError):
            while self._answers.poll():
                kind, *rest = self._answers.recv()
                if kind == "failed":
                    self._end(rest[0])
                    return
                if kind == "resumed":
                    del self.losses[rest[0] :]  # one that was killed goes on from an older checkpoint
                    self.steps_before = min(self.steps_before, rest[0])
                    self.where = "here" if self.where == "returning" else self.where
                    continue
                if kind == "no room":
                    self.close()
                    self.where = "away"
                    return
                loss, time_s = rest
                self.losses.append([loss])
                self._times_s.append(time_s)
                self.steps_done = len(self.losses)
                if not math.isfinite(loss):
                    self._end("the loss is not finite")
                    return
                if len(self.losses) >= self._most_steps and self.last_step_s is None:
                    self._end_at_last()

    def _end_at_last(self) -> None:
        """It has trained all of its steps: it writes a checkpoint and leaves."""
        self.ended, self.last_step_s = LAST_STEP, time.monotonic()
        self.where, self._heard = "leaving", time.monotonic()
        self._wants_out.value = 1
        self._permits.release()

    def _end(self, reason: str) -> None:
        self.ended, self.where, self.last_step_s = reason, "away", None
        if self._process is not None:
            self._process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What the process is told; picklable."""

    source: JobSource | Job
    checkpoints: str
    """A folder; gone on from the newest in it."""
    autocast: Literal["bf16"] | None
    memory_bytes: int | None
    """Of the GPU's memory, what it may take."""
    device: Literal["cpu", "cuda"]
    parent: int


def _train(task: _Task, permits: Any, finished: Any, wants_out: Any, answers: Connection) -> None:
    """What the process runs."""
    die_with(task.parent)
    leave_signals_to_the_parent()
    os.nice(10)
    ready = False
    try:
        with alone_in_a_group() as control:
            training = _Training(task, control)
            ready = True
            answers.send(("resumed", training.step))
            while training.load_and_wait(permits, wants_out):
                answers.send(("step", *training.run()))
                finished.value += 1
            training.save()
    except BaseException as error:  # whatever the user's code does
        if isinstance(error, torch.OutOfMemoryError) and not ready and latest_checkpoint(Path(task.checkpoints)):
            answers.send(("no room",))  # it has run before, and will again
        else:
            answers.send(("failed", in_a_line(error)))
        raise SystemExit(1) from None


class _Training:
    """The job in its process."""

    def __init__(self, task: _Task, control: dist.ProcessGroup) -> None:
        self._folder, self._control = Path(task.checkpoints), control
        self._job = job = task.source.load() if isinstance(task.source, JobSource) else task.source
        device = torch.device(task.device, 0)
        if task.device == "cuda" and task.memory_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(task.memory_bytes / total, 1.0), device)
        traced = trace_job(job)
        plan = even_plan(traced.graph, num_devices=1, batch=job.batch, name=job.name)
        options = RunOptions(device=task.device, autocast=task.autocast, cuda_graphs=False)
        seat = Seat(device=0, on=device, backend="gloo", control=control, doing=Silent())
        schedule = lower(plan, traced.graph)
        self._as_run = Task(
            job=task.source, plan=plan, schedule=schedule, options=options, steps=1, checkpoints=task.checkpoints
        )
        self._executor, self._loader = set_up(job, plan, schedule, options, seat, traced=traced)
        part = self._executor.part
        self._tensors = held_tensors(part.traced.model, part.holdings, 0)
        self.step = 0
        if (checkpoint := latest_checkpoint(self._folder)) is not None:
            state = load_checkpoint(checkpoint, tensors=self._tensors, update=self._executor.update, control=control)
            self.step = state.step
            self._loader.start_at(state.position)
        self._position = self._loader.position

    def load_and_wait(self, permits: Any, wants_out: Any) -> bool:
        """Until the next step is permitted; False if the job is asked to leave instead."""
        self._position = self._loader.position  # of what is loaded now and may not be used
        self._loaded = self._loader.load()
        permits.acquire()
        return not wants_out.value

    def run(self) -> tuple[float, float]:
        """One step: its loss, and how long it took."""
        begun = time.perf_counter()
        loss = self._executor.run(self.step, self._loaded)
        assert loss is not None
        value = loss.item()  # waits for the step's end: what was permitted is then over
        if self._executor.part.on.type == "cuda":
            torch.cuda.synchronize()
        self.step += 1
        return value, time.perf_counter() - begun

    def save(self) -> None:
        """A checkpoint, from which another process can go on."""
        part = self._executor.part
        state = state_of(
            model=part.traced.model,
            holdings=part.holdings,
            step=self.step,
            position=self._position,
            seed=self._job.seed,
            scale=None,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        whence = self._as_run.job.source if isinstance(self._as_run.job, JobSource) else ""
        write_artifacts(RunFolder(self._folder.parent), replace(self._as_run, steps=self.step), self._job, whence)
        update, control = self._executor.update, self._control
        save_checkpoint(self._folder, state, tensors=self._tensors, update=update, control=control, keep=1)
