"""Two processes on one GPU, each with a job that it replays for as long as it is told: with MPS, and without."""

import collections
import contextlib
import math
import multiprocessing as mp
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from jobs import Which, at_work, compared, prepare

LEAD_S = 0.1
"""How long a background process runs before the foreground's."""
MPS_FOLDER = "/tmp/burstpool-mps"


def play(which: Which, pipe: Connection) -> None:
    """Builds the job, then replays it for as long as it is told."""
    from burstpool.share.gpu.loop import alone_in_a_group, streams

    prepare()
    with alone_in_a_group() as control:
        high, _ = streams(torch.device("cuda", 0))
        work = at_work(which, control, high, float("inf"))
        pipe.send("ready")
        while (seconds := pipe.recv()) is not None:
            pipe.send(played(work.steps, high, seconds))


def played(steps: Any, stream: Any, seconds: float) -> dict[str, Any]:
    """Replays with two steps under way; when each ended, by the host's clock, and how long it took on the device."""
    events: collections.deque[Any] = collections.deque()
    times, ends, last = [], [], None
    stop = time.monotonic() + seconds
    with torch.cuda.stream(stream):
        while time.monotonic() < stop:
            for piece in steps.pieces:
                piece()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record(stream)
            if len(events) > 2:
                done = events.popleft()
                done.synchronize()
                ends.append(time.monotonic())
                if last is not None:
                    times.append(last.elapsed_time(done) / 1e3)
                last = done
        torch.cuda.synchronize()
    return {"times": times, "ends": ends}


class Process:
    """One that answers over a pipe, from outside. One that has died, or is silent for too long, has `failed`."""

    def __init__(self, work: Callable[..., None], *arguments: Any, until_s: float = math.inf) -> None:
        """`work` gets the arguments and its end of the pipe; it is waited for until then, by `time.monotonic`."""
        self.failed = ""
        """Why nothing more is to be expected of it."""
        self._until_s = until_s
        self.pipe, theirs = mp.Pipe()
        self.process = mp.get_context("spawn").Process(target=work, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it is ready, or has failed."""
        if (answer := self.answer()) != "ready":
            self.failed = answer["failed"]

    def tell(self, order: Any) -> None:
        """Nothing happens where it has failed."""
        with contextlib.suppress(OSError):
            self.pipe.send(order)

    def answer(self) -> Any:
        """What it says next, or why it does not."""
        left_s = max(self._until_s - time.monotonic(), 0.0)
        try:
            if not self.failed and self.pipe.poll(None if math.isinf(left_s) else left_s):
                return self.pipe.recv()
            self.failed = self.failed or "no answer in time"
        except (EOFError, OSError):
            self.process.join(1.0)
            self.failed = f"its process has ended with status {self.process.exitcode}"
        return {"failed": self.failed}


class Player(Process):
    """That process, from outside."""

    def __init__(self, which: Which, *, mps_percent: int | None = None, until_s: float = math.inf) -> None:
        changes = {} if mps_percent is None else {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_FOLDER}/pipe"}
        if mps_percent is not None and mps_percent < 100:
            changes["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(mps_percent)
        before = dict(os.environ)
        os.environ.update(changes)
        super().__init__(play, which, until_s=until_s)
        os.environ.clear()
        os.environ.update(before)

    def play(self, seconds: float) -> dict[str, Any]:
        """For so long, from now; waits for the end."""
        self.tell(seconds)
        return self.answer()


def two_processes(foreground: Player, background: Player, seconds: float, own_rate: float) -> dict[str, Any]:
    """Both at once, next to the foreground alone; `own_rate`: the background's steps a second with the GPU its own."""
    alone = foreground.play(seconds / 2)
    background.tell(seconds + 2 * LEAD_S)
    time.sleep(LEAD_S)
    begun = time.monotonic()
    shared = foreground.play(seconds)
    ended = time.monotonic()
    beside = background.answer()
    if failed := foreground.failed or background.failed:
        return {"failed": failed}
    inside = [end for end in beside["ends"] if begun + 0.1 * seconds <= end <= ended - 0.1 * seconds]
    rate = (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else 0.0
    times = shared["times"][len(shared["times"]) // 20 :]
    return compared(times, statistics.mean(alone["times"]), rate / own_rate)


def start_mps() -> bool:
    """Whether there is an MPS server now."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    os.makedirs(f"{MPS_FOLDER}/pipe", exist_ok=True)
    os.makedirs(f"{MPS_FOLDER}/log", exist_ok=True)
    environment = {**os.environ, **mps_environment()}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=False)
    asked = subprocess.run(
        ["nvidia-cuda-mps-control"], input="get_server_list\n", text=True, env=environment, check=False
    )
    return asked.returncode == 0


def mps_environment() -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_FOLDER}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{MPS_FOLDER}/log"}
