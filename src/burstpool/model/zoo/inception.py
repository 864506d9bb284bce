"""Inception-v3 with its auxiliary head: Szegedy et al., CVPR'16.

Parameter names, shapes, initialisation and numerics are torchvision's (with `transform_input=False`), so that
its weights load. In training it returns the logits of both heads, otherwise the main ones alone. The branches
of each `Mixed` module read the same input and are joined by concatenation. The auxiliary head normalises over the batch
alone at 299 pixels, so training needs at least two samples a device.
"""

from functools import partial
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Rate, Seed, Size
from burstpool.model.zoo.images import image_data, sgd

ImageSize = Annotated[int, Field(ge=299)]
"""The auxiliary head's 5×5 convolution needs the 17×17 map that 299 pixels leave."""
Width = Annotated[int, Field(ge=2, multiple_of=2)]
"""Every number of channels is a multiple of 16 at width 32, so it stays whole at every even width."""

AUXILIARY_WEIGHT = 0.4
"""Share of the auxiliary head in the loss, as in torchvision's reference training."""


class InceptionOutputs(NamedTuple):
    """What the model returns while it trains."""

    logits: Tensor
    """Of the main head, [N, num_classes]."""
    aux_logits: Tensor
    """Of the auxiliary head, [N, num_classes]."""


class BasicConv2d(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def row(in_channels: int, out_channels: int, length: int) -> BasicConv2d:
    """A convolution along the rows that keeps the size."""
    return BasicConv2d(in_channels, out_channels, (1, length), padding=(0, length // 2))


def column(in_channels: int, out_channels: int, length: int) -> BasicConv2d:
    """A convolution along the columns that keeps the size."""
    return BasicConv2d(in_channels, out_channels, (length, 1), padding=(length // 2, 0))


def pooled(x: Tensor) -> Tensor:
    """Average over 3×3 neighbours, of the same size."""
    return F.avg_pool2d(x, 3, stride=1, padding=1)


class InceptionA(nn.Module):
    """35×35: 1×1, 5×5, two 3×3, pooling."""

    def __init__(self, in_channels: int, unit: int, *, pool_channels: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, 4 * unit, 1)
        self.branch5x5_1 = BasicConv2d(in_channels, 3 * unit, 1)
        self.branch5x5_2 = BasicConv2d(3 * unit, 4 * unit, 5, padding=2)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, 4 * unit, 1)
        self.branch3x3dbl_2 = BasicConv2d(4 * unit, 6 * unit, 3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(6 * unit, 6 * unit, 3, padding=1)
        self.branch_pool = BasicConv2d(in_channels, pool_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = (
            self.branch1x1(x),
            self.branch5x5_2(self.branch5x5_1(x)),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            self.branch_pool(pooled(x)),
        )
        return torch.cat(branches, 1)


class InceptionB(nn.Module):
    """35×35 to 17×17: 3×3, two 3×3, pooling."""

    def __init__(self, in_channels: int, unit: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(in_channels, 24 * unit, 3, stride=2)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, 4 * unit, 1)
        self.branch3x3dbl_2 = BasicConv2d(4 * unit, 6 * unit, 3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(6 * unit, 6 * unit, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        branches = (
            self.branch3x3(x),
            self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x))),
            F.max_pool2d(x, 3, stride=2),
        )
        return torch.cat(branches, 1)


class InceptionC(nn.Module):
    """17×17: 1×1, 7×7 and two 7×7 as rows and columns, pooling."""

    def __init__(self, in_channels: int, unit: int, *, inner: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, 12 * unit, 1)
        self.branch7x7_1 = BasicConv2d(in_channels, inner, 1)
        self.branch7x7_2 = row(inner, inner, 7)
        self.branch7x7_3 = column(inner, 12 * unit, 7)
        self.branch7x7dbl_1 = BasicConv2d(in_channels, inner, 1)
        self.branch7x7dbl_2 = column(inner, inner, 7)
        self.branch7x7dbl_3 = row(inner, inner, 7)
        self.branch7x7dbl_4 = column(inner, inner, 7)
        self.branch7x7dbl_5 = row(inner, 12 * unit, 7)
        self.branch_pool = BasicConv2d(in_channels, 12 * unit, 1)

    def forward(self, x: Tensor) -> Tensor:
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        branches = (
            self.branch1x1(x),
            self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x))),
            self.branch7x7dbl_5(self.branch7x7dbl_4(double)),
            self.branch_pool(pooled(x)),
        )
        return torch.cat(branches, 1)


class InceptionD(nn.Module):
    """17×17 to 8×8: 3×3, 7×7 then 3×3, pooling."""

    def __init__(self, in_channels: int, unit: int) -> None:
        super().__init__()
        self.branch3x3_1 = BasicConv2d(in_channels, 12 * unit, 1)
        self.branch3x3_2 = BasicConv2d(12 * unit, 20 * unit, 3, stride=2)
        self.branch7x7x3_1 = BasicConv2d(in_channels, 12 * unit, 1)
        self.branch7x7x3_2 = row(12 * unit, 12 * unit, 7)
        self.branch7x7x3_3 = column(12 * unit, 12 * unit, 7)
        self.branch7x7x3_4 = BasicConv2d(12 * unit, 12 * unit, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        branches = (
            self.branch3x3_2(self.branch3x3_1(x)),
            self.branch7x7x3_4(seven),
            F.max_pool2d(x, 3, stride=2),
        )
        return torch.cat(branches, 1)


class InceptionE(nn.Module):
    """8×8: 1×1, two branches that fork again into a row and a column, pooling."""

    def __init__(self, in_channels: int, unit: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, 20 * unit, 1)
        self.branch3x3_1 = BasicConv2d(in_channels, 24 * unit, 1)
        self.branch3x3_2a = row(24 * unit, 24 * unit, 3)
        self.branch3x3_2b = column(24 * unit, 24 * unit, 3)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, 28 * unit, 1)
        self.branch3x3dbl_2 = BasicConv2d(28 * unit, 24 * unit, 3, padding=1)
        self.branch3x3dbl_3a = row(24 * unit, 24 * unit, 3)
        self.branch3x3dbl_3b = column(24 * unit, 24 * unit, 3)
        self.branch_pool = BasicConv2d(in_channels, 12 * unit, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        branches = (
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled(x)),
        )
        return torch.cat(branches, 1)


class InceptionAux(nn.Module):
    """The auxiliary head on the last 17×17 map."""

    def __init__(self, in_channels: int, unit: int, *, num_classes: int) -> None:
        super().__init__()
        self.conv0 = BasicConv2d(in_channels, 8 * unit, 1)
        self.conv1 = BasicConv2d(8 * unit, 48 * unit, 5)
        self.fc = nn.Linear(48 * unit, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(F.avg_pool2d(x, 5, stride=3)))
        x = F.adaptive_avg_pool2d(x, 1)
        logits: Tensor = self.fc(x.flatten(1))
        return logits


class Inception3(nn.Module):
    """Takes images [N, 3, H, W], 299 pixels or more; returns `InceptionOutputs`, when evaluating logits."""

    def __init__(self, *, num_classes: int = 1000, width: int = 32) -> None:
        super().__init__()
        unit = width // 2  # every number of channels is a multiple of it
        self.Conv2d_1a_3x3 = BasicConv2d(3, 2 * unit, 3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(2 * unit, 2 * unit, 3)
        self.Conv2d_2b_3x3 = BasicConv2d(2 * unit, 4 * unit, 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = BasicConv2d(4 * unit, 5 * unit, 1)
        self.Conv2d_4a_3x3 = BasicConv2d(5 * unit, 12 * unit, 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b = InceptionA(12 * unit, unit, pool_channels=2 * unit)
        self.Mixed_5c = InceptionA(16 * unit, unit, pool_channels=4 * unit)
        self.Mixed_5d = InceptionA(18 * unit, unit, pool_channels=4 * unit)
        self.Mixed_6a = InceptionB(18 * unit, unit)
        self.Mixed_6b = InceptionC(48 * unit, unit, inner=8 * unit)
        self.Mixed_6c = InceptionC(48 * unit, unit, inner=10 * unit)
        self.Mixed_6d = InceptionC(48 * unit, unit, inner=10 * unit)
        self.Mixed_6e = InceptionC(48 * unit, unit, inner=12 * unit)
        self.AuxLogits = InceptionAux(48 * unit, unit, num_classes=num_classes)
        self.Mixed_7a = InceptionD(48 * unit, unit)
        self.Mixed_7b = InceptionE(80 * unit, unit)
        self.Mixed_7c = InceptionE(128 * unit, unit)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(128 * unit, num_classes)
        self._initialise()

    def _initialise(self) -> None:
        # torchvision also means 0.01 for the convolution of the auxiliary head, but its code leaves it at 0.1.
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                std = 0.001 if module is self.AuxLogits.fc else 0.1
                nn.init.trunc_normal_(module.weight, std=std, a=-2, b=2)

    def forward(self, images: Tensor) -> Tensor | InceptionOutputs:
        x = self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(images)))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(self.maxpool1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(self.maxpool2(x))))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        aux_logits = self.AuxLogits(x) if self.training else None
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        logits: Tensor = self.fc(self.dropout(self.avgpool(x)).flatten(1))
        return logits if aux_logits is None else InceptionOutputs(logits, aux_logits)


def inception_loss(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross-entropy of the main head and, while training, 0.4 times that of the auxiliary one."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, target)
    logits, aux_logits = output
    return F.cross_entropy(logits, target) + AUXILIARY_WEIGHT * F.cross_entropy(aux_logits, target)


def inception_v3(
    *,
    lr: Rate = 0.045,
    image_size: ImageSize = 299,
    num_classes: Size = 1000,
    width: Width = 32,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """Inception-v3 on synthetic images; `width` is the channels of the first convolution."""
    return Job(
        model=partial(Inception3, num_classes=num_classes, width=width),
        loss=inception_loss,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr),
        batch=batch,
        seed=seed,
    )
