"""BERT-medium with its masked-language-model head: Devlin et al., NAACL'19; sizes of Turc et al., 2019.

The head's last layer is tied to the token embedding. There is no next-sentence head and no padding mask:
samples are dense, and each hides the same number of tokens.

Shapes: N = samples, T = tokens, W = width, V = vocabulary.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from functools import partial

import torch
from torch import Tensor, nn

from burstpool.data import Integers, Masked, Synthetic
from burstpool.job import Job
from burstpool.model.zoo.attention import SelfAttention
from burstpool.model.zoo.hyperparameters import Fraction, Rate, Seed, Size, check_heads
from burstpool.model.zoo.tokens import token_loss

MASK_TOKEN = 103
"""Of BERT's own vocabulary; in one too small to hold it, the last token stands in."""
MASKED_FRACTION = 0.15
"""Of the tokens of a sample, rounded down, but at least one."""
EPSILON = 1e-12
"""Of the layer norms."""


class Embeddings(nn.Module):
    """The sum of a token's, its position's and its segment's embedding."""

    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(positions, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        place_T = torch.arange(tokens.shape[1], device=tokens.device)
        sum_NTW = self.token(tokens) + self.position(place_T) + self.segment(segments)
        x_NTW: Tensor = self.dropout(self.norm(sum_NTW))
        return x_NTW


class Layer(nn.Module):
    """Attention and a feed-forward network, each normalised after its shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, dropout=dropout, causal=False)
        self.attention_norm = nn.LayerNorm(width, eps=EPSILON)
        self.feedforward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.feedforward_norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_NTW: Tensor) -> Tensor:
        x_NTW = self.attention_norm(x_NTW + self.dropout(self.attention(x_NTW)))
        result_NTW: Tensor = self.feedforward_norm(x_NTW + self.dropout(self.feedforward(x_NTW)))
        return result_NTW


class Bert(nn.Module):
    """Takes tokens and segments (0 or 1), both [N, T]; returns logits of the hidden tokens [N, T, V]."""

    def __init__(
        self,
        *,
        vocabulary: int = 30_522,
        positions: int = 512,
        width: int = 512,
        heads: int = 8,
        layers: int = 8,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.embeddings = Embeddings(vocabulary, positions, width, dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, dropout) for _ in range(layers)))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=EPSILON))
        self.head = nn.Linear(width, vocabulary)
        self.apply(_initialise)
        self.head.weight = self.embeddings.token.weight

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x_NTW: Tensor = self.layers(self.embeddings(tokens, segments))
        logits_NTV: Tensor = self.head(self.transform(x_NTW))
        return logits_NTV


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, 0.0, 0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def bert_medium(
    *,
    lr: Rate = 1e-4,
    dropout: Fraction = 0.1,
    vocabulary: Size = 30_522,
    tokens: Size = 128,
    width: Size = 512,
    heads: Size = 8,
    layers: Size = 8,
    batch: Size = 32,
    seed: Seed = 0,
) -> Job:
    """BERT-medium on synthetic text in which 15% of the tokens are hidden."""
    check_heads(width, heads)
    text = Synthetic(
        inputs={
            "tokens": Integers(count=vocabulary, shape=(tokens,)),
            "segments": Integers(count=2, shape=(tokens,)),
        },
        target=Integers(count=1),
    )
    data = Masked(
        source=text,
        field="tokens",
        mask_token=min(MASK_TOKEN, vocabulary - 1),
        num_masked=max(1, int(MASKED_FRACTION * tokens)),
    )
    model = partial(
        Bert,
        vocabulary=vocabulary,
        positions=max(512, tokens),
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
    )
    optimizer = partial(torch.optim.AdamW, lr=lr, weight_decay=0.01)
    return Job(model=model, loss=token_loss, data=data, optimizer=optimizer, batch=batch, seed=seed)
