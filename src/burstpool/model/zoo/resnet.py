"""ResNet: He et al., CVPR'16, and Wide ResNet: Zagoruyko and Komodakis, BMVC'16.

Parameter names, shapes and numerics are torchvision's, so that its weights load; like there, a bottleneck
strides in its 3×3 convolution, not in the first (the variant known as v1.5). ReLUs are not in place: a block
of layers may begin with one, and its input belongs to the block before.
"""

from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Rate, Seed, Size
from burstpool.model.zoo.images import image_data, sgd

ImageSize = Annotated[int, Field(ge=32)]
"""The image is halved five times; 32 pixels leave one."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut."""

    EXPANSION = 1
    """Channels it returns, in units of its width."""

    def __init__(self, in_channels: int, width: int, *, stride: int, wide: int = 1) -> None:
        super().__init__()
        channels = width * wide
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample = shortcut(in_channels, width, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        result: Tensor = self.relu(x + residual)
        return result


class Bottleneck(nn.Module):
    """A 3×3 convolution between two of 1×1, and a shortcut."""

    EXPANSION = 4
    """Channels it returns, in units of its width."""

    def __init__(self, in_channels: int, width: int, *, stride: int, wide: int = 1) -> None:
        super().__init__()
        channels, out_channels = width * wide, width * self.EXPANSION
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample = shortcut(in_channels, out_channels, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        residual = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        result: Tensor = self.relu(x + residual)
        return result


def shortcut(in_channels: int, out_channels: int, *, stride: int) -> nn.Sequential | None:
    """The projection of a shortcut whose two ends differ in shape, else nothing."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
    )


class ResNet(nn.Module):
    """Takes images [N, 3, H, W], returns logits [N, num_classes]."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        *,
        num_classes: int = 1000,
        width: int = 64,
        wide: int = 1,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages: list[nn.Sequential] = []
        in_channels = width
        for stage, count in enumerate(blocks):
            layers = []
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(block(in_channels, width * 2**stage, stride=stride, wide=wide))
                in_channels = width * 2**stage * block.EXPANSION
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


def resnet18(
    *,
    lr: Rate = 0.1,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """ResNet-18 on synthetic images; `width` is the channels of the first convolution."""
    return Job(
        model=partial(ResNet, BasicBlock, (2, 2, 2, 2), num_classes=num_classes, width=width),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr),
        batch=batch,
        seed=seed,
    )


def resnet50(
    *,
    lr: Rate = 0.1,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """ResNet-50 on synthetic images; `width` is the channels of the first convolution."""
    return Job(
        model=partial(ResNet, Bottleneck, (3, 4, 6, 3), num_classes=num_classes, width=width),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr),
        batch=batch,
        seed=seed,
    )


def resnet152(
    *,
    lr: Rate = 0.1,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """ResNet-152 on synthetic images; `width` is the channels of the first convolution."""
    return Job(
        model=partial(ResNet, Bottleneck, (3, 8, 36, 3), num_classes=num_classes, width=width),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr),
        batch=batch,
        seed=seed,
    )


def wide_resnet101_2(
    *,
    lr: Rate = 0.1,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """ResNet-101 whose 3×3 convolutions have twice the channels, on synthetic images."""
    return Job(
        model=partial(ResNet, Bottleneck, (3, 4, 23, 3), num_classes=num_classes, width=width, wide=2),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr),
        batch=batch,
        seed=seed,
    )
