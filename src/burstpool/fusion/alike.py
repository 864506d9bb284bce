"""Whether two ways to compute an array's step can be the same but for rounding, by losses and norms of gradients.

A compiler may err, and then trains something else without a word. Takes what was seen of one step in each way, from the
same weights; returns in words where they cannot be the same. Norms, as they are cheap to keep: a gradient that has only
another direction is not told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_TIMES = 10.0
"""By which norms of a parameter's gradient may differ. Rounding moves those of some layers by their own size: in a
network with batch norm over few samples, ten thousand times as much as the numbers it comes from."""
_TIMES_AT_RANDOM = 100.0
"""By which a member's may be larger than with other random numbers: these may leave whole branches out."""
_COUNTS = 0.01
"""Share of all of a member's gradient from which on a parameter's is looked at."""
_NOTHING = 1e-6
"""Norms below this may be rounding of what is zero."""
_LOSS = 0.1
"""By which losses may differ, as a share of them, and at least."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one step in one way."""

    losses: Tensor
    """[M]"""
    norms: Mapping[str, Tensor | None]
    """Parameter → [M], in double precision; None where there is no gradient."""


def seen(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> Seen:
    """The losses [M] of a step, and the gradients that it has left with the parameters [M, …]."""
    gradients = {key: parameter.grad for key, parameter in parameters.items()}
    norms = {key: None if gradient is None else _norms(gradient) for key, gradient in gradients.items()}
    return Seen(losses.detach().double(), norms)


def unlike(mine: Seen, right: Seen, *, random: bool) -> str:
    """Where a step cannot be the one that is right; empty if it can.

    `random`: masks may be other ones. Then all of a member's gradient is compared as one, and that losses are numbers.
    """
    if extra := [key for key, norms in right.norms.items() if (mine.norms[key] is None) != (norms is None)]:
        return f"{extra[0]!r} has a gradient in one of them only"
    off = (mine.losses - right.losses).abs() > _LOSS * right.losses.abs() + _LOSS
    if wrong := _wrong("the loss", "is", mine.losses, right.losses, off if not random else torch.zeros_like(off)):
        return wrong
    found = {key: norms for key, norms in mine.norms.items() if norms is not None}
    wanted = {key: norms for key, norms in right.norms.items() if norms is not None}
    if not wanted:
        return ""
    if random:
        pair = _of_all(found), _of_all(wanted)
        return _wrong("the gradient", "has norm", *pair, (pair[0] > _TIMES_AT_RANDOM * pair[1]) & (pair[0] > _NOTHING))
    least = (_COUNTS * _of_all({key: norms.nan_to_num(0.0, 0.0, 0.0) for key, norms in wanted.items()})).clamp(_NOTHING)
    wrong_ones = (_far_apart(key, norms, wanted[key], least) for key, norms in found.items())
    return next(filter(None, wrong_ones), "")


def _far_apart(key: str, found: Tensor, wanted: Tensor, least: Tensor) -> str:
    near = (found <= _TIMES * wanted) & (wanted <= _TIMES * found)
    return _wrong(repr(key), "has a gradient of norm", found, wanted, (torch.maximum(found, wanted) > least) & ~near)


def _wrong(what: str, verb: str, found: Tensor, wanted: Tensor, differs: Tensor) -> str:
    """In words, of the first member that differs, or that has no number where there is one."""
    members = (wanted.isfinite() & (differs | ~found.isfinite())).nonzero().flatten().tolist()
    if not members:
        return ""
    first = members[0]
    return f"{what} of member {first} {verb} {float(found[first]):.3g}, not {float(wanted[first]):.3g}"


def _of_all(norms: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([*norms.values()]).square().sum(0).sqrt()


def _norms(gradient: Tensor) -> Tensor:
    rows = gradient.reshape(len(gradient), -1)
    norms: Tensor = torch.linalg.vector_norm(rows.float() if rows.dtype.itemsize == 2 else rows, dim=1)
    return norms.double()
