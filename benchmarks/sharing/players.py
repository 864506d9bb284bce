"""Two processes on one GPU, each with a job that it replays for as long as it is told: with MPS, and without."""

import collections
import multiprocessing as mp
import os
import shutil
import statistics
import subprocess
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from jobs import Which, at_work, compared, prepare

LEAD_S = 0.1
"""How long a background process runs before the foreground's."""
MPS_FOLDER = "/tmp/burstpool-mps"


def play(which: Which, pipe: Connection) -> None:
    """Builds the job, then replays it for as long as it is told."""
    from burstpool.share.gpu import alone_in_a_group, streams

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


class Player:
    """That process, from outside."""

    def __init__(self, which: Which, *, mps_percent: int | None = None) -> None:
        changes = {} if mps_percent is None else {"CUDA_MPS_PIPE_DIRECTORY": f"{MPS_FOLDER}/pipe"}
        if mps_percent is not None and mps_percent < 100:
            changes["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(mps_percent)
        before = dict(os.environ)
        os.environ.update(changes)
        self.pipe, theirs = mp.Pipe()
        self.process = mp.get_context("spawn").Process(target=play, args=(which, theirs), daemon=True)
        self.process.start()
        os.environ.clear()
        os.environ.update(before)
        theirs.close()

    def wait(self) -> None:
        assert self.pipe.recv() == "ready"

    def go(self, seconds: float) -> None:
        self.pipe.send(seconds)

    def result(self) -> dict[str, Any]:
        return self.pipe.recv()


def two_processes(foreground: Player, background: Player, seconds: float, own_rate: float) -> dict[str, float]:
    """Both at once, next to the foreground alone; `own_rate`: the background's steps a second with the GPU its own."""
    foreground.go(seconds / 2)
    alone = foreground.result()
    background.go(seconds + 2 * LEAD_S)
    time.sleep(LEAD_S)
    begun = time.monotonic()
    foreground.go(seconds)
    shared = foreground.result()
    ended = time.monotonic()
    inside = [end for end in background.result()["ends"] if begun + 0.1 * seconds <= end <= ended - 0.1 * seconds]
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
