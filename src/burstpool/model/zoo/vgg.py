"""VGG without batch norm, configurations D (16 layers) and E (19): Simonyan and Zisserman, ICLR'15.

Parameter names, shapes and numerics are torchvision's, so that its weights load. ReLUs are not in place: a
block of layers may begin with one, and its input belongs to the block before.
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
"""Five poolings halve the image; 32 pixels leave one."""

CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Layers with weights → convolutions before each pooling; three linear layers follow."""


class VGG(nn.Module):
    """Takes images [N, 3, H, W], returns logits [N, num_classes]."""

    def __init__(self, depth: int = 16, *, num_classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features(CONVOLUTIONS[depth], width))
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        hidden = 64 * width
        self.classifier = nn.Sequential(
            nn.Linear(8 * width * 7 * 7, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, 0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.avgpool(self.features(images))
        logits: Tensor = self.classifier(x.flatten(1))
        return logits


def _features(convolutions: tuple[int, ...], width: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    in_channels = 3
    for stage, count in enumerate(convolutions):
        channels = width * min(2**stage, 8)
        for _ in range(count):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()]
            in_channels = channels
        layers.append(nn.MaxPool2d(2, 2))
    return layers


def vgg16(
    *,
    lr: Rate = 0.01,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """VGG-16 on synthetic images; `width` is the channels of the first convolution."""
    return Job(
        model=partial(VGG, 16, num_classes=num_classes, width=width),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr, weight_decay=5e-4),
        batch=batch,
        seed=seed,
    )


def vgg19(
    *,
    lr: Rate = 0.01,
    image_size: ImageSize = 224,
    num_classes: Size = 1000,
    width: Size = 64,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """VGG-19 on synthetic images; `width` is the channels of the first convolution."""
    return Job(
        model=partial(VGG, 19, num_classes=num_classes, width=width),
        loss=F.cross_entropy,
        data=image_data(image_size, num_classes),
        optimizer=sgd(lr, weight_decay=5e-4),
        batch=batch,
        seed=seed,
    )
