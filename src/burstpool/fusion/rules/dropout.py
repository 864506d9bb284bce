"""Dropout of every kind and other random numbers: each member draws from its own stream, with its own probability.

`dropout` and `feature_dropout` draw the masks member by member and multiply once; whatever else is random runs
member by member with torch's own generator set to the member's stream.

Shapes: M = members.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from burstpool.errors import FusionError
from burstpool.fusion import kernels
from burstpool.fusion.rules.base import Call, Lowered, PerMember, Rule, Run, column
from burstpool.fusion.rules.layout import memory_order

aten = torch.ops.aten


def probabilities(p: Any, members: int) -> list[float]:
    """Each member's own."""
    return list(p.values) if isinstance(p, PerMember) else [p] * members


def scaled_mask(run: Run, shape: Sequence[int], p: Any, like: Tensor, order: Sequence[int] | None = None) -> Tensor:
    """[M, *shape]: zero where dropped, 1 / (1 - p) where kept. Draws what torch's dropout would draw."""
    if order is not None:
        mask = scaled_mask(run, [shape[dim] for dim in order], p, like)
        return mask.permute(0, *(order.index(dim) + 1 for dim in range(len(shape))))
    ps = probabilities(p, run.members)
    if run.seeded is not None:
        return _seeded_mask(run, shape, ps, like)
    mask = torch.empty(run.members, *shape, dtype=like.dtype, device=like.device)
    for row, p_i, generator in zip(mask.unbind(0), ps, run.streams.generators, strict=True):
        if 0 < p_i < 1 and row.numel():
            row.bernoulli_(1 - p_i, generator=generator)
        else:
            row.fill_(float(p_i < 1))
    if isinstance(p, PerMember):
        return mask.mul_(_scales(ps, like).view(-1, *[1] * len(shape)))
    return mask.div_(1 - p) if 0 < p < 1 else mask


def _seeded_mask(run: Run, shape: Sequence[int], ps: Sequence[float], like: Tensor) -> Tensor:
    """The same from one seed a member, in arithmetic alone: a hash of the seed and the element's place."""
    count = math.prod(shape)
    if count > _WORD:
        raise FusionError(f"{count} masked numbers of one member are too many for masks from seeds")
    seeds = run.seeds()
    halves = (seeds & _WORD).to(torch.int32), ((seeds >> 31) & _WORD).to(torch.int32)
    chances = column(tuple(ps), torch.float32, like.device)
    columns = (*halves, chances, _scales(ps, like))
    low, high, chances, scales = (numbers.view(-1, *[1] * len(shape)) for numbers in columns)
    places = torch.arange(count, dtype=torch.int32, device=like.device).view(1, *shape)
    drawn = _hashed(_hashed(places ^ low) + high)
    return (((drawn >> 8) & 0xFFFFFF) * 2.0**-24 >= chances).to(like.dtype) * scales


def _scales(ps: Sequence[float], like: Tensor) -> Tensor:
    """[M]: what is kept is multiplied by; rounded once, as torch has it, where `like` is of 16 bits."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return column(tuple(1 - p or 1.0 for p in ps), dtype, like.device).reciprocal().to(like.dtype)


_WORD = 2**31 - 1


def _hashed(x: Tensor) -> Tensor:
    """Each integer of 32 bits well mixed: multiply and shift twice, then shift. Products wrap around."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x = (x ^ ((x >> shift) & (2 ** (32 - shift) - 1))) * factor
    return x ^ ((x >> 16) & 0xFFFF)


def dropped(run: Run, x: Tensor, p: Any, order: Sequence[int] | None = None) -> Tensor:
    """[M, …] with each member's own mask: in one kernel on a GPU, where torch's own numbers cannot be had anyway."""
    if run.seeded is not None or not kernels.usable(x):
        return x * scaled_mask(run, x.shape[1:], p, x, order)
    from burstpool.fusion.kernels.dropout import dropout

    return dropout(x, run.seeds(), column(tuple(probabilities(p, run.members)), torch.float32, x.device))


def _is_off(p: Any) -> bool:
    return not isinstance(p, PerMember) and p == 0


def _dropout(call: Call) -> Lowered | None:
    name = call.op.overloadpacket.__name__
    in_place, by_feature = name.endswith("_"), name.startswith("feature")
    first, batched = next(iter(call.arguments)), call.is_batched(next(iter(call.arguments)))
    if isinstance(call["train"], PerMember):
        return None
    if not call["train"] or _is_off(call["p"]):
        if batched:
            return Lowered(kernel=lambda run, x, *_: x, why="off: hands its input on")
        return Lowered(kernel=lambda run, x, *_: x, way="shared", why="off: hands its input on", batched=False)
    if in_place and not batched:
        return None
    rank = call.rank(first)
    order = None if by_feature else memory_order(call.tensor(first))
    if by_feature and rank < 2:
        return None

    def kernel(run: Run, x: Tensor, p: Any, train: bool) -> Tensor:
        if batched and not by_feature and not in_place:
            return dropped(run, x, p, order)
        shape = x.shape[1:] if batched else x.shape
        mask = scaled_mask(run, (*shape[:2], *[1] * (rank - 2)) if by_feature else shape, p, x, order)
        return x.mul_(mask) if in_place else x * mask

    return Lowered(kernel=kernel, why="each member's own stream and probability, one product")


RULES: dict[Callable[..., Any], Rule] = dict.fromkeys(
    (aten.dropout, aten.dropout_, aten.feature_dropout, aten.feature_dropout_), _dropout
)
