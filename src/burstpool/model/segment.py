"""Segmentation: which operators of a captured graph make up each layer.

Takes a `Capture`. Returns `Segment`s in running order, each the operators of one module call plus the cheap
operators that follow it. Three passes, each only ever joining neighbours, so that the order of the operators,
and with it the random stream, stays the model's own:

1. `_split` cuts at every change of module call;
2. `_join_inseparable` joins what cannot be told apart by samples: views of memory written in place, and tensors
   whose samples are folded into another dimension;
3. `_contract` joins element-wise operators and reshapes to the layer whose result they alone use.

Free operators, which depend on neither samples nor parameters (masks, positions, sizes), belong to no segment:
each layer that needs one computes it again.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import sympy
import torch
from torch import fx

from burstpool.model.capture import BATCH_SYMBOL, Capture, inner_nodes, is_random

aten = torch.ops.aten

_CHEAP = {  # besides views and what torch tags as point-wise
    aten.dropout, aten.dropout_, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout,
    aten.relu, aten.relu_, aten.relu6, aten.relu6_, aten.hardswish, aten.hardswish_, aten.hardsigmoid,
    aten.hardsigmoid_, aten.gelu, aten.silu, aten.silu_, aten.elu, aten.elu_, aten.leaky_relu, aten.leaky_relu_,
    aten.selu, aten.mish, aten.softplus, aten.hardtanh, aten.hardtanh_, aten.flatten, aten.reshape,
    aten.contiguous, aten.unflatten, aten.to, aten.clone,
}  # fmt: skip
_MAYBE_VIEWS = {aten.reshape, aten.contiguous, aten.flatten, aten.unflatten, aten.to, aten.type_as, aten.dropout}
"""Operators that may return their input's own memory though their schema does not say so."""
_BATCH_NORM_TRAINING = 5
"""Position of batch_norm's argument that asks for the statistics of the samples at hand."""


@dataclass(slots=True)
class Segment:
    """The operators of one layer-to-be."""

    call: str
    """The module call that made the first of them, unique within the model."""
    path: str
    """Its module's name in the user's tree; "" for the model itself."""
    is_leaf: bool
    """Whether the module calls no other."""
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeNodes:
    """What any layer can have for itself: sizes, constants, buffers nobody writes, and what follows from them."""

    nodes: frozenset[fx.Node]
    writers: Mapping[fx.Node, Sequence[fx.Node]]
    """The node that made some memory → the free operators that overwrite that memory."""

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What a layer needs besides to have this node: its arguments, and whatever writes into its memory."""
        return [*node.all_input_nodes, *(self.writers.get(_root(node), ()) if node in self.nodes else ())]


def free_nodes(capture: Capture) -> FreeNodes:
    """Starts from all that looks free and takes out memory that anything else writes, until nothing changes."""
    writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in capture.graph.nodes:
        if (target := written_argument(node)) is not None:
            writers[_root(target)].append(node)
    spoilt = {root for root in writers if root.op == "placeholder"}
    while True:
        free = _free_but_for(spoilt, capture)
        more = {root for root, nodes in writers.items() if not free.issuperset(nodes)} - spoilt
        if not more:
            return FreeNodes(nodes=frozenset(free), writers=writers)
        spoilt |= more


def _free_but_for(spoilt: set[fx.Node], capture: Capture) -> set[fx.Node]:
    free: set[fx.Node] = set()
    for node in capture.graph.nodes:
        if node.op == "placeholder":
            is_free = node.name in capture.constants or node.name in capture.buffers
        elif node.op == "call_function":
            known_size = is_scalar(node) and not capture.data_dependent(scalar_expression(node, capture))
            is_free = known_size or (not is_random(node) and all(x in free for x in node.all_input_nodes))
        else:
            is_free = node.op == "get_attr"
        if is_free and (is_scalar(node) or _root(node) not in spoilt):
            free.add(node)
    return free


def segment(capture: Capture, free: FreeNodes) -> list[Segment]:
    """The layers' operators, in running order."""
    work = [node for node in capture.graph.nodes if node.op == "call_function" and node not in free.nodes]
    return _contract(_join_inseparable(_split(work), capture), capture, free.nodes)


def sample_dim(node: fx.Node, capture: Capture) -> int | None:
    """The only dimension that is the batch itself; None where there is none, or not just one."""
    sizes = [capture.size(size) for size in node.meta["val"].shape]
    growing = [dim for dim, size in enumerate(sizes) if isinstance(size, sympy.Expr)]
    return growing[0] if len(growing) == 1 and sizes[growing[0]] == BATCH_SYMBOL else None


def grows_with_batch(node: fx.Node, capture: Capture) -> bool:
    """Whether the tensor's size depends on the batch."""
    return any(isinstance(capture.size(size), sympy.Expr) for size in node.meta["val"].shape)


def mixes_samples(node: fx.Node, capture: Capture) -> bool:
    """Whether one sample's result depends on the others'."""
    if any(mixes_samples(inner, capture) for inner in inner_nodes(node)):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.batch_norm:
        return bool(node.args[_BATCH_NORM_TRAINING])
    given = [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]
    given = [x for x in given if grows_with_batch(x, capture)]
    value = node.meta.get("val")
    if not given or not isinstance(value, torch.Tensor):
        return False
    if not grows_with_batch(node, capture) or sum(_grows(size, capture) for size in value.shape) > 1:
        return True
    return not _is_view(node) and _works_along_samples(node, given[0], capture)


def _works_along_samples(node: fx.Node, first: fx.Node, capture: Capture) -> bool:
    """Whether the operator's `dim` (or an index) is the dimension of its first argument's samples."""
    if node.args[:1] != (first,) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    dims = first.meta["val"].dim()
    along = [dim for dim, size in enumerate(first.meta["val"].shape) if _grows(size, capture)]
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.name in ("dim", "dims"):
            named = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(dim, int) and dim % dims in along for dim in named):
                return True
        if argument.name == "indices" and isinstance(value, list | tuple):
            return any(index is not None and place in along for place, index in enumerate(value))
    return False


def _grows(size: Any, capture: Capture) -> bool:
    return isinstance(capture.size(size), sympy.Expr)


def is_scalar(node: fx.Node) -> bool:
    """Whether the node is a number rather than a tensor."""
    return isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def scalar_expression(node: fx.Node, capture: Capture) -> Any:
    """The number, or its expression in the batch."""
    value = node.meta["val"]
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    return value.node.expr.subs(dict.fromkeys(capture.batch_symbols, BATCH_SYMBOL))


def written_argument(node: fx.Node) -> fx.Node | None:
    """The tensor that an in-place operator such as `relu_` or `add_`, or one inside of a region, overwrites."""
    for inner in inner_nodes(node):
        target = written_argument(inner)
        if target is not None and (root := _root(target)).op == "placeholder":
            return _handed_to(node, root)
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            return value
    return None


def _handed_to(region: fx.Node, placeholder: fx.Node) -> fx.Node | None:
    """What a region's own placeholder stands for outside of it."""
    names = [node for node in placeholder.graph.nodes if node.op == "placeholder"]
    place = next((place for place, x in enumerate(region.args) if _is_body(x)), len(region.args))
    outer = region.args[place + 1 :]
    found = outer[names.index(placeholder)] if names.index(placeholder) < len(outer) else None
    return found if isinstance(found, fx.Node) else None


def _is_body(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and argument.op == "get_attr"


def _root(node: fx.Node) -> fx.Node:
    *_, root = memory_chain(node)
    return root


def memory_chain(node: fx.Node) -> Iterator[fx.Node]:
    """The node, and those whose memory its result may share, back to the one that made the memory."""
    current: fx.Node | None = node
    while current is not None:
        yield current
        current = _viewed_argument(current)


def _viewed_argument(node: fx.Node) -> fx.Node | None:
    if node.target is getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source if _viewed_argument(source) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.overloadpacket in _MAYBE_VIEWS:
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def stale_views(node: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node]:
    """Older views of the memory that this in-place operator writes, which are read after it.

    The graph does not show that such a read sees the write; it does so only through the shared memory.
    """
    target = written_argument(node)
    if target is None:
        return []
    family, queue = set(), [_root(target)]
    while queue:
        current = queue.pop()
        family.add(current)
        queue += [user for user in current.users if user not in family and _viewed_argument(user) is current]
    read_later = {view for view in family if any(order[user] > order[node] for user in view.users)}
    return [view for view in read_later if order[view] < order[node]]


def _call(node: fx.Node) -> tuple[str, str]:
    """The innermost module call a node belongs to, and that module's name."""
    for key, (path, _) in reversed((node.meta.get("nn_module_stack") or {}).items()):
        if not key.startswith("_empty"):  # export's own insertions
            return key, path
    return "", ""


def _split(nodes: Sequence[fx.Node]) -> list[Segment]:
    calling = {key for node in nodes for key in node.meta.get("nn_module_stack") or {} if key != _call(node)[0]}
    segments: list[Segment] = []
    home: dict[Any, Segment] = {}
    for node in nodes:
        call, path = _call(node)
        if node.target is getitem and node.args[0] in home:
            chosen = home[node.args[0]]  # the pieces of a result stay with the operator that made it
        elif segments and segments[-1].call == call:
            chosen = segments[-1]
        else:
            chosen = Segment(call, path, is_leaf=bool(path) and call not in calling)
            segments.append(chosen)
        chosen.nodes.append(node)
        home[node] = chosen
    return segments


def _join_inseparable(segments: list[Segment], capture: Capture) -> list[Segment]:
    order = {node: index for index, node in enumerate(capture.graph.nodes)}
    place = {node: index for index, segment_ in enumerate(segments) for node in segment_.nodes}
    belongs_with_previous = [False] * len(segments)

    def join(nodes: Iterable[fx.Node]) -> None:
        places = [place[node] for node in nodes if node in place]
        for index in range(min(places) + 1, max(places) + 1):
            belongs_with_previous[index] = True

    for node in place:
        if not _can_cross(node, capture):
            join([node, *node.users])
        if stale := stale_views(node, order):
            join([node, *stale, *(user for view in stale for user in view.users)])
    return _merge(segments, lambda before, after: belongs_with_previous[place[after.nodes[0]]])


def _can_cross(node: fx.Node, capture: Capture) -> bool:
    """Whether the node's result may travel between layers: a tensor whose samples can be told apart."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if any(capture.data_dependent(capture.size(size)) for size in node.meta["val"].shape):
        return False
    return not grows_with_batch(node, capture) or sample_dim(node, capture) is not None


def _contract(segments: list[Segment], capture: Capture, free: frozenset[fx.Node]) -> list[Segment]:
    def belongs(before: Segment, after: Segment) -> bool:
        inside, own = set(before.nodes), set(after.nodes)
        users = {user for node in before.nodes for user in node.users if user not in free}
        if not users <= inside | own or not users & own:
            return False  # others need its result too; "output" is among the users of what the model returns
        sources = {source for node in after.nodes for source in node.all_input_nodes} - own - free
        crossing = sources & inside
        if not any(grows_with_batch(node, capture) for node in crossing):
            return True  # e.g. learned positions, used once: not worth a transfer of their own
        return sources == crossing and all(_is_cheap(node) for node in after.nodes)

    return _merge(segments, belongs)


def _merge(segments: list[Segment], belongs: Callable[[Segment, Segment], bool]) -> list[Segment]:
    merged: list[Segment] = []
    for current in segments:
        if merged and belongs(merged[-1], current):
            merged[-1].nodes.extend(current.nodes)
        else:
            merged.append(current)
    return merged


def _is_cheap(node: fx.Node) -> bool:
    if node.target is getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return _is_view(node) or node.target.overloadpacket in _CHEAP or torch.Tag.pointwise in node.target.tags


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is getitem
    if node.target.overloadpacket in _MAYBE_VIEWS:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)
