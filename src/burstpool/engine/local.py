"""The local engine: one process a worker on this machine, started by multiprocessing's spawn.

Workers find each other at a TCPStore that the starting process holds on a free port. They ignore Ctrl-C and SIGTERM,
which terminals and batch systems send to all processes and which are the starting process's to handle, and die with it
(Linux: a signal from the kernel; elsewhere they notice when they next report). What a worker is doing lies in shared
memory and can be read after it was killed.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any

from burstpool.engine.base import PHRASE_BYTES, Place, Report, phrase
from burstpool.engine.failure import Failure, WorkerError, died, explain, failure_of

_HOST = "127.0.0.1"
_POLL_S = 0.25
"""How often silence is looked for."""
_GRACE_S = 2.0
"""How long to listen for the cause when a worker only lost its peer, and how much longer than workers, who can say
for whom they waited, the starting process waits."""
_END_S = 5.0
"""How long a worker whose pipe has ended, or that was killed, may take to die."""
_UNGUARDED = 'each worker imports your script; put what it does under `if __name__ == "__main__":`'
_STEP = struct.Struct("q")
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = threading.Lock()


class SharedDoing:
    """Shared memory in which a worker writes the step and what it is doing."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._view = memoryview(memory).cast("B")

    @staticmethod
    def allocate(context: Any) -> Any:
        """Memory that can be handed to a new process."""
        return context.RawArray("B", _STEP.size + PHRASE_BYTES)

    def begin_step(self, step: int) -> None:
        """A step begins."""
        _STEP.pack_into(self._view, 0, step + 1)

    def say(self, words: bytes) -> None:
        """Goes on to something else."""
        self._view[_STEP.size :] = words

    def read(self) -> str:
        """`"in step 12, forward features.0"`."""
        (step,) = _STEP.unpack_from(self._view)
        words = bytes(self._view[_STEP.size :]).rstrip(b"\0").decode(errors="replace")
        return ", ".join(part for part in (f"in step {step - 1}" if step else "", words) if part) or "starting"


def refuse_while_imported() -> None:
    """Ends a worker that imports the script which started it, where that would start workers as it is imported."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself finds out
        sys.stderr.write(f"burstpool: {_UNGUARDED}\n")
        raise SystemExit(2)


class LocalEngine:
    """Processes on this machine."""

    def __init__(self, *, threads: int | None = 1) -> None:
        self._threads = threads
        """CPU threads of a worker: one stands for one device; None leaves it to the environment."""

    def start(
        self, work: Callable[[Place, Any], Any], task: Any, *, num_workers: int, silence_s: float
    ) -> "LocalWorkers":
        """Starts them all; raises what pickling raises, with no process left."""
        refuse_while_imported()
        workers = LocalWorkers(num_workers, silence_s=silence_s)
        try:
            with _environment({} if self._threads is None else {"OMP_NUM_THREADS": str(self._threads)}):
                for rank in range(num_workers):
                    workers.add(rank, work, task)
        except BaseException:
            workers.terminate()
            raise
        return workers


class LocalWorkers:
    """Started processes."""

    def __init__(self, num_workers: int, *, silence_s: float) -> None:
        import torch.distributed as dist

        self._num_workers, self._silence_s = num_workers, silence_s
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        kill_at_exit(self, self._processes)
        self._pipes: list[Connection] = []
        self._doing: list[SharedDoing] = []
        self._changed: list[tuple[str, float]] = []
        """What each was doing when last looked at, and since when."""
        self._results: dict[int, Any] = {}
        self._failures: dict[int, Failure] = {}
        self._stop_asked = False

    def add(self, rank: int, work: Callable[[Place, Any], Any], task: Any) -> None:
        """Starts one more."""
        ours, theirs = self._context.Pipe(duplex=True)
        memory = SharedDoing.allocate(self._context)
        process = self._context.Process(
            target=_enter,
            args=(theirs, memory, os.getpid(), rank, self._num_workers, self._store.port, work, task),
            daemon=True,
            name=f"burstpool-{rank}",
        )
        self._pipes.append(ours)
        self._processes.append(process)
        self._doing.append(SharedDoing(memory))
        self._changed.append(("", time.monotonic()))
        process.start()
        theirs.close()  # the worker's end is then the only one: its death shows as the end of the pipe

    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def doing(self, rank: int) -> str:
        """What a worker says that it does: `"in step 12, forward features.0"`."""
        return self._doing[rank].read()

    def poll(self, timeout_s: float) -> list[Report]:
        """See `Workers.poll`."""
        reports = self._collect(min(timeout_s, _POLL_S))
        if self._failures:
            self._give_up()
        self._look_for_silence()
        return reports

    def results(self) -> list[Any] | None:
        """What the workers returned, by rank; None while any of them is running."""
        if len(self._results) < self._num_workers:
            return None
        return [self._results[rank] for rank in range(self._num_workers)]

    def ask_to_stop(self) -> None:
        """Every worker's `stop_asked` says so from now on."""
        if self._stop_asked:  # who asks again and again would fill the pipe of a worker that does not listen, and wait
            return
        self._stop_asked = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")

    def terminate(self) -> None:
        """Those that returned are let go, the others killed."""
        started = [process for process in self._processes if process.pid is not None]
        kill_running([process for rank, process in enumerate(self._processes) if rank not in self._results])
        deadline = time.monotonic() + _END_S
        for process in started:
            process.join(timeout=max(deadline - time.monotonic(), 0))
        kill_running(started)
        for process in started:
            with contextlib.suppress(ValueError):  # it was killed and is not gone yet
                process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def _collect(self, timeout_s: float) -> list[Report]:
        open_ranks = {self._pipes[rank]: rank for rank in range(self._num_workers) if not self._is_over(rank)}
        reports: list[Report] = []
        for pipe in wait(list(open_ranks), timeout=timeout_s) if open_ranks else []:
            assert isinstance(pipe, Connection)
            rank = open_ranks[pipe]
            try:
                while not self._is_over(rank) and pipe.poll():
                    self._take(rank, *pickle.loads(pipe.recv_bytes()), reports=reports)
            except (EOFError, OSError):
                process = self._processes[rank]
                process.join(timeout=_END_S)
                self._failures[rank] = died(rank, process.exitcode, doing=self._doing[rank].read())
        return reports

    def _take(self, rank: int, kind: str, content: Any, *, reports: list[Report]) -> None:
        if kind == "report":
            reports.append(Report(rank=rank, content=content))
        elif kind == "result":
            self._results[rank] = content
        else:
            self._failures[rank] = content

    def _is_over(self, rank: int) -> bool:
        return rank in self._results or rank in self._failures

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for rank in range(self._num_workers):
            doing = self._doing[rank].read()
            if doing != self._changed[rank][0]:
                self._changed[rank] = (doing, now)
            elif not self._is_over(rank) and now - self._changed[rank][1] > self._silence_s + _GRACE_S:
                self._failures[rank] = Failure(rank=rank, reason="silent", message="is silent", doing=doing)
        if self._failures:
            self._give_up()

    def _give_up(self) -> None:
        """Listens a little for the cause, then ends all workers and raises."""
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline and len(self._failures) + len(self._results) < self._num_workers:
            if any(failure.reason in ("died", "raised") for failure in self._failures.values()):
                break
            self._collect(0.1)
        silent = {rank: self._doing[rank].read() for rank in range(self._num_workers) if not self._is_over(rank)}
        error: WorkerError = explain(list(self._failures.values()), silent, silence_s=self._silence_s)
        self.terminate()
        raise error


def _enter(
    pipe: Connection,
    memory: Any,
    parent: int,
    rank: int,
    num_workers: int,
    port: int,
    work: Callable[[Place, Any], Any],
    task: Any,
) -> None:
    """What a worker process runs."""
    die_with(parent)
    leave_signals_to_the_parent()
    doing = SharedDoing(memory)
    doing.say(phrase("starting"))
    asked = False

    def tell(kind: str, content: Any) -> None:
        # Not pipe.send: torch would then leave tensors in shared memory, which goes with this process.
        pipe.send_bytes(pickle.dumps((kind, content)))

    def stop_asked() -> bool:
        nonlocal asked
        while not asked and pipe.poll():
            asked = pipe.recv() == "stop"
        return asked

    place = Place(
        rank=rank,
        num_workers=num_workers,
        host=_HOST,
        port=port,
        local_rank=rank,
        num_local=num_workers,
        doing=doing,
        report=lambda content: tell("report", content),
        stop_asked=stop_asked,
    )
    try:
        tell("result", work(place, task))
    except (EOFError, BrokenPipeError):
        os._exit(1)  # nobody is there to be told
    except BaseException as error:
        tell("failure", failure_of(rank, error, doing=doing.read()))
        sys.exit(1)
    # An interpreter that ends searches all objects for circles, twice: most of a second with torch. All memory goes
    # with the process, so there is nothing to be found.
    gc.freeze()


def kill_at_exit(owner: object, processes: list[Any]) -> None:
    """Kills what is in the list when its owner is gone, or this process ends.

    Before multiprocessing does, which sends SIGTERM to all that are left and waits: these ignore it.
    """
    util.Finalize(owner, kill_running, args=(processes,), exitpriority=0)


def kill_running(processes: list[Any]) -> None:
    """Ends those that are running.

    One that waits for a disk or a network file system dies when that answers, which may be never: nobody waits for it.
    """
    running = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in running:
        process.kill()
    deadline = time.monotonic() + _END_S
    for process in running:
        process.join(timeout=max(deadline - time.monotonic(), 0))


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and SIGTERM do nothing here; SIGTERM ends this process's own children, as whoever starts them expects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignored)  # a function, not SIG_IGN, which a new program would inherit
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=_end_by_sigterm)


def _ignored(number: int, frame: Any) -> None:
    pass


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignored:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables that new processes inherit; for one thread after the other, as there is one environment."""
    with _ENVIRONMENT:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
