"""Members' work side by side on a GPU: several CUDA streams that start after and end before the current one.

Autograd runs each operator's backward on the stream of its forward, so the backward pass is side by side too. Inside
of a recorded step the streams become branches of the graph. `in_turn` is for a step that will be cut into pieces, which
have no branches: nothing is side by side in it, and operators are chosen by their times with one kernel after another.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")

_STREAMS = 8
_in_turn = ContextVar("in turn", default=False)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """Inside, nothing is side by side."""
    token = _in_turn.set(True)
    try:
        yield
    finally:
        _in_turn.reset(token)


def is_in_turn() -> bool:
    """Whether this is inside of `in_turn`."""
    return _in_turn.get()


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]


def side_by_side(work: Sequence[Callable[[], T]], device: torch.device) -> list[T]:
    """The results in order; each piece on one of a few streams, or one after another where there are none."""
    if device.type != "cuda" or is_in_turn():
        return [piece() for piece in work]
    current, used = torch.cuda.current_stream(device), _streams(device)[: len(work)]
    for stream in used:
        stream.wait_stream(current)
    results = []
    for place, piece in enumerate(work):
        with torch.cuda.stream(used[place % len(used)]):
            results.append(piece())
    for stream in used:
        current.wait_stream(stream)
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)
    return results
