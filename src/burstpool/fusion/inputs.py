"""Inputs: how they are passed to a model, and those of which each member has its own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.model.capture import BATCH_SYMBOL, Capture, batch_of, flatten_arguments


def model_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As a job's inputs are: tuple → positional, dict → keywords, else one argument."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def stacked_inputs(inputs: Any, members: int) -> Any:
    """The structure with tensors [M, …]; a list is one structure a member."""
    if isinstance(inputs, list):
        if len(inputs) != members:
            raise FusionError(f"{len(inputs)} inputs for {members} members; pass one each")
        leaves = [pytree.tree_flatten(item) for item in inputs]
        for index, (_, spec) in enumerate(leaves):
            if spec != leaves[0][1]:
                raise FusionError(f"the inputs of member {index} have another structure than those of member 0")
        columns = zip(*(flat for flat, _ in leaves), strict=True)
        return pytree.tree_unflatten([_stacked(column) for column in columns], leaves[0][1])
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] != members):
            raise FusionError(
                f"with per_member=True a tensor has the members first: {list(leaf.shape)} is not [{members}, …]"
            )
    return inputs


def named_inputs(capture: Capture, example: Sequence[Any], inputs: Any, *, own: int | None) -> dict[str, Any]:
    """What each placeholder of the inputs stands for; `own` is the number of members where each has its own."""
    args, kwargs = model_arguments(inputs if own is None else stacked_inputs(inputs, own))
    leaves, spec = flatten_arguments(args, kwargs)
    if spec != capture.in_spec:
        wanted = capture.in_spec.num_leaves
        raise FusionError(
            f"the inputs are not like the example: {spec.num_leaves} values in another structure than its {wanted}"
        )
    named = {name: leaf for name, leaf in zip(capture.inputs, leaves, strict=True) if name}
    _check_like_example(capture, leaves, example, own=own is not None)
    samples = batch_of((), named) if own is None else batch_of((), {name: leaf[0] for name, leaf in named.items()})
    low, high = capture.batch_range
    if samples < low or (high is not None and samples > high):
        raise FusionError(f"a batch of {samples} is outside of what the model's code allows: {low} to {high or 'any'}")
    if samples == 1:
        _check_norms_of_one(capture)
    stored = {*capture.parameters, *capture.buffers, *capture.constants}
    placeholders = [node.name for node in capture.graph.nodes if node.op == "placeholder"]
    return {name: named.get(name) for name in placeholders if name not in stored}


def _check_norms_of_one(capture: Capture) -> None:
    """Refuses, as torch does, one sample for batch norm in training with one value a channel: it has no variance."""
    graphs = [capture.graph, *(m.graph for m in capture.root.children() if isinstance(m, fx.GraphModule))]
    for node in (node for graph in graphs for node in graph.nodes):
        if node.target is not torch.ops.aten.batch_norm.default or not node.args[5]:
            continue
        sizes = [capture.size(size) for size in node.args[0].meta["val"].shape]
        if math.prod(size if isinstance(size, int) else size.subs(BATCH_SYMBOL, 1) for size in sizes) == sizes[1]:
            raise FusionError(
                f"batch norm ({node.name!r}) has one value a channel in a batch of one sample, which torch refuses in "
                "training; leave the batch out, or take more samples"
            )


def _check_like_example(capture: Capture, leaves: Sequence[Any], example: Sequence[Any], *, own: bool) -> None:
    """Refuses inputs that the captured code was not made for: other sizes than the batch's, other plain values."""
    shapes = {node.name: node.meta["val"].shape for node in capture.graph.nodes if node.name in capture.inputs}
    for name, leaf, given in zip(capture.inputs, leaves, example, strict=True):
        if not name:
            if not _alike(leaf, given):
                raise FusionError(f"the models were captured with {given!r}; called with {leaf!r}, fuse them anew")
            continue
        if not isinstance(leaf, torch.Tensor):
            raise FusionError(f"input {name!r} has type {type(leaf).__name__}; the models were captured with a tensor")
        sizes = leaf.shape[1:] if own else leaf.shape
        fixed = [(size, int(want)) for size, want in zip(sizes, shapes[name], strict=False) if isinstance(want, int)]
        if len(sizes) != len(shapes[name]) or any(size != want for size, want in fixed):
            wanted = ["N" if isinstance(size, torch.SymInt) else size for size in shapes[name]]
            raise FusionError(f"input {name!r} has shape {list(sizes)}; the models were captured for {wanted}")


def _stacked(column: tuple[Any, ...]) -> Any:
    if not all(isinstance(value, torch.Tensor) for value in column):
        if not all(_alike(value, column[0]) for value in column):
            kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in column))
            raise FusionError(f"members have different values that are no tensors ({kinds}); pass a tensor for each")
        return column[0]
    shapes = [list(tensor.shape) for tensor in column]
    if any(shape != shapes[0] for shape in shapes):
        raise FusionError(f"members' batches have different shapes: {shapes}; they must have one")
    return torch.stack(column)


def _alike(value: Any, other: Any) -> bool:
    """Whether plain values are the same; of arrays only one and the same is."""
    if value is other:
        return True
    try:
        return not isinstance(value, torch.Tensor) and bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return False
