"""Gradient clipping, each member by its own norm or value, as `torch.nn.utils.clip_grad_norm_` does for one.

Shapes: M = members.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion.rules.base import column

_EPSILON = 1e-6
"""As in torch: keeps a norm of zero from dividing."""


def clip_grad_norm(
    parameters: Sequence[nn.Parameter], max_norm: float | Sequence[float | None], members: int
) -> Tensor:
    """Scales the gradients in place; returns each member's norm before, [M]."""
    limits = _limits(max_norm, members, "norms")
    gradients = _gradients(parameters)
    if not gradients:
        return torch.zeros(members)
    norms = [torch.linalg.vector_norm(gradient.reshape(members, -1), dim=1) for gradient in gradients]
    norm_M: Tensor = torch.linalg.vector_norm(torch.stack(norms, 1), dim=1)
    limit_M = column(limits, norm_M.dtype, norm_M.device)
    factor_M: Tensor = (limit_M / (norm_M + _EPSILON)).clamp(max=1.0)
    # A member without a limit keeps its gradient to the bit, even one that is not finite.
    factor_M = torch.where(torch.isinf(limit_M), torch.ones_like(factor_M), factor_M)
    for gradient in gradients:
        gradient.mul_(factor_M.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype.to_real()))
    return norm_M


def clip_grad_value(
    parameters: Sequence[nn.Parameter], clip_value: float | Sequence[float | None], members: int
) -> None:
    """Cuts every number of the gradients off at its member's limit, in place."""
    limits = _limits(clip_value, members, "values")
    for gradient in _gradients(parameters):
        limit = column(limits, gradient.dtype, gradient.device).view(-1, *[1] * (gradient.dim() - 1))
        gradient.clamp_(-limit, limit)


def _limits(given: float | Sequence[float | None], members: int, what: str) -> tuple[float, ...]:
    """One a member; infinite for None."""
    listed: Any = given.tolist() if hasattr(given, "tolist") else given
    limits = list(listed) if isinstance(listed, list | tuple) else [listed] * members
    if len(limits) != members:
        raise FusionError(f"{len(limits)} {what} for {members} members; pass one each, None for no clipping")
    try:
        return tuple(math.inf if limit is None else float(limit) for limit in limits)
    except (TypeError, ValueError):
        raise FusionError(f"{given!r} are no {what} to clip to; pass a number, or a list of one a member") from None


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.is_sparse for gradient in gradients):
        raise FusionError("sparse gradients, as of nn.Embedding(sparse=True), cannot be clipped, nor can torch")
    return gradients
