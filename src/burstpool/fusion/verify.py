"""Verify: members' own modules beside their captured graph, then the graph fused beside each member alone.

The second is one step in double precision, compared operator by operator: FusionError names the first operator whose
result differs, or, where only gradients differ, the operator whose backward pass does. The first is in uncaptured.py.
Works on copies: weights, buffers and random streams stay as they are. On CUDA dropout is left out of the second
comparison, as torch's fused kernel draws other numbers there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from burstpool.errors import FusionError
from burstpool.fusion.compare import cloned, dense, difference_of, is_close, is_inexact, loss_of, size_of, with_absent
from burstpool.fusion.double import doubled, doubled_mode
from burstpool.fusion.modes import Example, Mode
from burstpool.fusion.plan import Step
from burstpool.fusion.rules import Run
from burstpool.fusion.rules.base import Kernel
from burstpool.fusion.serial import alone, member_values
from burstpool.fusion.streams import Streams
from burstpool.fusion.structure import Operator
from burstpool.fusion.uncaptured import check_modules
from burstpool.model.capture import flatten_arguments

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray

_FLOOR = 1e-3
"""Gradients smaller than this share of the largest are compared by their distance to it."""
_LEAST_STATE = 1e-3
"""What lies in a model has no common size; smaller numbers are compared by their distance to this."""
_UNFILLED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)
"""Operators whose result is whatever lay in memory: here zeros, so that what is not written to yet is alike."""
_NARROW_TOLERANCE = 2e-2
"""Where the user's own code computes in half precision."""


@dataclass(slots=True)
class Trace:
    """What one run did: each operator's result as it was, and the tensors themselves, for their gradients."""

    results: dict[str, list[Tensor | None]] = field(default_factory=dict)
    """None for what an operator did not compute, as nobody asks for it."""
    live: dict[str, list[Tensor | None]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor | None]] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=dict)

    def record(self, key: str, value: Any) -> Any:
        """Keeps copies: an in-place operator may overwrite the result later. Returns what to go on with."""
        value = _apart(value)
        parts = _parts(value)
        self.results[key] = [None if part is None else part.detach().clone() for part in parts]
        self.live[key] = parts
        self.versions[key] = self._versions(key)
        return value

    def was_written(self, key: str) -> bool:
        """Whether an in-place operator wrote into the result: its gradient is then another tensor's."""
        return self._versions(key) != self.versions.get(key, [])

    def _versions(self, key: str) -> list[int]:
        return [part._version for part in self.live.get(key, []) if part is not None]

    def backward(self, loss: Tensor, leaves: Mapping[str, Tensor]) -> None:
        """The gradients of every operator's result, and of the parameters."""
        keys = [*self.live, *leaves]
        groups: list[Sequence[Tensor | None]] = [*self.live.values(), *([leaf] for leaf in leaves.values())]
        wanted = [t for group in groups for t in group if t is not None and t.requires_grad]
        if not loss.requires_grad or not wanted:
            return
        found = map(dense, torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True))
        for key, group in zip(keys, groups, strict=True):
            self.gradients[key] = [next(found) if t is not None and t.requires_grad else None for t in group]


def verify(array: "FusedArray", example: Example, *, tolerance: float, dropout: bool = True) -> None:
    """Refuses an array that does not do what its members do alone; without `dropout` nothing is dropped."""
    check_modules(array, example)
    mode = doubled_mode(array.mode)
    if not dropout:
        mode.operators = [[_without_dropout(operator) for operator in member] for member in mode.operators]
        _drop_nothing(mode)
    leaves = flatten_arguments(*example)[0]
    inputs = {name: doubled(leaf) for name, leaf in zip(mode.capture.inputs, leaves, strict=True) if name}
    state = {key: doubled(t.detach().clone()).requires_grad_(t.requires_grad) for key, t in array.state.tensors.items()}
    values = mode.values(state, array.state.aliases, with_absent(mode, inputs))
    check = _Check(mode, array.state.aliases, array.streams, tolerance)
    check.run(values)


class _Check:
    """One comparison."""

    def __init__(self, mode: Mode, aliases: Mapping[str, str], streams: Streams, tolerance: float) -> None:
        self.mode, self.aliases, self.streams, self.tolerance = mode, aliases, streams, tolerance
        self.members = len(streams.generators)
        self.plan = mode.plan(frozenset())
        for step in self.plan.inner():
            if _is_unfilled(step.node):
                step.kernel = _zeroing(step.kernel)

    def run(self, values: Mapping[str, Any]) -> None:
        """Forward, then backward."""
        rows = member_values(self.mode, self.members, {n: cloned(v) for n, v in values.items()}, frozenset())
        fused = self._fused(values)
        for member in range(self.members):
            separate = self._alone(member, rows[member])
            self._compare_results(fused, separate, member)
            self._compare_state(values, rows[member], member)
            self._compare_gradients(fused, separate, member)

    def _fused(self, values: Mapping[str, Any]) -> Trace:
        trace = Trace()
        run = Run(members=self.members, streams=self.streams.clone())

        def visit(step: Step, arguments: list[Any], result: Any) -> Any:
            return trace.record(step.key, result)

        results = self.plan.walk(run, [values[node.name] for node in self.plan.placeholders], visit)
        outputs = self.mode.outputs(self.plan, results, run)
        loss = torch.stack(
            [loss_of([o[i] for o in outputs if isinstance(o, Tensor)]) for i in range(self.members)]
        ).sum()
        trace.backward(loss, self._once({name: values[name] for name in self.mode.capture.parameters}))
        return trace

    def _alone(self, member: int, row: dict[str, Any]) -> Trace:
        trace = Trace()
        names, keys = list(self.mode.capture.parameters), self.mode.capture.parameters
        made = {self.aliases[keys[name]]: cloned(row[name]) for name in names}
        leaves = {name: made[self.aliases[keys[name]]] for name in names}
        row.update(leaves)

        def visit(key: str, node: fx.Node, result: Any) -> Any:
            return trace.record(key, result.zero_() if _is_unfilled(node) else result)

        def forward() -> list[Any]:
            return alone(self.mode, member, row, visit)

        outputs = self.streams.clone().drawing(member, forward)
        trace.backward(loss_of(outputs), self._once(leaves))
        return trace

    def _once(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A parameter with several names, once."""
        first: dict[str, str] = {}
        keys = self.mode.capture.parameters
        return {n: leaf for n, leaf in leaves.items() if first.setdefault(self.aliases[keys[n]], n) == n}

    def _compare_results(self, fused: Trace, separate: Trace, member: int) -> None:
        for step in self._steps().values():
            mine, theirs = self._of(step, fused.results.get(step.key, []), member), separate.results.get(step.key, [])
            for a, b in zip(mine, theirs, strict=True):
                if a is None and len(mine) > 1:
                    continue  # if anybody asks for it, that operator's result tells
                if a is None or b is None or not self._close(a, b, scale=0.0):
                    size = "" if a is None or b is None else f" (largest difference {difference_of(a, b):.2g})"
                    raise FusionError(
                        f"verification failed: {_named(step)} gives member {member} another result than alone"
                        f'{size}; run with mode="serial"'
                    )

    def _compare_state(self, values: Mapping[str, Any], row: Mapping[str, Any], member: int) -> None:
        """What operators wrote besides their results: running statistics, rows of a table that were cut to a norm."""
        for name, key in {**self.mode.capture.parameters, **self.mode.capture.buffers}.items():
            mine, theirs = values[name][member].detach(), row[name].detach()
            if not is_close(mine, theirs, tolerance=self.tolerance, least=_LEAST_STATE):
                raise FusionError(
                    f"verification failed: a step leaves member {member} another {key!r} than alone "
                    f'(largest difference {difference_of(mine, theirs):.2g}); run with mode="serial"'
                )

    def _compare_gradients(self, fused: Trace, separate: Trace, member: int) -> None:
        steps = self._steps()
        scale = max((size_of(g) for group in separate.gradients.values() for g in group if g is not None), default=0.0)
        if separate.gradients and not fused.gradients:
            raise FusionError("verification failed: no operator passes a gradient on fused, though alone some do")
        for key in reversed(list(separate.gradients)):
            if "/" in key and key not in fused.gradients:
                continue  # inside of a region, which is compared as a whole
            if fused.was_written(key) or separate.was_written(key):
                continue
            step = steps.get(key)
            mine = fused.gradients.get(key, [])
            if step is not None and not step.lowered.batched:
                continue  # a shared tensor gathers all members' gradients
            for a, b in zip(mine, separate.gradients[key], strict=True):
                if (a is None) != (b is None) and size_of(a) + size_of(b) > 0:
                    raise FusionError(
                        f"verification failed: {self._blamed(key)} passes a gradient on only fused, or only alone"
                    )
                if a is not None and b is not None and not self._close(a[member], b, scale=scale):
                    raise FusionError(
                        f"verification failed: {self._blamed(key)} gives member {member} another gradient than alone "
                        f'(largest difference {difference_of(a[member], b):.2g}); run with mode="serial"'
                    )

    def _steps(self) -> dict[str, Step]:
        """By operator the last step, which may have given its result the member dimension."""
        return {step.key: step for step in self.plan.steps}

    def _blamed(self, key: str) -> str:
        """The operators that use the value, in which the gradient went wrong."""
        node = next((n for n in self.mode.capture.graph.nodes if n.name == key), None)
        users = {} if node is None else node.users
        named = [_named(step) for step in self.plan.steps if step.node in users]
        return " or ".join(named) or f"what follows {key!r}"

    def _of(self, step: Step, results: Sequence[Tensor | None], member: int) -> list[Tensor | None]:
        return [result[member] if step.lowered.batched and result is not None else result for result in results]

    def _close(self, a: Tensor, b: Tensor, *, scale: float) -> bool:
        narrow = is_inexact(b) and b.dtype not in (torch.float64, torch.complex128)
        tolerance = max(self.tolerance, _NARROW_TOLERANCE if narrow else 0.0)
        return is_close(a, b, tolerance=tolerance, least=_FLOOR * scale)


def _parts(value: Any) -> list[Tensor | None]:
    """The tensors in an operator's result, and None where one of several is missing."""
    if value is None or isinstance(value, Tensor):
        return [value]
    return [part for item in value for part in _parts(item)] if isinstance(value, list | tuple) else []


def _apart(value: Any) -> Any:
    """Several results, each as a tensor of its own: where an operator computes one from the other (an LSTM cell's h
    from its c), only what others do with a result belongs to the result's gradient."""
    if isinstance(value, list | tuple):
        return type(value)(_alias(item) if isinstance(item, Tensor) else _apart(item) for item in value)
    return value


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _is_unfilled(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _UNFILLED


def _zeroing(kernel: Kernel) -> Kernel:
    def zeroed(run: Run, *arguments: Any) -> Any:
        return kernel(run, *arguments).zero_()

    return zeroed


def _named(step: Step) -> str:
    stack = list((step.node.meta.get("nn_module_stack") or {}).values())
    where = f" of module {stack[-1][0]!r}" if stack and stack[-1][0] else ""
    return f"operator {step.key!r} ({step.node.target}, {step.lowered.way}){where}"


_PROBABILITIES = {
    "dropout": "p",
    "feature_dropout": "p",
    "scaled_dot_product_attention": "dropout_p",
    "lstm": "dropout",
    "gru": "dropout",
    "rnn_tanh": "dropout",
    "rnn_relu": "dropout",
}
"""Operator → the argument that is its probability."""


def _without_dropout(operator: Operator) -> Operator:
    name = next((p for op, p in _PROBABILITIES.items() if operator.text.startswith(f"aten.{op}.")), None)
    numbers = dict(operator.numbers)
    if name is not None and name in numbers:
        numbers[name] = 0.0
    return Operator(operator.key, operator.text, numbers)


def _drop_nothing(mode: Mode) -> None:
    """Sets every probability of the (copied) graph to zero."""
    for node in mode.capture.graph.nodes:
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "").removesuffix("_")
        name = _PROBABILITIES.get(packet)
        if name is None:
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        place = names.index(name)
        if place < len(node.args):
            node.update_arg(place, 0.0)
        elif name in node.kwargs:
            node.update_kwarg(name, 0.0)
