"""Embeddings and bags: one table of M·V rows, each member's indices moved to its own part of it.

A padding row takes no gradient in any member's part, and only there: the flat table has no padding row.

Shapes: M = members, V = rows of one member's table, D = width, L = indices.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, caller, plain
from burstpool.fusion.rules.fallback import looped

aten = torch.ops.aten


def _starts(run: Run, table: Tensor, rank: int) -> Tensor:
    """Where each member's rows start, [M, 1, …]."""
    rows = table.shape[1]
    starts = torch.arange(0, run.members * rows, rows, device=table.device)
    return starts.view(-1, *[1] * rank)


def _embedding(call: Call) -> Lowered | None:
    if not call.is_batched("weight"):
        return Lowered(kernel=plain(caller(call.op)), why="all members use one table")
    if call["scale_grad_by_freq"] is True or call["sparse"] is True:
        return looped(call, "gradients by frequency, or sparse; vmap forgets the padding row")
    padding, rank = call["padding_idx"], call.rank("indices")

    def kernel(run: Run, table_MVD: Tensor, index: Tensor, *_: Any) -> Tensor:
        y = F.embedding(index + _starts(run, table_MVD, rank), table_MVD.flatten(0, 1))
        if padding < 0:
            return y
        return torch.where((index == padding).unsqueeze(-1), y.detach(), y)

    return Lowered(kernel=kernel, why="one table, each member's indices moved to its own rows")


def _embedding_bag(call: Call) -> Lowered | None:
    options = {name: call.arguments.get(name) for name in call.arguments}
    plain = not options["scale_grad_by_freq"] and not options["sparse"] and not options["include_last_offset"]
    own_weights = call["per_sample_weights"] is not None and not call.is_batched("per_sample_weights")
    padding = options.get("padding_idx")
    if not call.is_batched("weight") or not plain or own_weights or (padding is not None and padding >= 0):
        return None
    if call.rank("indices") != 1:
        return None

    def kernel(
        run: Run,
        table: Tensor,
        index: Tensor,
        offsets: Tensor,
        scale: bool,
        mode: int,
        sparse: bool,
        weights: Any,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        index_ML = index + _starts(run, table, 1)
        length = index_ML.shape[1]
        ends = torch.arange(0, run.members * length, length, device=table.device).view(-1, 1)
        weights = None if weights is None else weights.flatten()
        results = aten.embedding_bag(
            table.flatten(0, 1), index_ML.flatten(), (offsets + ends).flatten(), scale, mode, sparse, weights
        )
        return results[0].view(run.members, -1, table.shape[2]), None, None, None  # nobody asks for the others

    users = [user.args[1] for user in call.node.users]
    if any(place != 0 for place in users):
        return None
    return Lowered(kernel=kernel, why="one table, each member's bags after the other's")


RULES: dict[Callable[..., Any], Rule] = {aten.embedding: _embedding, aten.embedding_bag: _embedding_bag}
