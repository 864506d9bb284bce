"""Operators that name dimensions: softmax, reductions, selections, sorts. The dimensions move one to the right.

A negative dimension counts from the last and stays. A reduction over everything becomes one over all but the first.
"""

from collections.abc import Callable
from typing import Any

import torch

from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, caller, expander

aten = torch.ops.aten

_ONE_DIM = (
    aten.softmax, aten.log_softmax, aten._softmax, aten._log_softmax, aten.transpose, aten.transpose_, aten.unsqueeze,
    aten.unsqueeze_, aten.swapaxes_, aten.swapdims, aten.swapdims_,
    aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.narrow, aten.cumsum,
    aten.cumprod, aten.gather, aten.index_select, aten.topk, aten.sort, aten.argsort, aten.argmax, aten.argmin,
    aten.max, aten.min, aten.median, aten.kthvalue, aten.logcumsumexp, aten.diff, aten.swapaxes, aten.scatter,
    aten.scatter_add, aten.scatter_, aten.scatter_add_, aten.index_add, aten.index_add_, aten.cummax, aten.cummin,
    aten.tensor_split, aten.select_scatter, aten.slice_scatter,
)  # fmt: skip
_REDUCTIONS = (
    aten.sum, aten.mean, aten.prod, aten.amax, aten.amin, aten.var, aten.std, aten.norm, aten.logsumexp, aten.any,
    aten.all, aten.var_mean, aten.linalg_vector_norm, aten.count_nonzero, aten.aminmax, aten.std_mean, aten.nansum,
)  # fmt: skip
_DIM_NAMES = ("dim", "dim0", "dim1", "axis0", "axis1", "dims")
_SIZED_ALIKE = ("index", "src", "source", "prepend", "append")
"""Tensors that must have the member dimension if `self` has it."""


def shifted(dim: int) -> int:
    """One member's dimension in a batched tensor."""
    return dim if dim < 0 else dim + 1


def _one_dim(call: Call) -> Lowered | None:
    names = [name for name in _DIM_NAMES if name in call.arguments]
    if call.op.overloadpacket not in (aten.unsqueeze, aten.unsqueeze_) and call.rank("self") == 0:
        return None
    if not names or any(not isinstance(call[name], int) for name in names):
        return _reduce_all(call)
    if call.op.overloadpacket in (aten.index_select, aten.index_add, aten.index_add_):
        return None if call.is_batched("index") or not call.is_batched("self") else _shift(call, names)
    if call.op is aten.max.dim and call.is_batched("self"):
        return _laid_max(call)
    return _shift(call, names)


class _LaidMax(torch.autograd.Function):
    """`max` along a dimension whose gradient lies in memory as its input does; torch's is always contiguous."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.max(x, dim, keepdim)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.x = x.shape, x.stride(), x.dtype, dim, keepdim
        return values, indices

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shape, stride, dtype, dim, keepdim = ctx.x
        (indices,) = ctx.saved_tensors
        g = grads[0] if keepdim else grads[0].unsqueeze(dim)
        gradient = torch.empty_strided(shape, stride, dtype=dtype, device=g.device).zero_()
        return gradient.scatter_(dim, indices if keepdim else indices.unsqueeze(dim), g), None, None


def _laid_max(call: Call) -> Lowered:
    def kernel(run: Run, x: torch.Tensor, dim: int, keepdim: bool) -> Any:
        dim = shifted(dim) % x.dim()
        if x.is_contiguous() or not x.is_cuda or 0 in x.stride():
            return aten.max.dim(x, dim, keepdim)
        return _LaidMax.apply(x, dim, keepdim)  # type: ignore[no-untyped-call]

    return Lowered(kernel=kernel, why="dimension shifted")


def _shift(call: Call, names: list[str]) -> Lowered:
    op, order = caller(call.op), list(call.arguments)
    alike = [n for n in _SIZED_ALIKE if (n in order and n != "index") or (n == "index" and _index_is_sized(call))]
    if not any(call.is_tensor(n) and not call.is_batched(n) for n in ["self", *(n for n in alike if n in order)]):
        places = {order.index(name): shifted(call[name]) for name in names}

        def direct(run: Run, *arguments: Any) -> Any:
            moved = list(arguments)
            for place, dim in places.items():
                moved[place] = dim
            return op(*moved)

        return Lowered(kernel=direct, why="dimension shifted")
    expand = expander(call, ["self", *(name for name in alike if name in order)])

    def kernel(run: Run, *arguments: Any) -> Any:
        bound = dict(zip(order, arguments, strict=True))
        expand(run, bound)
        bound.update((name, shifted(bound[name])) for name in names)
        return op(*bound.values())

    return Lowered(kernel=kernel, why="dimension shifted")


def _index_is_sized(call: Call) -> bool:
    packet = call.op.overloadpacket
    return packet in (aten.gather, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_)


def _reduction(call: Call) -> Lowered | None:
    dims: Any = call.arguments.get("dim")
    if call.rank("self") == 0:
        return None
    if isinstance(dims, int) and not isinstance(dims, bool):
        return _shift(call, ["dim"])
    if not dims:
        return _reduce_all(call)
    op, place = caller(call.op), list(call.arguments).index("dim")
    moved = [shifted(dim) for dim in list(dims)]

    def kernel(run: Run, *arguments: Any) -> Any:
        return op(*arguments[:place], moved, *arguments[place + 1 :])

    return Lowered(kernel=kernel, why="dimensions shifted")


def _reduce_all(call: Call) -> Lowered | None:
    """Over everything a member has."""
    name = call.op.overloadpacket.__name__
    reduce = _WHOLE.get(name)
    known = {"self", "dtype", "correction", "unbiased", "keepdim", "dim", "p"}
    plain = all(call[n] in (None, False, []) for n in call.arguments if n in ("correction", "keepdim", "dim"))
    if reduce is None or not set(call.arguments) <= known or not plain or call.rank("self") == 0:
        return None
    order = list(call.arguments)

    def kernel(run: Run, *arguments: Any) -> Any:
        bound = dict(zip(order, arguments, strict=True))
        return reduce(bound["self"].flatten(1), bound)

    return Lowered(kernel=kernel, why="over all dimensions but the member's")


_WHOLE: dict[str, Callable[[torch.Tensor, dict[str, Any]], Any]] = {
    "sum": lambda x, a: x.sum(1, dtype=a.get("dtype")),
    "mean": lambda x, a: x.mean(1, dtype=a.get("dtype")),
    "prod": lambda x, a: x.prod(1, dtype=a.get("dtype")),
    "max": lambda x, a: x.amax(1),  # amax shares a tie's gradient as max() does
    "min": lambda x, a: x.amin(1),
    "amax": lambda x, a: x.amax(1),
    "amin": lambda x, a: x.amin(1),
    "any": lambda x, a: x.any(1),
    "all": lambda x, a: x.all(1),
    "var": lambda x, a: x.var(1, unbiased=a.get("unbiased", True)),
    "std": lambda x, a: x.std(1, unbiased=a.get("unbiased", True)),
    "norm": lambda x, a: x.norm(2 if a.get("p") is None else a["p"], 1),
    "argmax": lambda x, a: x.argmax(1),
    "argmin": lambda x, a: x.argmin(1),
}

RULES: dict[Callable[..., Any], Rule] = {
    **dict.fromkeys(_ONE_DIM, _one_dim),
    **dict.fromkeys(_REDUCTIONS, _reduction),
}
