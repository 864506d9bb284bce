"""The whole step as one: forward, losses, backward and optimizer recorded in a CUDA graph, compiled if asked.

    step = RecordedStep(array, optimizer, loss, x, y)
    losses = step(x, y)                                       # [M], on the device

Recording fixes the batch's shape and the array's members: after `drop` or `admit` make a new one. Learning rates and
other numbers may change between steps, as they live on the device; a member may be stopped. On the CPU the
step runs as it is written.
Ignores host-side work between the parts: clipping by other means than `max_norm` does not fit in.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion.array import FusedArray
from burstpool.fusion.optim import ArrayOptimizer, FusedOptimizer

_WARM_UP = 3
"""Steps before recording: lowerings are chosen in them, and torch's libraries choose their kernels."""


class RecordedStep:
    """One training step of an array, replayed."""

    def __init__(
        self,
        array: FusedArray,
        optimizer: ArrayOptimizer,
        loss: Callable[..., Tensor],
        inputs: Any,
        *targets: Any,
        per_member: bool = False,
        autocast: torch.dtype | None = None,
        max_norm: float | Sequence[float | None] | None = None,
        compiled: bool = False,
        must_record: bool = True,
    ) -> None:
        """`must_record=False` runs a step that cannot be recorded as it is written, instead of refusing it."""
        self.array, self.optimizer, self.loss, self.per_member = array, optimizer, loss, per_member
        self.autocast, self.max_norm = autocast, max_norm
        self._members, self._active = len(array), array.active
        self._must_record = must_record
        if compiled:
            array.compile()
        self._static = pytree.tree_map(_owned, (inputs, targets))
        self._graph: torch.cuda.CUDAGraph | None = None
        if array.device.type == "cuda" and (must_record or isinstance(optimizer, FusedOptimizer)):
            self._record()

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """The losses [M] of one step; on CUDA the next step overwrites them."""
        if len(self.array) != self._members:
            raise FusionError(
                f"the step was recorded for {self._members} members, the array has {len(self.array)}; record anew"
            )
        if self._graph is None:
            return self._step(inputs, targets)
        self._check_recorded()
        if self._graph is None:  # it was recorded anew, and could not be
            return self._step(inputs, targets)
        self._take(inputs, targets)
        self._graph.replay()
        self.array._restore_frozen()
        return self._losses

    def _check_recorded(self) -> None:
        """What was recorded must be what the array is now."""
        if self.array.active is not self._active:
            raise FusionError("members have left or joined the array since the step was recorded; record anew")
        if self.optimizer.keeps_state != self._keeps_state:
            self._record()  # a member was stopped: its optimizer state stays as it is from now on

    def _take(self, inputs: Any, targets: Sequence[Any]) -> None:
        """The batch to where the recorded step reads it."""
        mine, given = (pytree.tree_leaves(tree) for tree in (self._static, (inputs, targets)))
        if len(mine) != len(given):
            raise FusionError(f"the step was recorded with {len(mine)} inputs and targets, it was given {len(given)}")
        for static, new in zip(mine, given, strict=True):
            if isinstance(static, Tensor):
                if new.shape != static.shape:
                    shapes = f"{list(static.shape)}, it was given one of shape {list(new.shape)}"
                    raise FusionError(f"the step was recorded for a tensor of shape {shapes}; record another step")
                static.copy_(new, non_blocking=True)

    def _step(self, inputs: Any, targets: Sequence[Any]) -> Tensor:
        self.optimizer.zero_grad()
        kind = self.array.device.type
        setting = torch.autocast(kind, dtype=self.autocast) if self.autocast else contextlib.nullcontext()
        with setting:
            losses = self.array.losses(inputs, self.loss, *targets, per_member=self.per_member)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        if self.max_norm is not None:
            self.array.clip_grad_norm_(self.max_norm)
        self.optimizer.step()
        return losses.detach()

    def _record(self) -> None:
        if not isinstance(self.optimizer, FusedOptimizer):
            raise FusionError(f"{type(self.optimizer.proxies[0]).__name__} has no formula here and cannot be recorded")
        before = torch.backends.cudnn.benchmark
        # Shapes stay, so cuDNN may choose by trying; before our own lowerings are compared, as it changes their order.
        self.array.recording, torch.backends.cudnn.benchmark = True, True
        saved = self.array.state_dict()
        try:
            self._warm_up_and_capture(saved)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if self._must_record:
                raise
            self._give_up(saved)
        finally:
            self.array.recording, torch.backends.cudnn.benchmark = False, before

    def _give_up(self, saved: dict[str, Any]) -> None:
        """The loss, or the model, does what a graph cannot hold: the step runs as it is written."""
        assert isinstance(self.optimizer, FusedOptimizer)
        torch.cuda.synchronize(self.array.device)
        self._graph, self.optimizer.recorded = None, False
        self._rewind(saved)

    def _warm_up_and_capture(self, saved: dict[str, Any]) -> None:
        inputs, targets = self._static
        assert isinstance(self.optimizer, FusedOptimizer)
        self.optimizer.recorded, self._keeps_state = True, self.optimizer.keeps_state
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._step(inputs, targets)
        torch.cuda.current_stream().wait_stream(side)
        self._rewind(saved)
        self._graph = torch.cuda.CUDAGraph()
        for generator in self.array.streams.generators:
            self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph):
            self._losses = self._step(inputs, targets)

    def _rewind(self, saved: dict[str, Any]) -> None:
        """Undoes the warm-up in place: the recorded step must find its state where it will be."""
        self.optimizer.zero_grad()
        self.array.load_state_dict(saved)


def _owned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
