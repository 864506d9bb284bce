"""A Transformer language model of the size of PyTorch's word-language-model example.

Vaswani et al., NeurIPS'17, and one of the workloads of HFTA: `nn.TransformerEncoder` under a causal mask,
sinusoidal positions, a linear head that is not tied to the embedding. Batch first, where the example puts
time first.

Shapes: N = samples, T = tokens, W = width, V = vocabulary.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import math
from functools import partial

import torch
from torch import Tensor, nn

from burstpool.job import Job
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size, check_heads
from burstpool.model.zoo.tokens import text_data, token_loss


def sinusoids(tokens: int, width: int) -> Tensor:
    """Positions [T, W] as sines and cosines of falling frequency (Vaswani et al., section 3.5)."""
    position = torch.arange(tokens).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angle = position * frequency
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)[:, :width]


class TransformerLM(nn.Module):
    """Takes tokens [N, T], returns logits of the next ones [N, T, V]."""

    positions: Tensor
    """Sinusoids, [T, W]."""
    mask: Tensor
    """Minus infinity above the diagonal, [T, T]."""

    def __init__(
        self,
        *,
        vocabulary: int = 33_278,
        tokens: int = 35,
        width: int = 200,
        feedforward: int = 200,
        heads: int = 2,
        layers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, feedforward, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("positions", sinusoids(tokens, width), persistent=False)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens)
        self.register_buffer("mask", mask, persistent=False)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.head.weight, -0.1, 0.1)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x_NTW: Tensor = self.embedding(tokens) * math.sqrt(self.width)
        x_NTW = self.dropout(x_NTW + self.positions)
        # Saying that the mask is causal spares the encoder from looking into it, which cannot be traced.
        x_NTW = self.encoder(x_NTW, mask=self.mask, is_causal=True)
        logits_NTV: Tensor = self.head(x_NTW)
        return logits_NTV


def transformer(
    *,
    lr: Rate = 1e-3,
    dropout: Fraction = 0.2,
    vocabulary: Size = 33_278,
    tokens: Size = 35,
    width: Size = 200,
    feedforward: Size = 200,
    heads: Size = 2,
    layers: Size = 2,
    batch: Size = 20,
    seed: Seed = 0,
) -> Job:
    """The Transformer language model on synthetic text."""
    check_heads(width, heads)
    return Job(
        model=partial(
            TransformerLM,
            vocabulary=vocabulary,
            tokens=tokens,
            width=width,
            feedforward=feedforward,
            heads=heads,
            layers=layers,
            dropout=dropout,
        ),
        loss=token_loss,
        data=text_data(vocabulary, tokens),
        optimizer=partial(torch.optim.Adam, lr=lr),
        batch=batch,
        seed=seed,
    )
