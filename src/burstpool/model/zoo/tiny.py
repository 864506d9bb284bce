"""Tiny models of each kind for demonstrations and tests: they learn the real digits in seconds on a CPU.

Each takes the 8×8 images in the form that suits it and returns logits [N, 10].
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import digits
from burstpool.data.handwritten import NUM_CLASSES, NUM_LEVELS
from burstpool.job import Job
from burstpool.model.zoo.gpt import Block
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size, check_heads
from burstpool.model.zoo.inception import BasicConv2d, pooled
from burstpool.model.zoo.resnet import BasicBlock

NUM_PIXELS = 64
ROW_PIXELS = 8


class TinyMLP(nn.Module):
    """Two hidden layers; takes images [N, 1, 8, 8]."""

    def __init__(self, *, width: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(NUM_PIXELS, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, NUM_CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class TinyVGG(nn.Module):
    """Four convolutions, two poolings, two linear layers; no batch norm. Takes images [N, 1, 8, 8]."""

    def __init__(self, *, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for in_channels, channels in ((1, width), (width, 2 * width)):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * 2 * 2, 8 * width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(8 * width, NUM_CLASSES),
        )

        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class TinyResNet(nn.Module):
    """A stem and three residual blocks with batch norm; takes images [N, 1, 8, 8]."""

    def __init__(self, *, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            BasicBlock(width, width, stride=1),
            BasicBlock(width, 2 * width, stride=2),
            BasicBlock(2 * width, 4 * width, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.pool(self.blocks(self.stem(images))).flatten(1))
        return logits


class Mixed(nn.Module):
    """Four branches on one input, joined by concatenation: 1×1, 3×3, two 3×3, pooling. Returns 4 × width."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, width, 1)
        self.branch3x3 = nn.Sequential(BasicConv2d(in_channels, width, 1), BasicConv2d(width, width, 3, padding=1))
        self.branch3x3dbl = nn.Sequential(
            BasicConv2d(in_channels, width, 1),
            BasicConv2d(width, width, 3, padding=1),
            BasicConv2d(width, width, 3, padding=1),
        )
        self.branch_pool = BasicConv2d(in_channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.branch1x1(x), self.branch3x3(x), self.branch3x3dbl(x), self.branch_pool(pooled(x)))
        return torch.cat(branches, 1)


class TinyInception(nn.Module):
    """A stem and two modules of four branches, with batch norm; takes images [N, 1, 8, 8]."""

    def __init__(self, *, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = BasicConv2d(1, 2 * width, 3, padding=1)
        self.mixed1 = Mixed(2 * width, width)
        self.halve = nn.MaxPool2d(2)
        self.mixed2 = Mixed(4 * width, 2 * width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(8 * width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.mixed2(self.halve(self.mixed1(self.stem(images))))
        logits: Tensor = self.fc(self.dropout(self.pool(x).flatten(1)))
        return logits


class TinyLSTM(nn.Module):
    """Reads an image row by row; takes rows [N, 8, 8]."""

    def __init__(self, *, width: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(ROW_PIXELS, width, layers, batch_first=True)
        self.fc = nn.Linear(width, NUM_CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.lstm(rows)[0][:, -1])
        return logits


class TinyTransformer(nn.Module):
    """Reads an image as 64 tokens, one for each pixel's level; takes tokens [N, 64]."""

    def __init__(self, *, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_LEVELS, width)
        self.position = nn.Parameter(torch.randn(NUM_PIXELS, width))
        blocks = (Block(width, heads, dropout=dropout, causal=False) for _ in range(layers))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(NUM_PIXELS * width, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.norm(self.blocks(self.token(tokens) + self.position))
        logits: Tensor = self.fc(x.flatten(1))
        return logits


def tiny_mlp(
    *,
    lr: Rate = 0.1,
    momentum: Fraction = 0.9,
    weight_decay: Rate = 0.0,
    width: Size = 64,
    dropout: Fraction = 0.0,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """A multilayer perceptron on the digits; `width` is the size of its hidden layers."""
    return Job(
        model=partial(TinyMLP, width=width, dropout=dropout),
        loss=F.cross_entropy,
        data=digits(),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay),
        batch=batch,
        seed=seed,
    )


def tiny_vgg(
    *,
    lr: Rate = 0.03,
    momentum: Fraction = 0.9,
    weight_decay: Rate = 0.0,
    width: Size = 16,
    dropout: Fraction = 0.0,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """A chain of convolutions on the digits; `width` is the channels of the first."""
    return Job(
        model=partial(TinyVGG, width=width, dropout=dropout),
        loss=F.cross_entropy,
        data=digits(),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay),
        batch=batch,
        seed=seed,
    )


def tiny_resnet(
    *,
    lr: Rate = 0.05,
    momentum: Fraction = 0.9,
    weight_decay: Rate = 0.0,
    width: Size = 16,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """Residual blocks with batch norm on the digits; `width` is the channels of the first."""
    return Job(
        model=partial(TinyResNet, width=width),
        loss=F.cross_entropy,
        data=digits(),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay),
        batch=batch,
        seed=seed,
    )


def tiny_inception(
    *,
    lr: Rate = 0.05,
    momentum: Fraction = 0.9,
    weight_decay: Rate = 0.0,
    width: Size = 8,
    dropout: Fraction = 0.0,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """Branching convolutions on the digits; `width` is the channels of a branch of the first module."""
    return Job(
        model=partial(TinyInception, width=width, dropout=dropout),
        loss=F.cross_entropy,
        data=digits(),
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=momentum, weight_decay=weight_decay),
        batch=batch,
        seed=seed,
    )


def tiny_lstm(*, lr: Rate = 1e-2, width: Size = 64, layers: Size = 1, batch: Size = 32, seed: Seed = 0) -> Job:
    """An LSTM that reads a digit row by row; `width` is its hidden size."""
    return Job(
        model=partial(TinyLSTM, width=width, layers=layers),
        loss=F.cross_entropy,
        data=digits(form="rows"),
        optimizer=partial(torch.optim.Adam, lr=lr),
        batch=batch,
        seed=seed,
    )


def tiny_transformer(
    *,
    lr: Rate = 3e-3,
    width: Size = 32,
    heads: Size = 4,
    layers: Size = 2,
    dropout: Fraction = 0.0,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """A transformer that reads a digit as 64 tokens."""
    check_heads(width, heads)
    return Job(
        model=partial(TinyTransformer, width=width, heads=heads, layers=layers, dropout=dropout),
        loss=F.cross_entropy,
        data=digits(form="tokens"),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        batch=batch,
        seed=seed,
    )
