"""Dataflow: a plan's blocks joined with what flows between them.

Takes a Plan and either the traced LayerGraph or, where only somebody's Profile is there, its layers. Returns which
block makes which value, who takes it, and what each block's parameters weigh: all that lowering, validating and
simulating need to know of a model. Ignores the model's inputs and targets: any device loads those it needs.

- The loss belongs to the last block, so the last block takes every value the model returns.
- A parameter that several blocks share belongs to the first of them, whose backward comes last: it is reduced and
  stepped once, with that block. Such blocks must run on the same devices.
- A Profile says only which layer takes from which: each layer makes one value of its own name, that can be split by
  samples and has a gradient; layers nobody takes from return the model's output; no parameter is shared.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from burstpool.errors import PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan.plan import Plan, PlannedBlock
from burstpool.profiling.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowValue:
    """A value that leaves the block that makes it."""

    name: str
    """As the LayerGraph calls it; the layer's name where there is only a Profile."""
    maker: str
    """The block that makes it."""
    takers: tuple[str, ...]
    """Other blocks that take it, in the plan's order; the last block also for the loss."""
    bytes_per_sample: int
    """What one sample of it weighs."""
    has_samples: bool
    """Whether it can be cut along samples, and so move between devices."""
    differentiable: bool
    """Whether its gradient flows back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowBlock:
    """A block of the plan, and what it handles."""

    name: str
    layers: tuple[str, ...]
    """As the plan says."""
    index: int
    """Its place in the plan."""
    takes: tuple[str, ...]
    """Values of other blocks that it needs."""
    makes: tuple[str, ...]
    """Values that other blocks take from it."""
    parameter_bytes: int
    """Parameters that are reduced and stepped with it: its own, and those it shares with later blocks."""
    sharers: tuple[str, ...] = ()
    """Later blocks that share a parameter with it: their gradients are part of what it reduces."""
    joint: bool = False
    """Whether one sample's result depends on the others' (batch norm): its devices run it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """All blocks and the values between them."""

    blocks: Mapping[str, FlowBlock]
    """By name, in the plan's order."""
    values: Mapping[str, FlowValue]
    """By name, in the order in which they are made; only those that cross from one block to another."""

    @property
    def last(self) -> FlowBlock:
        """The block that computes the loss."""
        return next(reversed(self.blocks.values()))  # type: ignore[call-overload,no-any-return]


Source = LayerGraph | Profile | Dataflow
"""Where a model's dataflow can come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """What a LayerGraph and a Profile have in common."""

    order: tuple[str, ...]
    inputs: Mapping[str, tuple[str, ...]]
    """Layer → values it takes, the model's inputs left out."""
    values: Mapping[str, tuple[str, int, bool, bool]]
    """Value → layer that makes it, bytes a sample, has samples, differentiable."""
    outputs: tuple[str, ...]
    """Values the model returns."""
    parameters: Mapping[str, Mapping[str, int]]
    """Layer → parameter → bytes."""
    joint: frozenset[str] = frozenset()
    """Layers in which one sample's result depends on the others'."""


def dataflow(plan: Plan, source: Source) -> Dataflow:
    """Joins plan and model; refuses a plan that leaves out layers or splits what cannot be split. Linear in edges."""
    if isinstance(source, Dataflow):
        return source
    layers = _of_graph(source) if isinstance(source, LayerGraph) else _of_profile(source)
    _check_layers(plan, layers)
    block_of = {layer: block.name for block in plan.blocks for layer in block.layers}
    takers = _takers(plan, layers, block_of)
    values = {
        name: FlowValue(
            name=name,
            maker=block_of[maker],
            takers=takers[name],
            bytes_per_sample=size,
            has_samples=has_samples,
            differentiable=differentiable,
        )
        for name, (maker, size, has_samples, differentiable) in layers.values.items()
        if takers[name]
    }
    found = Dataflow(blocks=_blocks(plan, layers, values), values=values)
    _check_shares(plan, found)
    return found


def _of_graph(graph: LayerGraph) -> _Layers:
    made = {value.name: (layer.name, value) for layer in graph.layers for value in layer.outputs}
    return _Layers(
        order=tuple(layer.name for layer in graph.layers),
        inputs={layer.name: tuple(name for name in layer.inputs if name in made) for layer in graph.layers},
        values={
            name: (maker, value.bytes_per_sample, value.sample_dim is not None, value.differentiable)
            for name, (maker, value) in made.items()
        },
        outputs=tuple(name for name in graph.outputs if name in made),
        parameters={layer.name: layer.parameters for layer in graph.layers},
        joint=frozenset(layer.name for layer in graph.layers if layer.mixes_samples),
    )


def _of_profile(profile: Profile) -> _Layers:
    order = tuple(layer.name for layer in profile.layers)
    known = set(order)
    taken = {name for layer in profile.layers for name in layer.inputs}
    return _Layers(
        order=order,
        inputs={layer.name: tuple(name for name in layer.inputs if name in known) for layer in profile.layers},
        values={layer.name: (layer.name, layer.output_bytes_per_sample, True, True) for layer in profile.layers},
        outputs=tuple(name for name in order if name not in taken),
        parameters={x.name: {x.name: x.parameter_bytes} if x.parameter_bytes else {} for x in profile.layers},
    )


def _check_layers(plan: Plan, layers: _Layers) -> None:
    planned = tuple(layer for block in plan.blocks for layer in block.layers)
    if planned == layers.order:
        return
    known, given = set(layers.order), set(planned)
    if unknown := [name for name in planned if name not in known]:
        raise PlanError(f"the plan names layer {unknown[0]!r}, which the model does not have; plan this model again")
    if missing := [name for name in layers.order if name not in given]:
        raise PlanError(f"no block of the plan runs layer {missing[0]!r}; every layer must be in one")
    place = {name: index for index, name in enumerate(planned)}
    for layer, names in layers.inputs.items():
        for name in names:
            if place[maker := layers.values[name][0]] > place[layer]:
                raise PlanError(f"the plan runs layer {layer!r} before {maker!r}, from which it takes; reorder blocks")


def _takers(plan: Plan, layers: _Layers, block_of: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Value → blocks that take it from outside, in the plan's order."""
    place = {block.name: index for index, block in enumerate(plan.blocks)}
    found: dict[str, set[str]] = {name: set() for name in layers.values}
    for layer, names in layers.inputs.items():
        for name in names:
            found[name].add(block_of[layer])
    for name in layers.outputs:
        found[name].add(plan.blocks[-1].name)
    for name, (maker, *_) in layers.values.items():
        found[name].discard(block_of[maker])
    return {name: tuple(sorted(blocks, key=place.__getitem__)) for name, blocks in found.items()}


def _blocks(plan: Plan, layers: _Layers, values: Mapping[str, FlowValue]) -> dict[str, FlowBlock]:
    takes, makes = defaultdict(list), defaultdict(list)
    for value in values.values():
        makes[value.maker].append(value.name)
        for taker in value.takers:
            takes[taker].append(value.name)
    owner: dict[str, PlannedBlock] = {}
    owned: dict[str, dict[str, int]] = defaultdict(dict)
    sharers: dict[str, dict[str, None]] = defaultdict(dict)
    for block in plan.blocks:
        for name, size in _parameters(block, layers):
            first = owner.setdefault(name, block)
            owned[first.name][name] = size
            if first is block:
                continue
            sharers[first.name][block.name] = None
            if set(first.devices) != set(block.devices):
                raise PlanError(
                    f"blocks {first.name!r} and {block.name!r} share parameter {name!r} and run on different "
                    "devices; give both the same devices"
                )
    return {
        block.name: FlowBlock(
            name=block.name,
            layers=block.layers,
            index=index,
            takes=tuple(takes[block.name]),
            makes=tuple(makes[block.name]),
            parameter_bytes=sum(owned[block.name].values()),
            sharers=tuple(sharers[block.name]),
            joint=not layers.joint.isdisjoint(block.layers),
        )
        for index, block in enumerate(plan.blocks)
    }


def _parameters(block: PlannedBlock, layers: _Layers) -> Iterable[tuple[str, int]]:
    return ((name, size) for layer in block.layers for name, size in layers.parameters[layer].items())


def _check_shares(plan: Plan, flow: Dataflow) -> None:
    """A value without samples cannot be cut: it stays on its device."""
    blocks = {block.name: block for block in plan.blocks}
    for value in flow.values.values():
        if value.has_samples:
            continue
        maker = blocks[value.maker]
        for taker in (blocks[name] for name in value.takers):
            # One that is the same for every sample needs the same devices; one that folds samples into another
            # dimension, the same samples on each.
            same = set(maker.shares) == set(taker.shares) if value.bytes_per_sample else None
            if same is None:
                same = set(maker.devices) == set(taker.devices)
            if not same:
                raise PlanError(
                    f"value {value.name!r} cannot be cut along samples, so blocks {maker.name!r} and {taker.name!r} "
                    f"must run on the same {'samples of the same ' if value.bytes_per_sample else ''}devices"
                )
