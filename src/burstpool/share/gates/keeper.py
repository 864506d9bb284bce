"""The keeper of one background job: starts it, restarts it from its checkpoint, evicts it, ends it.

A background that raises, hangs, allocates without end, turns NaN or is killed ends alone: its process is its own, and
the foreground never waits for it. It is started again from its last checkpoint as long as that takes it further than
before; one that fails twice at the same step has ended. When the machine's memory runs short it is asked to write a
checkpoint and leave, or killed where that takes too long, and comes back when there is room again.
"""

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine, LocalWorkers
from burstpool.errors import RunError, ShareError, in_a_line
from burstpool.run.folder import read_losses
from burstpool.run.trainer import InterruptedRun, Start, resumed, run_for_others
from burstpool.run.worker import Task
from burstpool.share.base import Background
from burstpool.share.fused import FusedReport, FusedTask, fused_work
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.gated import GatedTask, gated_work
from burstpool.share.preparing import Mistake, Preparing, prepare_work
from burstpool.share.results import BackgroundFolder

_LOG = logging.getLogger(__name__)
_LEAVE_S = 5.0
"""How long one that is asked to leave may do the same thing before it is killed; all in all where memory is short."""
_WRITE_S = 60.0
"""How long that may take where it writes what it has learnt at the end, or all in all until it does: an array of large
models is gigabytes."""
_WRITING = "writing a checkpoint"
_HURRIED = "it was to end at once"
_ASK_S = 0.02
"""Between two times that it is asked to leave: a process that is only starting has not heard the first."""

State = Literal["starting", "running", "evicted", "ended", "failed"]


class GatedEngine:
    """The local engine with the worker behind a gate."""

    def __init__(
        self, gate: Gate, *, memory_bytes: int | None, lowest_priority: bool, gpu: int | None, gpu_share: float
    ) -> None:
        self._gate, self._memory_bytes, self._lowest_priority = gate, memory_bytes, lowest_priority
        self._gpu, self._gpu_share = gpu, gpu_share
        self.workers: LocalWorkers | None = None

    def start(
        self, work: Callable[[Place, Any], Any], task: Any, *, num_workers: int, silence_s: float
    ) -> LocalWorkers:
        """See `Engine`."""
        gated = self._gated(work, task)
        self.workers = LocalEngine().start(gated_work, gated, num_workers=num_workers, silence_s=silence_s)
        return self.workers

    def start_preparing(self, work: Callable[[Place, Any], Any], task: Any, *, silence_s: float) -> LocalWorkers:
        """The same for what needs no GPU and asks at no gate."""
        on_host = replace(
            self._gated(work, task), gpu=None, memory_bytes=None if self._gpu is not None else self._memory_bytes
        )
        self.workers = LocalEngine().start(gated_work, on_host, num_workers=1, silence_s=silence_s)
        return self.workers

    def _gated(self, work: Callable[[Place, Any], Any], task: Any) -> GatedTask:
        return GatedTask(
            work=work,
            task=task,
            gate=str(self._gate.path),
            memory_bytes=self._memory_bytes,
            lowest_priority=self._lowest_priority,
            gpu=self._gpu,
            gpu_share=self._gpu_share,
        )


@dataclass(slots=True, kw_only=True)
class Kept:
    """What became of a background job."""

    name: str
    state: State = "starting"
    reason: str = ""
    """Why it failed or was evicted, last."""
    restarts: int = 0
    evictions: int = 0
    losses: list[Any] = field(default_factory=list)
    """By step: a number, or one for each member of an array."""
    last_step_s: float | None = None
    """When it had trained all of its steps, by the machine's clock; None as long as it has not."""


class Keeper:
    """Keeps one background job going in a thread of its own."""

    def __init__(
        self,
        background: Background,
        gate: Gate,
        folder: Path,
        *,
        memory_bytes: int | None = None,
        hang_s: float = 300.0,
        autocast: Literal["bf16", "fp16"] | None = None,
        gpu: int | None = None,
        gpu_share: float = 0.5,
    ) -> None:
        """`gpu` is the device of the plan whose GPU it works on, None for a CPU; `gpu_share` as in `GatedTask`."""
        self.background, self.gate, self.folder = background, gate, BackgroundFolder(folder)
        self.kept = Kept(name=background.name)
        self._engine = GatedEngine(
            gate,
            memory_bytes=background.memory_bytes or memory_bytes,
            lowest_priority=background.lowest_priority,
            gpu=gpu,
            gpu_share=gpu_share,
        )
        self._hang_s, self._autocast = hang_s, autocast
        self._device: Literal["cpu", "cuda"] = "cpu" if gpu is None else "cuda"
        self._stopping = False
        self._may_run = threading.Event()
        self._may_run.set()
        self._at_work = False
        self._deciding = threading.Lock()
        self._failed_at = -1
        self._killed = ""
        """Why it had to be killed when it was asked to leave; empty if it was not."""
        self._at_once = False
        self._last_step_s: float | None = None
        """When the loss of its last step came: what it writes then is no part of its speed."""
        self._prepared: Task | FusedTask | None = None
        self._mistake: ShareError | None = None
        self._is_ready = threading.Event()
        """Prepared, or over before it could be."""
        self._thread = threading.Thread(target=self._keep, name=f"keeper of {background.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread, and with it the job."""
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Waits until it has ended for good; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wait_until_prepared(self, timeout_s: float) -> bool:
        """Whether it gets so far in this time; raises ShareError where the user's mistake is in the way."""
        self._is_ready.wait(timeout_s)
        if self._mistake is not None:
            raise self._mistake
        return self._prepared is not None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        workers = self._engine.workers
        with contextlib.suppress(ValueError):  # the keeper's thread lets go of it at this moment
            pids = workers.pids() if workers is not None else []
            return pids[0] if pids else None
        return None

    @property
    def is_here(self) -> bool:
        """Whether it has a process, or is starting one: false before `start`, while it is away, and when it is over."""
        return self._thread.is_alive() and self._at_work

    def evict(self, reason: str) -> bool:
        """Has it leave, and keeps it out until `readmit`; False, and nothing happens, if it is not here."""
        with self._deciding:
            is_over = self._stopping or self.kept.state in ("ended", "failed")
            if is_over or not self._may_run.is_set() or not self.is_here:
                return False
            self._may_run.clear()
            self.kept.evictions += 1
            self.kept.state, self.kept.reason = "evicted", reason
        threading.Thread(target=self._ask_to_leave, daemon=True).start()
        return True

    def readmit(self) -> None:
        """It may come back, from its checkpoint."""
        self._may_run.set()

    def stop(self) -> None:
        """Ends it with a checkpoint; returns when its process is gone. One that is away stays away."""
        with self._deciding:
            self._stopping = True
        self._may_run.set()
        self._ask_to_leave()

    def hurry(self) -> None:
        """Whoever waits for `stop` waits no longer: what is not written by now is lost."""
        self._at_once = True

    def _ask_to_leave(self) -> None:
        """Until it has: an attempt that begins at this moment is told too, and what takes too long is killed.

        One that is being prepared has nothing to save, and is killed at once.
        """
        begun_s = since_s = time.monotonic()
        before = self._doing()
        while self.is_here:
            now_s = time.monotonic()
            if (doing := self._doing()) != before:
                before, since_s = doing, now_s
            with self._deciding:  # so that no attempt that begins when it may come back is meant
                if not self._stopping and self._may_run.is_set():
                    break
                self.gate.let_leave()
                if (workers := self._engine.workers) is not None:
                    workers.ask_to_stop()
                why = self._too_long(doing, for_s=now_s - since_s, in_all_s=now_s - begun_s)
                if why and (pid := self.pid) is not None:
                    self._killed = self._killed or why
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_ASK_S)
        if self._stopping and self._thread.is_alive():
            self._thread.join()

    def _too_long(self, doing: str, *, for_s: float, in_all_s: float) -> str:
        """Why one that has been asked to leave is to be killed; empty if it is not.

        `for_s`: how long it has been doing what it does.
        """
        if self._prepared is None:
            return f"it was not ready when it was asked to end; it was {doing}"
        if self._at_once:
            return _HURRIED
        if not self._stopping:  # there is a checkpoint to come back to, and memory is wanted now
            return f"it did not leave for {_LEAVE_S:g} s; it was {doing}" if in_all_s > _LEAVE_S else ""
        writes = _WRITING in doing
        if for_s > (most_s := _WRITE_S if writes else _LEAVE_S):
            return f"it did not answer for {most_s:g} s when it was asked to end; it was {doing}"
        if in_all_s > _WRITE_S and not writes:
            return f"it had not ended {_WRITE_S:g} s after it was asked to; it was {doing}"
        return ""

    def _keep(self) -> None:
        """Until it has ended, failed twice at one step, or is stopped. Whatever happens, the state says what it was."""
        try:
            while not self._stopping:
                self._may_run.wait()
                if not self._keep_once():
                    break
        except Exception as error:  # its losses cannot be read, say
            self._fail(error)
        finally:
            self._at_work = False
            self._is_ready.set()
        if self.kept.state == "running":
            self.kept.state, self.kept.reason = "ended", ""

    def _keep_once(self) -> bool:
        """One attempt, from its checkpoint; whether there may be another."""
        with self._deciding:
            self._at_work = self._may_run.is_set() and not self._stopping
            if not self._at_work:
                return True
            self.gate.let_leave(False)
            self.gate.say_away(False)
            self.kept.state, self._killed = "running", ""
        try:
            self._attempt()
        except InterruptedRun:
            return True  # asked to leave
        except Exception as error:
            return self._goes_on_after(RunError(self._killed) if self._killed else error)
        finally:
            self.gate.forget_slice()
            self.gate.say_away(True)
            self.kept.losses = self._losses()
            self._at_work = False
        with self._deciding:
            self.kept.state, self.kept.reason = "ended", ""
            self.kept.last_step_s = self._last_step_s or time.time()
        return False

    def _goes_on_after(self, error: Exception) -> bool:
        """Whether there may be another attempt after one that failed."""
        if self.kept.state == "evicted":  # it comes back from its checkpoint; what is wrong with itself shows again
            _LOG.warning("background %s left without a checkpoint of its last steps: %s", self.kept.name, error)
            return True
        if self._killed == _HURRIED:
            return False
        if self._stopping or not isinstance(error, RunError) or (step := self._reached()) <= self._failed_at:
            self._fail(error)
            return False
        _LOG.warning("background %s is started again: %s", self.kept.name, error)
        self._failed_at = step
        self.kept.restarts += 1
        return True

    def _fail(self, error: Exception) -> None:
        words = in_a_line(error)
        with self._deciding:
            self.kept.state, self.kept.reason = "failed", words
        if self._mistake is None:  # that is raised to whoever waits
            _LOG.warning("background %s has failed: %s", self.kept.name, words)

    def _reached(self) -> int:
        """The step it was in: losses come in batches, and the last ones of a process that was killed are missing."""
        match = re.match(r"in step (\d+)", self._doing())
        return int(match[1]) if match else len(self._losses())

    def _doing(self) -> str:
        return self._engine.workers.doing(0) if self._engine.workers is not None else ""

    def _prepare(self) -> Task | FusedTask:
        """In a process of its own, since it runs the job's code."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        wanted = Preparing(
            background=self.background,
            folder=self.folder,
            device=self._device,
            autocast=self._autocast,
            hang_s=self._hang_s,
        )
        workers = self._engine.start_preparing(prepare_work, wanted, silence_s=self._hang_s)
        try:
            while (results := workers.results()) is None:
                workers.poll(0.25)
        finally:
            workers.terminate()
        if isinstance(results[0], Mistake):
            self._mistake = ShareError(results[0].words)
            raise self._mistake
        prepared: Task | FusedTask = results[0]
        return prepared

    def _attempt(self) -> None:
        if self._prepared is None:
            self.gate.say_away(True)  # it does not ask yet
            self._prepared = self._prepare()
            self.gate.say_away(False)
            self._is_ready.set()
        if isinstance(self._prepared, FusedTask):
            self._train_array(self._prepared)
        else:
            self._train(*resumed(self._prepared, self.folder.run))

    def _train(self, task: Task, start: Start) -> None:
        run_for_others(task, start, engine=self._engine, observer=lambda progress: self._came_to(progress.step))

    def _train_array(self, task: FusedTask) -> None:
        workers = self._engine.start(fused_work, task, num_workers=1, silence_s=self._hang_s)
        try:
            while (results := workers.results()) is None:
                for report in workers.poll(0.25):
                    self._note(report.content)
        finally:
            workers.terminate()
        if results[0] < self.background.steps:
            raise InterruptedRun(self.folder.path, results[0])

    def _note(self, report: FusedReport) -> None:
        losses = self.kept.losses
        del losses[report.step :]  # a restart repeats the steps since the checkpoint
        losses.append(list(report.losses))
        self._came_to(len(losses))

    def _came_to(self, steps: int) -> None:
        if steps >= self.background.steps:
            self._last_step_s = time.time()

    def _losses(self) -> list[Any]:
        if len(self.background.settings) > 1:
            return self.kept.losses
        return [loss.loss for loss in read_losses(self.folder.run.losses)]
