"""Cutting a captured CUDA graph into pieces that are launched one by one.

Takes a torch.cuda.CUDAGraph that was captured with `keep_graph=True` and not replayed yet. The nodes are put in an
order in which they could run one after the other, made to run so, and cut into consecutive runs; each run becomes a
graph of its own with the same kernels on the same memory. Launched in order on one stream, the pieces do what the whole
would: what a node needs comes before it, in its own piece or in an earlier one.

No piece has branches, also where the captured step has some, as cuDNN makes them for the groups of a convolution. The
driver gives branches hardware queues, of which there are few; such a piece may stand in the foreground's queue, behind
steps that are yet to run.

The first piece is launched by torch, which also moves the random streams on as a replay of the whole would.
"""

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from burstpool.errors import CaptureError
from burstpool.model.cuda_driver import Handle, call
from burstpool.model.graph_nodes import ordered_nodes, put_in_a_row

Piece = Callable[[], object]
"""Launches it on the current stream."""

_SHORTEST_S, _LONGEST_S = 1e-4, 3e-4
"""Of pieces: worth a launch, and short beside any step worth sharing."""
_IN_A_STEP, _IN_A_GAP = 20, 4
"""Pieces that a step of the foreground, and one of its gaps, are as long as: fewer, and steps differ by a piece more or
less, which the tail pays for, or much of a gap is too short for the next piece."""
_MOST_PROBES = 200
"""Pieces that are timed to see where to cut."""


def piece_length_s(step_s: float, gaps_s: Sequence[float] = ()) -> float:
    """How long background pieces are to be beside a foreground of such steps, with such gaps in each. Pure.

    Of the gaps the one counts below which half of their time lies. A step that was never timed is not a number.
    """
    wanted_s = step_s / _IN_A_STEP if math.isfinite(step_s) else _LONGEST_S
    shorter_s = 0.0
    for gap_s in sorted(gaps_s):
        shorter_s += gap_s
        if shorter_s >= sum(gaps_s) / 2:
            wanted_s = min(wanted_s, gap_s / _IN_A_GAP)
            break
    return min(max(wanted_s, _SHORTEST_S), _LONGEST_S)


def cut_after(times_s: Sequence[float], target_s: float) -> list[int]:
    """Where to end pieces, in places of `times_s`, so that each is about `target_s` long. Pure.

    A piece ends where its length is nearest to the target; what is longer by itself stays whole.
    """
    ends, length_s = [], 0.0
    for place, time_s in enumerate(times_s):
        if length_s and abs(length_s + time_s - target_s) > abs(length_s - target_s):
            ends.append(place - 1)
            length_s = 0.0
        length_s += time_s
    return ends


def parts_of(whole_s: float, times_s: Sequence[float]) -> list[float]:
    """Stretches' times within the whole. Pure. Launched on its own, each takes as much more as any other."""
    launch_s = max(0.0, sum(times_s) - whole_s) / len(times_s)
    parts_s = [max(0.0, time_s - launch_s) for time_s in times_s]
    return [part_s * whole_s / sum(parts_s) for part_s in parts_s] if any(parts_s) else list(times_s)


def looked_into(bounds: Sequence[int], times_s: Sequence[float], longest_s: float) -> list[int]:
    """Bounds that also part each node of the stretches that take longer: the large kernels of an update, say. Pure."""
    found = [bounds[0]]
    for (start, stop), time_s in zip(pairwise(bounds), times_s, strict=True):
        found += range(start + 1, stop + 1) if time_s > longest_s else [stop]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Where a graph was cut."""

    num_nodes: int
    ends: tuple[int, ...]
    """After so many nodes, in the order in which they run."""


class CutGraph:
    """A captured graph as pieces. Owns what it launches: keep it as long as its pieces are used."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        target_s: float,
        timed: Callable[[Sequence[Piece]], list[float]],
        cuts: "Cuts | None" = None,
    ) -> None:
        """Pieces of about `target_s`; `timed` replays some pieces and says how long each took.

        `cuts` are those of an earlier capture of the same step: nothing is replayed then. Raises CaptureError where
        this one has another number of nodes.
        """
        self._graph = graph
        self._executables: list[Handle] = []
        raw = Handle(graph.raw_cuda_graph())
        self.pieces: list[Piece] = []
        nodes = ordered_nodes(raw) if math.isfinite(target_s) else []
        self.whole: list[Piece] = self._made(raw, nodes, [0, len(nodes)]) if nodes and cuts is None else []
        """The graph as it was captured, to be timed; it moves no random stream. Empty where it is not to be cut."""
        if nodes:
            put_in_a_row(raw, nodes)
        ends: list[int] = []
        if cuts is not None:
            if len(nodes) != cuts.num_nodes:
                raise CaptureError(f"the step has {len(nodes)} nodes now and had {cuts.num_nodes}")
            ends = list(cuts.ends)
        elif len(nodes) > 1:
            bounds = [*range(0, len(nodes), max(len(nodes) // _MOST_PROBES, 1)), len(nodes)]
            (whole_s,) = self._timed(raw, nodes, [0, len(nodes)], timed)
            times_s = parts_of(whole_s, self._timed(raw, nodes, bounds, timed))
            if (finer := looked_into(bounds, times_s, target_s / 2)) != bounds:
                bounds, times_s = finer, parts_of(whole_s, self._timed(raw, nodes, finer, timed))
            ends = [bounds[place + 1] for place in cut_after(times_s, target_s)]
        self.cuts = Cuts(num_nodes=len(nodes), ends=tuple(ends))
        """Where it was cut."""
        rest = self._made(raw, nodes, [*ends, len(nodes)]) if ends else []
        for node in nodes[ends[0] :] if ends else ():
            call("cuGraphDestroyNode", node)
        graph.instantiate()
        self.pieces = [graph.replay, *rest]

    def forget_whole(self) -> None:
        """It has been timed."""
        if self.whole:
            call("cuGraphExecDestroy", self._executables.pop(0))
            self.whole = []

    def __del__(self) -> None:
        self._free()

    def _timed(
        self,
        graph: Handle,
        nodes: Sequence[Handle],
        bounds: Sequence[int],
        timed: Callable[[Sequence[Piece]], list[float]],
    ) -> list[float]:
        """Seconds of the stretches between neighbouring bounds."""
        kept = len(self._executables)
        times_s = timed(self._made(graph, nodes, bounds))
        self._free(kept)
        return times_s

    def _made(self, graph: Handle, nodes: Sequence[Handle], bounds: Sequence[int]) -> list[Piece]:
        """Pieces of the nodes between neighbouring bounds; halves again and again, so that copying stays cheap."""
        if len(bounds) == 2:
            executable = Handle()
            own, _ = _copied(graph, nodes, bounds[0], bounds[1])
            call("cuGraphInstantiateWithFlags", ctypes.byref(executable), own, ctypes.c_ulonglong(0))
            call("cuGraphDestroy", own)
            self._executables.append(executable)
            return [functools.partial(_launch, executable)]
        middle = len(bounds) // 2
        pieces = []
        for part in (bounds[: middle + 1], bounds[middle:]):
            own, kept = _copied(graph, nodes, part[0], part[-1])
            pieces += self._made(own, kept, [bound - part[0] for bound in part])
            call("cuGraphDestroy", own)
        return pieces

    def _free(self, kept: int = 0) -> None:
        """All but the first so many."""
        while len(self._executables) > kept:
            call("cuGraphExecDestroy", self._executables.pop())


def _copied(graph: Handle, nodes: Sequence[Handle], start: int, stop: int) -> tuple[Handle, list[Handle]]:
    """A copy of the graph with the nodes from `start` to `stop` only, and these in order."""
    copy = Handle()
    call("cuGraphClone", ctypes.byref(copy), graph)
    kept = []
    for place, node in enumerate(nodes):
        twin = Handle()
        call("cuGraphNodeFindInClone", ctypes.byref(twin), node, copy)
        if start <= place < stop:
            kept.append(twin)
        else:
            call("cuGraphDestroyNode", twin)
    return copy, kept


def _launch(executable: Handle) -> None:
    call("cuGraphLaunch", executable, Handle(torch.cuda.current_stream().cuda_stream))
