"""DCGAN's generator and discriminator for images of 64×64: Radford et al., ICLR'16.

A job has one model and one loss, so the two networks are two jobs, each doing the work it does in the
adversarial game. The generator, without an adversary, draws the image that belongs to its noise (mean squared
error; Bojanowski et al., ICML'18, train generators so). The discriminator tells real images from made ones,
labels that the data gives; it returns logits where PyTorch's example ends in a sigmoid, the same function but
safe in half precision.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import Floats, Integers, Synthetic
from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size

IMAGE_SIZE = 64
"""Fixed by the number of layers: four pixels, doubled four times."""


class Generator(nn.Module):
    """Takes noise [N, noise, 1, 1], returns images [N, channels, 64, 64] with values from -1 to 1."""

    def __init__(self, *, noise: int = 100, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.ConvTranspose2d(noise, 8 * width, 4, bias=False),
            nn.BatchNorm2d(8 * width),
            nn.ReLU(),
        ]
        for factor in (4, 2, 1):
            layers += [
                nn.ConvTranspose2d(2 * factor * width, factor * width, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(factor * width),
                nn.ReLU(),
            ]
        layers += [nn.ConvTranspose2d(width, channels, 4, stride=2, padding=1, bias=False), nn.Tanh()]
        self.main = nn.Sequential(*layers)
        self.apply(initialise)

    def forward(self, noise: Tensor) -> Tensor:
        images: Tensor = self.main(noise)
        return images


class Discriminator(nn.Module):
    """Takes images [N, channels, 64, 64], returns one logit each, [N]: positive for real."""

    def __init__(self, *, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2),
        ]
        for factor in (1, 2, 4):
            layers += [
                nn.Conv2d(factor * width, 2 * factor * width, 4, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(2 * factor * width),
                nn.LeakyReLU(0.2),
            ]
        layers.append(nn.Conv2d(8 * width, 1, 4, bias=False))
        self.main = nn.Sequential(*layers)
        self.apply(initialise)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.main(images)
        return logits.flatten()


def initialise(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, around one in batch norm, as in the paper."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def real_or_made_loss(logits: Tensor, real: Tensor) -> Tensor:
    """Binary cross-entropy, the mean over samples; `real` is 1 or 0."""
    return F.binary_cross_entropy_with_logits(logits, real.to(logits.dtype))


def dcgan_generator(
    *,
    lr: Rate = 2e-4,
    beta1: Fraction = 0.5,
    noise: Size = 100,
    width: Size = 64,
    channels: Size = 3,
    batch: Size = 64,
    seed: Seed = 0,
) -> Job:
    """DCGAN's generator, drawing the synthetic image that belongs to its noise."""
    return Job(
        model=partial(Generator, noise=noise, width=width, channels=channels),
        loss=F.mse_loss,
        data=Synthetic(inputs=Floats(shape=(noise, 1, 1)), target=Floats(shape=(channels, IMAGE_SIZE, IMAGE_SIZE))),
        optimizer=_adam(lr, beta1),
        batch=batch,
        seed=seed,
    )


def dcgan_discriminator(
    *,
    lr: Rate = 2e-4,
    beta1: Fraction = 0.5,
    width: Size = 64,
    channels: Size = 3,
    batch: Size = 64,
    seed: Seed = 0,
) -> Job:
    """DCGAN's discriminator on synthetic images, half of them labelled real."""
    return Job(
        model=partial(Discriminator, width=width, channels=channels),
        loss=real_or_made_loss,
        data=Synthetic(inputs=Floats(shape=(channels, IMAGE_SIZE, IMAGE_SIZE)), target=Integers(count=2)),
        optimizer=_adam(lr, beta1),
        batch=batch,
        seed=seed,
    )


def _adam(lr: float, beta1: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Adam]:
    return partial(torch.optim.Adam, lr=lr, betas=(beta1, 0.999))
