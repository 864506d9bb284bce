"""BigLSTM, a language model of two wide LSTM layers: Jozefowicz et al., 2016, arXiv:1602.02410.

Each layer keeps 8192 cells and passes a projection of 1024 values on. The vocabulary is that of the One
Billion Word benchmark, 793,471 words: embedding and output layer hold 1.6 of the 1.8 billion parameters, and
one sample's logits take 63 MB in float32. Pass a smaller `vocabulary` for anything but a large device.

The loss is the full softmax. The paper trains with importance sampling, which draws other words at each step;
the full softmax needs no random numbers and is the loss the paper reports. State does not carry over from one
batch to the next.

Shapes: N = samples, T = tokens, P = projection, V = vocabulary.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

from functools import partial

import torch
from torch import Tensor, nn

from burstpool.errors import JobError
from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size
from burstpool.model.zoo.tokens import text_data, token_loss


class BigLSTM(nn.Module):
    """Takes tokens [N, T], returns logits of the next ones [N, T, V]."""

    def __init__(
        self,
        *,
        vocabulary: int = 793_471,
        hidden: int = 8192,
        projection: int = 1024,
        layers: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, projection)
        self.layers = nn.ModuleList(
            nn.LSTM(projection, hidden, proj_size=projection, batch_first=True) for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(projection, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x_NTP: Tensor = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x_NTP = self.dropout(layer(x_NTP)[0])
        logits_NTV: Tensor = self.head(x_NTP)
        return logits_NTV


def biglstm(
    *,
    lr: Rate = 0.2,
    dropout: Fraction = 0.1,
    vocabulary: Size = 793_471,
    hidden: Size = 8192,
    projection: Size = 1024,
    layers: Size = 2,
    tokens: Size = 20,
    batch: Size = 128,
    seed: Seed = 0,
) -> Job:
    """BigLSTM on synthetic text, unrolled over `tokens` tokens."""
    if projection >= hidden:
        raise JobError(f"projection={projection} must be smaller than hidden={hidden}")
    return Job(
        model=partial(
            BigLSTM,
            vocabulary=vocabulary,
            hidden=hidden,
            projection=projection,
            layers=layers,
            dropout=dropout,
        ),
        loss=token_loss,
        data=text_data(vocabulary, tokens),
        optimizer=partial(torch.optim.Adagrad, lr=lr),
        batch=batch,
        seed=seed,
    )
