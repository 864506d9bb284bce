"""Recorded graphs: their nodes in a row, and what a failed recording leaves behind."""

import gc
from itertools import pairwise

import pytest
import torch

from burstpool.model.cuda_driver import Handle
from burstpool.model.graph_nodes import edges, ordered_nodes, put_in_a_row
from burstpool.model.recording import recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_graph_with_branches_does_the_same_in_a_row() -> None:
    x = torch.arange(8.0, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    sides = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
    with recording(graph):
        main, parts = torch.cuda.current_stream(), []
        for factor, side in enumerate(sides, start=1):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                parts.append(x * factor + factor)
        for side in sides:
            main.wait_stream(side)
        found = sum(parts, torch.zeros(8, device="cuda"))
    raw = Handle(graph.raw_cuda_graph())
    nodes = ordered_nodes(raw)
    row = {(before.value, after.value, 0) for before, after in pairwise(nodes)}
    assert set(edges(raw)) != row
    put_in_a_row(raw, nodes)
    assert set(edges(raw)) == row
    graph.instantiate()
    x.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, 6 * (torch.arange(8.0, device="cuda") + 2))


def test_after_a_failed_recording_the_allocator_gives_its_memory_back() -> None:
    def fails() -> None:
        large = torch.ones(64 << 20, device="cuda")
        large.sum().item()  # which no graph can hold

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError), recording(graph):
        fails()
    cached = torch.ones(64 << 20, device="cuda")
    del cached, graph
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)
    assert torch.rand(3, device="cuda").isfinite().all()
