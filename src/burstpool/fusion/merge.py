"""Merging: batch norm in training with the sum, the activation and the maximum that follow it, as one kernel.

The maximum is that over the rows of a sample, as point networks take it of a cloud, where nobody asks in which row.

The bias of a convolution or linear layer before it goes along: the norm takes it away again, so that it moves the
running mean only, and adding it to the activations would be a pass over memory for nothing.

Takes a plan's steps, returns them with each such chain as one step at the place of its last operator. Only where
nobody else reads what lies between, and nothing in between reads the running statistics or changes what the norm reads.
Whether a chain really runs as one is decided when it runs: on CUDA, channels innermost in memory, no double precision;
else, and where measuring says so, its operators run apart.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from burstpool.fusion.plan import Step
from burstpool.fusion.rules import Lowered, PerMember, Run
from burstpool.fusion.rules.base import Kernel, nodes_in
from burstpool.fusion.rules.layout import per_channel
from burstpool.fusion.rules.norms import largest_in_one, norm_in_one
from burstpool.model.segment import memory_chain, written_argument

aten = torch.ops.aten

_ACTIVATIONS = {
    aten.relu.default: "relu",
    aten.relu_.default: "relu",
    aten.hardswish.default: "hardswish",
    aten.hardswish_.default: "hardswish",
    aten.leaky_relu.default: "leaky_relu",
    aten.leaky_relu_.default: "leaky_relu",
    aten.silu.default: "silu",
    aten.silu_.default: "silu",
}
_BY_SIGN = ("relu", "leaky_relu")
"""Activations whose derivative the result's sign tells."""
_BIASED = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv_transpose2d.input,
    aten.linear.default,
)
"""Layers whose third argument is a bias."""
_SUMS = (aten.add.Tensor, aten.add_.Tensor)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A norm and what follows it."""

    norm: Step
    layer: Step | None
    """What gives the norm its input, where it has a bias."""
    sum: Step | None
    residual: fx.Node | None
    activation: Step | None
    maximum: Step | None

    @property
    def bias(self) -> Any:
        return None if self.layer is None else self.layer.arguments[2]

    @property
    def steps(self) -> list[Step]:
        return [step for step in (self.norm, self.sum, self.activation, self.maximum) if step is not None]


def merged(
    steps: Sequence[Step], outputs: Sequence[fx.Node], fixed: set[fx.Node], batched: Mapping[fx.Node, bool]
) -> list[Step]:
    """The steps, chains as one; `fixed` nodes stay as they are, `batched` ones have the member dimension."""
    by_node: dict[fx.Node, Step] = {}
    for step in steps:
        if step.node in by_node:
            fixed = fixed | {step.node}
        by_node[step.node] = step
    kept = {*outputs, *fixed}
    replaced: dict[fx.Node, Step | None] = {}
    for step in steps:
        free = {node: other for node, other in by_node.items() if node not in replaced}
        chain = _movable(_chain(step, free, kept, batched), steps)
        if chain is not None:
            *inner, last = chain.steps
            replaced.update((s.node, None) for s in inner)
            replaced[last.node] = _as_one(chain)
            if chain.layer is not None:
                replaced[chain.layer.node] = _without_bias(chain.layer)
    found = [replaced.get(step.node, step) for step in steps]
    return [step for step in found if step is not None]


def _chain(
    step: Step, by_node: dict[fx.Node, Step], kept: set[fx.Node], batched: Mapping[fx.Node, bool]
) -> _Chain | None:
    if not is_training_norm(step) or step.node in kept:
        return None
    following = _only_user(step.node, by_node)
    sum_, residual = None, None
    if following is not None and following.node.target in _SUMS:
        residual = _residual(following, step.node, by_node)
        if residual is not None:
            sum_, following = following, None if following.node in kept else _only_user(following.node, by_node)
    activation = following if following is not None and _follows(following, residual is not None) else None
    if activation is not None:
        following = None if activation.node in kept else _only_user(activation.node, by_node)
    maximum = following if following is not None and sum_ is None and _is_over_rows(following, kept) else None
    layer = _biased(step.arguments[0], by_node, kept, batched)
    if sum_ is None and activation is None and maximum is None and layer is None:
        return None
    return _Chain(step, layer, sum_, residual, activation, maximum)


def _movable(chain: _Chain | None, steps: Sequence[Step]) -> _Chain | None:
    """The chain, or less of it, whose norm may as well run where its last operator does; None where it may not."""
    if chain is None or _may_move(chain, steps):
        return chain
    shorter = replace(chain, maximum=None)
    return shorter if (shorter.activation or shorter.sum or shorter.layer) and _may_move(shorter, steps) else None


def _may_move(chain: _Chain, steps: Sequence[Step]) -> bool:
    own = {step.node for step in chain.steps}
    places = [place for place, step in enumerate(steps) if step.node in own]
    statistics = memory_of(chain.norm.arguments[3:5])
    reads = memory_of([*chain.norm.arguments, chain.residual, chain.bias])
    between = [step for step in steps[places[0] : places[-1]] if step.node not in own]
    written = (written_argument(step.node) for step in between)
    return not any(statistics & memory_of(step.arguments) for step in between) and not reads & memory_of(list(written))


def memory_of(arguments: Sequence[Any]) -> set[fx.Node]:
    """Which nodes made the memory that arguments lie in."""
    return {[*memory_chain(node)][-1] for node in nodes_in(arguments)}


def _biased(
    node: fx.Node, by_node: dict[fx.Node, Step], kept: set[fx.Node], batched: Mapping[fx.Node, bool]
) -> Step | None:
    """The layer before the norm, where its bias is each member's own and nobody else reads its result."""
    step = by_node.get(node)
    if step is None or node in kept or len(node.users) != 1 or step.node.target not in _BIASED:
        return None
    weight, bias = step.arguments[1:3]
    if not isinstance(bias, fx.Node) or not batched.get(bias, False) or not isinstance(weight, fx.Node):
        return None
    # The norm's channels are dimension 1. A linear layer's outputs are the last, a convolution's of one sample the
    # first: they are the same where the result has as many dimensions as the weight.
    same_channels = node.meta["val"].dim() == weight.meta["val"].dim()
    return step if same_channels and step.lowered.way == "rule" and step.lowered.batched else None


def _without_bias(step: Step) -> Step:
    return replace(step, arguments=[*step.arguments[:2], None, *step.arguments[3:]])


def is_training_norm(step: Step) -> bool:
    """Whether the step is a batch norm that the kernel knows."""
    return "kernel" in step.lowered.others and step.node.target is aten.batch_norm.default


def _only_user(node: fx.Node, by_node: dict[fx.Node, Step]) -> Step | None:
    users = list(node.users)
    return by_node.get(users[0]) if len(users) == 1 else None


def _residual(step: Step, norm: fx.Node, by_node: dict[fx.Node, Step]) -> fx.Node | None:
    """The other summand, where it is a tensor of the same shape, each member's own."""
    left, right, alpha = step.arguments
    in_place = step.node.target is aten.add_.Tensor
    other = right if left is norm else left
    if not isinstance(other, fx.Node) or other is norm or alpha != 1 or (in_place and left is not norm):
        return None
    batched = step.lowered.batched and (other not in by_node or by_node[other].lowered.batched)
    value, mine = other.meta.get("val"), norm.meta["val"]
    alike = isinstance(value, Tensor) and value.dim() == mine.dim() and list(value.shape) == list(mine.shape)
    return other if batched and alike and other.op == "call_function" else None


def _follows(step: Step, summed: bool) -> bool:
    name = _ACTIVATIONS.get(step.node.target)  # type: ignore[call-overload]
    if name is None or any(isinstance(a, PerMember) for a in step.arguments):
        return False
    return not summed or name in _BY_SIGN


def _is_over_rows(step: Step, kept: set[fx.Node]) -> bool:
    """Whether the step is the maximum of [N, C, L] over L, of which only the values are read."""
    if step.node.target is not aten.max.dim or step.node in kept or step.lowered.way != "rule":
        return False
    x, dim, _ = step.arguments
    over_rows = isinstance(x, fx.Node) and x.meta["val"].dim() == 3 and dim in (2, -1)
    return over_rows and all(user.target is operator.getitem and user.args[1] == 0 for user in step.node.users)


def _as_one(chain: _Chain) -> Step:
    last = chain.steps[-1]
    arguments = [*chain.norm.arguments, chain.bias, chain.residual]
    apart = _apart(chain)
    words = " and ".join(str(s.node.target).split(".")[1].rstrip("_") for s in chain.steps[1:])
    why = f"batch norm{' with the ' + words + ' that follows' if words else ''}, in one kernel"
    others = {"apart": apart}
    if chain.maximum is not None:
        shorter = replace(chain, maximum=None)
        others["maximum apart"] = _then(_together(shorter, _apart(shorter)), chain.maximum)
    lowered = Lowered(kernel=_together(chain, apart), why=why, others=others)
    return Step(last.node, last.key, lowered, arguments, lowered.kernel)


def _apart(chain: _Chain) -> Kernel:
    """The chain's operators, one after another."""
    norm, sum_, activation, maximum = chain.norm, chain.sum, chain.activation, chain.maximum
    first = sum_ is None or sum_.arguments[0] is norm.node

    def kernel(run: Run, x: Tensor, *arguments: Any) -> Any:
        *rest, bias_MC, residual = arguments
        if bias_MC is not None:
            x = x + per_channel(bias_MC, x.dim() - 1).to(x.dtype)
        y = norm.lowered.kernel(run, x, *rest)
        if sum_ is not None:
            y = sum_.lowered.kernel(run, *((y, residual) if first else (residual, y)), 1)
        for step in (activation, maximum):
            y = y if step is None else step.lowered.kernel(run, y, *step.arguments[1:])
        return y

    return kernel


def _then(first: Kernel, step: Step) -> Kernel:
    return lambda run, *arguments: step.lowered.kernel(run, first(run, *arguments), *step.arguments[1:])


def _together(chain: _Chain, apart: Kernel) -> Kernel:
    activation, maximum = chain.activation, chain.maximum
    name = "" if activation is None else _ACTIVATIONS[activation.node.target]  # type: ignore[index]
    slope = float(activation.arguments[1]) if activation is not None and name == "leaky_relu" else 0.0

    def kernel(run: Run, *arguments: Any) -> Any:
        *norm, bias_MC, residual = arguments
        if maximum is None:
            y = norm_in_one(norm, residual, bias_MC, name, slope)
            return apart(run, *arguments) if y is None else y
        y = largest_in_one(norm, bias_MC, name, slope)
        if y is None:
            return apart(run, *arguments)
        return (y.unsqueeze(-1) if maximum.arguments[2] else y,)

    return kernel
