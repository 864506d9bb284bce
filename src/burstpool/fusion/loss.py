"""Losses: one number a member, from a function of one member's output.

The function is the user's own. Where it is one of torch's common losses on the output, it is computed for all
members at once; else vmap carries it; else it is called member by member. No 1/M anywhere: the sum of the losses
gives each member precisely its own gradient.

Shapes: M = members, N = samples, C = classes.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion.rules.fallback import without_vmaps_loop
from burstpool.fusion.rules.losses import MEAN, SUM, cross_entropy

_REDUCTIONS = {"mean": MEAN, "sum": SUM}
_DEPRECATED = ("size_average", "reduce")
"""torch's old words for a reduction; the slower ways know them."""


def member_losses(function: Callable[..., Any], output: Any, own: Sequence[Any], shared: Sequence[Any]) -> Tensor:
    """[M]: the function of each member's output, its own further arguments and the shared ones.

    Tensors in `output` and `own` have the member dimension first.
    """
    at_once = _at_once(function, output, own, shared)
    if at_once is not None:
        return at_once
    leaves, spec = pytree.tree_flatten((output, tuple(own)))
    members = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def one(*tensors: Tensor) -> Tensor:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        out, mine = pytree.tree_unflatten(filled, spec)
        return checked(function(out, *mine, *shared))

    tensors = [leaves[place] for place in places]
    try:
        with without_vmaps_loop():
            return torch.vmap(one)(*tensors)
    except FusionError:
        raise
    except Exception:  # what vmap cannot do; the user's own mistakes come up again
        rows = zip(*(tensor.unbind(0) for tensor in tensors), strict=True)
        return torch.stack([one(*row) for row in rows]).view(members)


def checked(loss: Any) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise FusionError(f"the loss function must return one number for a member's output; it returned {got}")
    return loss


def _at_once(function: Callable[..., Any], output: Any, own: Sequence[Any], shared: Sequence[Any]) -> Tensor | None:
    """The losses where the function does nothing but call a loss that is known here."""
    if not isinstance(output, Tensor) or any(not isinstance(value, Tensor) for value in own):
        return None
    try:
        result = function(_Members(output), *(_Members(value) for value in own), *shared)
    except Exception:  # the user's own mistakes come up again on the slower way
        return None
    return result.value if isinstance(result, _Members) and result.value.dim() == 1 else None


class _Members:
    """Stands for one member's tensor while all members' are meant; knows a few losses and raises at all else."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function not in _KNOWN:
            return NotImplemented
        bound = _signature(function).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        if any(bound.arguments.get(name) is not None for name in _DEPRECATED):
            return NotImplemented
        result = _KNOWN[function](**bound.arguments)
        return cls(result)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "_Members":
        """Of one member's dimensions."""
        rank = self.value.dim() - 1
        return _Members(self.value.flatten(start_dim % rank + 1, end_dim % rank + 1))

    def transpose(self, dim0: int, dim1: int) -> "_Members":
        """Of one member's dimensions."""
        rank = self.value.dim() - 1
        return _Members(self.value.transpose(dim0 % rank + 1, dim1 % rank + 1))


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    """Of torch's losses, of which there are few; finding it takes as long as a small loss."""
    return inspect.signature(function)


def _both(input: Any, target: Any) -> tuple[Tensor, Tensor]:
    """The input [M, …], the target [M, …] or shared."""
    if not isinstance(input, _Members):
        raise FusionError("the loss's first argument must be the output")
    return input.value, target.value if isinstance(target, _Members) else target


def _cross_entropy(
    input: Any, target: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float, **_: Any
) -> Tensor:
    x_MNC, classes = _both(input, target)
    rank = x_MNC.dim() - 1
    own = isinstance(target, _Members)
    if weight is not None or classes.is_floating_point() or classes.dim() != rank - 1 + own or rank < 2:
        raise FusionError("not a plain cross-entropy of class indices")
    return cross_entropy(x_MNC, classes, ignore_index, label_smoothing, _REDUCTIONS[reduction])


def _elementwise(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def loss(input: Any, target: Any, reduction: str, weight: Any = None, pos_weight: Any = None, **_: Any) -> Tensor:
        x, wanted = _both(input, target)
        if weight is not None or pos_weight is not None:
            raise FusionError("weighted")
        if wanted.shape != (x.shape if isinstance(target, _Members) else x.shape[1:]):
            raise FusionError("broadcast")
        each = function(x, wanted.expand_as(x), reduction="none").flatten(1)
        return each.mean(1) if _REDUCTIONS[reduction] == MEAN else each.sum(1)

    return loss


_KNOWN: dict[Any, Callable[..., Tensor]] = {
    F.cross_entropy: _cross_entropy,
    F.mse_loss: _elementwise(F.mse_loss),
    F.l1_loss: _elementwise(F.l1_loss),
    F.binary_cross_entropy_with_logits: _elementwise(F.binary_cross_entropy_with_logits),
}
"""torch's losses → the same for all members."""
