"""Gradients left with their parameters, where `backward` did not: each in memory of its own.

`torch.autograd.grad`, or a compiled function, may give two parameters one tensor, or parts of one, or a number expanded
to a parameter's shape. Clipping, unscaling and `zero_grad` write into gradients in place, so what shares memory is
copied. Gradients are not added to what was there; how they lie in memory is left as it is, gaps included.

Also: whether two ways to compute an array's gradients can be the same but for rounding.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

_TIMES = 10.0
"""By which norms of gradients may differ. Rounding moves those of some layers by their own size: in a network with
batch norm over few samples, ten thousand times as much as the numbers it comes from."""
_COUNTS = 0.01
"""Share of all of a member's gradient from which on a parameter's is looked at."""


def differentiate(total: Tensor, parameters: Iterable[nn.Parameter]) -> None:
    """As `backward`, but gradients are not accumulated: that would copy some, and mind on which stream."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    leave_gradients(trained, torch.autograd.grad(total, trained, allow_unused=True))


def leave_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Sets each parameter's `.grad`."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and not _is_own(gradient, taken):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        parameter.grad = gradient


def forget_gradients(parameters: Iterable[nn.Parameter], *, set_to_none: bool) -> None:
    """No gradients, or gradients of zero."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad = parameter.grad.detach().zero_()  # not `detach_`: it may be a view


def _is_own(gradient: Tensor, taken: dict[int, list[tuple[int, int]]]) -> bool:
    """Whether no two elements lie in one place, nor any where an earlier gradient's do; `taken` is by storage."""
    if gradient.layout is not torch.strided or gradient.numel() == 0:
        return True
    sides = list(zip(gradient.shape, gradient.stride(), strict=True))
    if any(stride == 0 and size > 1 for size, stride in sides):
        return False
    start = int(gradient.storage_offset())
    end: int = start + sum((size - 1) * stride for size, stride in sides) + 1
    others = taken.setdefault(gradient.untyped_storage().data_ptr(), [])
    if any(start < theirs and mine < end for mine, theirs in others):
        return False
    others.append((start, end))
    return True


def gradient_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """[M] of each [M, …]; None where there is no gradient."""
    return {
        key: None if (grad := parameter.grad) is None else torch.linalg.vector_norm(grad.float().flatten(1), dim=1)
        for key, parameter in parameters.items()
    }


def unlike(mine: Mapping[str, Tensor | None], right: Mapping[str, Tensor | None]) -> str:
    """Where gradients cannot be the same as those that are right, by their norms; empty if they can."""
    if extra := [key for key in right if (mine[key] is None) != (right[key] is None)]:
        return f"{extra[0]!r} has a gradient in one of them only"
    pairs = [(key, mine[key], of) for key, of in right.items() if of is not None]
    if not pairs:
        return ""
    least = _COUNTS * torch.stack([of for _, _, of in pairs]).square().sum(0).sqrt()
    for key, found, wanted in pairs:
        assert found is not None
        counts = torch.maximum(found, wanted) > least
        near = (found <= _TIMES * wanted) & (wanted <= _TIMES * found)
        wrong = (wanted.isfinite() & ((counts & ~near) | ~found.isfinite())).nonzero().flatten().tolist()
        if wrong:
            member = wrong[0]
            norms = f"{float(found[member]):.3g}, not {float(wanted[member]):.3g}"
            return f"{key!r} of member {member} has one of norm {norms}"
    return ""
