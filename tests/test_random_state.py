"""Random state: kept where it is used. GPUs that nobody uses are left alone: jobs on CPUs make no context on them."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from burstpool import trace
from burstpool.job import Job, load_job
from burstpool.model.modules import trace_modules
from burstpool.model.traced import TracedModel
from burstpool.random_state import random_state_kept, seed_all
from burstpool.run import checkpoint
from burstpool.run.checkpoint import CheckpointState, save_checkpoint
from burstpool.run.order import Position
from burstpool.share.gpu.loop import alone_in_a_group


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """There seems to be one; who wants a context on it is noted, and fails as on a GPU that is full."""
    wanted: list[str] = []

    def init() -> None:
        wanted.append("a context")
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_lazy_init", init)
    return wanted


@pytest.mark.parametrize("way", [trace, lambda model, example: trace_modules(model, (example,), {})])
def test_building_and_tracing_a_model_leave_a_full_gpu_alone(
    way: Callable[[torch.nn.Module, torch.Tensor], TracedModel], a_gpu: list[str]
) -> None:
    job = load_job("zoo:tiny_vgg")
    assert way(job.build_model(), job.samples(4)[0]).graph.layers
    assert a_gpu == []


def test_a_checkpoint_of_tensors_on_the_cpu_leaves_a_full_gpu_alone(tmp_path: Path, a_gpu: list[str]) -> None:
    saved = _save(tmp_path, torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]
    assert a_gpu == []


class _OnGpu(torch.Tensor):
    is_cuda = True


def test_tensors_on_a_gpu_are_copied_ahead_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(checkpoint, "FileSystemWriter", lambda path, **options: given.append(options))
    monkeypatch.setattr(checkpoint, "save", lambda *whole, **options: None)
    _save(tmp_path / "cpu", torch.ones(3))
    _save(tmp_path / "gpu", torch.ones(3).as_subclass(_OnGpu))
    assert [bool(options["per_thread_copy_ahead"]) for options in given] == [False, True]


def _save(folder: Path, tensor: torch.Tensor) -> Path:
    nothing: Any = SimpleNamespace(optimizer=None, scheduler=None, parameters={})
    state = CheckpointState(model="Linear", step=1, position=Position(), seed=0)
    with alone_in_a_group() as control:
        return save_checkpoint(folder, state, tensors={"w": tensor}, update=nothing, control=control, keep=2)


def test_what_is_drawn_afterwards_is_what_it_would_have_been() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with random_state_kept():
        seed_all(1)
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)


class _Generator:
    """A GPU's."""

    def __init__(self) -> None:
        self.seed, self.drawn = 0, 0

    def initial_seed(self) -> int:
        return self.seed

    def manual_seed(self, seed: int) -> None:
        self.seed, self.drawn = seed, 0


class _Unused:
    """A GPU that nobody has used yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generator, self.in_use = _Generator(), False
        self.generator.manual_seed(99)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.in_use)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # whose state `fork_rng` would ask for
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.generator.manual_seed)

    def draw(self) -> None:
        self.in_use = True
        self.generator.drawn += 1


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> _Unused:
    return _Unused(monkeypatch)


def test_a_model_that_builds_on_a_gpu_has_the_weights_of_its_seed_the_first_time_too(unused: _Unused) -> None:
    """Nothing was seeded there before: it is built again, and the GPU's own numbers begin where they would have."""
    built: list[int] = []

    def model() -> torch.nn.Module:
        unused.draw()
        built.append(unused.generator.seed)
        return torch.nn.Linear(2, 2)

    job = Job(model=model, loss=torch.nn.functional.mse_loss, data=[], optimizer=torch.optim.SGD, seed=3)
    job.build_model()
    assert built == [99, 3]
    job.build_model()
    assert built[2:] == [3]


def test_a_gpu_that_a_failing_model_began_to_use_draws_what_it_would_have(unused: _Unused) -> None:
    @random_state_kept()
    def build() -> None:
        unused.draw()
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        build()
    assert (unused.generator.seed, unused.generator.drawn) == (99, 0)


def test_a_model_that_is_built_again_is_never_there_twice(unused: _Unused) -> None:
    """One of more than half of a GPU would else run out of its memory."""
    there: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def model() -> torch.nn.Module:
        unused.draw()
        assert not there
        there.add(made := torch.nn.Linear(2, 2))
        return made

    Job(model=model, loss=torch.nn.functional.mse_loss, data=[], optimizer=torch.optim.SGD).build_model()
