"""vmap's rules under autocast: an operator's arguments in the formats that they have alone.

autocast knows operators by name, and vmap calls others in their place: a product of matrices where alone is one of a
matrix and a vector, which autocast leaves in 32 bits. So the first member's call is watched once for each combination
of formats; then its casts are made first, and vmap runs without autocast. What does not come out alike (an operator
that is made of others, some of which are cast) runs in a loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from burstpool.fusion.rules.base import Call, Kernel, Run, caller

_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
Casts = tuple[torch.dtype | None, ...]
"""What each of the arguments' leaves is cast to; None for what stays as it is."""


def as_alone_under_autocast(
    call: Call, mapped: Kernel, loop: Kernel, rows: Callable[[Sequence[Any], int], list[Any]]
) -> Kernel:
    """`mapped`, but under autocast in the formats of a member alone; `rows(arguments, members)` are the first's."""
    known: dict[Any, Casts | None] = {}

    def kernel(run: Run, *arguments: Any) -> Any:
        if not any(map(torch.is_autocast_enabled, _KEYS)):  # most often; and taking arguments apart takes time
            return mapped(run, *arguments)
        leaves, spec = pytree.tree_flatten(list(arguments))
        kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu")
        if kind not in _KEYS or not torch.is_autocast_enabled(kind):
            return mapped(run, *arguments)
        formats = tuple(leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves)
        key = (torch.get_autocast_dtype(kind), formats)
        if key not in known:
            known[key] = _casts(call, rows(arguments, run.members), kind)
        casts = known[key]
        if casts is None:
            return loop(run, *arguments)
        with torch.autocast(kind, enabled=False):
            return mapped(run, *pytree.tree_unflatten(_cast(leaves, casts), spec))

    return kernel


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees which tensors are cast, to what."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.casts: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten._to_copy.default and given.get("dtype") is not None:
            self.casts.append((args[0], given["dtype"]))
        return func(*args, **given)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _casts(call: Call, arguments: list[Any], kind: str) -> Casts | None:
    """What autocast does to one member's arguments; None where casting them first would not do the same."""
    op = caller(call.op)
    # Of parameters autocast keeps what it has cast, and would not cast them again.
    leaves, spec = pytree.tree_flatten([pytree.tree_map_only(Tensor, torch.detach, each) for each in arguments])
    with _Watching() as seen:
        alone = op(*pytree.tree_unflatten(leaves, spec))
    name: str = call.op.name()  # type: ignore[no-untyped-call]
    by_name = torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEYS[kind])
    if seen.casts and not by_name:
        return None
    casts = tuple(next((to for source, to in seen.casts if source is leaf), None) for leaf in leaves)
    with torch.autocast(kind, enabled=False):
        cast_first = op(*pytree.tree_unflatten(_cast(leaves, casts), spec))
    return casts if _formats(alone) == _formats(cast_first) else None


def _cast(leaves: Sequence[Any], casts: Casts) -> list[Any]:
    return [leaf if to is None else leaf.to(to) for leaf, to in zip(leaves, casts, strict=True)]


def _formats(result: Any) -> list[Any]:
    return [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(result)]
