"""Branches: a model's graph as a row of stages, some of them with branches in between.

Takes a Profile or a LayerGraph. Returns a Row: stages one after the other; between two of them, where the graph forks
and joins again, a Fork of branches, which are rows themselves. Every layer is in one stage. Most stages have one layer;
several where layers cannot be told apart this way (graphs that are not series-parallel) or must stay together (a shared
parameter, a value that cannot be cut along samples): such a stage has one width.

Before a fork stands an empty stage, the port: what all branches take is regrouped there once, not for each of them.
Ignores the model's inputs: any device loads those it needs. Layers nobody takes from end in the last one, which has the
loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from burstpool.model.graph import LayerGraph
from burstpool.profiling.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers of one width."""

    layers: tuple[int, ...] = ()
    """Their places in the model; none for a port."""
    bytes_per_sample: int = 0
    """What it hands on to what follows, a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Rows side by side from the stage before to the stage after."""

    branches: "tuple[Row, ...]"
    """One may be empty: a shortcut, which hands on what the stage before made."""
    shortcut_bytes: int = 0
    """What the shortcut hands on, a sample."""


Row = tuple[Stage | Fork, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """A whole model."""

    row: Row
    """Begins and ends with a stage."""
    parameter_bytes: tuple[int, ...]
    """Layer → its parameters, shared ones with their first layer only."""

    @property
    def has_branches(self) -> bool:
        """Whether there is any fork."""
        return any(isinstance(part, Fork) for part in self.row)


def layers_of(row: Row) -> tuple[int, ...]:
    """All layers of a row, in its order."""
    found: list[int] = []
    for part in row:
        if isinstance(part, Stage):
            found += part.layers
        else:
            found += [layer for branch in part.branches for layer in layers_of(branch)]
    return tuple(found)


def model_row(source: Profile | LayerGraph) -> ModelRow:
    """The graph as a row. O(layers × edges) at worst, linear on chains."""
    graph = _of_profile(source) if isinstance(source, Profile) else _of_layer_graph(source)
    stages = _stages(graph)
    edges = _stage_edges(graph, stages)
    made: list[dict[str, int]] = [{} for _ in stages]
    for (maker, _), values in edges.items():
        made[maker].update(values)
    sizes = {ends: sum(values.values()) for ends, values in edges.items()}
    outs = [sum(values.values()) for values in made]
    row = _Decomposition(stages, sizes, outs).whole()
    return ModelRow(row=row, parameter_bytes=_own_parameters(graph))


@dataclass(slots=True)
class _Graph:
    num_layers: int
    edges: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    """(maker, taker) → values that cross, with bytes a sample."""
    parameters: list[dict[str, int]] = field(default_factory=list)
    """Layer → parameter → bytes."""
    together: list[tuple[int, int]] = field(default_factory=list)
    """First and last of layers that must have one width."""

    def add(self, maker: int, taker: int, name: str, size: int) -> None:
        if maker != taker:
            self.edges.setdefault((maker, taker), {})[name] = size


def _of_profile(profile: Profile) -> _Graph:
    place = {layer.name: index for index, layer in enumerate(profile.layers)}
    parameters = [{x.name: x.parameter_bytes} if x.parameter_bytes else {} for x in profile.layers]
    graph = _Graph(len(profile.layers), parameters=parameters)
    taken = set()
    for index, layer in enumerate(profile.layers):
        for name in layer.inputs:
            if name in place:
                graph.add(place[name], index, name, profile.layers[place[name]].output_bytes_per_sample)
                taken.add(name)
    for index, layer in enumerate(profile.layers):
        if layer.name not in taken:
            graph.add(index, len(profile.layers) - 1, layer.name, layer.output_bytes_per_sample)
    return graph


def _of_layer_graph(source: LayerGraph) -> _Graph:
    maker = {value.name: (index, value) for index, layer in enumerate(source.layers) for value in layer.outputs}
    graph = _Graph(len(source.layers), parameters=[dict(layer.parameters) for layer in source.layers])
    last = len(source.layers) - 1
    taking = [(index, name) for index, layer in enumerate(source.layers) for name in layer.inputs]
    for index, name in [*taking, *((last, name) for name in source.outputs)]:
        if name in maker:
            made, value = maker[name]
            graph.add(made, index, name, value.bytes_per_sample)
            if value.sample_dim is None:
                graph.together.append((made, index))
    first: dict[str, int] = {}
    for index, layer in enumerate(source.layers):
        graph.together += [(first.setdefault(name, index), index) for name in layer.parameters]
    return graph


def _own_parameters(graph: _Graph) -> tuple[int, ...]:
    seen: set[str] = set()
    found = []
    for parameters in graph.parameters:
        found.append(sum(size for name, size in parameters.items() if name not in seen))
        seen.update(parameters)
    return tuple(found)


def _stages(graph: _Graph) -> list[tuple[int, ...]]:
    """Layers, those that must stay together with all between them as one."""
    reach = list(range(graph.num_layers))
    for first, last in graph.together:
        reach[first] = max(reach[first], last)
    stages: list[tuple[int, ...]] = []
    start = 0
    while start < graph.num_layers:
        stop = start
        place = start
        while place <= stop:
            stop = max(stop, reach[place])
            place += 1
        stages.append(tuple(range(start, stop + 1)))
        start = stop + 1
    return stages


def _stage_edges(graph: _Graph, stages: Sequence[tuple[int, ...]]) -> dict[tuple[int, int], dict[str, int]]:
    """Between stages; a stage nobody feeds takes nothing from the one before it (a model's input)."""
    of = {layer: index for index, layers in enumerate(stages) for layer in layers}
    edges: dict[tuple[int, int], dict[str, int]] = {}
    for (a, b), values in graph.edges.items():
        if of[a] != of[b]:
            edges.setdefault((of[a], of[b]), {}).update(values)
    fed = {b for _, b in edges}
    for stage in range(1, len(stages)):
        if stage not in fed:
            edges[0, stage] = {}
    return edges


class _Decomposition:
    """Cuts the stages where everything passes through one of them; what lies between is branches."""

    def __init__(
        self, stages: Sequence[tuple[int, ...]], sizes: dict[tuple[int, int], int], outs: Sequence[int]
    ) -> None:
        self.stages, self.sizes, self.outs = stages, sizes, outs
        self.takers: list[list[int]] = [[] for _ in stages]
        for a, b in sizes:
            self.takers[a].append(b)

    def whole(self) -> Row:
        """All stages."""
        first, last = 0, len(self.stages) - 1
        if first == last:
            return (self._stage(first),)
        return (self._stage(first), *self._between(first, list(range(1, last)), last), self._stage(last))

    def _stage(self, index: int) -> Stage:
        return Stage(layers=self.stages[index], bytes_per_sample=self.outs[index])

    def _between(self, entry: int, inner: list[int], leave: int, *, in_branch: bool = False) -> Row:
        """The row from one stage to another, both left out; in a branch, a shortcut beside it is not part of it."""
        found: list[Stage | Fork] = []
        points = [entry, *self._cuts(entry, inner, leave, in_branch=in_branch), leave]
        start = 0
        for a, b in pairwise(points):
            stop = inner.index(b, start) if b != leave else len(inner)
            part = inner[start:stop]
            if part:
                found += self._fork(a, part, b)
            if b != leave:
                found.append(self._stage(b))
            start = stop + 1
        return tuple(found)

    def _cuts(self, entry: int, inner: Sequence[int], leave: int, *, in_branch: bool) -> list[int]:
        """Stages over which no value jumps."""
        here = {*inner, leave}
        first = set(inner) if in_branch else here
        reach = max((b for b in self.takers[entry] if b in first), default=entry)
        cuts = []
        for index in inner:
            if reach <= index:
                cuts.append(index)
            reach = max([reach, *(b for b in self.takers[index] if b in here)])
        return cuts

    def _fork(self, entry: int, inner: list[int], leave: int) -> Row:
        branches: list[Row] = []
        for part in self._components(inner):
            if len(part) > 1 and not self._cuts(entry, part, leave, in_branch=True):
                layers = tuple(layer for index in part for layer in self.stages[index])
                size = sum(self.sizes.get((index, leave), 0) for index in part)
                branches.append((Stage(layers=layers, bytes_per_sample=size),))
            else:
                branches.append(self._between(entry, part, leave, in_branch=True))
        shortcut = self.sizes.get((entry, leave))
        if shortcut is not None:
            branches.append(())
        if len(branches) == 1:
            return branches[0]
        port = Stage(bytes_per_sample=self.outs[entry])
        return (port, Fork(branches=tuple(branches), shortcut_bytes=shortcut or 0))

    def _components(self, inner: Sequence[int]) -> list[list[int]]:
        """Stages that hang together, in the model's order."""
        here = set(inner)
        root = {index: index for index in inner}

        def find(index: int) -> int:
            while root[index] != index:
                index = root[index]
            return index

        for index in inner:
            for taker in self.takers[index]:
                if taker in here:
                    a, b = sorted((find(index), find(taker)))
                    root[b] = a
        found: dict[int, list[int]] = {}
        for index in inner:
            found.setdefault(find(index), []).append(index)
        return list(found.values())
