"""Random numbers in a loss: seen operator by operator, so that each member draws them from its own stream.

A captured model says which of its operators draw; a loss is the user's own code, and does not. Ignores Python's and
numpy's random numbers, which torch does not see.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from burstpool.errors import FusionError
from burstpool.fusion.streams import Streams


class DrawsError(Exception):
    """The loss draws random numbers, on a way on which members would not draw their own."""


class NotDrawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises DrawsError where numbers would be drawn; nothing is drawn then."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_numbers(func):
            raise DrawsError(str(func))
        return func(*args, **(kwargs or {}))


class DrawingFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws from one member's stream in the place of torch's own."""

    def __init__(self, streams: Streams, member: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams, self.member = streams, member

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not draws_numbers(func):
            return func(*args, **given)
        if any(isinstance(value, torch.Generator) for value in (*args, *given.values())):
            raise FusionError(
                "the loss draws from a torch.Generator of its own; leave it out, and each member draws from the stream "
                "that fuse(…, seeds=[…]) starts"
            )
        self.streams.draws_in_loss = True
        result = self.streams.drawing(self.member, lambda: func(*args, **given))
        _check_device(result, self.streams.device)
        return result


def draws_numbers(operator: Any) -> bool:
    """Whether torch marks it as one whose result depends on a seed."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises FusionError where it would draw; for ways that have no streams of their own."""

    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            with NotDrawing():  # type: ignore[no-untyped-call]
                return function(*args, **kwargs)
        except DrawsError:
            raise FusionError("the loss draws random numbers") from None

    return refusing


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """For operators of ours inside of `NotDrawing`, which are known not to draw; watching takes as long as a loss."""
    if isinstance(_get_current_dispatch_mode(), NotDrawing):
        with _pop_mode_temporarily():
            yield
    else:
        yield


def _check_device(result: Any, device: torch.device) -> None:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != device.type:
            raise FusionError(
                f"the loss draws random numbers on the {leaf.device.type}, the members' streams are on {device.type}; "
                "draw where the output is: torch.rand(…, device=output.device)"
            )
