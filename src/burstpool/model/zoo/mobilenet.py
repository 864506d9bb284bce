"""MobileNetV3-Large: Howard et al., ICCV'19.

Parameter names, shapes and numerics are torchvision's, so that its weights load. Activations are not in
place: a block of layers may begin with one, and its input belongs to the block before.
"""

from functools import partial
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size
from burstpool.model.zoo.images import image_data, sgd

ImageSize = Annotated[int, Field(ge=32)]
"""The image is halved five times; 32 pixels leave one."""
Multiplier = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Scales every number of channels, rounded to a multiple of eight."""


class Row(NamedTuple):
    """One line of the paper's table 1."""

    kernel: int
    """Side of the depthwise convolution."""
    expanded: int
    """Channels of the depthwise convolution."""
    out_channels: int
    """Channels of the result."""
    excite: bool
    """Whether channels are weighted by squeeze and excitation."""
    hard_swish: bool
    """Whether activations are hard-swish, else ReLU."""
    stride: int
    """Stride of the depthwise convolution."""


STEM_CHANNELS = 16
LARGE = (
    Row(3, 16, 16, False, False, 1),
    Row(3, 64, 24, False, False, 2),
    Row(3, 72, 24, False, False, 1),
    Row(5, 72, 40, True, False, 2),
    Row(5, 120, 40, True, False, 1),
    Row(5, 120, 40, True, False, 1),
    Row(3, 240, 80, False, True, 2),
    Row(3, 200, 80, False, True, 1),
    Row(3, 184, 80, False, True, 1),
    Row(3, 184, 80, False, True, 1),
    Row(3, 480, 112, True, True, 1),
    Row(3, 672, 112, True, True, 1),
    Row(5, 672, 160, True, True, 2),
    Row(5, 960, 160, True, True, 1),
    Row(5, 960, 160, True, True, 1),
)
HEAD_EXPANSION = 6
"""Channels of the last convolution, in units of the last row's."""
HEAD_CHANNELS = 1280
"""Width of the hidden layer of the classifier."""


def channels(count: float) -> int:
    """The multiple of eight nearest to `count`, but not under 90% of it."""
    nearest = max(8, int(count + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * count else nearest + 8


def convolution(
    in_channels: int,
    out_channels: int,
    kernel: int,
    *,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = None,
) -> nn.Sequential:
    """Convolution that keeps the size but for its stride, batch norm, and the activation if there is one."""
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels, eps=0.001, momentum=0.01),
    ]
    return nn.Sequential(*layers, *([activation()] if activation else []))


class SqueezeExcitation(nn.Module):
    """Weights each channel by what all of them average to."""

    def __init__(self, in_channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(in_channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, in_channels, 1)
        self.activation = nn.ReLU()
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale: Tensor = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return x * scale


class InvertedResidual(nn.Module):
    """Widens, convolves each channel by itself, weights them, narrows; a shortcut where shapes allow."""

    def __init__(self, in_channels: int, row: Row, width: float) -> None:
        super().__init__()
        expanded, out_channels = channels(row.expanded * width), channels(row.out_channels * width)
        activation = nn.Hardswish if row.hard_swish else nn.ReLU
        self.shortcut = row.stride == 1 and in_channels == out_channels
        layers: list[nn.Module] = []
        if expanded != in_channels:
            layers.append(convolution(in_channels, expanded, 1, activation=activation))
        layers.append(
            convolution(expanded, expanded, row.kernel, stride=row.stride, groups=expanded, activation=activation)
        )
        if row.excite:
            layers.append(SqueezeExcitation(expanded, channels(expanded // 4)))
        layers.append(convolution(expanded, out_channels, 1))
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.block(x)
        return result + x if self.shortcut else result


class MobileNetV3(nn.Module):
    """Takes images [N, 3, H, W], returns logits [N, num_classes]."""

    def __init__(self, *, num_classes: int = 1000, width: float = 1.0, dropout: float = 0.2) -> None:
        super().__init__()
        in_channels = channels(STEM_CHANNELS * width)
        layers: list[nn.Module] = [convolution(3, in_channels, 3, stride=2, activation=nn.Hardswish)]
        for row in LARGE:
            layers.append(InvertedResidual(in_channels, row, width))
            in_channels = channels(row.out_channels * width)
        last = HEAD_EXPANSION * in_channels
        layers.append(convolution(in_channels, last, 1, activation=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        head = channels(HEAD_CHANNELS * width)
        self.classifier = nn.Sequential(
            nn.Linear(last, head), nn.Hardswish(), nn.Dropout(dropout), nn.Linear(head, num_classes)
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def mobilenet_v3_large(
    *,
    lr: Rate = 0.1,
    dropout: Fraction = 0.2,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Multiplier = 1.0,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """MobileNetV3-Large on synthetic images; `width` is the paper's multiplier of all channels."""
    return Job(
        model=partial(MobileNetV3, num_classes=num_classes, width=width, dropout=dropout),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr, weight_decay=1e-5),
        batch=batch,
        seed=seed,
    )
