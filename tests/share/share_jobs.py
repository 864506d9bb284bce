"""Jobs for sharing, some with something wrong with them, as a user's file would hold them."""

import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from burstpool.data import digits
from burstpool.job import Job


class Small(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(512, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images))
        return logits


class Spoiled(Dataset[Any]):
    """The digits, until so many are loaded in one process: then something happens."""

    def __init__(self, what: str, after: int) -> None:
        self.data, self.what, self.after, self.loaded = digits(), what, after, 0
        self.hoard: list[Tensor] = []

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        if self.loaded == self.after:
            self.happen()
        image, label = self.data[index]
        return (image * float("nan") if self.what == "nan" and self.loaded > self.after else image), label

    def happen(self) -> None:
        match self.what:
            case "raise":
                raise ValueError("sample 7 is broken")
            case "kill":
                os.kill(os.getpid(), 9)
            case "hang":
                time.sleep(600)
            case "allocate":
                while True:
                    self.hoard.append(torch.ones(4 << 20))


class Altered(Spoiled):
    """The digits times a number, with noise that is drawn as they are loaded."""

    def __init__(self, times: float) -> None:
        super().__init__("", 0)
        self.times = times

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.times * image + 0.1 * torch.randn_like(image), label


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def altered(times: float = 1.0, lr: float = 0.05, seed: int = 3, batch: int = 20) -> Job:
    return Job(
        model=linear,
        loss=F.cross_entropy,
        data=Altered(times),
        optimizer=partial(torch.optim.SGD, lr=lr),
        batch=batch,
        seed=seed,
    )


def job(lr: float = 0.05, hidden: int = 32, what: str = "", after: int = 0, batch: int = 20, seed: int = 3) -> Job:
    return Job(
        model=partial(Small, hidden),
        loss=F.cross_entropy,
        data=Spoiled(what, after),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
        batch=batch,
        seed=seed,
    )
