"""What the fusion tests compare with: the same models, one after another, with torch alone."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from burstpool.fusion import FusedArray, fuse
from burstpool.job import model_arguments


def built(factory: Callable[[int], nn.Module], members: int) -> list[nn.Module]:
    """Members with weights of their own, in double precision."""
    models = []
    for seed in range(members):
        torch.manual_seed(seed)
        model = factory(seed).double()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
        models.append(model)
    return models


def weighted_sum(output: Any) -> Tensor:
    """A loss in which every element of every result has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            weights = torch.linspace(-1.0, 2.0, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
            total = total + (leaf * weights).sum()
    return total


def assert_same_step(
    factory: Callable[[int], nn.Module],
    example: Any,
    *,
    members: int = 3,
    lowerings: Sequence[str] = ("",),
    training: bool = True,
) -> FusedArray:
    """One forward and backward pass, fused and alone, with one batch for all and with each member's own.

    With several `lowerings` once with each; what has state or randomness is given one.
    """
    models = built(factory, members)
    for model in models:
        model.train(training)
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, example)
    for lowering, per_member in itertools.product(lowerings, (False, True)):
        inputs = [_varied(example, i) if per_member else example for i in range(members)]
        plan = array.mode.plan(_all_inputs(array) if per_member else frozenset())
        for step in plan.steps:
            if lowering in step.lowered.others:
                step.choose(lowering)
        plan.recompile()
        losses = array.losses(inputs if per_member else example, weighted_sum, per_member=per_member)
        losses.sum().backward()
        for index, model in enumerate(alone):
            torch.manual_seed(index)
            args, kwargs = model_arguments(inputs[index])
            _continue_stream(index, array, per_member, model, example)
            loss = weighted_sum(model(*args, **kwargs))
            loss.backward()
            torch.testing.assert_close(losses[index], loss, rtol=1e-9, atol=1e-11)
            for name, parameter in model.named_parameters():
                mine = array.state.parameters[name].grad
                assert (mine is None) == (parameter.grad is None), name
                if mine is not None:
                    torch.testing.assert_close(mine[index], parameter.grad, rtol=1e-9, atol=1e-10)
                parameter.grad = None
            for key, value in model.state_dict().items():
                torch.testing.assert_close(array.member(index).state_dict()[key], value, rtol=1e-9, atol=1e-11)
        for parameter in array.parameters():
            parameter.grad = None
    return array


def _continue_stream(index: int, array: FusedArray, second: bool, model: nn.Module, example: Any) -> None:
    """The second pass goes on where the first left the member's stream; replay the first on a copy."""
    if second:
        args, kwargs = model_arguments(example)
        copy.deepcopy(model)(*args, **kwargs)


def _varied(example: Any, member: int) -> Any:
    def vary(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf * (1.0 + 0.25 * member) - 0.1 * member

    return pytree.tree_map(vary, example)


def _all_inputs(array: FusedArray) -> frozenset[str]:
    return frozenset(name for name in array.mode.capture.inputs if name)


def train_alone(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[tuple[Any, Any]],
    loss: Callable[[Any, Any], Tensor],
) -> list[list[float]]:
    """Trains one model after another; random numbers go on in each one's own stream. Losses by member."""
    losses = []
    for model, optimizer in zip(models, optimizers, strict=True):
        losses.append([])
        for inputs, target in batches:
            args, kwargs = model_arguments(inputs)
            value = loss(model(*args, **kwargs), target)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(value.detach()))
    return losses


__all__ = ["assert_same_step", "built", "train_alone", "weighted_sum"]
