"""Small models with what is hard to split: ties, early outputs, values without samples, dropout of every kind."""

from functools import partial
from typing import Any

import torch
from run_cases import in_double
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import digits
from burstpool.job import Job


def _job(model: type[nn.Module], *, form: str = "image", **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": model,
        "loss": F.cross_entropy,
        "data": digits(form=form),  # type: ignore[arg-type]
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "name": model.__name__,
        "seed": 3,
    }
    return in_double(Job(**(fields | changes)))


class Tied(nn.Module):
    """An embedding whose weights are also those of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens).mean(1))))


class Positions(nn.Module):
    """Positions that two layers use: a value without samples that crosses between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.place = nn.Parameter(torch.randn(64, 8) / 8)
        self.scale = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        place = self.scale(self.place)
        hidden = torch.tanh(self.first(self.embed(tokens) + place))
        return self.last((hidden + place).mean(1))


class TwoHeads(nn.Module):
    """Returns a value that an early layer made."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.early = nn.Linear(16, 10)
        self.norm = nn.BatchNorm1d(16)
        self.late = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        hidden = self.body(images)
        return {"early": self.early(hidden), "late": self.late(self.norm(hidden))}


def both_heads(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output["late"], target) + 0.3 * F.cross_entropy(output["early"], target)


class Pooled(nn.Module):
    """Ends in a layer without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 10, 3)
        self.pool = nn.AdaptiveMaxPool2d(1)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(self.body(images)).flatten(1)


class Frozen(nn.Module):
    """A layer that is not trained, one that nothing uses, and a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Flatten(), nn.Linear(64, 16))
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("extra", torch.ones(2))
        self.frozen.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(self.frozen(images))))


class Untraceable(nn.Module):
    """Branches on a value inside a tensor, so that only whole modules can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh())
        self.second = Branching()
        self.last = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.second(self.first(images)))


class Branching(nn.Module):
    """See `Untraceable`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.abs().max() < 100 else x


class Dropouts(nn.Module):
    """Every kind of dropout, on samples in every place, batch norm behind one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.3), nn.BatchNorm2d(4), nn.SELU())
        self.alpha = nn.Sequential(nn.AlphaDropout(0.2), nn.Flatten(2), nn.FeatureAlphaDropout(0.2))
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3)  # samples second, heads folded into them
        self.head = nn.Sequential(nn.Dropout(0.4, inplace=True), nn.Linear(64 * 4, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.alpha(self.conv(images)).permute(2, 0, 1)
        x = x + self.attention(x, x, x)[0]
        return self.head(x.transpose(0, 1).flatten(1))


tied_job = partial(_job, Tied, form="tokens")
positions_job = partial(_job, Positions, form="tokens")
two_headed_job = partial(_job, TwoHeads, loss=both_heads)
modules_job = partial(_job, Untraceable)
pooled_job = partial(_job, Pooled)
frozen_job = partial(_job, Frozen)
dropout_job = partial(_job, Dropouts)
