"""A recording that fails tells why; on a device that refuses everything, which takes no GPU to show."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burstpool.model import recording


def test_the_first_error_of_a_recording_is_told_even_where_nothing_can_be_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine = SimpleNamespace(device=torch.device("cuda", 1))
    streams: list[Any] = []
    pools: list[Any] = []

    @contextlib.contextmanager
    def refusing(graph: Any, **_: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def no_memory(device: torch.device, pool: Any, generators: Any) -> None:
        pools.append((device, pool))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mine)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "graph", refusing)
    monkeypatch.setattr(recording, "abandon", no_memory)
    with pytest.raises(ValueError, match="of the loss"), recording.recording(None):  # type: ignore[arg-type]
        raise ValueError("of the loss")
    assert streams == [mine]
    assert pools == [(mine.device, (0, 7))]


def test_what_a_failed_recording_was_given_is_let_go_of_where_it_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda *given: ended.append(("end", *given)), raising=False
    )
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: ended.append(("let go", *given)), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    recording.abandon(torch.device("cuda", 1), (0, 7), [])
    assert ended == [("end", 1, (0, 7)), ("let go", 1, (0, 7))]
