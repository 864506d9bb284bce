"""Timing of a function on a device: as it is called, or recorded as a CUDA graph and replayed.

Recorded is what a recorded step will see: without the time to start each operator, which on a GPU hides all else where
operators are small. What cannot be recorded takes infinitely long, so that it is not chosen; what found no memory takes
`NO_MEMORY_S`, which says nothing of another time.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from burstpool.errors import CaptureError
from burstpool.model.cuda_driver import Handle
from burstpool.model.graph_nodes import ordered_nodes, put_in_a_row
from burstpool.model.recording import abandon

NO_MEMORY_S = sys.float_info.max
_REPEATS = 5
_REPLAYS, _REPLAYS_S, _MOST_REPLAYS = 6, 0.01, 200
"""At least so many and so long, as what else the machine does for a moment is not to meet them all; at most so many."""
_SLOW_S = 0.02
"""Past this a single call tells enough."""


def timed(function: Callable[[], None], device: torch.device) -> float:
    """Seconds, the smallest of a few: what else the machine does only ever adds."""
    with torch.enable_grad():
        function()
        times = []
        for _ in range(_REPEATS):
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            times.append(time.perf_counter() - start)
    return min(times)


def timed_recorded(
    function: Callable[[], None],
    device: torch.device,
    generators: Sequence[torch.Generator] = (),
    *,
    in_a_row: bool = False,
) -> float:
    """Seconds of a replay; infinite where the function cannot be recorded, NO_MEMORY_S where memory was missing.

    `in_a_row`: with one kernel after the other, also where cuDNN would have some side by side.
    """
    graph, pool = torch.cuda.CUDAGraph(keep_graph=in_a_row), torch.cuda.graph_pool_handle()
    try:
        with torch.enable_grad(), torch.cuda.stream(_side(device)):
            function()
            function()
            for generator in generators:
                graph.register_generator_state(generator)
            with _capturing(graph, pool):
                function()
            if in_a_row:
                raw = Handle(graph.raw_cuda_graph())
                put_in_a_row(raw, ordered_nodes(raw))
                graph.instantiate()
            return replay_times([graph], device)[0]
    except (RuntimeError, CaptureError) as error:  # the code cannot be recorded, or the driver refuses its graph
        abandon(device, pool, generators)
        missing = any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__))
        return NO_MEMORY_S if missing else math.inf


def _side(device: torch.device) -> torch.cuda.Stream:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@contextlib.contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Records on the current stream; without the collection of garbage that torch.cuda.graph begins with."""
    torch.cuda.synchronize()
    _make_room()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    finally:
        graph.capture_end()


def _make_room() -> None:
    """Gives unused memory back where a recording may need it, which can take nothing from another pool itself.

    What the function takes lies unused after it ran, so that as much is enough.
    """
    free, _ = torch.cuda.mem_get_info()
    if free < torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
        torch.cuda.empty_cache()


def replay_times(graphs: Sequence[torch.cuda.CUDAGraph], device: torch.device) -> list[float]:
    """Seconds of a replay of each, the smallest of a few; in turns, so that what else the machine does meets all."""
    turns: list[list[float]] = []
    while len(turns) < _REPLAYS or (sum(map(min, turns)) < _REPLAYS_S and len(turns) < _MOST_REPLAYS):
        turns.append([_replayed(graph, device) for graph in graphs])
        if max(turns[-1]) > _SLOW_S and len(turns) > 1:
            break
    return [min(times) for times in zip(*turns, strict=True)]


def _replayed(graph: torch.cuda.CUDAGraph, device: torch.device) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    took_s: float = start.elapsed_time(end) / 1e3
    return took_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
