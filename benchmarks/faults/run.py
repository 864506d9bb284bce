"""A worker killed with SIGKILL at random points of a run: does the resumed run end as if nothing had happened?

    python benchmarks/faults/run.py [--points 20] [--seed 0]

Trains a small model with batch norm, dropout, Adam and a learning-rate schedule on two workers, once undisturbed and
then again and again with one worker killed at a random moment: while it joins, loads, computes, communicates or writes
a checkpoint. Each killed run is resumed until it ends, and its weights and losses are compared bit by bit. Prints one
JSON line.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import digits
from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine, LocalWorkers
from burstpool.errors import RunError
from burstpool.job import Job
from burstpool.run.folder import read_losses
from burstpool.run.options import RunOptions
from burstpool.run.outcome import Result
from burstpool.run.trainer import train

STEPS = 120
OPTIONS = RunOptions(checkpoint_every=10, timeout_s=30, timeline_steps=0)


class Model(nn.Module):
    """A bit of everything that has state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(512, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.5)


def job() -> Job:
    return Job(
        model=Model,
        loss=F.cross_entropy,
        data=digits(),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        scheduler=schedule,
        batch=24,
        name="faults",
    )


class KillingEngine:
    """The local engine, with one worker killed some time after it has reached a step."""

    def __init__(self, *, rank: int, step: int, delay_s: float) -> None:
        self._rank, self._step, self._delay_s = rank, step, delay_s
        self.doing = ""
        """What the worker did when it was killed."""

    def start(
        self, work: Callable[[Place, Any], Any], task: Any, *, num_workers: int, silence_s: float
    ) -> LocalWorkers:
        workers = LocalEngine().start(work, task, num_workers=num_workers, silence_s=silence_s)
        threading.Thread(target=self._kill, args=(workers, workers.pids()[self._rank]), daemon=True).start()
        return workers

    def _kill(self, workers: LocalWorkers, pid: int) -> None:
        while self._is_early(workers.doing(self._rank)):
            time.sleep(0.0005)
        time.sleep(self._delay_s)
        self.doing = workers.doing(self._rank)
        os.kill(pid, signal.SIGKILL)

    def _is_early(self, words: str) -> bool:
        if self._step < 0:
            return False
        return not words.startswith("in step") or int(words.split()[2].rstrip(",")) < self._step


def one_point(folder: Path, whole: Result, chance: random.Random) -> dict[str, Any]:
    """Kills, resumes, compares."""
    rank, step = chance.randrange(2), chance.randrange(-1, STEPS - 2)
    delay_s = chance.uniform(0, 3.0) if step < 0 else chance.uniform(0, 0.02)
    engine = KillingEngine(rank=rank, step=step, delay_s=delay_s)
    try:
        train(job(), 2, steps=STEPS, run_folder=folder, options=OPTIONS, engine=engine)
        message = "it ended before it was killed"
    except RunError as error:
        message = str(error)
    begun = [loss.step for loss in read_losses(folder / "losses.jsonl")]
    result = whole if "ended before" in message else train(job(), 2, steps=STEPS, resume=folder, options=OPTIONS)
    own, expected = load_file(result.weights), load_file(whole.weights)
    same_weights = own.keys() == expected.keys() and all(torch.equal(own[key], expected[key]) for key in own)
    losses = [loss.loss for loss in read_losses(result.folder / "losses.jsonl")]
    return {
        "rank": rank,
        "doing": engine.doing,
        "named": f"rank {rank} was killed by SIGKILL" in message,
        "steps_seen": len(begun),
        "resumed_at": result.losses[0].step,
        "bit_equal": same_weights and losses == [loss.loss for loss in whole.losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="burstpool-faults-") as folder:
        whole = train(job(), 2, steps=STEPS, run_folder=Path(folder) / "whole", options=OPTIONS)
        points = []
        for number in range(arguments.points):
            points.append(one_point(Path(folder) / str(number), whole, chance))
            sys.stderr.write(f"{number + 1}/{arguments.points}: {points[-1]}\n")
    report = {
        "benchmark": "faults",
        "points": len(points),
        "bit_equal": sum(point["bit_equal"] for point in points),
        "named": sum(point["named"] for point in points),
        "killed_while": [point["doing"] for point in points],
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
