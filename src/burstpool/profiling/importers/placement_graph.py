"""Reader of the training graphs of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS'20).

A graph has forward and backward nodes, paired by `colorClass`, and edges. Returns a Profile with a layer a
forward node: `fpgaLatency` (ms, of an arbitrary accelerator) of the pair as its times, the forward edges as
its inputs.

The traps: an edge's `cost` is its `size`/2^31, whatever the unit, and is ignored; backward edges keep the
forward direction, so only forward edges are read; a node's `size` is its parameters and its output
together, so the parameters are what its outgoing edges leave of it.

The layer graphs are PipeDream's profiles (msr-fiddle/pipedream, `profiler/*/profiles/*/graph.txt`: the same
nodes, the same times), which is where KNOWN has their minibatch from. Of an unknown graph the whole
minibatch is one unit: batch 1 is one minibatch. Times are as recorded, also where they look booked on a
neighbour.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import pydantic

from burstpool.artifact import first_line
from burstpool.errors import ProfileError
from burstpool.profiling.importers.plain import read_text
from burstpool.profiling.profile import LayerProfile, Profile

NODES = re.compile(r'^\s*\{.*"nodes"\s*:\s*\[', re.DOTALL)
"""How a placement graph, and no profile, begins."""
GRAPH_INPUT = "input"
"""What nodes without a predecessor take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a graph's file does not say, from PipeDream's profile of the same model."""

    model: str
    batch: int
    """Samples in the minibatch that was measured."""
    parameter_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of last nodes, whose parameters cannot be told from their output."""
    remark: str = ""
    """What to know about the recorded times."""


KNOWN = {
    (326, 363): Known(
        model="inception_v3",
        batch=128,  # its input is 128 × 3 × 299 × 299 × 4 bytes
        parameter_bytes={"node326": 8_196_000},
        remark="node1 is the input and its 21.7 ms are data loading; node239 (the auxiliary classifier) has "
        "an edge to node258 that the model has not",
    ),
    (96, 122): Known(
        model="gnmt",
        batch=128,  # its hidden states are 128 × 1024 × 4 bytes; 25 words a sentence
        parameter_bytes={"node96": 132_512_000},
        remark="the backward of the bidirectional LSTM (node5) is booked on the embedding before it (node4)",
    ),
}
"""(forward nodes, forward edges) → the model."""


class _Node(pydantic.BaseModel):
    id: int
    name: str = ""
    fpgaLatency: float = pydantic.Field(ge=0, allow_inf_nan=False)  # noqa: N815 (the file's names)
    isBackwardNode: bool  # noqa: N815
    colorClass: int | None = None  # noqa: N815
    size: float = pydantic.Field(ge=0, allow_inf_nan=False)
    supportedOnFpga: bool = True  # noqa: N815


class _Edge(pydantic.BaseModel):
    sourceId: int  # noqa: N815
    destId: int  # noqa: N815
    size: float = pydantic.Field(ge=0, allow_inf_nan=False)


class _Graph(pydantic.BaseModel):
    nodes: list[_Node]
    edges: list[_Edge]
    maxSizePerFPGA: float = 0.0  # noqa: N815


def recognises(text: str) -> bool:
    """Whether it is a JSON object with nodes."""
    return NODES.search(text) is not None


def read(path: Path) -> Profile:
    """The profile in the file."""
    graph = _parse(path)
    pairs = _pairs(graph, path)
    edges = [edge for edge in graph.edges if edge.sourceId in pairs and edge.destId in pairs]
    known = KNOWN.get((len(pairs), len(edges)), Known(model=path.stem, batch=1))
    outputs = _output_bytes(edges, path)
    layers = []
    for node in _sorted_nodes(pairs, edges, path):
        inputs = [_name(pairs[edge.sourceId][0]) for edge in edges if edge.destId == node]
        layers.append(_layer(*pairs[node], inputs=inputs, output_bytes=outputs.get(node), known=known, path=path))
    unit = f"measured at batch {known.batch}" if known.batch > 1 else "batch 1 is one minibatch of unknown size"
    device = "V100"  # not recorded; the graphs' memory limit is 16 GiB, and PipeDream ran on V100s
    source = f"msr-fiddle/dnn-partitioning's {path.name}: {unit}; the device is not recorded, taken for a {device}"
    return Profile(
        model=known.model,
        device=device,
        source="; ".join(filter(None, [source, known.remark])),
        layers=tuple(layers),
    )


def _parse(path: Path) -> _Graph:
    try:
        data: Any = json.loads(read_text(path))
        return _Graph.model_validate(data)
    except pydantic.ValidationError as error:
        raise ProfileError(f"{path}: {first_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path} is not whole JSON ({error}); was it cut short?") from None


def _pairs(graph: _Graph, path: Path) -> dict[int, tuple[_Node, _Node]]:
    """Forward node → itself and its backward node."""
    backward: dict[int | None, list[_Node]] = {}
    forward: dict[int | None, list[_Node]] = {}
    for node in graph.nodes:
        (backward if node.isBackwardNode else forward).setdefault(node.colorClass, []).append(node)
        if not node.supportedOnFpga:
            raise ProfileError(f"{path}: node {node.id} does not run on an accelerator and has no time there")
    if not backward:
        raise ProfileError(f"{path} has no backward nodes: an inference graph; use the model's training graph")
    pairs = {}
    for color, nodes in forward.items():
        if color is None or len(nodes) != 1 or len(backward.get(color, ())) != 1:
            raise ProfileError(
                f"{path}: node {nodes[0].id} is not alone in its colorClass {color} with one backward node; "
                "only layer graphs, whose nodes come in such pairs, can be read"
            )
        pairs[nodes[0].id] = (nodes[0], backward[color][0])
    if alone := set(backward) - set(forward):
        raise ProfileError(f"{path}: backward node {backward[min(alone, key=str)][0].id} has no forward node")
    return pairs


def _output_bytes(edges: list[_Edge], path: Path) -> dict[int, float]:
    """Node → bytes of its output, which all its outgoing edges carry."""
    sizes: dict[int, float] = {}
    for edge in edges:
        if sizes.setdefault(edge.sourceId, edge.size) != edge.size:
            raise ProfileError(f"{path}: edges from node {edge.sourceId} carry different sizes; they must agree")
    return sizes


def _sorted_nodes(pairs: Mapping[int, Any], edges: list[_Edge], path: Path) -> list[int]:
    """An order in which they can run; among those that can, the smallest id first."""
    waits_for = {node: sum(edge.destId == node for edge in edges) for node in pairs}
    followers: dict[int, list[int]] = {}
    for edge in edges:
        followers.setdefault(edge.sourceId, []).append(edge.destId)
    ready = [node for node, count in waits_for.items() if count == 0]
    heapify(ready)
    order = []
    while ready:
        order.append(heappop(ready))
        for follower in followers.get(order[-1], ()):
            waits_for[follower] -= 1
            if waits_for[follower] == 0:
                heappush(ready, follower)
    if len(order) < len(pairs):
        raise ProfileError(f"{path}: the forward edges go in a circle through node {min(set(pairs) - set(order))}")
    return order


def _layer(
    forward: _Node,
    backward: _Node,
    *,
    inputs: list[str],
    output_bytes: float | None,
    known: Known,
    path: Path,
) -> LayerProfile:
    name = _name(forward)
    if output_bytes is None:
        output_bytes = forward.size - known.parameter_bytes.get(name, 0)
    if output_bytes > forward.size:
        raise ProfileError(
            f"{path}: node {forward.id} hands on {output_bytes:.0f} bytes but has size {forward.size:.0f}"
        )
    return LayerProfile(
        name=name,
        inputs=tuple(inputs) or (GRAPH_INPUT,),
        parameter_bytes=round(forward.size - output_bytes),
        output_bytes_per_sample=math.ceil(output_bytes / known.batch),
        forward_s={known.batch: forward.fpgaLatency * 1e-3},
        backward_s={known.batch: backward.fpgaLatency * 1e-3},
        kind="" if inputs else "input",
    )


def _name(node: _Node) -> str:
    return node.name or f"node{node.id}"
