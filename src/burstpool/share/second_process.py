"""A background job that CUDA graphs cannot hold: a process of its own on the same GPU, let go one step at a time.

Its steps run eagerly and are not cut; the foreground's process gives a permit for each and sees when it has ended.
Where an MPS server runs, both processes' kernels run side by side on the GPU, else the driver gives the GPU to one
process after the other, and the controller finds out what that costs. Whatever happens to the process, the foreground's
has nothing to do with it but a counter in shared memory.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.multiprocessing

from burstpool.engine.local import die_with
from burstpool.errors import BurstpoolError, ShareError
from burstpool.job import Job
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.run.torchrun import Silent
from burstpool.run.worker import JobSource
from burstpool.schedule.lower import lower
from burstpool.share.gpu import alone_in_a_group

_WARM_UP_STEPS = 3
_CALIBRATION_STEPS = 5
_START_S = 300.0
"""How long the process may take to its first steps."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A step that was permitted."""

    process: "SecondProcess"
    number: int

    def query(self) -> bool:
        """Whether it has ended; those of a process that is gone have."""
        return self.process.finished >= self.number or bool(self.process.ended)


class SecondProcess:
    """A `Filler` (see `gpu.py`) whose pieces are whole steps of another process."""

    def __init__(
        self,
        name: str,
        source: JobSource | Job,
        *,
        autocast: Literal["bf16"] | None = None,
        memory_bytes: int | None = None,
        hang_s: float = 60.0,
    ) -> None:
        """Waits until the process has trained some steps, with the GPU its own, so that its speed alone is known."""
        self.name, self.ended, self.done_s, self.steps_done = name, "", 0.0, 0
        self.losses: list[list[float]] = []
        self._times_s: list[float] = []
        context = torch.multiprocessing.get_context("spawn")
        # Without a lock: there is one writer, and it may be killed at any moment.
        self._permits, self._finished = context.Semaphore(0), context.RawValue("q", 0)
        self._answers, theirs = context.Pipe(duplex=False)
        self._given, self._hang_s, self._heard = 0, hang_s, time.monotonic()
        self._process: Any = context.Process(
            target=_train,
            args=(source, self._permits, self._finished, theirs),
            kwargs={"autocast": autocast, "memory_bytes": memory_bytes, "parent": os.getpid()},
            daemon=True,
        )
        self._process.start()
        theirs.close()
        for _ in range(_WARM_UP_STEPS + _CALIBRATION_STEPS):
            self._permits.release()
            self._given += 1
        self.alone_s = self._calibrated()

    @property
    def finished(self) -> int:
        """Steps that have ended."""
        return int(self._finished.value)

    @property
    def next_s(self) -> float:
        """See `Filler`."""
        return self.alone_s

    def launch(self, gate: torch.cuda.Event | None) -> Posted | None:
        """See `Filler`; a step begins at once, whatever the gate: its process does not know the other's events."""
        if self.ended or self._given > self.finished:  # one at a time
            return None
        self._given += 1
        self.done_s += self.alone_s
        self._heard = time.monotonic()
        self._permits.release()
        return Posted(self, self._given)

    def look_after(self) -> None:
        """See `Filler`."""
        self._read()
        if self.ended:
            return
        if not self._process.is_alive():
            code = self._process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            self._end(f"its process {how}")
        elif self._given > self.finished and time.monotonic() - self._heard > self._hang_s:
            self._end(f"a step has taken more than {self._hang_s:g} s")

    def finish(self) -> None:
        """See `Filler`."""
        deadline = time.monotonic() + self._hang_s
        while self._given > self.finished and not self.ended and time.monotonic() < deadline:
            self.look_after()
            time.sleep(1e-3)
        self._read()

    def close(self) -> None:
        """See `Filler`."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _calibrated(self) -> float:
        deadline = time.monotonic() + _START_S
        while len(self.losses) < self._given:
            self.look_after()
            if self.ended or time.monotonic() > deadline:
                reason = self.ended or f"it did not come to its first steps within {_START_S:g} s"
                self.close()
                raise ShareError(f"background {self.name} cannot be run: {reason}")
            time.sleep(1e-3)
        times_s = sorted(self._times_s[-_CALIBRATION_STEPS:])
        return times_s[len(times_s) // 2]

    def _read(self) -> None:
        """Takes in what the process has said."""
        with contextlib.suppress(EOFError, OSError):
            while self._answers.poll():
                kind, *rest = self._answers.recv()
                if kind == "failed":
                    self._end(rest[0])
                    return
                loss, time_s = rest
                self.losses.append([loss])
                self._times_s.append(time_s)
                self.steps_done = len(self.losses)
                if not math.isfinite(loss):
                    self._end("the loss is not finite")

    def _end(self, reason: str) -> None:
        self.ended = reason
        if self._process is not None:
            self._process.kill()


def _train(
    source: JobSource | Job,
    permits: Any,
    finished: Any,
    answers: Connection,
    *,
    autocast: Literal["bf16"] | None,
    memory_bytes: int | None,
    parent: int,
) -> None:
    """What the process runs."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides when to end
    os.nice(10)
    try:
        for loss, time_s in _steps(source, permits, autocast=autocast, memory_bytes=memory_bytes):
            answers.send(("step", loss, time_s))
            finished.value += 1
    except BaseException as error:  # whatever the user's code does
        words = str(error) if isinstance(error, BurstpoolError) else f"{type(error).__name__}: {error}"
        answers.send(("failed", " ".join(words.split())[:300]))
        raise SystemExit(1) from None


def _steps(
    source: JobSource | Job, permits: Any, *, autocast: Literal["bf16"] | None, memory_bytes: int | None
) -> Iterator[tuple[float, float]]:
    job = source.load() if isinstance(source, JobSource) else source
    device = torch.device("cuda", 0)
    if memory_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(memory_bytes / total, 1.0), device)
    with alone_in_a_group() as control:
        traced = trace_job(job)
        plan = even_plan(traced.graph, num_devices=1, batch=job.batch, name=job.name)
        options = RunOptions(device="cuda", autocast=autocast, cuda_graphs=False)
        seat = Seat(device=0, on=device, backend="gloo", control=control, doing=Silent())
        executor, loader = set_up(job, plan, lower(plan, traced.graph), options, seat, traced=traced)
        step = 0
        while True:
            loaded = loader.load()
            permits.acquire()
            begun = time.perf_counter()
            loss = executor.run(step, loaded)
            assert loss is not None
            value = loss.item()  # waits for the step's end: what was permitted is then over
            torch.cuda.synchronize()
            yield value, time.perf_counter() - begun
            step += 1
