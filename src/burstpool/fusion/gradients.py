"""Gradients left with their parameters, where `backward` did not: each in memory of its own.

`torch.autograd.grad`, or a compiled function, may give two parameters one tensor, or parts of one, or a number expanded
to a parameter's shape. Clipping, unscaling and `zero_grad` write into gradients in place, so what shares memory is
copied. Gradients are not added to what was there; how they lie in memory is left as it is, gaps included.

Also `first_derivative_only`, for functions with a backward pass of their own that cannot be differentiated again.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class _Refused(torch.autograd.Function):
    """The first of the tensors, as something made of all of them that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *sources: Tensor | None) -> Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("this function of an array has no second derivative")


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes of a backward pass one whose results raise when they are differentiated, where autograd keeps a graph.

    torch's `once_differentiable` does so only where what comes from above has a gradient itself, and not where
    `torch.autograd.grad` is asked for some tensors' gradients, as it passes by what leads to none of them: a gradient
    penalty would be a constant without a word. So results lead to what they were made of, which is to be saved.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        sources = (*grads, *ctx.saved_tensors)
        results = found if isinstance(found, tuple) else (found,)
        refused: Callable[..., Tensor] = _Refused.apply
        return tuple(None if result is None else refused(result, *sources) for result in results)

    return once


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
