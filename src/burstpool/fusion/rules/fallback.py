"""Where no rule knows better: torch's vmap of the operator, else a loop over members.

vmap is tried on tensors without data when the plan is made; an operator that it does not know, or only knows as a
slow loop of its own, runs in our loop. Random operators always do, each member with its own stream.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion.rules.autocast import as_alone_under_autocast
from burstpool.fusion.rules.base import Call, Kernel, Lowered, PerMember, Run, caller

_TRIAL_MEMBERS = 2
_NO_LOOP = "fallback"
"""A word of torch's refusal."""
BY_STRIDES = {
    torch.ops.aten.as_strided,
    torch.ops.aten.as_strided_copy,
    torch.ops.aten.as_strided_scatter,
}
"""Operators that are told where in memory to read: a member's tensor lies elsewhere than alone."""


def fallback(call: Call) -> Lowered:
    """vmap's rule, else a loop."""
    if call.op.overloadpacket in BY_STRIDES:
        raise FusionError(
            f"operator {call.node.name!r} ({call.op}) reads memory by strides, in which members lie otherwise than "
            "alone; use slices or unfold"
        )
    if torch.Tag.nondeterministic_seeded in call.op.tags:
        return Lowered(kernel=_loop(call, random=True), way="loop", why="random: each member draws from its own stream")
    if call.per_member():
        names = ", ".join(call.per_member())
        return Lowered(kernel=_loop(call), way="loop", why=f"members have different {names}")
    problem = "writes in place" if call.op._schema.is_mutable else _vmap_problem(call)
    if problem is None:
        loop = _loop(call)
        kernel = as_alone_under_autocast(call, _vmap(call), loop, lambda arguments, m: _row(call, arguments, m))
        return Lowered(kernel=kernel, way="vmap", why="no rule; vmap has one")
    return Lowered(kernel=_loop(call), way="loop", why=f"no rule; vmap: {problem}")


def looped(call: Call, why: str) -> Lowered:
    """A loop over members, where vmap's rule is known to be wrong."""
    return Lowered(kernel=_loop(call), way="loop", why=why)


def _in_dims(call: Call) -> tuple[Any, ...]:
    return tuple(_tree_dims(call.flags(value)) for value in call.arguments.values())


def _tree_dims(flags: Any) -> Any:
    if isinstance(flags, list | tuple):
        return [_tree_dims(flag) for flag in flags] if any(pytree.tree_leaves(flags)) else None
    return 0 if flags else None


def _vmap(call: Call) -> Kernel:
    mapped = torch.vmap(caller(call.op), in_dims=_in_dims(call))

    def kernel(run: Run, *arguments: Any) -> Any:
        # The graph's own kind of list is another to vmap.
        return mapped(*(list(a) if isinstance(a, list | tuple) else a for a in arguments))

    return kernel


def _vmap_problem(call: Call) -> str | None:
    """None where vmap has a rule of its own for the operator."""
    try:
        arguments = [_trial(value, call) for value in call.arguments.values()]
        with without_vmaps_loop():
            _vmap(call)(None, *arguments)
    except Exception as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:120]
        return "has no rule and would loop more slowly" if _NO_LOOP in why else why
    return None


class _Inside:
    """How many are inside of `without_vmaps_loop`, in all threads: torch has one switch for all of them."""

    lock = threading.Lock()
    count = 0
    before = True


@contextlib.contextmanager
def without_vmaps_loop() -> Iterator[None]:
    """vmap refuses what it has no rule for, instead of a loop and a warning on standard error at each call."""
    functorch: Any = torch._C._functorch
    with _Inside.lock:
        if _Inside.count == 0:
            _Inside.before = functorch._is_vmap_fallback_enabled()
            functorch._set_vmap_fallback_enabled(False)
        _Inside.count += 1
    try:
        yield
    finally:
        with _Inside.lock:
            _Inside.count -= 1
            if _Inside.count == 0:
                functorch._set_vmap_fallback_enabled(_Inside.before)


def _trial(value: Any, call: Call) -> Any:
    """The argument with tensors that hold no data."""
    if isinstance(value, list | tuple):
        return [_trial(item, call) for item in value]
    if not isinstance(value, fx.Node):
        return value
    meta = value.meta.get("val")
    if not isinstance(meta, torch.Tensor):
        return _hint(meta)
    shape = [_hint(size) for size in meta.shape]
    if call.flags(value):
        shape.insert(0, _TRIAL_MEMBERS)
    return torch.empty(shape, dtype=meta.dtype, device="meta")


def _hint(size: Any) -> Any:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def _loop(call: Call, *, random: bool = False) -> Kernel:
    op = caller(call.op)
    if torch.Tag.inplace_view in call.op.tags:
        raise FusionError(
            f"operator {call.node.name!r} ({call.op}) changes a tensor's shape in place; use the form that returns it"
        )
    flags = [call.flags(value) for value in call.arguments.values()]
    written = [place for place, a in enumerate(call.op._schema.arguments) if a.alias_info and a.alias_info.is_write]
    returns_it = any(result.alias_info is not None for result in call.op._schema.returns)

    def kernel(run: Run, *arguments: Any) -> Any:
        columns = [_split(a, f, run.members) for a, f in zip(arguments, flags, strict=True)]
        for place in written:
            # Of its own: a gradient may need what was written, and writing for the next member would spoil it.
            columns[place] = [mine.clone() for mine in columns[place]]
        results = []
        for member, row in enumerate(zip(*columns, strict=True)):
            one = functools.partial(op, *row)
            results.append(run.streams.drawing(member, one) if random else one())
        for place in written:
            arguments[place].copy_(torch.stack(list(columns[place])))
        return arguments[written[0]] if written and returns_it else joined(results)

    return kernel


def _row(call: Call, arguments: Sequence[Any], members: int) -> list[Any]:
    """The first member's arguments."""
    flags = [call.flags(value) for value in call.arguments.values()]
    return [_split(a, f, members)[0] for a, f in zip(arguments, flags, strict=True)]


def _split(value: Any, flags: Any, members: int) -> Sequence[Any]:
    """The argument of each member."""
    if isinstance(value, PerMember):
        return value.values
    if isinstance(flags, list | tuple):
        columns = [_split(item, flag, members) for item, flag in zip(value, flags, strict=True)]
        return [list(row) for row in zip(*columns, strict=True)] if columns else [[]] * members
    return value.unbind(0) if flags else [value] * members


def joined(results: Sequence[Any]) -> Any:
    """Members' results as one, tensors stacked."""
    leaves = [pytree.tree_flatten(result) for result in results]
    stacked = [
        torch.stack(parts) if isinstance(parts[0], torch.Tensor) else parts[0]
        for parts in zip(*(flat for flat, _ in leaves), strict=True)
    ]
    return pytree.tree_unflatten(stacked, leaves[0][1])
