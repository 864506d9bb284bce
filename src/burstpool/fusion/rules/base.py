"""What a rule is: from one captured operator to the same operator for all members at once.

A rule takes a `Call` (the operator, and which of its arguments carry the member dimension) and returns a `Lowered`
(what to run instead), or None where it does not know better than the fallbacks. Rules are pure and run once, when
a plan is made; what they return runs every step.

The contract of a value: a *batched* tensor has the member dimension first, [M, …], whatever its strides; a *shared*
one is the same for all members and has no such dimension. The physical layout lives in the strides alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from burstpool.fusion.memory import KeptMemory
from burstpool.fusion.streams import Streams

_SEEDS_AT_ONCE = 32
"""Starting an operator for each member is dear; a model's forward pass asks for a few seeds."""

Way = Literal["rule", "vmap", "loop", "shared"]


class PerMember(NamedTuple):
    """A number that members do not agree on: one value each."""

    values: tuple[Any, ...]

    def tensor(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        """[M, 1, …] of `rank` ones, in the type and on the device of `like`."""
        return column(self.values, like.dtype, like.device).view(-1, *[1] * rank)


@functools.lru_cache(maxsize=1024)
def column(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The numbers on the device, [M]; not to be written to. Kept, as a recording CUDA graph can copy nothing there."""
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(slots=True)
class Run:
    """What the members' own state adds to an operator at run time."""

    members: int
    """M, the number of members."""
    streams: Streams
    """Each member's random numbers."""
    seeded: list[torch.Tensor] | None = None
    """Seeds [M] drawn beforehand, from which all random numbers are to be made; None to use the streams."""
    memory: KeptMemory | None = None
    """Where large gradients lie on the CPU; None for memory of their own."""
    _seeds: list[torch.Tensor] = field(default_factory=list)

    def seeds(self) -> torch.Tensor:
        """[M]: one number of each member's stream, for a kernel that draws on from there. Drawn in blocks."""
        if self.seeded:
            return self.seeded.pop()
        if not self._seeds:
            self._seeds = list(self.streams.drawn(_SEEDS_AT_ONCE).unbind(1))
        return self._seeds.pop()


Kernel = Callable[..., Any]
"""`kernel(run, *arguments)`, the arguments in the order of the operator's schema, defaults filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """What runs instead of an operator."""

    kernel: Kernel
    way: Way = "rule"
    why: str = ""
    """For `explain()`: what the kernel does, or why there is no better one."""
    batched: bool = True
    """Whether the result carries the member dimension."""
    others: Mapping[str, Kernel] = field(default_factory=dict)
    """Other ways to do the same, by name, to be measured against `kernel`."""


class Call:
    """One operator of the captured graph and what is known of its arguments."""

    def __init__(self, node: fx.Node, arguments: Mapping[str, Any], batched: Callable[[fx.Node], bool]) -> None:
        self.node, self.arguments, self._batched = node, arguments, batched
        assert isinstance(node.target, torch._ops.OpOverload)
        self.op = node.target

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def is_batched(self, name: str) -> bool:
        """Whether any tensor of the argument carries the member dimension."""
        return any(self._batched(node) for node in nodes_in(self.arguments[name]))

    def batched_names(self) -> list[str]:
        """The arguments that carry the member dimension."""
        return [name for name in self.arguments if self.is_batched(name)]

    def per_member(self) -> list[str]:
        """The arguments whose numbers differ between members."""
        return [name for name, value in self.arguments.items() if isinstance(value, PerMember)]

    def flags(self, value: Any) -> Any:
        """The argument's structure with True for batched tensors, False for everything else."""
        if isinstance(value, fx.Node):
            return self._batched(value)
        if isinstance(value, list | tuple) and not isinstance(value, PerMember):
            return type(value)(self.flags(item) for item in value)
        return False

    def tensor(self, name: str) -> torch.Tensor:
        """One member's own tensor, as captured: shape and type, no data."""
        value: torch.Tensor = self.arguments[name].meta["val"]
        return value

    def is_tensor(self, name: str) -> bool:
        """Whether the argument is one tensor."""
        value = self.arguments[name]
        return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)

    def rank(self, name: str) -> int:
        """Dimensions of one member's tensor."""
        return self.tensor(name).dim()

    @property
    def result(self) -> torch.Tensor:
        """One member's own result."""
        value: torch.Tensor = self.node.meta["val"]
        return value


Rule = Callable[[Call], Lowered | None]


def nodes_in(value: Any) -> list[fx.Node]:
    """The graph nodes in an argument."""
    if isinstance(value, fx.Node):
        return [value]
    if isinstance(value, list | tuple):
        return [node for item in value for node in nodes_in(item)]
    return []


def bind(node: fx.Node) -> dict[str, Any]:
    """All arguments of the operator by the names of its schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    bound: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            bound[argument.name] = node.args[index]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


def caller(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The operator as a function of all its arguments by position; torch takes some by keyword only."""
    names = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    if not names:
        return op
    count = len(op._schema.arguments) - len(names)

    def call(*arguments: Any) -> Any:
        return op(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))

    return call


def plain(function: Callable[..., Any]) -> Kernel:
    """A kernel that needs nothing of the run."""

    def kernel(run: Run, *arguments: Any) -> Any:
        return function(*arguments)

    return kernel


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What autocast would make of the tensor in a product; its own type outside."""
    kind = tensor.device.type
    on = torch.is_autocast_enabled(kind) and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return torch.get_autocast_dtype(kind) if on else tensor.dtype


def with_members(tensor: torch.Tensor, members: int) -> torch.Tensor:
    """A shared tensor as a batched one, without copying."""
    return tensor.unsqueeze(0).expand(members, *tensor.shape)


def padded(tensor: torch.Tensor, missing: int) -> torch.Tensor:
    """A batched tensor with `missing` dimensions of size 1 after the member dimension, so that it broadcasts."""
    return tensor.reshape(tensor.shape[0], *[1] * missing, *tensor.shape[1:]) if missing else tensor


def expander(call: Call, names: Sequence[str]) -> Callable[[Run, dict[str, Any]], None]:
    """Gives the member dimension to those of the named tensors that are shared."""
    shared = [name for name in names if call.is_tensor(name) and not call.is_batched(name)]

    def expand(run: Run, bound: dict[str, Any]) -> None:
        for name in shared:
            bound[name] = with_members(bound[name], run.members)

    return expand
