"""Moving a job's tensors between a GPU and the host without anybody who holds them noticing.

A tensor stays the same object; only where its numbers lie changes. So a model, its optimizer and whatever refers to
their tensors need not be made again, and the numbers are the same to the bit. Tensors that share memory with others are
not moved as one: each must have its own, as parameters, buffers and optimizer state do.
"""

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator

import torch


def move(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Puts the numbers of each tensor there; strides stay. Raises what the allocator raises, with some moved."""
    for tensor in tensors:
        if tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)


def give_back() -> None:
    """Hands memory that nobody uses any more back to the GPU; graphs hold some until they are collected."""
    gc.collect()
    torch.cuda.empty_cache()


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
