"""A GPU's memory: what is free of it, and how much of it a job may take."""

import contextlib
from collections.abc import Iterator

import torch

from burstpool.errors import ShareError
from burstpool.share.gpu.evictions import Memory
from burstpool.share.gpu.moving import give_back


class MemoryOf:
    """What a GPU has free.

    Where the foreground is called eagerly, memory that torch keeps for it counts as free as far as no step since the
    last look used it; what graphs keep for themselves does not.
    """

    def __init__(self, device: torch.device, *, grows: bool) -> None:
        """To be made when all jobs are there."""
        self._device, self._grows = device, grows
        give_back()
        self._kept_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def __call__(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self._device)
        if not self._grows:
            return Memory(free, total)
        used = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return Memory(free + max(torch.cuda.memory_reserved(self._device) - used - self._kept_bytes, 0), total)


@contextlib.contextmanager
def memory_cap(name: str, device: torch.device, memory_bytes: int | None) -> Iterator[None]:
    """What is allocated on the device inside may take so much more than before; else ShareError."""
    if memory_bytes is None:
        yield
        return
    give_back()  # what torch keeps unused would be room beyond the cap
    total = torch.cuda.get_device_properties(device).total_memory
    taken = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(min((taken + memory_bytes) / total, 1.0), device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ShareError(f"background {name} needs more than {memory_bytes} bytes of the GPU's memory") from error
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
