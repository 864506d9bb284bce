"""Multi-head self-attention, the part that BERT and GPT share.

Shapes: N = samples, T = tokens, W = width, A = heads, D = width of a head.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Takes and returns [N, T, W]; causal attention looks at no later token."""

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_NTW: Tensor) -> Tensor:
        qkv_NT3AD: Tensor = self.qkv(x_NTW).unflatten(2, (3, self.heads, -1))
        q_NATD, k_NATD, v_NATD = qkv_NT3AD.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed_NATD = F.scaled_dot_product_attention(q_NATD, k_NATD, v_NATD, dropout_p=dropout, is_causal=self.causal)
        result_NTW: Tensor = self.out(mixed_NATD.transpose(1, 2).flatten(2))
        return result_NTW
