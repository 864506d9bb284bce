"""CUDA graphs emulated on the CPU, so that the way a step is cut into graphs can be tested without a GPU.

A capture logs every operator with the tensors it read and made; a replay runs them again and puts the results into the
same tensors. Unlike a real capture, this one executes: what it changes is undone by `emulate`. A tensor that would be
read too early, too late or from the wrong place gives other numbers than an eager step, as it would on a GPU.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from burstpool.model import recording
from burstpool.run import graphs
from burstpool.run.executor import Executor
from burstpool.run.loading import Loaded


def emulate(executor: Executor) -> None:
    """Has an executor on the CPU capture and replay its steps."""
    graphs.torch = recording.torch = _Torch()  # type: ignore[assignment]
    executor.passes.allow_nan = True  # looking at the loss is what a capture cannot hold
    executor.wants_graphs = True
    capture = executor._try_to_capture

    def capture_and_undo(loaded: Sequence[Sequence[Loaded]]) -> None:
        saved = [(tensor, tensor.detach().clone()) for tensor in _changing(executor)]
        before = executor.is_captured
        capture(loaded)
        if executor.is_captured and not before:
            with torch.no_grad():
                for tensor, copy in saved:
                    tensor.copy_(copy)

    executor._try_to_capture = capture_and_undo  # type: ignore[method-assign]


def _changing(executor: Executor) -> list[torch.Tensor]:
    model, optimizer = executor.part.traced.model, executor.update.optimizer
    kept = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    states = optimizer.state.values() if optimizer is not None else ()
    return kept + [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]


class _Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = operator(*args, **(kwargs or {}))
        results, inputs = _tensors(made), {_memory(tensor) for tensor in _tensors((args, kwargs))}
        if operator._schema.is_mutable:
            self.calls.append((operator, args, kwargs, []))
        elif any(_memory(tensor) not in inputs for tensor in results):  # a view needs no work
            self.calls.append((operator, args, kwargs, results))
        return made


class _Graph:
    def __init__(self, keep_graph: bool = False) -> None:
        self.log = _Log()

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Generators need no registration here."""

    def replay(self) -> None:
        with torch.no_grad():
            for operator, args, kwargs, results in self.log.calls:
                made = _tensors(operator(*args, **(kwargs or {})))
                for result, new in zip(results, made, strict=False):
                    result.copy_(new)


class _Cuda:
    CUDAGraph = _Graph

    @staticmethod
    def graph_pool_handle() -> None:
        return None

    @staticmethod
    def current_stream() -> None:
        return None

    @staticmethod
    @contextlib.contextmanager
    def graph(graph: _Graph, **_: Any) -> Iterator[None]:
        with graph.log:
            yield


class _Torch:
    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
