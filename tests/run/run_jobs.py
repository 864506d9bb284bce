"""Jobs with something wrong with them, as a user's file would hold them."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from burstpool.data import digits
from burstpool.job import Job


class Spoiled(Dataset[Any]):
    """The digits, until a worker has loaded so many: then something happens, once, to the worker of one rank."""

    def __init__(self, what: str, *, after: int, rank: int, marker: str) -> None:
        self.data, self.what, self.after, self.rank, self.marker = digits(), what, after, rank, marker
        self.loaded = 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        if self.loaded == self.after and _rank() == self.rank and not Path(self.marker).exists():
            Path(self.marker).touch()
            self.happen()
        image, label = self.data[index]
        return image.double(), label

    def happen(self) -> None:
        if self.what == "raise":
            raise ValueError("sample 7 is broken")
        if self.what == "hang":
            time.sleep(600)
        if self.what == "kill":
            os.kill(os.getpid(), 9)


def _rank() -> int:
    import multiprocessing

    return int(multiprocessing.current_process().name.rpartition("-")[2])


class Small(nn.Module):
    """A bit of everything that has state: batch norm, dropout, momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(256, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


def small_model() -> nn.Module:
    return Small().double()


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)


def small_job(*, what: str = "", after: int = 0, rank: int = 0, marker: str = "", lr: float = 0.01) -> Job:
    return Job(
        model=small_model,
        loss=F.cross_entropy,
        data=Spoiled(what, after=after, rank=rank, marker=marker),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        scheduler=halving,
        batch=10,
        seed=5,
        name="small",
    )
