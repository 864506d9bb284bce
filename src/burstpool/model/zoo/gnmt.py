"""GNMT, a translator of stacked LSTMs with attention: Wu et al., 2016, arXiv:1609.08144.

The encoder's first layer reads both ways; residual connections start at the third layer of either stack. The
attention is additive (Bahdanau et al., ICLR'15) with normalised weights. As in the MLPerf reference, the
first decoder layer runs over the whole sentence before the attention, which gives its context to every later
layer: the paper feeds the context of the previous word back, which would force a step at a time. Sentences
are dense (one length, no padding, no packing) and the translation is given while training (teacher forcing).

Shapes: N = sentences, S = source tokens, T = target tokens, H = hidden, V = vocabulary.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import math
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.data import Integers, Synthetic, TeacherForced
from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size

Layers = Annotated[int, Field(ge=2)]
"""Of the encoder, and as many of the decoder."""

INITIAL_RANGE = 0.1
"""Weights of the recurrent and linear layers start uniform within ± this."""
LABEL_SMOOTHING = 0.1
"""Share of the target spread over the whole vocabulary."""


class Attention(nn.Module):
    """Additive attention: each query gets the mean of the keys, weighted by how well they match."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.match = nn.Parameter(torch.empty(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.scale = nn.Parameter(torch.full((), 1 / math.sqrt(hidden)))

    def forward(self, queries_NTH: Tensor, keys_NSH: Tensor) -> Tensor:
        both_NTSH = self.query(queries_NTH).unsqueeze(2) + self.key(keys_NSH).unsqueeze(1) + self.bias
        direction_H = self.match * (self.scale / torch.linalg.vector_norm(self.match))
        scores_NTS = torch.tanh(both_NTSH) @ direction_H
        return torch.bmm(F.softmax(scores_NTS, dim=2), keys_NSH)


class Encoder(nn.Module):
    """Takes tokens [N, S], returns what they mean, [N, S, H]."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.both_ways = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.merge = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.layers = nn.ModuleList(nn.LSTM(hidden, hidden, batch_first=True) for _ in range(layers - 2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor) -> Tensor:
        x_NSH: Tensor = self.both_ways(self.dropout(self.embedding(source)))[0]
        x_NSH = self.merge(self.dropout(x_NSH))[0]
        for layer in self.layers:
            x_NSH = layer(self.dropout(x_NSH))[0] + x_NSH
        return x_NSH


class Decoder(nn.Module):
    """Takes the translation's tokens so far, [N, T], and the encoder's result; returns logits [N, T, V]."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.first = nn.LSTM(hidden, hidden, batch_first=True)
        self.attention = Attention(hidden)
        self.layers = nn.ModuleList(nn.LSTM(2 * hidden, hidden, batch_first=True) for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, translation: Tensor, encoded_NSH: Tensor) -> Tensor:
        x_NTH: Tensor = self.first(self.dropout(self.embedding(translation)))[0]
        context_NTH = self.attention(x_NTH, encoded_NSH)
        for number, layer in enumerate(self.layers):
            y_NTH = layer(torch.cat((self.dropout(x_NTH), context_NTH), 2))[0]
            x_NTH = y_NTH + x_NTH if number else y_NTH
        logits_NTV: Tensor = self.head(x_NTH)
        return logits_NTV


class GNMT(nn.Module):
    """Takes tokens of the source [N, S] and of the translation so far [N, T]; returns logits [N, T, V]."""

    def __init__(self, *, vocabulary: int = 32_000, hidden: int = 1024, layers: int = 8, dropout: float = 0.2) -> None:
        super().__init__()
        self.encoder = Encoder(vocabulary, hidden, layers, dropout)
        self.decoder = Decoder(vocabulary, hidden, layers, dropout)
        for name, parameter in self.named_parameters():
            if not name.endswith(("attention.bias", "attention.scale")):
                nn.init.uniform_(parameter, -INITIAL_RANGE, INITIAL_RANGE)

    def forward(self, source: Tensor, translation: Tensor) -> Tensor:
        logits_NTV: Tensor = self.decoder(translation, self.encoder(source))
        return logits_NTV


def translation_loss(logits_NTV: Tensor, target_NT: Tensor) -> Tensor:
    """Cross-entropy with labels smoothed by 0.1, the mean over tokens and so over samples."""
    return F.cross_entropy(logits_NTV.flatten(0, 1), target_NT.flatten(), label_smoothing=LABEL_SMOOTHING)


def gnmt(
    *,
    lr: Rate = 1e-3,
    dropout: Fraction = 0.2,
    vocabulary: Size = 32_000,
    hidden: Size = 1024,
    layers: Layers = 8,
    tokens: Size = 50,
    batch: Size = 64,
    seed: Seed = 0,
) -> Job:
    """GNMT on synthetic sentences of `tokens` tokens in both languages."""
    sentences = Synthetic(
        inputs=Integers(count=vocabulary, shape=(tokens,)),
        target=Integers(count=vocabulary, shape=(tokens + 1,)),
    )
    return Job(
        model=partial(GNMT, vocabulary=vocabulary, hidden=hidden, layers=layers, dropout=dropout),
        loss=translation_loss,
        data=TeacherForced(sentences),
        optimizer=partial(torch.optim.Adam, lr=lr),
        batch=batch,
        seed=seed,
    )
