"""Attention: members fold into samples, so that torch's own kernels see one larger batch.

With dropout the product is written out, because each member draws its own mask.

Shapes: M = members, N = samples, A = heads, T = queries, S = keys, D = width of a head.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, padded, with_members
from burstpool.fusion.rules.dropout import dropped

aten = torch.ops.aten


def _attention(call: Call) -> Lowered | None:
    names = ("query", "key", "value")
    rank = call.rank("query")
    if rank < 3 or any(call.rank(name) != rank for name in names) or set(call.per_member()) - {"dropout_p"}:
        return None
    flags = [call.is_batched(name) for name in names]
    mask_rank = call.rank("attn_mask") if call["attn_mask"] is not None else 0
    mask_batched = call.is_batched("attn_mask")
    dropped = isinstance(call["dropout_p"], tuple) or call["dropout_p"] > 0
    if dropped and call["enable_gqa"]:
        return None
    attend = _written_out if dropped else _folded

    def kernel(run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        q, k, v = (t if f else with_members(t, run.members) for t, f in zip((q, k, v), flags, strict=True))
        if mask is not None and (mask_batched or mask_rank > 2):
            mask = padded(mask if mask_batched else mask.unsqueeze(0), rank - mask_rank)
        return attend(run, q, k, v, mask, *rest)

    why = "written out: each member's own dropout mask" if dropped else "members folded into samples"
    return Lowered(kernel=kernel, why=why)


def _folded(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    samples = max(t.shape[1] for t in (q, k, v))  # what all samples share is spread
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(run.members, samples, *mask.shape[2:]).flatten(0, 1)
    q_NATD, k_NASD, v_NASD = (t.expand(-1, samples, *t.shape[2:]).flatten(0, 1) for t in (q, k, v))
    y = aten.scaled_dot_product_attention(q_NATD, k_NASD, v_NASD, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
    return y.view(run.members, -1, *y.shape[1:])  # type: ignore[no-any-return]


def _written_out(
    run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: Any, causal: bool, scale: float | None, gqa: bool
) -> Tensor:
    # As torch's own unfused attention: both factors get the root of the scale.
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = torch.matmul(q * factor, (k * factor).transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # Autocast does not know the operator but what it is made of: its backward would meet two types.
    with torch.autocast(q.device.type, enabled=False):
        weights = aten._safe_softmax(scores, -1)
    return torch.matmul(dropped(run, weights, p), v)


RULES: dict[Callable[..., Any], Rule] = {aten.scaled_dot_product_attention: _attention}
