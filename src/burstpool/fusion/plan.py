"""Plan: a captured graph with the member dimension carried through every operator, as one Python function.

Takes a graph, which of its placeholders are batched, and the numbers members differ in. Returns a `Plan`: what runs
for each operator (see `rules/`), and the function made of it. In-place operators stay in place; where they write
members' values into a tensor that all share, that tensor gets the member dimension; where an older view of the
memory is read afterwards, each member's part is first laid as it is alone, so that views of it stay views; and what
is a copy alone (`contiguous`, `reshape`) is one here where it or its source is written to.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from burstpool.errors import FusionError
from burstpool.fusion.rules import Call, Lowered, PerMember, Run, bind, lower
from burstpool.fusion.rules.base import Kernel, nodes_in, plain, with_members
from burstpool.fusion.rules.layout import as_alone
from burstpool.model.segment import memory_chain, stale_views, written_argument

_REGIONS = {
    torch.ops.higher_order.wrap_with_set_grad_enabled: 1,
    torch.ops.higher_order.wrap_with_autocast: 4,
}
"""Region → how many of its arguments come before its body."""
_INLINE = (bool, int, str, type(None))


@dataclass(slots=True)
class Step:
    """One operator of the plan."""

    node: fx.Node
    key: str
    """The operator's name, after those of the regions it lies in."""
    lowered: Lowered
    arguments: list[Any]
    kernel: Kernel
    """The lowering that was chosen."""
    chosen: str = ""
    """Its name among the lowering's others; empty for the first choice."""

    def choose(self, name: str) -> None:
        """Another of the lowering's ways."""
        self.kernel, self.chosen = (self.lowered.others[name] if name else self.lowered.kernel), name


class _PromotionNeededError(Exception):
    """A shared tensor is given members' values: plan again with the member dimension on it."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node


class Plan:
    """Runs a graph for all members."""

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        batched: Mapping[str, bool],
        numbers: Mapping[str, Mapping[str, PerMember]],
        prefix: str = "",
    ) -> None:
        """`batched` says of each placeholder whether it has the member dimension."""
        self.graph, self.root, self.numbers, self.prefix = graph, root, numbers, prefix
        self.placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        order = {node: index for index, node in enumerate(graph.nodes)}
        self._anchored = {_root(node) for node in graph.nodes if stale_views(node, order)}
        written = {_root(node) for node in graph.nodes if written_argument(node) is not None}
        self._copied = {n for n in graph.nodes if n.meta.get("copies") and [*memory_chain(n)][-1] in written}
        self._promoted: set[fx.Node] = set()
        while True:
            self.batched = {node: batched[node.name] for node in self.placeholders}
            try:
                self.steps = self._plan()
                break
            except _PromotionNeededError as promotion:
                if promotion.node in self._promoted:
                    raise FusionError(
                        f"operator {promotion.node.name!r} cannot be given the member dimension"
                    ) from None
                self._promoted.add(promotion.node)
        self._run: Callable[..., Any] | None = None
        self.compiled: dict[str, Any] | None = None
        """Options with which torch.compile takes the function over."""
        self.choice: str | None = None
        """What measuring said of the whole: "fused", "rules" or "serial"; None before."""

    def __call__(self, run: Run, values: Sequence[Any]) -> Any:
        """The graph's results for the placeholders' values, in order."""
        if self._run is None:
            made = self._compile()
            self._run = made if self.compiled is None else torch.compile(made, **self.compiled)
        return self._run(run, *values)

    def merge(self) -> None:
        """Joins chains of operators that one kernel can do, and parts products over concatenations."""
        from burstpool.fusion.concatenation import without_concatenations
        from burstpool.fusion.merge import merged

        outputs = nodes_in(self.graph.output_node().args[0])
        fixed = self._anchored | self._promoted | self._copied
        steps = merged(self.steps, outputs, fixed, self.batched)
        self.steps = without_concatenations(steps, outputs, fixed, self.batched)
        self._run = None

    def recompile(self) -> None:
        """Takes up a change of lowerings."""
        self._run = None

    def walk(self, run: Run, values: Sequence[Any], visit: Callable[[Step, list[Any], Any], Any]) -> Any:
        """Runs step by step; `visit(step, arguments, result)` sees each and returns what to go on with."""
        known: dict[fx.Node, Any] = dict(zip(self.placeholders, values, strict=True))
        for step in self.steps:
            arguments = [_filled(argument, known) for argument in step.arguments]
            known[step.node] = visit(step, arguments, step.kernel(run, *arguments))
        return _filled(self.graph.output_node().args[0], known)

    def _plan(self) -> list[Step]:
        steps = [
            self._promotion(node) for node in self.placeholders if node in self._promoted and not self.batched[node]
        ]
        for node in self.graph.nodes:
            if node.op == "call_function":
                step = self._step(node)
                self.batched[node] = step.lowered.batched
                steps.append(step)
                if node in self._promoted and not step.lowered.batched:
                    steps.append(self._promotion(node))
                elif node in self._copied and step.lowered.batched:
                    steps.append(_extra(node, _new_memory(node), "a copy, as alone"))
                elif node in self._anchored and step.lowered.batched:
                    steps.append(_extra(node, _laid_as_alone(node), "written through views"))
            elif node.op not in ("placeholder", "output", "get_attr"):
                raise FusionError(f"cannot fuse graph node {node.name!r} of kind {node.op}")
        return steps

    def _promotion(self, node: fx.Node) -> Step:
        self.batched[node] = True

        new = _new_memory(node)
        return _extra(
            node, lambda run, x: new(run, with_members(x, run.members)), "members write their own values into it"
        )

    def _step(self, node: fx.Node) -> Step:
        key = self.prefix + node.name
        if node.target in _REGIONS:
            return self._region(node, key)
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._python(node, key)
        _check_sizes(node)
        arguments = bind(node)
        for name, values in self.numbers.get(key, {}).items():
            arguments[name] = values
        call = Call(node, arguments, self.batched.__getitem__)
        self._check_write(node, call)
        lowered = lower(call)
        return Step(node, key, lowered, list(arguments.values()), lowered.kernel)

    def _check_write(self, node: fx.Node, call: Call) -> None:
        """Members' values, or random ones, written into a tensor that all share."""
        target = written_argument(node)
        if target is None or self.batched[target]:
            return
        random = torch.Tag.nondeterministic_seeded in call.op.tags
        if call.batched_names() or call.per_member() or random:
            raise _PromotionNeededError(_root(node))

    def _python(self, node: fx.Node, key: str) -> Step:
        """`getitem` and arithmetic on sizes."""
        batched = any(self.batched[source] for source in node.all_input_nodes)
        if key in self.numbers:
            raise FusionError(f"members differ in a size, at operator {key!r}; fuse them apart")
        target: Any = node.target
        why = "a part of a result" if batched else "the same for all members"
        lowered = Lowered(kernel=plain(target), way="rule" if batched else "shared", why=why, batched=batched)
        return Step(node, key, lowered, list(node.args), lowered.kernel)

    def _region(self, node: fx.Node, key: str) -> Step:
        """The body of `torch.no_grad()` or `torch.autocast` in the user's code, planned on its own."""
        place = _REGIONS[node.target]  # type: ignore[index]
        body = node.args[place]
        assert isinstance(body, fx.Node)
        module = getattr(self.root, str(body.target))
        inputs = list(node.args[place + 1 :])
        names = [inner.name for inner in module.graph.nodes if inner.op == "placeholder"]
        flags = {name: any(self.batched[n] for n in nodes_in(value)) for name, value in zip(names, inputs, strict=True)}
        plan = Plan(module.graph, module, flags, self.numbers, f"{self.prefix}{body.name}/")
        results = nodes_in(module.graph.output_node().args[0])
        mixed = [plan.batched[result] for result in results]
        kernel = _region_kernel(node, plan, mixed)
        lowered = Lowered(kernel=kernel, why="a region with its own setting", batched=any(mixed))
        return Step(node, key, lowered, inputs, kernel)

    def inner(self) -> "list[Step]":
        """All steps, those of regions after the region itself."""
        steps: list[Step] = []
        for step in self.steps:
            steps.append(step)
            plan = getattr(step.kernel, "plan", None)
            steps += plan.inner() if plan is not None else []
        return steps

    def _compile(self) -> Callable[..., Any]:
        """One function with a line for each step, which frees what is not needed any more."""
        names = {node: f"{node.name}_" for node in self.graph.nodes}
        space: dict[str, Any] = {}
        last = _last_uses(self.steps, self.graph)
        lines = [f"def fused(run, {', '.join(names[node] for node in self.placeholders)}):"]
        for index, step in enumerate(self.steps):
            space[f"k{index}"] = step.kernel
            text = ", ".join(["run", *(_source(argument, names, space) for argument in step.arguments)])
            lines.append(f"    {names[step.node]} = k{index}({text})")
            if gone := [names[node] for node in last.get(index, ())]:
                lines.append(f"    del {', '.join(gone)}")
        lines.append(f"    return {_source(self.graph.output_node().args[0], names, space)}")
        exec(compile("\n".join(lines), "<fused plan>", "exec"), space)
        function: Callable[..., Any] = space["fused"]
        return function


def _extra(node: fx.Node, kernel: Kernel, why: str) -> Step:
    return Step(node, node.name, Lowered(kernel=kernel, why=why), [node], kernel)


def _laid_as_alone(node: fx.Node) -> Kernel:
    """Each member's part in the order in memory that it has alone: what is a view of it alone is one here."""
    laid = as_alone(node.meta["val"])
    return lambda run, x: laid(x)


def _new_memory(node: fx.Node) -> Kernel:
    """A copy, laid so."""
    laid = _laid_as_alone(node)
    return lambda run, x: laid(run, x.clone())


def _region_kernel(node: fx.Node, plan: Plan, mixed: Sequence[bool]) -> Kernel:
    def kernel(run: Run, *values: Any) -> Any:
        with _setting(node):
            results = plan(run, values)
            if not all(mixed) and any(mixed):
                results = tuple(
                    x if flag else with_members(x, run.members) for x, flag in zip(results, mixed, strict=True)
                )
            return results

    kernel.plan = plan  # type: ignore[attr-defined]
    return kernel


def _setting(node: fx.Node) -> Any:
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return torch.set_grad_enabled(bool(node.args[0]))
    device, dtype, enabled, cache = node.args[:4]
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)  # type: ignore[arg-type]


def _root(node: fx.Node) -> fx.Node:
    target = written_argument(node)
    assert target is not None
    *_, root = memory_chain(target)
    return root


def _check_sizes(node: fx.Node) -> None:
    value = node.meta.get("val")
    for tensor in value if isinstance(value, list | tuple) else [value]:
        if isinstance(tensor, torch.Tensor) and any(
            isinstance(size, torch.SymInt) and size.node.hint is None for size in tensor.shape
        ):
            raise FusionError(
                f"operator {node.name!r} ({node.target}) makes a tensor whose size depends on values, "
                "which differ between members; use masks (torch.where) instead"
            )


def _filled(argument: Any, known: Mapping[fx.Node, Any]) -> Any:
    if isinstance(argument, fx.Node):
        return known[argument]
    if isinstance(argument, PerMember):
        return argument
    if isinstance(argument, list | tuple):
        return type(argument)(_filled(item, known) for item in argument)
    return argument


def _last_uses(steps: Sequence[Step], graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """Step → values nobody reads after it."""
    kept = set(nodes_in(graph.output_node().args[0]))
    last: dict[fx.Node, int] = {}
    for index, step in enumerate(steps):
        last.update(dict.fromkeys([step.node, *nodes_in(step.arguments)], index))
    dying: dict[int, list[fx.Node]] = {}
    for node, index in last.items():
        if node not in kept:
            dying.setdefault(index, []).append(node)
    return dying


def _source(value: Any, names: Mapping[fx.Node, str], space: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, list | tuple) and not isinstance(value, PerMember):
        items = ", ".join(_source(item, names, space) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items},)" if items else "()"
    if type(value) in _INLINE or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    name = f"c{len(space)}"
    space[name] = value
    return name
