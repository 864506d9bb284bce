"""Passes: forward and backward of blocks on one device, and the samples that flow between them.

Holds, for the step that is running, the pieces of values and gradients a device has, and the block runs that wait for
their backward. A block's inputs are cut off from what made them; its backward starts from the gradients that its
takers left, here or on other devices. The loss belongs to the last block: each device's mean is weighted by its
samples, so that gradients added over devices and minibatches are those of the mean over everything.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from burstpool.errors import RunError
from burstpool.model.block import Block, BlockRun
from burstpool.model.traced import TracedModel
from burstpool.run.loading import Loaded
from burstpool.run.losses import not_finite
from burstpool.run.moment import Moment
from burstpool.run.reshard import Pieces
from burstpool.schedule.actions import Action

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Passes:
    """The values, gradients and block runs of one device in one step."""

    def __init__(
        self,
        traced: TracedModel,
        blocks: Mapping[str, Block],
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        moment: Moment,
        num_minibatches: int,
        on: torch.device,
        autocast: str | None,
    ) -> None:
        self._traced, self._blocks, self._loss_function, self._moment = traced, blocks, loss, moment
        self._values = traced.graph.values()
        self._samples_a_step = moment.batch * num_minibatches
        self._on, self._autocast = on, autocast
        self._last = list(blocks)[-1]
        self.returned = traced.graph.outputs
        """Values that the model returns."""
        self.sent_back: frozenset[str] = frozenset()
        """Values whose gradients travel from here: they must be there even where none flows."""
        self.allow_nan = True
        self.loss_scale = 1.0
        """Factor on the loss, for fp16."""
        self._held: dict[tuple[str, int], Pieces] = {}
        self._gradients: dict[tuple[str, int], Pieces] = {}
        self._runs: dict[tuple[str, int], BlockRun] = {}
        self._losses: dict[int, tuple[torch.Tensor, float]] = {}
        self._loaded: Sequence[Sequence[Loaded]] = ()
        self.loss: torch.Tensor | None = None
        """This device's part of the step's loss so far; None where it has none."""

    def begin_step(self, loaded: Sequence[Sequence[Loaded]]) -> None:
        """Takes the model's inputs and targets of a new step."""
        self._held.clear()
        self._gradients.clear()
        self._runs.clear()
        self._losses.clear()
        self._loaded, self.loss = loaded, None
        for minibatch, parts in enumerate(loaded):
            for part in parts:
                for name, tensor in part.values.items():
                    self.put(name, minibatch, part.start, part.stop, tensor)

    def forward(self, action: Action) -> Callable[[], None]:
        """A function that runs it."""
        block, minibatch, start, stop = self._blocks[action.block], action.minibatch, action.start, action.stop
        # The last block needs all that the model returns, for the loss.
        extra = [x for x in self._traced.graph.outputs if x not in block.outputs] if block is self._last_block else []
        taken = [(name, self._values[name].differentiable) for name in dict.fromkeys([*block.inputs, *extra])]
        call = block.caller(stop - start)
        num_inputs = len(block.inputs)

        def forward() -> None:
            leaves = tuple(self._leaf(name, minibatch, start, stop, differs) for name, differs in taken)
            moment = self._moment
            moment.minibatch, moment.start, moment.stop = minibatch, start, stop
            with self._autocasting():
                outputs = tuple(call(leaves[:num_inputs]))
                if block is self._last_block:
                    made = dict(zip(block.outputs, outputs, strict=True))
                    made.update(zip((name for name, _ in taken), leaves, strict=True))
                    self._compute_loss(made, minibatch, start, stop)
            self._runs[action.block, minibatch] = BlockRun(block=block, inputs=leaves, outputs=outputs)
            for name, output in zip(block.outputs, outputs, strict=True):
                self.put(name, minibatch, start, stop, output.detach())

        return forward

    def backward(self, action: Action) -> Callable[[], None]:
        """A function that runs it."""
        block, minibatch, start, stop = self._blocks[action.block], action.minibatch, action.start, action.stop
        extra = [x for x in self._traced.graph.outputs if x not in block.outputs] if block is self._last_block else []
        taken = list(dict.fromkeys([*block.inputs, *extra]))

        def backward() -> None:
            run = self._runs.pop((action.block, minibatch))
            if block is self._last_block:
                loss, weight = self._losses.pop(minibatch)
                loss.backward(torch.full_like(loss, weight * self.loss_scale))  # type: ignore[no-untyped-call]
            else:
                run.backward([self._pop_gradient(name, minibatch, start, stop) for name in block.outputs])
            for name, leaf in zip(taken, run.inputs, strict=True):
                gradient = leaf.grad
                if gradient is None and name in self.sent_back:
                    gradient = torch.zeros_like(leaf)
                if gradient is not None:
                    self.add_gradient(name, minibatch, start, stop, gradient)

        return backward

    def put(self, name: str, minibatch: int, start: int, stop: int, tensor: torch.Tensor) -> None:
        """Holds samples of a value."""
        self._pieces(self._held, name, minibatch).put(start, stop, tensor)

    def take(self, name: str, minibatch: int, start: int, stop: int) -> torch.Tensor:
        """Samples of a value that this device holds."""
        pieces = self._held.get((name, minibatch))
        found = pieces.take(start, stop) if pieces is not None else None
        if found is None:
            raise RunError(
                f"samples {start}:{stop} of {name!r}, minibatch {minibatch}, never came; the schedule is unsound"
            )
        return found

    def drop(self, name: str, minibatch: int) -> None:
        """Nobody here needs the value any more."""
        self._held.pop((name, minibatch), None)

    def add_gradient(self, name: str, minibatch: int, start: int, stop: int, gradient: torch.Tensor) -> None:
        """One taker's part of a value's gradient."""
        self._pieces(self._gradients, name, minibatch).add(start, stop, gradient)

    def pop_gradient(self, name: str, minibatch: int, start: int, stop: int) -> torch.Tensor:
        """The gradient to send to the value's maker."""
        found = self._pop_gradient(name, minibatch, start, stop)
        if found is None:
            raise RunError(f"there is no gradient of {name!r}, samples {start}:{stop}; the schedule is unsound")
        return found

    @property
    def _last_block(self) -> Block:
        return self._blocks[self._last]

    def _leaf(self, name: str, minibatch: int, start: int, stop: int, differs: bool) -> torch.Tensor:
        tensor = self.take(name, minibatch, start, stop)
        return tensor.detach().requires_grad_() if differs else tensor

    def _pop_gradient(self, name: str, minibatch: int, start: int, stop: int) -> torch.Tensor | None:
        pieces = self._gradients.get((name, minibatch))
        if pieces is None:
            return None
        any_there = pieces.holds_any(start, stop)
        found = pieces.pop(start, stop)
        if found is None and any_there:
            raise RunError(
                f"part of the gradient of {name!r}, samples {start}:{stop}, is missing; the schedule is unsound"
            )
        return found

    def _pieces(self, store: dict[tuple[str, int], Pieces], name: str, minibatch: int) -> Pieces:
        found = store.get((name, minibatch))
        if found is None:
            found = store[name, minibatch] = Pieces(self._values[name].sample_dim)
        return found

    def _compute_loss(self, made: Mapping[str, torch.Tensor], minibatch: int, start: int, stop: int) -> None:
        part = next(x for x in self._loaded[minibatch] if x.start <= start and stop <= x.stop)
        loss = self._loss_function(self._traced.output(made), part.target_of(start, stop))
        if loss.dim() != 0:
            raise RunError(f"the loss returned a tensor of shape {tuple(loss.shape)}; it must be the mean over samples")
        weight = (stop - start) / self._samples_a_step
        self._losses[minibatch] = (loss, weight)
        # Before any gradient of it is made: the parameters stay as they were.
        if not self.allow_nan and not math.isfinite(loss.item()):
            raise RunError(not_finite(loss.item(), self._moment.step))
        own = loss.detach() * weight
        self.loss = own if self.loss is None else self.loss + own

    def _autocasting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._on.type, dtype=AUTOCAST[self._autocast])
