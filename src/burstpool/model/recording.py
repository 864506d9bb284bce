"""Recording a CUDA graph, and what to mend where it cannot be recorded.

`torch.cuda.graph` leaves two things behind when the recorded code does what a graph cannot hold: the stream of the
recording stays the current one, and random generators refuse to draw, as they believe in a recording that goes on.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def recording(
    graph: torch.cuda.CUDAGraph,
    *,
    generators: Sequence[torch.Generator] = (),
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
) -> Iterator[None]:
    """Records what runs inside, instead of running it; draws from torch's own generator and `generators`.

    Other threads, a loader's or a communication library's, may use the device meanwhile. Where it fails, the first
    error is raised and everything but the graph can be used again.
    """
    for generator in generators:
        graph.register_generator_state(generator)
    before, first = torch.cuda.current_stream(), None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except BaseException as error:
                first = error
                raise
    except BaseException as error:
        torch.cuda.set_stream(before)
        with contextlib.suppress(RuntimeError):  # where memory is missing for this, too, the first error says so
            release(generators)
        raise first or error from None
    finally:
        first = None  # it holds this frame, and all that the recorded code had made


def release(generators: Sequence[torch.Generator]) -> None:
    """Lets generators draw again after a recording failed: one that succeeds ends what they believe to go on."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
