"""Session: one traced model on one device under one set of options, as every way of measuring needs it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from burstpool.job import Job
from burstpool.model.block import Block
from burstpool.model.buffers import kept
from burstpool.model.capture import batch_of, resize_batch, resize_samples
from burstpool.model.trace import TracedModel

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is measured, and where."""

    traced: TracedModel
    device: torch.device
    autocast: str | None
    loss: Callable[[Any, Any], torch.Tensor]
    target: Any
    """For the example the model was traced with."""
    job: Job | None = None
    """Whose samples are loaded, and whose optimizer steps, between the steps that are measured."""

    def arguments(self, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The model's arguments for so many samples, on the device.

        The job's own where it is known: max pooling takes a quarter less time for a few samples that come again.
        """
        found = self.job.example(batch) if self.job else resize_batch(*self.traced.example, batch)
        return self._on_device(found)  # type: ignore[no-any-return]

    def targets(self, batch: int) -> Any:
        """The loss's targets for so many samples, on the device."""
        if self.job:
            return self._on_device(self.job.samples(batch)[1])
        return self._on_device(resize_samples(self.target, batch_of(*self.traced.example), batch))

    def autocasting(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast, if asked for. It caches casts of weights until it is left, so enter it once a pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.autocast])

    def caller(self, block: Block, batch: int) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        """The block as a function of its inputs, with as little as possible around it."""
        plain = block.caller(batch)
        if self.autocast is None:
            return plain

        def under_autocast(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            with self.autocasting():
                return plain(inputs)

        return under_autocast

    def leaves(self, block: Block, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The block's inputs, cut off from what made them."""
        known = self.traced.graph.values()
        return [
            tensor.detach().requires_grad_(known[name].differentiable)
            for name, tensor in zip(block.inputs, values, strict=True)
        ]

    def output_leaves(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model returns, cut off likewise."""
        names = self.traced.graph.outputs
        return {name: values[name].detach().requires_grad_(_has_gradient(values[name])) for name in names}

    def step(self, batch: int) -> Callable[[], None]:
        """A whole step of the user's own model: forward, loss, backward."""
        args, kwargs = self.arguments(batch)
        target = self.targets(batch)
        model = self.traced.model
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

        def step() -> None:
            with self.autocasting():
                result = self.loss(model(*args, **kwargs), target)
            if parameters:
                torch.autograd.grad(result, parameters, allow_unused=True)

        return step

    def uses(self) -> dict[str, int]:
        """How many layers take each value; the model's caller counts as one."""
        taken = [name for layer in self.traced.layers for name in layer.inputs]
        return {name: (taken + list(self.traced.graph.outputs)).count(name) for name in self.traced.graph.values()}

    @contextlib.contextmanager
    def model_left_as_it_was(self) -> Iterator[None]:
        """Keeps measuring from using up random numbers and from moving batch norm's statistics."""
        with kept(self.traced.model), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            yield

    def _on_device(self, tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), tree)
