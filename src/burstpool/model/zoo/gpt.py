"""A GPT of the size of the smallest GPT-2: Radford et al., 2019; the code's outline follows nanoGPT.

Learned positions, layer norm before each part, the head tied to the token embedding.

Shapes: N = samples, T = tokens, W = width, V = vocabulary.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

import math
from functools import partial

import torch
from torch import Tensor, nn

from burstpool.job import Job
from burstpool.model.zoo.attention import SelfAttention
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size, check_heads
from burstpool.model.zoo.tokens import text_data, token_loss


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout=dropout, causal=causal)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NTW: Tensor) -> Tensor:
        x_NTW = x_NTW + self.dropout(self.attention(self.attention_norm(x_NTW)))
        result_NTW: Tensor = x_NTW + self.dropout(self.feedforward(self.feedforward_norm(x_NTW)))
        return result_NTW


class GPT(nn.Module):
    """Takes tokens [N, T], returns logits of the next ones [N, T, V]."""

    def __init__(
        self,
        *,
        vocabulary: int = 50_257,
        positions: int = 1024,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout=dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(layers)
        self.head.weight = self.token.weight

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # What is added to the residual stream starts smaller: its variance adds up over the layers.
                added = name.endswith(("attention.out.weight", "feedforward.2.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers) if added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        place_T = torch.arange(tokens.shape[1], device=tokens.device)
        x_NTW: Tensor = self.dropout(self.token(tokens) + self.position(place_T))
        logits_NTV: Tensor = self.head(self.norm(self.blocks(x_NTW)))
        return logits_NTV


def gpt_small(
    *,
    lr: Rate = 6e-4,
    weight_decay: Rate = 0.1,
    dropout: Fraction = 0.1,
    vocabulary: Size = 50_257,
    tokens: Size = 1024,
    width: Size = 768,
    heads: Size = 12,
    layers: Size = 12,
    batch: Size = 8,
    seed: Seed = 0,
) -> Job:
    """A small GPT on synthetic text of `tokens` tokens, which is also the number of positions it knows."""
    check_heads(width, heads)
    model = partial(
        GPT,
        vocabulary=vocabulary,
        positions=tokens,
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
    )
    return Job(
        model=model,
        loss=token_loss,
        data=text_data(vocabulary, tokens),
        optimizer=partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay),
        batch=batch,
        seed=seed,
    )
