"""A recording that fails tells why; on a device that refuses everything, which takes no GPU to show."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burstpool.model import recording


def test_the_first_error_of_a_recording_is_told_even_where_nothing_can_be_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams: list[str] = []

    @contextlib.contextmanager
    def refusing(graph: Any, **_: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    def no_memory(generators: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "mine")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "graph", refusing)
    monkeypatch.setattr(recording, "release", no_memory)
    with pytest.raises(ValueError, match="of the loss"), recording.recording(None):  # type: ignore[arg-type]
        raise ValueError("of the loss")
    assert streams == ["mine"]
