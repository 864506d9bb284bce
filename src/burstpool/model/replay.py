"""Replay: one training step of a traced model, block by block, each backward from the gradients of the next.

The reference that other ways to run a model are tested against, and the way a trace is checked against the model
it came from. One process, one device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from burstpool.model.block import BlockRun
from burstpool.model.traced import TracedModel


def replay_step(
    traced: TracedModel,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    loss: Callable[[Any], torch.Tensor],
    cuts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Runs forward, loss and backward over the blocks between `cuts`; leaves gradients in the parameters."""
    values = traced.input_values(*args, **kwargs)
    batch = traced.batch_of(values)
    runs: list[BlockRun] = []
    for block in traced.blocks(cuts):
        run = block.run(*(values[name] for name in block.inputs), batch=batch)
        values.update(zip(block.outputs, (output.detach() for output in run.outputs), strict=True))
        runs.append(run)
    leaves = {
        name: values[name].requires_grad_(values[name].is_floating_point() or values[name].is_complex())
        for name in traced.graph.outputs
    }
    result = loss(traced.output(values | leaves))
    result.backward()  # type: ignore[no-untyped-call]
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for run in reversed(runs):
        received = run.backward([gradients.pop(name, None) for name in run.block.outputs])
        for name, gradient in zip(run.block.inputs, received, strict=True):
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return result.detach()


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def sum_of_outputs(output: Any) -> torch.Tensor:
    """A loss for models whose own is not at hand: every floating-point result counts."""
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return torch.stack([(x * x).mean() for x in tensors]).sum()
