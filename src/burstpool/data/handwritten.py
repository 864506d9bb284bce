"""Handwritten digits: 1797 real images of 8×8 pixels in 10 classes, shipped with the package.

The data is the test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (1998),
UCI Machine Learning Repository, https://archive.ics.uci.edu/dataset/80, licensed CC BY 4.0, the same images
as scikit-learn's `load_digits`. `digits.npz` holds them as `images` (uint8, 1797×8×8, levels 0 to 16) and
`labels` (uint8), in the order of `numpy.random.default_rng(0).permutation(1797)`; the pixels are unchanged.
"""

import functools
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from burstpool.errors import JobError

Form = Literal["image", "rows", "tokens"]
"""How a sample shows its image: float [1, 8, 8]; float [8, 8], rows; int64 [64], pixels' levels."""

NUM_CLASSES = 10
NUM_LEVELS = 17
"""Pixel levels, 0 to 16: the vocabulary of the form `tokens`."""
NUM_TRAIN = 1437
"""The first 1437 images are for training, the other 360 for testing."""


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """One part of the digits; floats are levels divided by 16, targets are int64."""

    def __init__(self, *, train: bool = True, form: Form = "image") -> None:
        if form not in get_args(Form):
            raise JobError(f"digits have no form {form!r}; pass one of: {', '.join(get_args(Form))}")
        self.train = train
        self.form = form
        levels, labels = _load()
        part = slice(None, NUM_TRAIN) if train else slice(NUM_TRAIN, None)
        self.inputs = _as_form(levels[part], form)
        """All inputs of the part, stacked."""
        self.targets = labels[part]
        """All classes of the part, stacked."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __reduce__(self) -> tuple[Any, ...]:
        # Every process has the file, so the pixels need not travel.
        return functools.partial(Digits, train=self.train, form=self.form), ()

    def __repr__(self) -> str:
        return f"digits(train={self.train}, form={self.form!r})"


def digits(train: bool = True, *, form: Form = "image") -> Digits:
    """The training or the test part of the handwritten digits."""
    return Digits(train=train, form=form)


def _as_form(levels: Tensor, form: Form) -> Tensor:
    if form == "tokens":
        return levels.flatten(1).long()
    scaled = levels.float() / (NUM_LEVELS - 1)
    return scaled.unsqueeze(1) if form == "image" else scaled


@functools.cache
def _load() -> tuple[Tensor, Tensor]:
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        return torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
