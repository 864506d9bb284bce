"""Element-wise operators: the same operator on [M, …], shapes aligned so that they broadcast as one member's would.

Also PReLU, whose weight is each member's own, and numbers that differ between members.
"""
# ruff: noqa: N803 -- shape suffixes are capitals

import functools
from collections.abc import Callable
from typing import Any

import torch

from burstpool.fusion.rules.base import (
    Call,
    Kernel,
    Lowered,
    PerMember,
    Rule,
    Run,
    Way,
    caller,
    padded,
    plain,
    with_members,
)
from burstpool.fusion.rules.layout import per_channel

aten = torch.ops.aten

UNTAGGED = {  # element-wise, though torch does not tag them so
    aten.hardswish, aten.hardswish_, aten.hardsigmoid, aten.hardsigmoid_, aten.selu, aten.selu_, aten.celu, aten.celu_,
    aten.elu, aten.elu_, aten.mish, aten.mish_, aten.silu, aten.silu_, aten.softplus, aten.hardtanh, aten.hardtanh_,
    aten.relu6, aten.relu6_, aten.leaky_relu_, aten.threshold, aten.threshold_, aten.log_sigmoid, aten.softshrink,
    aten.hardshrink, aten.gelu, aten.gelu_, aten._to_copy, aten.clone, aten.detach, aten.detach_,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.copy_, aten.copy,
    aten.lift_fresh_copy,
    aten.alias, aten.zero_, aten.where, aten.square,
    aten.rsub, aten.clamp, aten.clamp_, aten.clip, aten.float_power, aten.isfinite, aten.isnan, aten.nan_to_num,
    aten.true_divide, aten.subtract, aten.multiply, aten.divide,
    aten.logical_not, aten.absolute, aten.square_, aten.lerp, aten.view_as_real, aten.conj, aten.positive,
    aten.view_as_complex, aten.real, aten.imag, aten.resolve_conj, aten.resolve_neg, aten._conj, aten._neg_view,
    aten.floor_divide,
}  # fmt: skip
_CHOOSING = ("condition", "mask")
"""Arguments whose type is not that of a result."""
_LAST = (torch.channels_last, torch.channels_last_3d)
_SCALAR_FORMS = {
    aten.add.Tensor: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor, aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor, aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
}  # fmt: skip


def is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Whether every element of the result depends on the same element of the arguments alone."""
    random = torch.Tag.nondeterministic_seeded in op.tags
    return not random and (torch.Tag.pointwise in op.tags or op.overloadpacket in UNTAGGED)


def pointwise(call: Call) -> Lowered | None:
    """The operator itself, on tensors of aligned ranks."""
    if call.per_member():
        return _with_different_numbers(call)
    tensors = [name for name in call.arguments if call.is_tensor(name)]
    if any(call.is_batched(name) and name not in tensors for name in call.arguments):
        return None  # lists of tensors
    rank = max((call.rank(name) for name in tensors), default=0)
    missing = {i: rank - call.rank(n) for i, n in enumerate(call.arguments) if n in tensors and call.is_batched(n)}
    cast = _zero_dim_casts(call, tensors)
    if call.arguments.get("memory_format") in _LAST:
        return Lowered(kernel=_as_it_lies(call), why="element-wise, as it lies in memory")
    if not any(missing.values()) and not cast:
        op = caller(call.op)
        return Lowered(kernel=lambda run, *arguments: op(*arguments), why="element-wise")
    return Lowered(kernel=_aligned(call, missing, cast), why="element-wise, ranks aligned")


def _aligned(call: Call, missing: dict[int, int], cast: dict[int, torch.dtype]) -> Kernel:
    op = caller(call.op)

    def kernel(run: Run, *arguments: Any) -> Any:
        aligned = list(arguments)
        for index, dtype in cast.items():
            aligned[index] = aligned[index].to(dtype)
        for index, count in missing.items():
            aligned[index] = padded(aligned[index], count)
        return op(*aligned)

    return kernel


def _as_it_lies(call: Call) -> Kernel:
    """Channels last is one member's layout, of as many dimensions; rules lay what they need laid."""
    op, place = caller(call.op), list(call.arguments).index("memory_format")
    return lambda run, *arguments: op(*arguments[:place], None, *arguments[place + 1 :])


def _zero_dim_casts(call: Call, tensors: list[str]) -> dict[int, torch.dtype]:
    """A number does not widen a tensor's type, but with the member dimension it would: [] → [M]."""
    types = {name: call.tensor(name).dtype for name in tensors if name not in _CHOOSING}
    if len(set(types.values())) < 2:
        return {}
    ranked = [dtype for name, dtype in types.items() if call.rank(name) > 0]
    wide = functools.reduce(torch.promote_types, ranked or types.values())
    return {
        index: _beside(types[name], wide)
        for index, name in enumerate(call.arguments)
        if name in types and call.rank(name) == 0 and call.is_batched(name)
    }


def _beside(number: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """What torch makes of a number's type beside a tensor's: of the kind of the two that holds more, as wide as it."""
    if number.is_complex and wide.is_floating_point:
        return torch.promote_types(wide, torch.complex32)
    if number is torch.bool or _kind(number) > _kind(wide):
        return number
    return wide.to_real() if wide.is_complex and not number.is_complex else wide


def _kind(dtype: torch.dtype) -> int:
    """Truth values, integers, real and complex numbers."""
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)


def _like(call: Call) -> Lowered | None:
    """`x.type_as(other)`, `x.to(other)`: of the other only its type and its device."""
    if "other" not in call.arguments:
        return pointwise(call)
    batched = call.is_batched("self")
    way: Way = "rule" if batched else "shared"
    return Lowered(kernel=plain(caller(call.op)), way=way, why="takes no values of the other", batched=batched)


def _filled(call: Call) -> Lowered | None:
    """Filled with each member's own number; torch takes one for all only."""
    if "value" not in call.arguments or not call.is_batched("value"):
        return pointwise(call)
    rank, masked = call.rank("self"), "mask" in call.arguments
    batched, mask_batched = call.is_batched("self"), masked and call.is_batched("mask")
    if masked:
        rank = max(rank, call.rank("mask"))
    missing, mask_missing = rank - call.rank("self"), rank - call.rank("mask") if masked else 0
    in_place = call.op._schema.is_mutable

    def kernel(run: Run, x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        value = padded(arguments[-1], rank).to(x.dtype)
        mine = padded(x if batched else with_members(x, run.members), missing)
        mask = padded(arguments[0], mask_missing) if mask_batched else arguments[0]
        filled = torch.where(mask, value, mine) if masked else value.expand_as(mine)
        return x.copy_(filled) if in_place else filled if masked else filled.clone()

    return Lowered(kernel=kernel, why="each member's own number")


def _with_different_numbers(call: Call) -> Lowered | None:
    """`x * a` with each member's own a: a tensor [M, 1, …] in place of the number."""
    form = _SCALAR_FORMS.get(call.op)
    if form is None or call.per_member() not in (["other"], ["exponent"]):
        return None
    numbers: PerMember = call[call.per_member()[0]]
    if any(isinstance(v, float) for v in numbers.values) and not call.tensor("self").is_floating_point():
        return None
    rank, op, batched = call.rank("self"), caller(form), call.is_batched("self")

    def kernel(run: Run, x: torch.Tensor, other: Any, *rest: Any) -> Any:
        return op(x if batched else x.unsqueeze(0), numbers.tensor(x, rank), *rest)

    return Lowered(kernel=kernel, why="element-wise, each member's own number")


def _prelu(call: Call) -> Lowered | None:
    rank, weight_rank = call.rank("self"), call.rank("weight")
    if not call.is_batched("weight") or rank < 2 or weight_rank != 1:
        return None

    def kernel(run: Run, x: torch.Tensor, w_MC: torch.Tensor) -> torch.Tensor:
        slopes = per_channel(w_MC, rank).to(x.dtype)
        shape = torch.broadcast_shapes(x.shape, slopes.shape)  # type: ignore[no-untyped-call]
        result: torch.Tensor = aten._prelu_kernel(x.expand(shape), slopes.expand(shape))
        return result

    return Lowered(kernel=kernel, why="each member's own slopes, broadcast")


def _glu(call: Call) -> Lowered | None:
    dim = call["dim"]

    def kernel(run: Run, x: torch.Tensor, _: int) -> torch.Tensor:
        return torch.nn.functional.glu(x, dim if dim < 0 else dim + 1)

    return Lowered(kernel=kernel, why="dimension shifted") if call.rank("self") > 0 else None


RULES: dict[Callable[..., Any], Rule] = {
    aten.prelu: _prelu,
    aten.glu: _glu,
    aten.to: _like,
    aten.type_as: _like,
    **dict.fromkeys((aten.fill, aten.fill_, aten.masked_fill, aten.masked_fill_), _filled),
}
