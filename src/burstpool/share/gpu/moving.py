"""Moving a job's tensors between a GPU and the host without anybody who holds them noticing.

A tensor stays the same object; only where its numbers lie changes. So a model, its optimizer and whatever refers to
their tensors need not be made again, and the numbers are the same to the bit. Tensors that share memory with others are
not moved as one: each must have its own, as parameters, buffers and optimizer state do.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator

import torch


class Away:
    """Tensors of a job that lie in the host's memory for a while; those that always do are left alone."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Puts the numbers of those that are on a GPU into the host's memory; strides stay."""
        known = {id(tensor) for tensor in self._tensors}
        for tensor in tensors:
            if tensor.device.type != "cpu":
                tensor.data = tensor.data.cpu()
                self._tensors += [tensor] if id(tensor) not in known else []
                known.add(id(tensor))

    def bring_back(self, device: torch.device) -> None:
        """Puts them on the GPU again. Where the allocator raises, some are there: `take` them again."""
        for tensor in self._tensors:
            if tensor.device.type == "cpu":
                tensor.data = tensor.data.to(device)

    def forget(self) -> None:
        """They are back for good."""
        self._tensors = []


def give_back() -> None:
    """Hands memory that nobody uses any more back to the GPU; graphs hold some until they are collected."""
    at_rest = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    if at_rest:
        gc.freeze()


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Python's collector leaves alone what is there already: going through all of it stops whoever launches work."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def or_else(undo: Callable[[], None]) -> Iterator[None]:
    """Undoes what was begun inside if it raises, and raises the same then.

    An exception holds on to all that was in the functions it came from; it is made to let go first, so that `undo` can
    give that memory back.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error.with_traceback(None)
        failed.__cause__ = failed.__context__ = None
    if failed is not None:
        undo()
        raise failed


def ran_out(error: BaseException | None) -> bool:
    """Whether an exception, or what led to it, was that memory ran out: a capture that fails so says something else."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
