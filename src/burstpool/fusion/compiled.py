"""An array's forward pass, losses and gradients as functions that torch.compile has taken over.

Two of them: all members at once, or one member's function called for each. Both take a batch and its targets, leave
each parameter's gradient in `.grad` and return the losses [M]: other ways to do what `array.losses(…).sum().backward()`
does, to be compared with it.

What is compiled is first run once and written down operator by operator, backward pass included, in torch's plain
operators: the compiler joins them itself, and would see nothing of kernels of our own; but for a loss over many
classes, which is an operator of ours. For all members at once, masks of dropout are made from each member's seed by
arithmetic that the compiler can join, and depend on the member's stream alone; on the CPU, where masks are those of
training alone, what draws random numbers is refused; a loss that does is refused everywhere. For each shape of the
inputs, and each value that is no tensor, it is written down anew; the loss's code does not run again after that, so
that a tensor which it takes from its surroundings stays the one it was (surroundings.py).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion import kernels
from burstpool.fusion.gradients import leave_gradients
from burstpool.fusion.inputs import stacked_inputs
from burstpool.fusion.loss import checked, member_losses
from burstpool.fusion.random_losses import watched
from burstpool.fusion.rules import Run
from burstpool.fusion.serial import alone, draws, random_operators, written_inputs
from burstpool.fusion.streams import Streams

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray

TOGETHER, APART = "compiled together", "compiled apart"
MOST_APART = 32
"""Members up to which each is run on its own: beyond, recording takes long and fusing has won."""
_MOST_KEPT = 8
"""Ways that an array keeps: a loss that is written as a lambda is another one every time."""


def compiled_ways(
    array: "FusedArray",
    loss: Callable[..., Tensor],
    *,
    per_member: bool = False,
    autocast: torch.dtype | None = None,
) -> tuple[dict[str, Callable[[Any, Sequence[Any]], Tensor]], dict[str, str]]:
    """The ways that can be had, by name; and why the others cannot. The array keeps those made last."""
    ways: dict[str, Callable[[Any, Sequence[Any]], Tensor]] = {}
    refused: dict[str, str] = {}
    kept = array.compiled_ways
    for name, make in {TOGETHER: CompiledTogether, APART: CompiledApart}.items():
        key = (name, loss if isinstance(loss, Hashable) else id(loss), per_member, autocast, array.training)
        try:
            made: Any = kept.pop(key, None) or make(array, loss, per_member=per_member, autocast=autocast)
        except FusionError as error:
            refused[name] = str(error)
        else:
            ways[name] = kept[key] = made
    for key in list(kept)[:-_MOST_KEPT]:
        del kept[key]
    return ways, refused


def compiler_options(device: torch.device, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """torch.compile's options for a fused function, with those that are given.

    No padding between rows: on CUDA, torch 2.11 hands some tensors to one kernel with it and to another without, which
    reads beyond their end.
    """
    options = {"dynamic": False, **(given or {})}
    if device.type != "cuda" or options.get("backend", "inductor") != "inductor":
        return options
    mode = options.pop("mode", None)
    of_mode = torch._inductor.list_mode_options(mode) if mode else {}
    return {**options, "options": {"comprehensive_padding": False, **of_mode, **(options.get("options") or {})}}


class _Compiled:
    """What both have in common: a function of tensors, written down when it is first called with such inputs."""

    def __init__(
        self, array: "FusedArray", loss: Callable[..., Tensor], *, per_member: bool, autocast: torch.dtype | None
    ) -> None:
        """Refuses with FusionError what it cannot do."""
        if array.device.type == "cpu" and draws(array.mode):
            raise FusionError("it draws random numbers")
        self.array, self.loss, self.per_member, self.autocast = array, loss, per_member, autocast
        self._training = array.training
        self._functions: dict[Any, Callable[..., Any]] = {}
        """By all that is written down as it is: shapes, what is no tensor, which parameters have gradients."""

    def _call(
        self, losses: Callable[[Mapping[str, Tensor], Any], Tensor], state: Mapping[str, Tensor], rest: Any
    ) -> Any:
        """`losses(state, rest)` summed, and its gradients by the parameters' keys, compiled."""
        if self.array.training != self._training:
            raise FusionError("the array is in another mode, training or eval, than when the step was made")
        leaves, spec = pytree.tree_flatten((dict(state), rest))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place].detach() for place in places]
        kinds = [_kind(leaf) for leaf in pytree.tree_leaves(rest)]
        written_for = (spec, tuple(kinds), tuple(self._trained))
        with torch.no_grad(), torch.autocast(self.array.device.type, enabled=False):
            if written_for not in self._functions:

                def function(*given: Tensor) -> tuple[Tensor, list[Tensor | None]]:
                    filled = list(leaves)
                    for place, tensor in zip(places, given, strict=True):
                        filled[place] = tensor
                    return self._gradients(losses, *pytree.tree_unflatten(filled, spec))

                # Writing it down runs it, which must leave no trace in buffers, inputs and random streams.
                shared = {id(state[key]) for key in state if key in self.array.state.parameters}
                fresh = [leaves[p] if id(leaves[p]) in shared else leaves[p].detach().clone() for p in places]
                drawn_from = [self.array.device] if self.array.device.type == "cuda" else []
                with kernels.plain_operators(), torch.random.fork_rng(devices=drawn_from):
                    graph = make_fx(function)(*[tensor.detach() for tensor in fresh])
                self._functions[written_for] = torch.compile(
                    of_any_layout(graph), **compiler_options(self.array.device)
                )
            return self._functions[written_for](*tensors)

    def _gradients(
        self, losses: Callable[[Mapping[str, Tensor], Any], Tensor], state: Mapping[str, Tensor], rest: Any
    ) -> tuple[Tensor, list[Tensor | None]]:
        own = {key: state[key].detach().requires_grad_() for key in self._trained}
        with torch.enable_grad():
            with torch.autocast(self.array.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                found = losses({**state, **own}, rest)
            return found.detach(), list(torch.autograd.grad(found.sum(), list(own.values()), allow_unused=True))

    @property
    def _trained(self) -> list[str]:
        return [key for key, parameter in self.array.state.parameters.items() if parameter.requires_grad]


def of_any_layout(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph, changed in place: its views copy where they must, but for those that are written to.

    They were written down for the layouts that this device's kernels gave; the compiler's may be others, where a kernel
    returns a dense tensor and the compiler keeps its input's strides.
    """
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default and not any(_writes_to(node, user) for user in node.users):
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph


def _writes_to(node: torch.fx.Node, user: torch.fx.Node) -> bool:
    """Whether an operator changes what the node gives in place."""
    schema = getattr(user.target, "_schema", None)
    given = zip(user.args, schema.arguments, strict=False) if schema else ()
    return any(value is node and argument.alias_info and argument.alias_info.is_write for value, argument in given)


class CompiledTogether(_Compiled):
    """All members at once, by the rules' own choice of lowerings."""

    def __call__(self, inputs: Any, targets: Sequence[Any]) -> Tensor:
        """The losses [M]; leaves gradients."""
        array = self.array
        mode, batched, named = array.placed(inputs, per_member=self.per_member)
        plan = mode.plan(batched, "compiled")
        own = tuple(stacked_inputs(target, len(array)) for target in targets) if self.per_member else ()
        count = len(random_operators(mode))
        seeds = list(array.streams.drawn(count).unbind(1)) if count else []

        def losses(state: Mapping[str, Tensor], rest: Any) -> Tensor:
            given, mine, shared, drawn = rest
            values = mode.values(state, array.state.aliases, given)
            run = Run(members=len(array), streams=_NoStreams(), seeded=list(drawn))
            results = plan(run, [values[node.name] for node in plan.placeholders])
            output = pytree.tree_unflatten(mode.outputs(plan, results, run), mode.capture.out_spec)
            return member_losses(self.loss, output, mine, shared, run.streams)

        rest = (named, own, () if self.per_member else tuple(targets), seeds)
        found, gradients = self._call(losses, array.state.tensors, rest)
        leave_gradients([array.state.parameters[key] for key in self._trained], gradients)
        return found  # type: ignore[no-any-return]


class CompiledApart(_Compiled):
    """One member after another, each by the same compiled function."""

    def __init__(
        self, array: "FusedArray", loss: Callable[..., Tensor], *, per_member: bool, autocast: torch.dtype | None
    ) -> None:
        super().__init__(array, loss, per_member=per_member, autocast=autocast)
        if len(array) > MOST_APART:
            raise FusionError(f"there are more than {MOST_APART} members")
        if array.mode.numbers or any(array.mode.constant(place)[1] for place in range(len(array.mode.constants[0]))):
            raise FusionError("members differ in numbers of their code")

    def __call__(self, inputs: Any, targets: Sequence[Any]) -> Tensor:
        """The losses [M]; leaves gradients."""
        array = self.array
        mode, batched, named = array.placed(inputs, per_member=self.per_member)
        last, written = len(array) - 1, written_inputs(mode)
        own = [stacked_inputs(target, len(array)) for target in targets] if self.per_member else targets
        function = watched(self.loss)

        def loss(state: Mapping[str, Tensor], rest: Any) -> Tensor:
            given, wanted = rest
            leaves = alone(mode, 0, mode.values(state, array.state.aliases, given))
            return checked(function(pytree.tree_unflatten(leaves, mode.capture.out_spec), *wanted))

        def one(member: int) -> Any:
            given = {name: value[member] if name in batched else value for name, value in named.items()}
            if member != last:
                given.update((name, given[name].clone()) for name in written if name not in batched)
            wanted = pytree.tree_map_only(Tensor, lambda t: t[member], tuple(own)) if self.per_member else tuple(own)
            state = {key: tensor[member] for key, tensor in array.state.tensors.items()}
            return self._call(loss, state, (given, wanted))

        members = range(len(array))
        if draws(mode):
            found = [array.streams.drawing(member, partial(one, member)) for member in members]
        else:
            found = [one(member) for member in members]
        for place, key in enumerate(self._trained):
            column = [gradients[place] for _, gradients in found]
            array.state.parameters[key].grad = None if column[0] is None else torch.stack(column)
        return torch.stack([value for value, _ in found])


def _kind(leaf: Any) -> Any:
    """What a function that was written down for an input expects of it."""
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf)


class _NoStreams(Streams):
    """Stands for the members' streams where only seeds may be used."""

    def __init__(self) -> None:
        super().__init__([], torch.device("cpu"))

    def drawing(self, member: int, function: Callable[[], Any]) -> Any:
        raise FusionError("an operator draws numbers that have no seeded form")

    def drawn(self, count: int) -> Tensor:
        raise FusionError("an operator draws more seeds than there are")
