"""Layer code: one layer's operators as a function of its inputs and its state.

Takes the captured operators of a layer. Returns an `OperatorCode`, which runs at any batch size, on any device,
with the model's own parameters or with others of the same shapes. Operators that overwrite a value another layer
made become their out-of-place forms, so that a layer never changes what it is given. Single operators of it can be
replaced by functions (`with_operators`), which is how samples split over devices are normalised together.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Protocol, runtime_checkable

import sympy
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from burstpool.model.capture import BATCH_SYMBOL, Capture, is_random, writes
from burstpool.model.segment import FreeNodes, is_scalar, memory_chain, scalar_expression, stale_views, written_argument


class LayerCode(Protocol):
    """What a block needs of a layer to run it."""

    state: tuple[str, ...]
    """State-dict keys of the parameters and buffers it uses, in the order `__call__` takes them."""

    def __call__(self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
        """The layer's outputs."""
        ...

    def signature(self) -> str:
        """The same text for two layers that do the same work on the same shapes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Where a tensor keeps its samples: dimension `dim` counts `before` × samples × `after`, the last fastest."""

    dim: int
    before: int = 1
    after: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One call of an operator in a layer's code."""

    operator: torch._ops.OpOverload
    place: int
    """How many operators come before it in the layer; the same in every process that traces the model."""
    arguments: tuple[Any, ...]
    """As captured: plain values as they are, tensors as nodes of a graph."""
    samples: Fold | None
    """Where its first argument keeps the samples; None where that cannot be told, or there are none."""


Replace = Callable[[Site], Callable[..., Any] | None]
"""What to call in an operator's place, with the same arguments; None leaves it as it is."""


@runtime_checkable
class ReplaceableCode(Protocol):
    """Layer code whose operators can be replaced."""

    def with_operators(self, replace: Replace) -> "LayerCode":
        """The same code with other operators."""
        ...


class OperatorCode:
    """A layer as captured operators."""

    def __init__(
        self,
        capture: Capture,
        nodes: Sequence[fx.Node],
        *,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        free: FreeNodes,
        device: torch.device,
    ) -> None:
        needed = _with_free_sources(nodes, set(inputs), capture, free)
        keys = {**capture.parameters, **capture.buffers}
        stored = [node for node in needed if node.name in keys]
        constants = [node for node in needed if node.name in capture.constants]
        self.state = tuple(keys[node.name] for node in stored)
        self._constants = [capture.constants[node.name] for node in constants]
        self._traced_on = device
        self._constants_on: dict[torch.device, list[Any]] = {}
        self._capture = capture
        builder = _Builder(capture, device=device)
        builder.take("constants", constants)
        builder.take("state", stored)
        builder.take("inputs", inputs)
        builder.protect(inputs, needed)
        for node in needed:
            builder.copy(node)
        self._module = builder.finish(outputs)
        self._depends_on_device = bool(self._constants) or bool(builder.device.users)
        self._run = self._module.forward  # past nn.Module's hooks, which a layer does not have

    def __call__(self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], batch: int) -> list[torch.Tensor]:
        if not self._depends_on_device:
            return self._run(batch, None, (), state, inputs)  # type: ignore[no-any-return]
        device = next((tensor.device for tensor in (*inputs, *state)), self._traced_on)
        if device not in self._constants_on:
            self._constants_on[device] = [_on(constant, device) for constant in self._constants]
        return self._run(batch, device, self._constants_on[device], state, inputs)  # type: ignore[no-any-return]

    def signature(self) -> str:
        """The generated code, regions' included: names in it depend only on the operators and their order."""
        bodies = [module for module in self._module.modules() if isinstance(module, fx.GraphModule)]
        return "\n".join(str(body.code) for body in bodies)

    def with_operators(self, replace: Replace) -> "OperatorCode":
        """The same layer, with the operators replaced for which `replace` returns a function."""
        module = _replaced(self._module, replace, self._capture)
        if module is self._module:
            return self
        changed = copy.copy(self)
        changed._module, changed._run = module, module.forward
        return changed


def _replaced(module: fx.GraphModule, replace: Replace, capture: Capture, *, first: int = 0) -> fx.GraphModule:
    """A copy of the module with replaced operators; the module itself where none is."""
    functions: dict[str, Callable[..., Any]] = {}
    parts: dict[str, Any] = {}
    place = first
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            samples = _fold(node.args[0], capture) if node.args else None
            function = replace(Site(operator=node.target, place=place, arguments=node.args, samples=samples))
            if function is not None:
                functions[node.name] = function
            place += 1
        elif node.op == "get_attr":
            parts[node.target] = part = getattr(module, node.target)
            if isinstance(part, fx.GraphModule):  # the body of an autocast or no_grad region
                parts[node.target] = _replaced(part, replace, capture, first=place)
                place += len(part.graph.nodes)
    if not functions and all(part is getattr(module, name) for name, part in parts.items()):
        return module
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        node.target = functions.get(node.name, node.target)
    return fx.GraphModule(parts, graph)


def _fold(node: Any, capture: Capture) -> Fold | None:
    """Where the node's result keeps its samples."""
    found = _growing(node, capture)
    if found is None:
        return None
    dim, _, size = found
    if size == BATCH_SYMBOL:
        return Fold(dim=dim)
    copies = size / BATCH_SYMBOL
    if not copies.is_Integer:
        return None
    # Follow the folded dimension back to the view that folded it; what lies in between leaves its order alone.
    while isinstance(node, fx.Node):
        source = next((x for x in node.all_input_nodes if _growing(x, capture) is not None), None)
        before = _growing(source, capture)
        if before is None:
            return None
        if before[2] == BATCH_SYMBOL:
            after = _growing(node, capture)
            assert after is not None
            outer, rest = divmod(before[1], after[1])
            if rest or int(copies) % outer or _unordered(node):
                return None
            return Fold(dim=dim, before=outer, after=int(copies) // outer)
        if before[2] != size:
            return None
        node = source
    return None


def _growing(node: Any, capture: Capture) -> tuple[int, int, sympy.Expr] | None:
    """The only dimension that grows with the batch, how many elements the dimensions before it count, its size."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    sizes = [capture.size(size) for size in value.shape]
    dims = [dim for dim, size in enumerate(sizes) if isinstance(size, sympy.Expr)]
    if len(dims) != 1:
        return None
    outer = 1
    for size in sizes[: dims[0]]:
        outer *= int(size)
    return dims[0], outer, sizes[dims[0]]


def _unordered(node: fx.Node) -> bool:
    """Whether the operator is no view, so that the order of its elements is not that of its input."""
    return getattr(node.target, "overloadpacket", None) not in _VIEWS


_VIEWS = {torch.ops.aten.view, torch.ops.aten.reshape, torch.ops.aten.flatten, torch.ops.aten.unflatten,
          torch.ops.aten._unsafe_view}  # fmt: skip


def _with_free_sources(
    nodes: Sequence[fx.Node], inputs: set[fx.Node], capture: Capture, free: FreeNodes
) -> list[fx.Node]:
    """The nodes with everything they rest on besides the layer's inputs, in running order."""
    needed: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in needed or node in inputs:
            continue
        needed.add(node)
        if not is_scalar(node):  # a size follows from the batch, not from the tensor it was read off
            queue += free.sources(node)
    return [node for node in capture.graph.nodes if node in needed]


class _Builder:
    """Copies captured nodes into a graph of their own."""

    def __init__(self, capture: Capture, *, device: torch.device) -> None:
        self.capture, self.traced_on = capture, device
        self.root = nn.Module()
        self.graph = fx.Graph(owning_module=self.root)  # type: ignore[arg-type]
        self.batch = self.graph.placeholder("batch")
        self.device = self.graph.placeholder("on_device")  # not "device": generated code calls device(…)
        self.made: dict[fx.Node, Any] = {}
        self.given: set[fx.Node] = set()
        self.order = {node: index for index, node in enumerate(capture.graph.nodes)}

    def take(self, name: str, nodes: Sequence[fx.Node]) -> None:
        """Adds an argument that holds the values of these nodes."""
        sequence = self.graph.placeholder(name)
        for index, node in enumerate(nodes):
            self.made[node] = self.graph.call_function(getitem, (sequence, index))
            self.made[node].meta["val"] = node.meta.get("val")

    def protect(self, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
        """Copies those inputs that the layer overwrites in a way no out-of-place operator can stand in for."""
        self.given = set(inputs)
        for node in nodes:
            source = self._overwritten_input(node)
            if source is not None and (_out_of_place(node) is None or stale_views(node, self.order)):
                self.made[source] = self.graph.call_function(torch.ops.aten.clone.default, (self.made[source],))
                self.given.remove(source)

    def copy(self, node: fx.Node) -> None:
        """Adds one node."""
        if node in self.made:
            return
        if node.op == "get_attr":
            assert isinstance(node.target, str)
            name = node.target.replace(".", "_")
            setattr(self.root, name, getattr(self.capture.root, node.target))
            self.made[node] = self.graph.get_attr(name)
        elif is_scalar(node) and not self.capture.data_dependent(scalar_expression(node, self.capture)):
            self.made[node] = self._scalar(scalar_expression(node, self.capture))
        else:
            target = node.target if self._overwritten_input(node) is None else _out_of_place(node)
            assert callable(target)
            self.made[node] = self.graph.call_function(target, self._map(node.args), self._map(node.kwargs))
            self.made[node].meta["val"] = node.meta.get("val")

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """The runnable module."""
        self.graph.output([self.made[node] for node in outputs])
        self.graph.eliminate_dead_code(is_impure_node=_is_impure)
        return fx.GraphModule(self.root, self.graph)

    def _map(self, arguments: Any) -> Any:
        def replace(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return self.made[argument]
            return self.device if self._is_traced_on(argument) else argument

        return map_aggregate(arguments, replace)

    def _is_traced_on(self, argument: Any) -> bool:
        """Whether it names the device of the trace, be it without an index: `cuda` for `cuda:0`."""
        if not isinstance(argument, torch.device) or argument.type != self.traced_on.type:
            return False
        return argument.index in (None, self.traced_on.index)

    def _scalar(self, expression: Any) -> Any:
        if not isinstance(expression, sympy.Basic):
            return expression
        if expression == BATCH_SYMBOL:
            return self.batch
        batch = fx.Proxy(self.batch, fx.proxy.GraphAppendingTracer(self.graph))
        result = sympy_interp(PythonReferenceAnalysis, {BATCH_SYMBOL: batch}, expression)
        return result.node if isinstance(result, fx.Proxy) else result

    def _overwritten_input(self, node: fx.Node) -> fx.Node | None:
        target = written_argument(node)
        if target is None:
            return None
        for source in memory_chain(target):
            if source in self.given:
                return source
            if source is not target and written_argument(source) is not None:
                return None  # an earlier write, already made out of place, gave fresh memory
        return None


def _out_of_place(node: fx.Node) -> Any:
    """`relu_` → `relu`; None where there is no such form, or none that autograd knows."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket is torch.ops.aten.copy_:
        return None
    packet = getattr(torch.ops.aten, node.target.overloadpacket.__name__.removesuffix("_"), None)
    return getattr(packet, node.target._overloadname, None)


def _is_impure(node: fx.Node) -> bool:
    return node.op != "call_function" or writes(node) or is_random(node)


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
