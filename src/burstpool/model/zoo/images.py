"""What the image classifiers of the zoo share: synthetic images in place of ImageNet, and the optimizer."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from burstpool.data import Floats, Integers, Synthetic


def image_data(image_size: int, num_classes: int) -> Synthetic:
    """Square colour images of noise, each with a class."""
    return Synthetic(inputs=Floats(shape=(3, image_size, image_size)), target=Integers(count=num_classes))


def sgd(lr: float, *, weight_decay: float = 1e-4) -> Callable[[Iterable[nn.Parameter]], torch.optim.SGD]:
    """SGD with momentum 0.9, as the papers of the image classifiers use it."""
    return partial(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=weight_decay)
