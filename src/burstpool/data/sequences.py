"""Views of token data as training tasks: predict the next token, the translation, the hidden tokens.

Each takes a data set whose samples hold sequences of tokens and returns one of `(input, target)`. Every
sample has the same number of targets, so that a loss that is a mean over tokens is a mean over samples too,
and gradients of unequal shares of a batch can be averaged by the number of samples.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from burstpool.data.synthetic import generator
from burstpool.errors import JobError

IGNORED = -100
"""The target of a position that does not count; `torch.nn.functional.cross_entropy` leaves it out."""


@dataclass(frozen=True, slots=True)
class NextToken(Dataset[tuple[Tensor, Tensor]]):
    """Language modelling: from `(tokens [T+1], anything)` to `(tokens[:-1], tokens[1:])`."""

    source: Dataset[Any]
    """Samples whose input is a sequence of tokens."""

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.source[index][0]
        return tokens[:-1], tokens[1:]


@dataclass(frozen=True, slots=True)
class TeacherForced(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Translation: from `(tokens [S], tokens [T+1])` to `((source, translation[:-1]), translation[1:])`."""

    source: Dataset[Any]
    """Samples whose input and target are sequences of tokens."""

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        sentence, translation = self.source[index]
        return (sentence, translation[:-1]), translation[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Masked language modelling: hides the same number of tokens in each sample, the same ones at each visit.

    From `({field: tokens [T], …}, anything)` to `({field: tokens with holes, …}, tokens or IGNORED [T])`.
    Every hidden token becomes the mask token; BERT's rule of leaving some of them visible is not followed.
    """

    source: Dataset[Any]
    """Samples whose input is a dict of tensors."""
    field: str
    """The entry of the input that is masked."""
    mask_token: int
    """What stands in for a hidden token."""
    num_masked: int
    """Tokens hidden in each sample."""
    seed: int = 0
    """Chooses the positions."""

    def __post_init__(self) -> None:
        length = len(self.source[0][0][self.field])
        if not 1 <= self.num_masked <= length:
            raise JobError(f"num_masked={self.num_masked} of {length} tokens; pass 1 to {length}")

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs = dict(self.source[index][0])
        tokens = inputs[self.field]
        order = generator(self.seed, index % len(self)).permutation(len(tokens))
        hidden = torch.from_numpy(np.sort(order[: self.num_masked]))
        target = torch.full_like(tokens, IGNORED)
        target[hidden] = tokens[hidden]
        inputs[self.field] = tokens.index_fill(0, hidden, self.mask_token)
        return inputs, target
