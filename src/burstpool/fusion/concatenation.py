"""Merging: a product at every point over a concatenation, one part of which is the same at all points of a sample.

W·cat(a, expand(b)) = W_a·a + expand(W_b·b): the concatenation is never written, and the second product is done once a
sample. PointNet's segmentation so joins 64 channels of each point with 1,024 of the whole cloud.

Takes a plan's steps, returns them with the concatenation and the convolution of one point, or linear layer, behind it
as one step at the place of the latter. Only where nobody else reads the concatenation and nothing changes later what
it reads. What is the same at all points is known by its operator: `expand`, `repeat` and the like, of one point.

Shapes: M = members, N = samples, C = channels, O = output channels. Points are all dimensions but samples and channels.
"""
# ruff: noqa: N803, N806 -- shape suffixes are capitals

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from burstpool.fusion.merge import memory_of
from burstpool.fusion.plan import Step
from burstpool.fusion.rules import Call, Lowered, Run
from burstpool.fusion.rules.base import Kernel, nodes_in, with_members
from burstpool.fusion.rules.matmul import linear_batched, linear_shared
from burstpool.fusion.rules.products import point_product
from burstpool.fusion.rules.window import Window, window
from burstpool.model.segment import written_argument

aten = torch.ops.aten

_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_JOINS = (aten.cat.default, aten.concat.default)
_NORMS = (aten.batch_norm.default, aten.instance_norm.default)
_SPREADS = (
    aten.expand.default,
    aten.expand_as.default,
    aten.broadcast_to.default,
    aten.repeat.default,
    aten.tile.default,
)
"""Operators that put one point's values at all points; their first argument is that point."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the tensors that are joined."""

    source: fx.Node
    """The tensor itself, or what is spread over the points."""
    spread: Step | None
    channels: int
    batched: bool
    """Whether the source has the member dimension."""

    @property
    def arguments(self) -> list[Any]:
        return [self.source] if self.spread is None else self.spread.arguments


@dataclass(frozen=True, slots=True)
class _Product:
    """A layer and the concatenation it reads."""

    layer: Step
    join: Step
    parts: list[_Part]
    rank: int
    """Dimensions of one member's concatenation."""
    window: Window | None
    """The convolution's; None for a linear layer."""

    @property
    def dim(self) -> int:
        """The channels' dimension, counted from the last: the same with members and without."""
        return -1 if self.window is None else 1 - self.rank


def without_concatenations(
    steps: Sequence[Step], outputs: Sequence[fx.Node], fixed: set[fx.Node], batched: Mapping[fx.Node, bool]
) -> list[Step]:
    """The steps, products over such concatenations as one; `fixed` nodes stay as they are."""
    by_node = {step.node: step for step in steps if step.node not in fixed}
    statistics = _statistics(steps)
    replaced: dict[fx.Node, Step | None] = {}
    spread: set[fx.Node] = set()
    for step in by_node.values():
        product = _product(step, by_node, batched)
        if product is not None and _is_unchanged(product, steps, statistics):
            replaced.update({product.join.node: None, step.node: _as_one(product)})
            spread.update(part.spread.node for part in product.parts if part.spread is not None)
    found = [replaced.get(step.node, step) for step in steps]
    left = [step for step in found if step is not None]
    read = {*outputs, *(node for step in left for node in nodes_in(step.arguments))}
    return [step for step in left if step.node not in spread or step.node in read]


def _product(step: Step, by_node: Mapping[fx.Node, Step], batched: Mapping[fx.Node, bool]) -> _Product | None:
    is_linear = step.node.target is aten.linear.default
    if not (is_linear or step.node.target in _CONVOLUTIONS) or step.lowered.way != "rule":
        return None
    x, weight = step.arguments[:2]
    join = by_node.get(x)  # the graph's output is among the users of what it returns
    if join is None or join.node.target not in _JOINS or list(x.users) != [step.node] or not batched[weight]:
        return None
    rank, (tensors, dim) = x.meta["val"].dim(), join.arguments
    channels = rank - 1 if is_linear else 1
    values = [node.meta["val"] for node in tensors]
    alike = all(value.dim() == rank and value.dtype == values[0].dtype for value in values)
    if rank < 3 or not alike or dim % rank != channels:
        return None
    geometry = None if is_linear else _point_window(step, batched)
    if not is_linear and geometry is None:
        return None
    parts = [_part(node, channels, by_node, batched) for node in tensors]
    if len({part.spread is None for part in parts}) == 1 or any(not isinstance(p.channels, int) for p in parts):
        return None
    return _Product(step, join, parts, rank, geometry)


def _point_window(step: Step, batched: Mapping[fx.Node, bool]) -> Window | None:
    """The convolution's geometry, where it takes every point on its own."""
    assert isinstance(step.node.target, torch._ops.OpOverload)
    names = [argument.name for argument in step.node.target._schema.arguments]
    call = Call(step.node, dict(zip(names, step.arguments, strict=True)), batched.__getitem__)
    found = window(call) if call["groups"] == 1 else None
    if found is None or not found.whole or not found.is_point or any(stride != 1 for stride in found.stride):
        return None
    return found


def _part(node: fx.Node, channels: int, by_node: Mapping[fx.Node, Step], batched: Mapping[fx.Node, bool]) -> _Part:
    value, step = node.meta["val"], by_node.get(node)
    if step is not None and step.node.target in _SPREADS:
        source = step.arguments[0]
        if _is_of_one_point(source.meta["val"], value, channels):
            return _Part(source, step, value.shape[channels], batched[source])
    return _Part(node, None, value.shape[channels], batched[node])


def _is_of_one_point(source: Tensor, spread: Tensor, channels: int) -> bool:
    if source.dim() != spread.dim() or source.shape[channels] != spread.shape[channels]:
        return False
    points = [dim for dim in range(1, spread.dim()) if dim != channels]
    sizes = [spread.shape[dim] for dim in points]
    known = all(isinstance(size, int) for size in sizes) and any(size > 1 for size in sizes)
    one_point = known and all(source.shape[dim] == 1 for dim in points)
    return one_point and (source.shape[0] == 1 or source.shape[0] == spread.shape[0])


def _is_unchanged(product: _Product, steps: Sequence[Step], statistics: set[fx.Node]) -> bool:
    """Whether nothing writes into the parts after they were joined, or spread.

    Also not behind the layer: its gradient needs what it read, of which the concatenation was a copy.
    """
    places = {step.node: place for place, step in enumerate(steps)}
    for part in product.parts:
        first = product.join.node if part.spread is None else part.spread.node
        memory = memory_of([part.source] if part.spread is None else [part.source, first])
        written = (written_argument(step.node) for step in steps[places[first] + 1 :])
        if memory & (statistics | memory_of(list(written))):
            return False
    return True


def _statistics(steps: Sequence[Step]) -> set[fx.Node]:
    """The memory of norms' running statistics, into which they write without a word in their schema."""
    graphs = {step.node.graph for step in steps}
    norms = (node for graph in graphs for node in graph.nodes if node.target in _NORMS)
    return {root for norm in norms for root in memory_of(norm.args[3:5])}


def _as_one(product: _Product) -> Step:
    layer = product.layer
    arguments = [[part.arguments for part in product.parts], *layer.arguments[1:]]
    why = "what is the same at all points of the concatenation is multiplied once a sample"
    lowered = Lowered(kernel=_parted(product), why=why, others={"apart": _apart(product)})
    return Step(layer.node, layer.key, lowered, arguments, lowered.kernel)


def _apart(product: _Product) -> Kernel:
    """The operators, one after another."""
    layer, join, parts = product.layer, product.join, product.parts

    def kernel(run: Run, given: Sequence[Sequence[Any]], *rest: Any) -> Tensor:
        tensors = [
            arguments[0] if part.spread is None else part.spread.lowered.kernel(run, *arguments)
            for part, arguments in zip(parts, given, strict=True)
        ]
        y: Tensor = layer.lowered.kernel(run, join.lowered.kernel(run, tensors, *join.arguments[1:]), *rest)
        return y

    return kernel


def _parted(product: _Product) -> Kernel:
    """A product of what differs between points, which begins with that of what does not."""
    plain = [place for place, part in enumerate(product.parts) if part.spread is None]
    spread = [place for place, part in enumerate(product.parts) if part.spread is not None]
    channels, points = [part.channels for part in product.parts], product.rank - 2
    own, own_start = (any(product.parts[place].batched for place in places) for places in (plain, spread))
    layer = _linear(own, points) if product.window is None else _convolution(own, product.window)
    start = linear_batched if own_start else linear_shared

    def kernel(run: Run, given: Sequence[Sequence[Any]], w_MOC: Tensor, b_MO: Tensor | None, *rest: Any) -> Tensor:
        pieces = torch.split(w_MOC, channels, 2)
        w_plain, w_spread = (_end_to_end([pieces[place] for place in places], 2) for places in (plain, spread))
        x, source = (_joined(product, run, given, places) for places in (plain, spread))
        start_MNO = start(run, source.flatten(-1 - points), w_spread.flatten(2), b_MO)
        y: Tensor = layer(run, x, w_plain, start_MNO)
        return y

    return kernel


def _linear(own: bool, points: int) -> Kernel:
    """Takes input, weight and what is added to all points of a sample; so does `_convolution`."""
    product = linear_batched if own else linear_shared

    def kernel(run: Run, x: Tensor, w_MOC: Tensor, start_MNO: Tensor) -> Tensor:
        members, samples, outputs = start_MNO.shape
        return product(run, x, w_MOC, None) + start_MNO.view(members, samples, *[1] * points, outputs)

    return kernel


def _convolution(own: bool, geometry: Window) -> Kernel:
    product = point_product(geometry, own)
    return lambda run, x, w_MOC, start_MNO: product(run, x, w_MOC, None, start_MNO=start_MNO)


def _joined(product: _Product, run: Run, given: Sequence[Sequence[Any]], places: Sequence[int]) -> Tensor:
    """These parts' sources as one, with the member dimension where any has it."""
    own = [product.parts[place].batched for place in places]
    tensors = [given[place][0] for place in places]
    if any(own):
        tensors = [x if flag else with_members(x, run.members) for x, flag in zip(tensors, own, strict=True)]
    return _end_to_end(tensors, product.dim)


def _end_to_end(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
