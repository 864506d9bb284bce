"""What all tests share: one thread, so that they do not fight over cores, and a cache of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shared_data() -> Path:
    """Public measurements beside the project; tests that need them skip where they are not."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no public measurements in {folder}")
    return folder
