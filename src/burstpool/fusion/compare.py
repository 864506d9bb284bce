"""Comparing what two runs of a model gave: a loss in which all results count, and what counts as the same."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion.modes import Mode


def loss_of(tensors: Sequence[Any]) -> Tensor:
    """Every result that can have a gradient counts, none by its plain sum: a softmax's is always one."""
    parts = [_real(t).double() for t in tensors if isinstance(t, Tensor) and is_inexact(t)]
    return torch.stack([(t * t).mean() + t.sin().mean() for t in parts]).sum() if parts else torch.zeros(())


def is_inexact(tensor: Tensor) -> bool:
    """Whether its numbers are rounded: floating point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_close(a: Tensor, b: Tensor, *, tolerance: float, least: float = 0.0) -> bool:
    """Whether they are the same up to a share of b's largest value, taken as `least` where it is smaller.

    Sums that cancel leave noise, which must not be measured by itself.
    """
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return False
    if not is_inexact(b):
        return torch.equal(a, b)
    bound = tolerance * max(size_of(b), least, 1e-300)
    return torch.allclose(a.to(b.dtype), b, rtol=0.0, atol=bound, equal_nan=True)


def size_of(tensor: Tensor | None) -> float:
    """The largest value by magnitude; nothing is as large as zero."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    values = tensor.detach() if is_inexact(tensor) else tensor.detach().double()
    finite = values[torch.isfinite(values)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def difference_of(a: Tensor, b: Tensor) -> float:
    """The largest difference of two values."""
    if a.shape != b.shape or not a.numel():
        return float("inf")
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max())


def dense(gradient: Tensor | None) -> Tensor | None:
    """An embedding's sparse gradient as others are."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def cloned(value: Any) -> Any:
    """A tensor as a leaf of its own; all else as it is."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def with_absent(mode: Mode, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, and None for placeholders of arguments that are no tensor."""
    names = [node.name for node in mode.capture.graph.nodes if node.op == "placeholder"]
    stored = {*mode.capture.parameters, *mode.capture.buffers, *mode.capture.constants}
    return {name: inputs.get(name) for name in names if name not in stored}


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
