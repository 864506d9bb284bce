"""Losses: one number a member, from a function of one member's output.

The function is the user's own. Where it is one of torch's common losses on the output, it is computed for all
members at once; else vmap carries it; else it is called member by member, as one that draws random numbers always is,
each member's from its own stream. No 1/M anywhere: the sum of the losses gives each member precisely its own gradient.

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
from burstpool.fusion.random_losses import DrawingFrom, DrawsError, NotDrawing, unwatched
from burstpool.fusion.rules.fallback import without_vmaps_loop
from burstpool.fusion.rules.losses import MEAN, SUM, cross_entropy
from burstpool.fusion.streams import Streams

_REDUCTIONS = {"mean": MEAN, "sum": SUM}
_DEPRECATED = ("size_average", "reduce")
"""torch's old words for a reduction; the slower ways know them."""


def member_losses(
    function: Callable[..., Any], output: Any, own: Sequence[Any], shared: Sequence[Any], streams: Streams
) -> Tensor:
    """[M]: the function of each member's output, its own further arguments and the shared ones.

    Tensors in `output` and `own` have the member dimension first.
    """
    draws = False
    try:
        at_once = _at_once(function, output, own, shared)
    except DrawsError:
        at_once, draws = None, True
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
    found = None if draws else _by_vmap(one, tensors)
    if found is not None:
        return found
    each = []
    for member, row in enumerate(zip(*(tensor.unbind(0) for tensor in tensors), strict=True)):
        with DrawingFrom(streams, member):
            each.append(one(*row))
    return torch.stack(each).view(members)


def _by_vmap(one: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor | None:
    """None for what vmap cannot do, random numbers included: it draws none before it refuses."""
    try:
        with without_vmaps_loop():
            return torch.vmap(one)(*tensors)
    except FusionError:
        raise
    except Exception:  # the user's own mistakes come up again
        return None


def checked(loss: Any) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise FusionError(f"the loss function must return one number for a member's output; it returned {got}")
    return loss


def _at_once(function: Callable[..., Any], output: Any, own: Sequence[Any], shared: Sequence[Any]) -> Tensor | None:
    """The losses where the function does nothing but call a loss that is known here; DrawsError where it draws."""
    if not isinstance(output, Tensor) or any(not isinstance(value, Tensor) for value in own):
        return None
    try:
        with NotDrawing():  # type: ignore[no-untyped-call]
            result = function(_Members(output), *(_Members(value) for value in own), *shared)
    except DrawsError:
        raise
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
        with unwatched():
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
