"""Views and joins: sizes get the member dimension in front, dimensions move one to the right.

Where an in-place operator writes through a view, the plan keeps the memory contiguous, so that these stay views.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from burstpool.errors import FusionError
from burstpool.fusion.rules.base import Call, Lowered, Rule, Run, caller, with_members
from burstpool.fusion.rules.layout import as_alone, is_dense

aten = torch.ops.aten


def _view(call: Call) -> Lowered | None:
    if "size" not in call.arguments and "shape" not in call.arguments:
        return Lowered(kernel=lambda run, x, dtype: x.view(dtype), why="the same memory read as another type")

    def kernel(run: Run, x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        return x.reshape(run.members, *_known(size, x, run.members))

    return Lowered(kernel=kernel, why="sizes of one member, member dimension in front")


def _known(size: Sequence[int], x: torch.Tensor, members: int) -> Sequence[int]:
    """Sizes without -1: an empty tensor does not tell it."""
    if -1 not in size or x.numel() == 0:
        return size
    rest = math.prod(n for n in size if n != -1)
    return [x.numel() // members // rest if n == -1 else n for n in size]


def _flatten(call: Call) -> Lowered | None:
    rank, start, end = call.rank("self"), call["start_dim"], call["end_dim"]
    if rank == 0:
        return None
    first, last = start % rank + 1, end % rank + 1
    return Lowered(kernel=lambda run, x, *_: x.flatten(first, last), why="dimensions shifted")


def _unflatten(call: Call) -> Lowered | None:
    dim = call["dim"] % call.rank("self") + 1
    return Lowered(kernel=lambda run, x, _, sizes: x.unflatten(dim, list(sizes)), why="dimension shifted")


def _expand(call: Call) -> Lowered | None:
    rank = call.rank("self")

    def kernel(run: Run, x: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
        new = len(size) - rank
        return x.view(run.members, *[1] * new, *x.shape[1:]).expand(run.members, *size) if new else x.expand(-1, *size)

    return Lowered(kernel=kernel, why="member dimension kept in front")


def _repeat(call: Call) -> Lowered | None:
    rank = call.rank("self")

    def kernel(run: Run, x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
        new = len(repeats) - rank
        return x.reshape(run.members, *[1] * new, *x.shape[1:]).repeat(1, *repeats)

    return Lowered(kernel=kernel, why="member dimension kept in front")


def _permute(call: Call) -> Lowered | None:
    rank = call.rank("self")
    order = [0, *(dim % rank + 1 for dim in call["dims"])] if rank else [0]
    return Lowered(kernel=lambda run, x, _: x.permute(order), why="dimensions shifted")


def _t(call: Call) -> Lowered | None:
    if call.rank("self") < 2:
        return Lowered(kernel=lambda run, x: x, why="a vector is its own transpose")
    transpose = torch.Tensor.transpose_ if call.op._schema.is_mutable else torch.Tensor.transpose
    return Lowered(kernel=lambda run, x: transpose(x, 1, 2), why="dimensions shifted")


def _squeeze(call: Call) -> Lowered | None:
    rank = call.rank("self")
    dims = call.arguments.get("dim")
    asked = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    # What export saw as 1 is 1 for every batch it allows.
    gone = tuple(d % rank + 1 for d in asked if rank and call.tensor("self").shape[d] == 1)
    squeeze = torch.Tensor.squeeze_ if call.op._schema.is_mutable else torch.Tensor.squeeze
    return Lowered(kernel=lambda run, x, *_: squeeze(x, gone) if gone else x, why="dimensions shifted")


def _cat(call: Call) -> Lowered | None:
    flags = call.flags(call["tensors"])
    dim = call["dim"]
    if any(node.meta["val"].dim() == 0 for node in call["tensors"]) and call.op.overloadpacket is aten.cat:
        return None
    shifted = dim if dim < 0 else dim + 1
    function = torch.stack if call.op.overloadpacket is aten.stack else torch.cat

    ranks = [node.meta["val"].dim() for node in call["tensors"]]

    def kernel(run: Run, tensors: Sequence[torch.Tensor], _: int) -> torch.Tensor:
        parts = [t if f else with_members(t, run.members) for t, f in zip(tensors, flags, strict=True)]
        if min(ranks) < max(ranks):  # torch passes over `torch.tensor([])`, whatever the others' dimensions
            shape = list(parts[ranks.index(max(ranks))].shape)
            shape[shifted] = 0
            parts = [p if rank == max(ranks) else p.new_empty(shape) for p, rank in zip(parts, ranks, strict=True)]
        return function(parts, shifted)

    return Lowered(kernel=kernel, why="dimension shifted")


def _pad(call: Call) -> Lowered | None:
    if call["mode"] == "constant":
        return Lowered(
            kernel=lambda run, x, pad, mode, value: aten.pad(x, pad, mode, value), why="counts from the last"
        )

    def kernel(run: Run, x: torch.Tensor, pad: Sequence[int], mode: str, value: float | None) -> torch.Tensor:
        folded = aten.pad(x.flatten(0, 1), pad, mode, value)
        return folded.view(run.members, -1, *folded.shape[1:])  # type: ignore[no-any-return]

    return Lowered(kernel=kernel, why="members folded into samples")


def _contiguous(call: Call) -> Lowered | None:
    """Needed for views, which are reshapes here. Where it or its source is written to, the plan sees to a copy."""
    return Lowered(kernel=lambda run, x, _: x, why="no copy needed")


def _as_strided(call: Call) -> Lowered | None:
    """Strides and offset are those of one member's memory, which is laid as alone."""
    alone = call.tensor("self")
    start = alone.storage_offset()
    if not is_dense(alone) or not isinstance(start, int):
        return None
    laid = as_alone(alone)

    def kernel(
        run: Run, x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
    ) -> torch.Tensor:
        x = laid(x)
        count, first = x.numel() // run.members, 0 if offset is None else offset - start
        last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if first < 0 or last >= count:
            raise FusionError(f"operator {call.node.name!r} (as_strided) reads beyond its tensor; members would mix")
        return x.as_strided((run.members, *size), (count, *stride), x.storage_offset() + first)

    return Lowered(kernel=kernel, why="strides of one member's memory, member dimension in front")


def _sym_size(call: Call) -> Lowered | None:
    rank = call.rank("self")
    dim = call["dim"] % rank + 1
    return Lowered(kernel=lambda run, x, _: x.shape[dim], way="shared", why="a size", batched=False)


def _numel(call: Call) -> Lowered | None:
    return Lowered(kernel=lambda run, x: x.numel() // run.members, way="shared", why="a size", batched=False)


def _new(call: Call) -> Lowered | None:
    """`x.new_zeros(size)` takes only the type and the device of x."""
    names = list(call.arguments)[1:]
    if any(call.is_batched(name) for name in names):
        return None
    op = caller(call.op)
    return Lowered(kernel=lambda run, x, *rest: op(x[0], *rest), way="shared", why="takes no values", batched=False)


RULES: dict[Callable[..., Any], Rule] = {
    aten.view: _view,
    aten.reshape: _view,
    aten._unsafe_view: _view,
    aten.flatten: _flatten,
    aten.unflatten: _unflatten,
    aten.expand: _expand,
    aten.repeat: _repeat,
    aten.permute: _permute,
    aten.t: _t,
    aten.t_: _t,
    aten.squeeze: _squeeze,
    aten.squeeze_: _squeeze,
    aten.cat: _cat,
    aten.concat: _cat,
    aten.stack: _cat,
    aten.pad: _pad,
    aten.contiguous: _contiguous,
    aten.as_strided: _as_strided,
    aten.sym_size: _sym_size,
    aten.sym_numel: _numel,
    aten.new_zeros: _new,
    aten.new_ones: _new,
    aten.new_full: _new,
    aten.new_empty: _new,
}
