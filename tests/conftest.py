"""What all tests share: one thread, so that they do not fight over cores, a cache of their own, and no luck.

Random numbers are the same at every run, whichever tests ran before in the process: examples of hypothesis, and what
torch, numpy and Python draw. Other examples: `pytest --hypothesis-profile=default --hypothesis-seed=7`.
"""

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, which is no fault of what is tested.
settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def pytest_collection_finish() -> None:
    """What is imported by now stays: tests that have the collector go through everything need not look at that."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _heeds_ctrl_c() -> None:
    """Also where a shell has started the tests in the background, which has them ignore it."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    import torch

    seed = 20_261_117  # unlike those that tests set themselves, lest two draws be the same by accident
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shared_data() -> Path:
    """Public measurements; tests that need them skip where they are not."""
    folder = Path(os.environ.get("BURSTPOOL_PUBLIC_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no public measurements in {folder}; BURSTPOOL_PUBLIC_DATA names another")
    return folder
