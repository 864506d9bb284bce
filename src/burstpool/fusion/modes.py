"""Modes: the captured graph of an array in training and in eval mode, and the plans made of it.

A member whose plain attributes equal another's is not captured again: exporting is the slow part of fusing.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from burstpool.errors import FusionError, TraceError
from burstpool.fusion.cumulative import cumulative_norm, cumulative_norms_as_tensors
from burstpool.fusion.plan import Plan
from burstpool.fusion.rules import PerMember, Run
from burstpool.fusion.rules.base import nodes_in, with_members
from burstpool.fusion.rules.layout import memory_order
from burstpool.fusion.structure import Operator, check_same_graph, differing_numbers, operators, same_attributes
from burstpool.model.capture import Capture, batch_of, capture
from burstpool.model.segment import memory_chain, written_argument

Example = tuple[tuple[Any, ...], dict[str, Any]]


class Mode:
    """One captured graph, and each member's numbers in it."""

    def __init__(self, models: Sequence[nn.Module], build: Callable[[int], nn.Module], example: Example) -> None:
        """`models` may hold no data; `build(i)` gives member i with data, in the mode to capture."""
        self.example = example
        self.capture = _captured(build(0), example, 0)
        self._captured = operators(self.capture)
        self.operators: list[list[Operator]] = [self._captured]
        self.constants: list[list[Any]] = [list(self.capture.constants.values())]
        self._seen: list[nn.Module] = [models[0]]
        self._forget()
        for index in range(1, len(models)):
            self.admit(models[index], lambda index=index: build(index))  # type: ignore[misc]

    def _forget(self) -> None:
        """What follows from who is a member is found anew."""
        self._plans: dict[Any, Plan] = {}
        self._constants: dict[int, tuple[Any, bool]] = {}
        self._numbers: dict[str, dict[str, PerMember]] | None = None
        self._memory_orders: dict[str, list[int]] | None = None

    def admit(
        self, model: nn.Module, build: Callable[[], nn.Module], *, member: int | None = None, reference: int = 0
    ) -> None:
        """Takes up a member whose graph has the same shape, or refuses it, by the numbers of the two."""
        for index, other in enumerate(self._seen):
            if other is model or same_attributes(other, model):
                self.operators.append(self.operators[index])
                self.constants.append(self.constants[index])
                break
        else:
            member = len(self.operators) if member is None else member
            captured = _captured(build(), self.example, member)
            found = operators(captured)
            check_same_graph(self.operators[0], found, member=member, reference=reference)
            same = _same_all(self.operators[0], found)
            self.operators.append(self.operators[0] if same else found)
            self.constants.append(list(captured.constants.values()))
        self._seen.append(model)
        self._forget()

    def keep(self, indices: Sequence[int]) -> None:
        """Only these members, in this order."""
        self.operators = [self.operators[index] for index in indices]
        self.constants = [self.constants[index] for index in indices]
        self._seen = [self._seen[index] for index in indices]
        self._forget()

    def taken(self, indices: Sequence[int]) -> "Mode":
        """The same graph for these members alone."""
        other = copy.copy(self)
        other.keep(indices)
        return other

    def values(
        self, state: Mapping[str, Tensor], aliases: Mapping[str, str], inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What each placeholder stands for, by name."""
        keys = {**self.capture.parameters, **self.capture.buffers}
        values = {name: state[aliases[key]] for name, key in keys.items()}
        for place, name in enumerate(self.capture.constants):
            values[name] = self.constant(place)[0]
        return {**values, **inputs}

    def constant(self, place: int) -> tuple[Any, bool]:
        """A tensor of the user's code, and whether members have different ones."""
        # Compared once: it waits for the device.
        if place not in self._constants:
            mine = [constants[place] for constants in self.constants]
            same = all(other is mine[0] or _equal(other, mine[0]) for other in mine)
            self._constants[place] = (mine[0], False) if same else (torch.stack(mine), True)
        return self._constants[place]

    @property
    def numbers(self) -> dict[str, dict[str, PerMember]]:
        """The numbers in which members differ, from each other or from the captured graph."""
        if self._numbers is None:
            self._numbers = differing_numbers(self._captured, self.operators)
        return self._numbers

    @property
    def memory_orders(self) -> dict[str, list[int]]:
        """How each parameter lies alone, where that is not the usual way: channels last, say."""
        if self._memory_orders is None:
            parameters = (node for node in self.capture.graph.nodes if node.name in self.capture.parameters)
            orders = {node.name: memory_order(node.meta["val"]) for node in parameters}
            self._memory_orders = {name: order for name, order in orders.items() if order is not None}
        return self._memory_orders

    def plan(self, batched_inputs: frozenset[str], key: Any = None) -> Plan:
        """The plan for these inputs being each member's own; `key` tells apart plans with lowerings of their own."""
        if (batched_inputs, key) not in self._plans:
            flags = {node.name: False for node in self.capture.graph.nodes if node.op == "placeholder"}
            flags.update(dict.fromkeys((*self.capture.parameters, *self.capture.buffers, *batched_inputs), True))
            flags.update((name, self.constant(place)[1]) for place, name in enumerate(self.capture.constants))
            self._plans[batched_inputs, key] = Plan(self.capture.graph, self.capture.root, flags, self.numbers)
        return self._plans[batched_inputs, key]

    def plans(self) -> list[Plan]:
        """All made so far."""
        return list(self._plans.values())

    def outputs(self, plan: Plan, results: Sequence[Any], run: Run) -> list[Any]:
        """The model's flattened results, each with the member dimension."""
        nodes = self.capture.graph.output_node().args[0]
        assert isinstance(nodes, list | tuple)
        found = dict(zip((n if nodes_in(n) else None for n in nodes), results, strict=True))
        outputs = []
        for node in self.capture.outputs:
            value = found[node] if nodes_in(node) else node
            shared = isinstance(value, Tensor) and not plan.batched[node]
            outputs.append(with_members(value, run.members) if shared else value)
        return outputs


def _captured(model: nn.Module, example: Example, member: int) -> Capture:
    device = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    try:
        # A graph is captured when it is first run: whether that is under autocast must make no difference to it.
        with torch.autocast(device.type, enabled=False), cumulative_norms_as_tensors(model):
            if batch_of(*example) == 0:
                raise FusionError("the example has no samples; pass a batch of one or more")
            captured = capture(model, *example)
    except TraceError as error:
        advice = ', or pass fallback="modules"'  # which an array does not have
        norm = cumulative_norm(model)
        hint = "" if norm is None else f"; module {norm or 'itself'!r} has momentum=None: give it a number"
        raise FusionError(f"member {member}: {str(error).replace(advice, '')}{hint}") from error
    _check_constants(captured, model, member)
    return captured


def _check_constants(captured: Capture, model: nn.Module, member: int) -> None:
    """Refuses a model that writes into a tensor that is no part of its state: members would write into one.

    And one that draws from a generator of its own: where that is is no part of its state either.
    """
    if any(isinstance(value, torch.Generator) for value in captured.constants.values()):
        raise FusionError(
            f"member {member}: {type(model).__name__} draws from a torch.Generator of its own; leave it out, and each "
            "member draws from the stream that fuse(…, seeds=[…]) starts"
        )
    written = [(written_argument(node), *_statistics(node)) for node in captured.graph.nodes]
    for target in (target for targets in written for target in targets if target is not None):
        if (name := [*memory_chain(target)][-1].name) in captured.constants:
            raise FusionError(
                f"member {member}: {type(model).__name__} writes into {name.removeprefix('c_')!r}, a tensor that is no "
                "parameter and no buffer; make it a buffer with register_buffer"
            )


def _statistics(node: fx.Node) -> list[fx.Node]:
    """A norm's running statistics, where it updates them; its schema does not say that it writes."""
    if node.target not in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        return []
    _, _, _, mean, variance, updates, *_ = node.args
    return [each for each in (mean, variance) if isinstance(each, fx.Node)] if updates else []


def _same_all(first: Sequence[Operator], other: Sequence[Operator]) -> bool:
    return all(a.numbers == b.numbers for a, b in zip(first, other, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
