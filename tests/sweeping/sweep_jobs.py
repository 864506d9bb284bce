"""Jobs that the sweep tests train, in double precision on a few handwritten digits."""

import itertools
import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, random_split

from burstpool import Job
from burstpool.data import digits


class Few(Dataset[tuple[Tensor, Tensor]]):
    """The first digits, in double precision; slow to load where SWEEP_TEST_SLOW says so."""

    def __init__(self, count: int, *, train: bool = True) -> None:
        self.count, self.train = count, train
        whole = digits(train=train)
        self.inputs, self.targets = whole.inputs[:count].double(), whole.targets[:count]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(float(os.environ.get("SWEEP_TEST_SLOW", "0")))
        return self.inputs[index], self.targets[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return _few, (self.count, self.train)


def _few(count: int, train: bool) -> Few:
    return Few(count, train=train)


def job(
    lr: float = 0.1,
    momentum: float = 0.9,
    width: int = 6,
    dropout: float = 0.2,
    gamma: float = 0.9,
    seed: int = 0,
    held_out: bool = False,
    data: int = 70,
) -> Job:
    """Batch norm, dropout, momentum and a schedule; an epoch of 70 samples ends between two rungs."""
    return Job(
        model=lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 10),
        ).double(),
        loss=F.cross_entropy,
        data=Few(data),
        evaluation=Few(23, train=False) if held_out else None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=momentum),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma),
        batch=8,
        seed=seed,
    )


def grouped(lr: float = 0.01, decay: float = 0.1, smoothing: float = 0.0) -> Job:
    """Parameters in two groups, and a loss that holds a hyper-parameter."""
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)).double(),
        loss=lambda output, target: F.cross_entropy(output, target, label_smoothing=smoothing),
        data=Few(70),
        optimizer=lambda parameters: _two_groups(list(parameters), lr, decay),
        batch=8,
    )


def _two_groups(parameters: list[nn.Parameter], lr: float, decay: float) -> torch.optim.Optimizer:
    biases, weights = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (False, True))
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "weight_decay": 0.0, "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr, eps=1e-3)


def diverging(lr: float = 0.1) -> Job:
    """One layer with a squared loss: a large rate ends in no number."""
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=_squared,
        data=Few(70),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )


def _squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - F.one_hot(target, 10)).square().mean()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10).double()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        return y * 2 if y.sum() > 0 else y


def untraceable(lr: float = 0.1) -> Job:
    """Its control flow depends on its data."""
    return Job(
        model=Branching,
        loss=F.cross_entropy,
        data=Few(70),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )


def refusing(lr: float = 0.1, classes: int = 10) -> Job:
    """Raises for a rate of 0.5; its loss raises for few classes once it is trained."""
    if lr == 0.5:
        raise RuntimeError("half a rate")
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=_Checked(classes),
        data=Few(70),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )


class _Checked:
    def __init__(self, classes: int) -> None:
        self.classes = classes

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        if self.classes < 10:
            raise ValueError(f"a digit is not among {self.classes} classes")
        return F.cross_entropy(output, target)


def scheduled(gamma: float = 0.9) -> Job:
    """Its schedule refuses a gamma above 1."""
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=F.cross_entropy,
        data=Few(70),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler=lambda optimizer: _falling(optimizer, gamma),
        batch=8,
    )


def _falling(optimizer: torch.optim.Optimizer, gamma: float) -> Any:
    if gamma > 1:
        raise ValueError("a rate that rises")
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma)


class Mislabelled(Few):
    """Digits beyond nine, which no model knows."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs, target + 10

    def __reduce__(self) -> tuple[Any, ...]:
        return Mislabelled, (self.count,)


def judged(lr: float = 0.1, sound: bool = True) -> Job:
    """Its held-out data makes the loss raise where it is not sound."""
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=F.cross_entropy,
        data=Few(70),
        evaluation=Few(23, train=False) if sound else Mislabelled(23, train=False),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=8,
    )


def single(lr: float = 0.1, scale: float = 1.0, seed: int = 0, held_out: bool = True) -> Job:
    """In single precision, as autocast wants it; its loss is multiplied, so that fp16 gradients can overflow."""
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), _Scaled(scale), nn.Linear(8, 10)),
        loss=F.cross_entropy,
        data=digits(),
        evaluation=digits(train=False) if held_out else None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        batch=8,
        seed=seed,
    )


class _Scaled(nn.Module):
    """Multiplies the gradients that go through it, not the values: a large factor makes gradients overflow in fp16."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale - (x * (self.scale - 1.0)).detach()


class Torn(Few):
    """A sample in the middle cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40:
            raise OSError("a torn page")
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return Torn, (self.count,)


def faulty(fault: str = "none") -> Job:
    """Can be made whatever its fault, which shows only when it is trained."""
    schedules = torch.optim.lr_scheduler
    return Job(
        model=Branching if fault == "branches" else lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=_detached if fault == "loss" else F.cross_entropy,
        data=Torn(70) if fault == "data" else Few(70),
        evaluation=Few(0 if fault == "evaluation" else 23, train=False),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler=lambda optimizer: (
            schedules.ReduceLROnPlateau(optimizer) if fault == "schedule" else schedules.ConstantLR(optimizer)
        ),
        batch=8,
    )


def _detached(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).detach()


def drawn(lr: float = 0.1) -> Job:
    """Its data are split at random when it is made, and its held-out samples are drawn anew whenever they are read."""
    some = random_split(Few(70), [40, 30])[0]
    others = Noisy(int(np.random.randint(10, 30)) + random.randrange(30))
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=F.cross_entropy,
        data=some,
        evaluation=others,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
    )


class Noisy(Few):
    """Digits with noise."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.randn_like(inputs), target

    def __reduce__(self) -> tuple[Any, ...]:
        return Noisy, (self.count,)


def noisy(lr: float = 0.1, seed: int = 0) -> Job:
    """A loss that draws random numbers, of a model that draws none, and held-out data on which it draws as well."""
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double(),
        loss=lambda output, target: F.cross_entropy(output + torch.randn_like(output), target),
        data=Few(70),
        evaluation=Few(23, train=False),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
        batch=8,
        seed=seed,
    )


def layered(widths: tuple[int, ...] = (6,), rates: list[float] = [0.1]) -> Job:  # noqa: B006
    """Hyper-parameters that are lists."""
    sizes = [64, *widths, 10]
    return Job(
        model=lambda: nn.Sequential(nn.Flatten(), *(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))).double(),
        loss=F.cross_entropy,
        data=Few(16),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rates[0]),
        batch=8,
    )
