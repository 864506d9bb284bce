"""Check: does a trace do exactly what the model does?

Takes a model and an example. Compares a traced step, layer by layer, with the model's own: results bit for bit,
buffers bit for bit, gradients to a tolerance. Used by the compatibility table and by tests.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from burstpool.job import model_arguments
from burstpool.model.buffers import kept
from burstpool.model.capture import batch_of, resize_samples
from burstpool.model.replay import replay_step, sum_of_outputs
from burstpool.model.traced import TracedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a traced step is from the model's own."""

    outputs_equal: bool
    """Bit for bit, the loss included."""
    buffers_equal: bool
    """Bit for bit, after the step."""
    output_error: float
    """Largest difference over the largest value of the same result."""
    gradient_error: float
    """Largest difference over the largest gradient of the same parameter."""

    def within(self, tolerance: float) -> bool:
        """Whether the trace is as good as the model."""
        return self.outputs_equal and self.buffers_equal and self.gradient_error <= tolerance


def check_step(
    traced: TracedModel,
    example: Any,
    *,
    batch: int,
    cuts: Sequence[int] | None = None,
    loss: Callable[[Any], torch.Tensor] = sum_of_outputs,
    seed: int = 0,
) -> Difference:
    """One step of the traced model, cut into blocks, against one of a copy of the model itself."""
    model = traced.model
    args, kwargs = model_arguments(example)
    args, kwargs = resize_samples((args, kwargs), batch_of(args, kwargs), batch)
    alone = copy.deepcopy(model)
    alone.zero_grad()

    def given() -> tuple[tuple[Any, ...], dict[str, Any]]:  # anew for each run: some models overwrite their inputs
        return pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))  # type: ignore[no-any-return]

    torch.manual_seed(seed)
    output = alone(*given()[0], **given()[1])
    expected = loss(output)
    expected.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    torch.manual_seed(seed)
    with kept(model), torch.no_grad():
        own = traced(*given()[0], **given()[1])
    torch.manual_seed(seed)
    with kept(model):
        found = replay_step(traced, *given(), loss=loss, cuts=cuts)
        difference = Difference(
            outputs_equal=torch.equal(found, expected.detach()) and _equal(own, output),
            output_error=_output_error(own, output),
            buffers_equal=_equal(dict(model.named_buffers()), dict(alone.named_buffers())),
            gradient_error=_gradient_error(model, alone),
        )
    model.zero_grad()
    return difference


def _equal(a: Any, b: Any) -> bool:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def _output_error(a: Any, b: Any) -> float:
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return max((_error(x, y) for x, y in pairs if isinstance(x, torch.Tensor)), default=0.0)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    scale = max(1.0, expected.abs().max().item())
    return (found - expected).abs().max().item() / scale


def _gradient_error(model: nn.Module, reference: nn.Module) -> float:
    worst = 0.0
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        if expected.grad is None and found.grad is None:
            continue
        a = torch.zeros_like(found) if found.grad is None else found.grad
        b = torch.zeros_like(expected) if expected.grad is None else expected.grad
        worst = max(worst, _error(a, b))
    return worst
