"""Memory that an array on the CPU uses again, step after step: that of large gradients.

glibc gives large blocks back to the system as soon as they are freed, or not, by what was freed before; the next step
then gets them page by page. For 16 MLPs of 784-128-128-10 that was 1,568 page faults a step in some processes, half of
the step, and none in others. A library does not change how its user's process allocates, so the array keeps the blocks
it has had. A block is handed out again when nothing refers to it any more: no gradient, no view, no copy of the
reference that the user has made. Ignores what torch's own operators allocate, and GPUs, where torch keeps freed memory.
"""

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 17
"""From here on glibc may ask the system for a block of its own."""


class KeptMemory:
    """Blocks of memory by size, and which of them are in use. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has blocks of its own, and none at first."""
        return KeptMemory, ()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the CPU, its values whatever they were."""
        count = int(torch.Size(shape).numel())
        if count * dtype.itemsize < SMALLEST_BYTES:
            return torch.empty(shape, dtype=dtype)
        blocks = self._blocks.setdefault(count * dtype.itemsize, [])
        block = next((block for block in blocks if block.is_free()), None)
        if block is None:
            block = _Block(count * dtype.itemsize)
            blocks.append(block)
        return block.lend(dtype).view(shape)

    def forget(self) -> None:
        """Gives back what is not in use; the rest follows when it is free."""
        self._blocks = {}

    @property
    def num_bytes(self) -> int:
        """All that is kept, in use or not."""
        return sum(size * len(blocks) for size, blocks in self._blocks.items())


class _Block:
    """Some memory, and whether a tensor still lies in it."""

    def __init__(self, num_bytes: int) -> None:
        # Private: what a forked process writes stays its own.
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        self._memory = mmap.mmap(-1, num_bytes, **private)
        self._lent: weakref.ref[Any] | None = None

    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, dtype: torch.dtype) -> Tensor:
        """The tensor's storage holds the view of the memory, not the memory itself: when it goes, we see it."""
        view = memoryview(self._memory)
        self._lent = weakref.ref(view)
        return torch.frombuffer(view, dtype=dtype)
