"""Layer code: one layer's operators as a function of its inputs and its state.

Takes the captured operators of a layer. Returns an `OperatorCode`, which runs at any batch size, on any device,
with the model's own parameters or with others of the same shapes. Operators that overwrite a value another layer
made become their out-of-place forms, so that a layer never changes what it is given.
"""

from collections.abc import Sequence
from operator import getitem
from typing import Any, Protocol

import sympy
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from burstpool.model.capture import BATCH_SYMBOL, Capture
from burstpool.model.segment import is_scalar, memory_chain, scalar_expression, stale_views, written_argument


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


class OperatorCode:
    """A layer as captured operators."""

    def __init__(
        self,
        capture: Capture,
        nodes: Sequence[fx.Node],
        *,
        inputs: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        device: torch.device,
    ) -> None:
        needed = _with_free_sources(nodes, set(inputs), capture)
        keys = {**capture.parameters, **capture.buffers}
        stored = [node for node in needed if node.name in keys]
        constants = [node for node in needed if node.name in capture.constants]
        self.state = tuple(keys[node.name] for node in stored)
        self._constants = [capture.constants[node.name] for node in constants]
        self._traced_on = device
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
        constants = [_on(constant, device) for constant in self._constants]
        return self._run(batch, device, constants, state, inputs)  # type: ignore[no-any-return]

    def signature(self) -> str:
        """The generated code: names in it depend only on the operators and their order."""
        return str(self._module.code)


def _with_free_sources(nodes: Sequence[fx.Node], inputs: set[fx.Node], capture: Capture) -> list[fx.Node]:
    """The nodes with everything they rest on besides the layer's inputs, in running order."""
    needed: set[fx.Node] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node in needed or node in inputs:
            continue
        needed.add(node)
        if not is_scalar(node):  # a size follows from the batch, not from the tensor it was read off
            queue += node.all_input_nodes
    return [node for node in capture.graph.nodes if node in needed]


class _Builder:
    """Copies captured nodes into a graph of their own."""

    def __init__(self, capture: Capture, *, device: torch.device) -> None:
        self.capture, self.traced_on = capture, device
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.batch = self.graph.placeholder("batch")
        self.device = self.graph.placeholder("device")
        self.made: dict[fx.Node, Any] = {}
        self.given: set[fx.Node] = set()
        self.order = {node: index for index, node in enumerate(capture.graph.nodes)}

    def take(self, name: str, nodes: Sequence[fx.Node]) -> None:
        """Adds an argument that holds the values of these nodes."""
        sequence = self.graph.placeholder(name)
        for index, node in enumerate(nodes):
            self.made[node] = self.graph.call_function(getitem, (sequence, index))

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

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        """The runnable module."""
        self.graph.output([self.made[node] for node in outputs])
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "call_function" or _writes(node))
        return fx.GraphModule(self.root, self.graph)

    def _map(self, arguments: Any) -> Any:
        def replace(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return self.made[argument]
            return self.device if argument == self.traced_on else argument

        return map_aggregate(arguments, replace)

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
    """`relu_` → `relu`."""
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = getattr(torch.ops.aten, node.target.overloadpacket.__name__.removesuffix("_"), None)
    return getattr(packet, node.target._overloadname, None)


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    return (schema is not None and schema.is_mutable) or torch.Tag.nondeterministic_seeded in tags


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
