"""Recording a CUDA graph, and what to mend where it cannot be recorded.

`torch.cuda.graph` leaves three things behind when the recorded code does what a graph cannot hold: the stream of the
recording stays the current one, and both random generators and the allocator believe in a recording that goes on. The
ones refuse to draw then, the other to give memory back.
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
    pool = pool or torch.cuda.graph_pool_handle()  # a graph does not tell its own after it has failed
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
            abandon((stream or before).device, pool, generators)
        raise first or error from None
    finally:
        first = None  # it holds this frame, and all that the recorded code had made


def abandon(device: torch.device, pool: Any, generators: Sequence[torch.Generator]) -> None:
    """After a recording into a pool failed: the allocator takes back what was for it, and generators draw again."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # a version of torch that has ended it by itself
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    torch.cuda.synchronize()
    # A recording that succeeds ends what generators believe to go on.
    empty = torch.cuda.CUDAGraph()
    for generator in generators:
        empty.register_generator_state(generator)
    with torch.cuda.graph(empty, capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
