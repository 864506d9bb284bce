"""Structure: whether models can be one array, and in which numbers they differ.

Takes models or captured graphs. Members of one array have the same parameters and buffers (names, shapes, types)
and the same operators on the same shapes; numbers that operators are given (a dropout's probability, a slope) may
differ. Raises FusionError that names the member and the first difference.
"""

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index as whole_number
from typing import Any

import torch
from torch import fx, nn

from burstpool.errors import FusionError
from burstpool.fusion.rules import PerMember, bind
from burstpool.fusion.rules.base import nodes_in
from burstpool.fusion.state import aliases
from burstpool.model.capture import Capture
from burstpool.model.segment import memory_chain, written_argument

_DEPTH = 6
"""How deep plain attributes are compared; what lies deeper counts as different, which only costs a capture."""

_SEEDS = -(2**63), 2**64 - 1
_CONTIGUOUS = torch.ops.aten.contiguous.default
_PLAIN = (int, float, str, bytes, bool, torch.dtype, torch.device, torch.Size, frozenset, set)
"""Types whose == says all."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of a captured graph, as text that is the same for the same work, and its numbers."""

    key: str
    """The node's name, after the names of the regions it lies in."""
    text: str
    """Operator, where its tensors come from, shape and type of its result."""
    numbers: Mapping[str, Any]
    """Argument → value, for arguments that hold no tensor."""


def checked_models(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The members, each its own object, of the same state."""
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        raise FusionError(f"models is one {type(models).__name__}; pass a list, one model for each member")
    if not isinstance(models, Iterable):
        raise FusionError(f"models is a {type(models).__name__}; pass a list, one model for each member")
    models = list(models)
    if not models:
        raise FusionError("no models: pass at least one")
    for index, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise FusionError(f"member {index} is a {type(model).__name__}; pass nn.Modules")
        if any(model is other for other in models[:index]):
            raise FusionError(f"member {index} is the same object as an earlier one; build each member on its own")
        check_tensors(model, member=index)
        if index:
            check_same_state(models[0], model, member=index)
    return models


def checked_seeds(models: Sequence[nn.Module], seeds: Sequence[int] | None) -> list[int]:
    """A seed for each member."""
    found = list(range(len(models))) if seeds is None else whole_numbers(seeds)
    if len(found) != len(models):
        raise FusionError(f"{len(found)} seeds for {len(models)} members; pass one each")
    return found


def whole_numbers(seeds: Iterable[int]) -> list[int]:
    """Python's own, also of numpy's."""
    try:
        found = [whole_number(seed) for seed in seeds]
    except TypeError:
        raise FusionError(f"seeds={seeds!r}; a seed is a whole number, one for each member") from None
    if wrong := [seed for seed in found if not _SEEDS[0] <= seed <= _SEEDS[1]]:
        raise FusionError(f"seed {wrong[0]} is outside of what torch takes: {_SEEDS[0]} to {_SEEDS[1]}")
    return found


def check_same_state(first: nn.Module, other: nn.Module, *, member: int, reference: int = 0) -> None:
    """Refuses a member whose parameters, buffers or modes are not those of the first; both by their numbers."""
    for kind in ("parameter", "buffer"):
        mine, theirs = _tensors(first, kind), _tensors(other, kind)
        for name in mine.keys() ^ theirs.keys():
            owner, lacking = (reference, member) if name in mine else (member, reference)
            raise FusionError(f"member {owner} has a {kind} {name!r}, member {lacking} has none; fuse them apart")
        for name, tensor in mine.items():
            _check_tensor(tensor, theirs[name], f"{kind} {name!r}", member, reference)
    tied, tied_there = aliases(first), aliases(other)
    for name in tied:
        if tied[name] != tied_there[name]:
            ties = [(reference, tied[name], member), (member, tied_there[name], reference)]
            owner, key, lacking = ties[tied[name] == name]
            raise FusionError(
                f"{name!r} of member {owner} is its {key!r}, of member {lacking} it is not; fuse them apart"
            )
    for (name, a), (_, b) in zip(first.named_modules(), other.named_modules(), strict=False):
        if a.training != b.training:
            modes = {True: "training", False: "eval"}
            raise FusionError(
                f"module {name or 'itself'!r} of member {member} is in {modes[b.training]} mode, of member "
                f"{reference} in {modes[a.training]} mode; call .train() or .eval() on all of them"
            )


def check_tensors(model: nn.Module, *, member: int) -> None:
    """Refuses lazy parameters, and a trained one in whose memory another tensor lies: the two would part."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    by_storage: dict[int, list[str]] = {}
    for key, tensor in held.items():
        if nn.parameter.is_lazy(tensor):
            raise FusionError(f"{key!r} of member {member} has no shape yet; run the lazy module on a batch first")
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(key)
    for mine, other in (pair for keys in by_storage.values() for pair in itertools.combinations(keys, 2)):
        trained = any(held[key].requires_grad for key in (mine, other))
        (start, end), (start_there, end_there) = _span(held[mine]), _span(held[other])
        if trained and start < end_there and start_there < end:
            raise FusionError(
                f"{other!r} of member {member} lies in the memory of {mine!r}, as by `.data`, and would not follow it; "
                "share the parameter itself, or copy it"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """From which to which address it lies."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tensors(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    named = model.named_parameters if kind == "parameter" else model.named_buffers
    return dict(named(remove_duplicate=False))


def _check_tensor(first: torch.Tensor, other: torch.Tensor, name: str, member: int, reference: int) -> None:
    for what in ("shape", "dtype", "device", "requires_grad"):
        a, b = getattr(first, what), getattr(other, what)
        if a != b:
            a, b = (list(a), list(b)) if what == "shape" else (a, b)
            raise FusionError(
                f"{name} of member {member} has {what} {b}, of member {reference} {a}; members of one array agree in "
                "it: put this one in an array of its own"
            )


def same_attributes(first: nn.Module, other: nn.Module) -> bool:
    """Whether two models of the same state surely run the same code with the same numbers."""
    return _Comparison(first, other).same()


class _Comparison:
    """Compares two models' plain attributes; whatever it does not know counts as different."""

    def __init__(self, first: nn.Module, other: nn.Module) -> None:
        self.mine, self.theirs = dict(first.named_modules()), dict(other.named_modules())
        self.names = {id(module): name for name, module in self.mine.items()}

    def same(self) -> bool:
        """Module by module."""
        return self.mine.keys() == self.theirs.keys() and all(
            type(module) is type(self.theirs[name])
            and self._same(_attributes(module), _attributes(self.theirs[name]), _DEPTH)
            for name, module in self.mine.items()
        )

    def _same(self, a: Any, b: Any, depth: int) -> bool:
        if a is b:
            return True
        if type(a) is not type(b) or depth == 0:
            return False
        if isinstance(a, nn.Module):  # compared where it is registered; one that is not would need a capture
            return id(a) in self.names and self.theirs[self.names[id(a)]] is b
        if isinstance(a, weakref.ref):  # recurrent networks keep such references to their weights
            return self._same(a(), b(), depth)
        if isinstance(a, torch.Tensor):  # without data: a parameter or buffer, compared as such
            return (a.is_meta and b.is_meta) or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
        if isinstance(a, Mapping):
            return a.keys() == b.keys() and all(self._same(a[key], b[key], depth - 1) for key in a)
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(self._same(x, y, depth - 1) for x, y in zip(a, b, strict=True))
        if isinstance(a, _PLAIN):
            return bool(a == b)
        fields = getattr(a, "__dict__", None)
        return fields is not None and not callable(a) and self._same(fields, b.__dict__, depth - 1)


def _attributes(module: nn.Module) -> dict[str, Any]:
    hidden = {"_parameters", "_buffers", "_modules"}
    return {name: value for name, value in vars(module).items() if name not in hidden}


def operators(capture: Capture) -> list[Operator]:
    """The captured graph as comparable operators.

    Without those that only lay a tensor anew, and that nobody writes to: torch's export leaves them out or not by how
    another operator happens to lay its result, as attention does with and without dropout.
    """
    return list(_operators(capture.graph, capture.root, ""))


def _operators(graph: fx.Graph, root: nn.Module, prefix: str) -> list[Operator]:
    place: dict[fx.Node, int] = {}
    places, found = itertools.count(), []
    written = {[*memory_chain(into)][-1] for node in graph.nodes if (into := written_argument(node)) is not None}
    for node in graph.nodes:
        if node.target is _CONTIGUOUS and [*memory_chain(node)][-1] not in written:
            place[node] = place[node.args[0]]
            continue
        place[node] = next(places)
        if node.op == "get_attr":
            inner = getattr(root, str(node.target), None)
            if isinstance(inner, fx.GraphModule):
                found += _operators(inner.graph, inner, f"{prefix}{node.name}/")
            continue
        arguments = bind(node) if isinstance(node.target, torch._ops.OpOverload) else dict(enumerate(node.args))
        numbers = {str(name): value for name, value in arguments.items() if not nodes_in(value)}
        wired = {name: _wiring(value, place) for name, value in arguments.items() if nodes_in(value)}
        # Placeholders are told apart by their place: their names come from the user's attributes.
        target = node.op if node.op in ("placeholder", "output") else str(node.target)
        text = f"{target} of {_wires(wired)} → {_described(node.meta.get('val'))}"
        found.append(Operator(prefix + node.name, text, {} if node.op in ("placeholder", "output") else numbers))
    return found


def _wiring(value: Any, place: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return f"%{place[value]}"
    return [_wiring(item, place) for item in value] if isinstance(value, list | tuple) else value


def _wires(wired: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in wired.items()) or "nothing"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        sizes = ["N" if isinstance(size, torch.SymInt) else int(size) for size in value.shape]
        return f"{sizes} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return f"({', '.join(_described(item) for item in value)})"
    return type(value).__name__


def check_same_graph(first: Sequence[Operator], other: Sequence[Operator], *, member: int, reference: int = 0) -> None:
    """Refuses a member whose operators are not those of the first; both by their numbers."""
    for a, b in zip(first, other, strict=False):
        if a.text != b.text:
            raise FusionError(
                f"at operator {a.key!r} member {member} runs {b.text}, member {reference} runs {a.text}; "
                "fuse them apart"
            )
        for name in a.numbers.keys() | b.numbers.keys():
            x, y = a.numbers.get(name), b.numbers.get(name)
            if type(x) is not type(y) and not (_is_number(x) and _is_number(y)):
                raise FusionError(
                    f"operator {a.key!r} of member {member} has {name}={y!r}, of member {reference} {name}={x!r}"
                )
    if len(first) != len(other):
        raise FusionError(
            f"member {member} runs {len(other)} operators, member {reference} runs {len(first)}; fuse them apart"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def differing_numbers(
    captured: Sequence[Operator], members: Sequence[Sequence[Operator]]
) -> dict[str, dict[str, PerMember]]:
    """Operator's key → argument → each member's own value, where one differs from what was captured.

    The member that was captured may have left: those that stay may agree on a number that the graph does not have.
    """
    found: dict[str, dict[str, PerMember]] = {}
    if all(other is captured for other in members):
        return found
    for index, operator in enumerate(captured):
        for name, number in operator.numbers.items():
            values = tuple(other[index].numbers[name] for other in members)
            if any(value != number for value in values):
                found.setdefault(operator.key, {})[name] = PerMember(values)
    return found
