"""The table of rules: operator → how to run it for all members at once. One operator family a file."""

from collections.abc import Callable
from typing import Any

import torch

from burstpool.fusion.rules import (
    attention,
    convolution,
    dims,
    dropout,
    embedding,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    recurrent,
    views,
)
from burstpool.fusion.rules.base import Call, Lowered, PerMember, Rule, Run, bind, caller, plain
from burstpool.fusion.rules.fallback import fallback

__all__ = ["RULES", "Call", "Lowered", "PerMember", "Rule", "Run", "bind", "lower"]

RULES: dict[Callable[..., Any], Rule] = {
    **views.RULES,
    **dims.RULES,
    **pointwise.RULES,
    **matmul.RULES,
    **convolution.RULES,
    **norms.RULES,
    **embedding.RULES,
    **indexing.RULES,
    **pooling.RULES,
    **attention.RULES,
    **recurrent.RULES,
    **dropout.RULES,
    **losses.RULES,
}
"""Operator packet → rule. Element-wise operators need no entry: torch tags them."""

_RULES_FOR_NUMBERS = {**pointwise.RULES, **dropout.RULES, **attention.RULES, **recurrent.RULES}
"""Rules that know numbers that differ between members."""


def lower(call: Call) -> Lowered:
    """The fast rule, else vmap, else a loop over members."""
    random = torch.Tag.nondeterministic_seeded in call.op.tags
    if not call.batched_names() and not call.per_member() and not random:
        return Lowered(kernel=plain(caller(call.op)), way="shared", why="the same for all members", batched=False)
    rule = RULES.get(call.op.overloadpacket)
    if rule is None and pointwise.is_pointwise(call.op):
        rule = pointwise.pointwise
    elif call.per_member() and call.op.overloadpacket not in _RULES_FOR_NUMBERS:
        rule = None
    lowered = rule(call) if rule is not None else None
    return lowered if lowered is not None else fallback(call)
