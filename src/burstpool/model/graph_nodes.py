"""Nodes of a recorded CUDA graph: in which order they could run, and how to have them run so.

Takes the graph's handle, as torch gives it of a graph that was recorded with `keep_graph=True` and not replayed yet.
"""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from burstpool.model.cuda_driver import Handle, call


def sorted_nodes(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """An order in which every node comes after those it needs, otherwise as they were captured. Pure."""
    missing = dict.fromkeys(nodes, 0)
    takers = defaultdict(list)
    for before, after in edges:
        takers[before].append(after)
        missing[after] += 1
    ready = [node for node in reversed(nodes) if not missing[node]]
    order = []
    while ready:
        node = ready.pop()
        order.append(node)
        for taker in reversed(takers[node]):
            missing[taker] -= 1
            if not missing[taker]:
                ready.append(taker)
    return order


def ordered_nodes(graph: Handle) -> list[Handle]:
    """All nodes, in an order in which they could run."""
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    nodes = (Handle * count.value)()
    call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    order = sorted_nodes([node or 0 for node in nodes], [(before, after) for before, after, _ in edges(graph)])
    return [Handle(node) for node in order]


def edges(graph: Handle) -> list[tuple[int, int, int]]:
    """A node, one that waits for it, and in which way: 0 for its end. Two nodes may have several."""
    count = ctypes.c_size_t()
    # The second form of the call: some edges say that a kernel may begin before the one it needs has ended.
    call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
    before, after, how = (Handle * count.value)(), (Handle * count.value)(), (ctypes.c_uint64 * count.value)()
    call("cuGraphGetEdges_v2", graph, before, after, how, ctypes.byref(count))
    return [(a or 0, b or 0, way) for a, b, way in zip(before, after, how, strict=True)]


def put_in_a_row(graph: Handle, nodes: Sequence[Handle]) -> None:
    """Has each node wait for the one before it and for no other. What is such a row already stays as it is."""
    now = edges(graph)
    row = [(before, after, 0) for before, after in pairwise(node.value or 0 for node in nodes)]
    if sorted(edge[:2] for edge in now) == sorted(edge[:2] for edge in row):
        return
    # A row only does what the edges did if every node of it waits for the last one's end.
    for name, wanted in (("cuGraphRemoveDependencies_v2", now), ("cuGraphAddDependencies_v2", row)):
        before, after = (
            (Handle * len(wanted))(*(a for a, _, _ in wanted)),
            (Handle * len(wanted))(*(b for _, b, _ in wanted)),
        )
        ways = (ctypes.c_uint64 * len(wanted))(*(way for _, _, way in wanted))
        call(name, graph, before, after, ways, ctypes.c_size_t(len(wanted)))
