"""Indexing by tensors: the member dimension is taken whole, the indices apply behind it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from burstpool.fusion.rules.base import Call, Lowered, Rule, Run
from burstpool.fusion.rules.fallback import looped

aten = torch.ops.aten


def _index(call: Call) -> Lowered | None:
    indices = call["indices"]
    places = [place for place, index in enumerate(indices) if index is not None]
    adjacent = places == list(range(places[0], places[0] + len(places)))
    boolean = any(indices[place].meta["val"].dtype in (torch.bool, torch.uint8) for place in places)
    if call.is_batched("indices") or boolean or not adjacent:
        return None

    def kernel(run: Run, x: torch.Tensor, index: Sequence[torch.Tensor | None]) -> Any:
        return aten.index.Tensor(x, [None, *index])

    return Lowered(kernel=kernel, why="indices behind the member dimension")


def _index_fill(call: Call) -> Lowered | None:
    return looped(call, "vmap fills in one member's number for all") if call.is_batched("value") else None


RULES: dict[Callable[..., Any], Rule] = {aten.index: _index, aten.index_fill: _index_fill}
