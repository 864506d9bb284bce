"""Gradient clipping, each member by its own norm, as `torch.nn.utils.clip_grad_norm_` does for one.

Shapes: M = members.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import math
from collections.abc import Sequence

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
    limits = list(max_norm) if isinstance(max_norm, Sequence) else [max_norm] * members
    if len(limits) != members:
        raise FusionError(f"{len(limits)} norms for {members} members; pass one each, None for no clipping")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(members)
    norms = [torch.linalg.vector_norm(gradient.reshape(members, -1), dim=1) for gradient in gradients]
    norm_M: Tensor = torch.linalg.vector_norm(torch.stack(norms, 1), dim=1)
    limit_M = column(tuple(math.inf if limit is None else limit for limit in limits), norm_M.dtype, norm_M.device)
    factor_M: Tensor = (limit_M / (norm_M + _EPSILON)).clamp(max=1.0)
    # A member without a limit keeps its gradient to the bit, even one that is not finite.
    factor_M = torch.where(torch.isinf(limit_M), torch.ones_like(factor_M), factor_M)
    for gradient in gradients:
        gradient.mul_(factor_M.view(-1, *[1] * (gradient.dim() - 1)).to(gradient.dtype.to_real()))
    return norm_M
