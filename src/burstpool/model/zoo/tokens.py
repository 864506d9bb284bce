"""What the language models of the zoo share: the loss over tokens, and synthetic text."""

from torch import Tensor
from torch.nn import functional as F

from burstpool.data import Integers, NextToken, Synthetic


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of `logits [N, T, V]` against `target [N, T]`, the mean over the tokens that count.

    A mean over samples too, as every sample of the zoo's data has the same number of tokens that count.
    """
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def text_data(vocabulary: int, tokens: int) -> NextToken:
    """Sequences of random tokens; the target of each is the next one."""
    text = Integers(count=vocabulary, shape=(tokens + 1,))
    return NextToken(Synthetic(inputs=text, target=Integers(count=1)))
