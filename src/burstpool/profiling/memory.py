"""Memory of a layer: what its forward keeps for its backward, and the most both hold at once.

Counts tensors' storages, each once. On CUDA the peak is the allocator's own, workspaces of libraries included; on
the CPU it is the sum of living storages, which leaves those out.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from burstpool.profiling.timing import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a layer's forward leaves behind for its backward."""

    inside_bytes: int
    """Tensors that nobody else sees."""
    inputs: frozenset[int]
    """Places of the inputs it keeps."""
    outputs: frozenset[int]
    """Places of the results it keeps."""
    output_bytes: tuple[int, ...]
    """Size of each result."""


def kept_by(
    forward: Callable[[], Sequence[torch.Tensor]],
    *,
    inputs: Sequence[torch.Tensor],
    state: Iterable[torch.Tensor],
) -> Kept:
    """Runs forward once and looks at what autograd saves."""
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage  # held, so that its address is not used again
        # Packs nothing: there is no backward, and a result that its own graph keeps would never be freed.

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        outputs = forward()
    places_in = {tensor.untyped_storage().data_ptr(): i for i, tensor in enumerate(inputs)}
    places_out = {tensor.untyped_storage().data_ptr(): i for i, tensor in enumerate(outputs)}
    known = {tensor.untyped_storage().data_ptr() for tensor in state} | {*places_in, *places_out}
    return Kept(
        inside_bytes=sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in known),
        inputs=frozenset(places_in[pointer] for pointer in saved if pointer in places_in),
        outputs=frozenset(places_out[pointer] for pointer in saved if pointer in places_out),
        output_bytes=tuple(output.numel() * output.element_size() for output in outputs),
    )


def peak_bytes(work: Work, *, given: Iterable[torch.Tensor], device: torch.device) -> int:
    """The most that one forward and backward hold at once, `given` (inputs and parameters) included."""
    base = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given}.values())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _once(work)
        return int(base + torch.cuda.max_memory_allocated(device) - before)
    living = _LivingStorages()
    with living:
        _once(work)
    return base + living.peak_bytes


def _once(work: Work) -> None:
    outputs = work.forward()
    if work.has_backward:
        work.backward(outputs, [torch.ones_like(output) for output in outputs])


class _LivingStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage that operators make until it dies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage not in self._seen and storage.data_ptr() not in known:
                self._seen.add(storage)
                self.now_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.now_bytes)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, size: int) -> None:
        self.now_bytes -= size


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
