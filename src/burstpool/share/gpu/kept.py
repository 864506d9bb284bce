"""State that a rehearsal must not change: what is replayed to be timed or compared trains nothing.

Takes the tensors that a step changes, and the optimizer where the host calls it. Ignores what an optimizer keeps
outside of its `state` and its `param_groups`.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What is replayed inside leaves no trace in these tensors."""
    saved = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, old in zip(tensors, saved, strict=True):
            tensor.copy_(old)
        torch.cuda.synchronize()


@contextlib.contextmanager
def counts_kept(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Steps of the optimizer inside leave no trace in what it counts on the host, and its tensors where they were.

    What the tensors hold is `kept`'s business.
    """
    entries: list[dict[str, Any]] = []
    if optimizer is not None:
        entries = [*optimizer.state.values(), *optimizer.param_groups]
    saved = [{name: _own(name, value) for name, value in entry.items()} for entry in entries]
    try:
        yield
    finally:
        for entry, old in zip(entries, saved, strict=True):
            entry.clear()
            entry.update(old)


def _own(name: str, value: Any) -> Any:
    """A copy of what may be changed in place, but for the parameters; tensors and numbers as they are."""
    return copy.deepcopy(value) if isinstance(value, list | dict) and name != "params" else value
