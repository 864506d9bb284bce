"""One member after another: the baseline that an array must not be slower than, and what `mode="serial"` runs.

The captured operators of each member on its own slices, with its own numbers and its own random stream.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from burstpool.fusion.modes import Mode
from burstpool.fusion.plan import _REGIONS, _filled, _setting
from burstpool.fusion.rules import PerMember, Run, bind
from burstpool.fusion.rules.concurrent import side_by_side
from burstpool.fusion.rules.fallback import BY_STRIDES, joined
from burstpool.fusion.rules.layout import in_order
from burstpool.model.segment import memory_chain, written_argument

Numbers = Mapping[str, Mapping[str, PerMember]]
Visit = Callable[[str, fx.Node, Any], Any]


def run_serially(
    mode: Mode,
    run: Run,
    values: Mapping[str, Any],
    batched: frozenset[str],
    *,
    concurrent: bool = False,
    only: int | None = None,
) -> list[Any]:
    """The model's flattened results [M, …], members run one by one, or side by side on a GPU's streams.

    `only` the first few, where how long they take is all that is asked for.
    """
    rows = member_values(mode, run.members, values, batched)[:only]
    # A member's stream takes the place of torch's own only where numbers are drawn: a recording allows no change of it.
    work: list[Callable[[], list[Any]]] = [partial(alone, mode, i, row) for i, row in enumerate(rows)]
    drawing = draws(mode)
    if drawing:
        work = [partial(run.streams.drawing, i, one) for i, one in enumerate(work)]
    if concurrent and not drawing:
        return joined(side_by_side(work, run.streams.device))  # type: ignore[no-any-return]
    return joined([one() for one in work])  # type: ignore[no-any-return]


def draws(mode: Mode) -> bool:
    """Whether any operator draws random numbers."""
    return bool(random_operators(mode))


def random_operators(mode: Mode) -> list[fx.Node]:
    """The operators that draw random numbers, those in regions included; dropout that is off draws none."""
    graphs = [mode.capture.graph, *(m.graph for m in mode.capture.root.children() if isinstance(m, fx.GraphModule))]
    nodes = [node for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    seeded = [node for node in nodes if torch.Tag.nondeterministic_seeded in node.target.tags]
    return [node for node in seeded if mode.numbers or not _is_off(node)]


def _is_off(node: fx.Node) -> bool:
    """Dropout with no chance of dropping, in every member."""
    bound = bind(node)
    if ("train" in bound and not bound["train"]) or bound.get("num_layers") == 1:  # an LSTM's is between layers
        return True
    return any(bound.get(name) == 0 for name in ("p", "dropout_p", "dropout"))


def written_inputs(mode: Mode) -> set[str]:
    """Inputs that the model's code writes into: where members share one, each must find it as it was."""
    return _written(mode) & set(mode.capture.inputs)


def _written(mode: Mode) -> set[str]:
    """Placeholders that the model's code writes into, and operators whose results it writes into."""
    targets = [target for node in mode.capture.graph.nodes if (target := written_argument(node)) is not None]
    return {list(memory_chain(target))[-1].name for target in targets}


def member_values(mode: Mode, members: int, values: Mapping[str, Any], batched: frozenset[str]) -> list[dict[str, Any]]:
    """What the placeholders stand for, member by member."""
    capture = mode.capture
    own = {*capture.parameters, *capture.buffers, *batched}
    own |= {name for place, name in enumerate(capture.constants) if mode.constant(place)[1]}
    columns, written = {}, _written(mode)
    for name, value in values.items():
        if name in written and name not in own:
            columns[name] = [*(value.clone() for _ in range(members - 1)), value]
        elif name not in own:
            columns[name] = [value] * members
        elif name in capture.buffers or name in written:
            columns[name] = [value[i] for i in range(members)]  # written in place: no unbind
        else:
            columns[name] = list(value.unbind(0))
    for name, order in mode.memory_orders.items():
        if name not in written:  # as it lies alone: torch draws masks in that order
            columns[name] = [in_order(mine, order) for mine in columns[name]]
    return [{name: column[i] for name, column in columns.items()} for i in range(members)]


def alone(mode: Mode, member: int, values: Mapping[str, Any], visit: Visit | None = None) -> list[Any]:
    """One member's flattened results; `visit(key, node, result)` sees every operator's result."""
    known = _walk(mode.capture.graph, mode.capture.root, values, _Member(member, mode.numbers, visit), "")
    return [known[node] if isinstance(node, fx.Node) else node for node in mode.capture.outputs]


class _Member:
    """Which member runs, with which numbers."""

    def __init__(self, index: int, numbers: Numbers, visit: Visit | None) -> None:
        self.index, self.numbers, self.visit = index, numbers, visit

    def call(self, node: fx.Node, key: str, known: Mapping[fx.Node, Any]) -> Any:
        """One operator."""
        args = map_aggregate(node.args, lambda a: known[a] if isinstance(a, fx.Node) else a)
        kwargs = map_aggregate(node.kwargs, lambda a: known[a] if isinstance(a, fx.Node) else a)
        target: Any = node.target
        by_strides = getattr(target, "overloadpacket", None) in BY_STRIDES
        if key in self.numbers or by_strides:
            bound: dict[str, Any] = {name: _filled(value, known) for name, value in bind(node).items()}
            bound.update((name, values.values[self.index]) for name, values in self.numbers.get(key, {}).items())
            if by_strides and bound["storage_offset"] is not None:  # counts from where the memory begins
                captured: Tensor = bind(node)["self"].meta["val"]
                bound["storage_offset"] += bound["self"].storage_offset() - captured.storage_offset()
            return target(**bound)
        if target is torch.ops.aten.view.default:  # a member's tensor may lie otherwise than when it was captured
            target = torch.ops.aten.reshape.default
        return target(*args, **kwargs)


def _walk(
    graph: fx.Graph, root: nn.Module, values: Mapping[str, Any] | Sequence[Any], member: _Member, prefix: str
) -> dict[fx.Node, Any]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = [values[node.name] for node in placeholders] if isinstance(values, Mapping) else values
    known: dict[fx.Node, Any] = dict(zip(placeholders, given, strict=True))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _REGIONS:
            known[node] = _region(node, root, known, member, prefix)
        else:
            known[node] = member.call(node, prefix + node.name, known)
        if member.visit is not None:
            known[node] = member.visit(prefix + node.name, node, known[node])
    return known


def _region(node: fx.Node, root: nn.Module, known: Mapping[fx.Node, Any], member: _Member, prefix: str) -> Any:
    place = _REGIONS[node.target]  # type: ignore[index]
    body = node.args[place]
    assert isinstance(body, fx.Node)
    inner = getattr(root, str(body.target))
    values = [_filled(value, known) for value in node.args[place + 1 :]]
    with _setting(node):
        found = _walk(inner.graph, inner, values, member, f"{prefix}{body.name}/")
    results = inner.graph.output_node().args[0]
    return map_aggregate(results, lambda a: found[a] if isinstance(a, fx.Node) else a)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in an operator's result."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, list | tuple) else []
