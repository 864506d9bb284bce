"""A small model with most of what arrays must carry along, and arrays of it, for tests of what arrays promise."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import FusedArray, fuse


class Net(nn.Module):
    """A convolution, batch norm, dropout and a tied pair of weights."""

    def __init__(self, width: int = 4, p: float = 0.2) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(p)
        self.fc, self.again = nn.Linear(width, width), nn.Linear(width, width)
        self.again.weight = self.fc.weight
        self.out = nn.Linear(width, 3)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3)) * self.scale
        return self.out(self.drop(self.again(self.fc(x).tanh())))


X = torch.linspace(-1, 1, 4 * 25).view(4, 1, 5, 5)


Y = torch.tensor([0, 2, 1, 1])


def nets(count: int = 3, **options: Any) -> list[nn.Module]:
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(Net(**options))
    return models


def trained(array: FusedArray, steps: int, start: int = 0) -> list[list[float]]:
    optimizer = array.optimizers[0]
    found = []
    for step in range(start, start + steps):
        losses = array.losses(X * (1 + 0.1 * step), lambda out: F.cross_entropy(out, Y))
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in array.schedulers:
            scheduler.step()
        found.append(losses.tolist())
    return found


def ready(count: int = 3, **options: Any) -> FusedArray:
    array = fuse(nets(count, **options), X)
    array.optimizer(torch.optim.Adam, lr=[0.01 * (i + 1) for i in range(count)])
    return array
