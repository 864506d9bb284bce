"""Checkpoints are copies: neither what was saved nor what was loaded changes with the training that goes on."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fusion_alone import built
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from burstpool.errors import FusionError
from burstpool.fusion import FusedArray, fuse

optim, schedules = torch.optim, torch.optim.lr_scheduler
X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(4, 6)

OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"momentum": [0.9, 0.8, 0.5]}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"maximize": [True, False, False]}),
    (optim.Adadelta, {}),
    (optim.SGD, {"nesterov": [True, False, True], "momentum": 0.9}),
    (optim.Adam, {"amsgrad": [True, False, True]}),
    (optim.NAdam, {}),
    (optim.NAdam, {"lr": torch.tensor(0.01)}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 1}),
    (optim.Rprop, {}),
    (optim.Adafactor, {}),
]
named = pytest.mark.parametrize(("factory", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", str(v)))


def model(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.2))


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


def ready(factory: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> FusedArray:
    array = fuse(built(model, 3), X)
    array.optimizer(factory, **{"lr": [0.1, 0.01, 0.02], **options})
    array.scheduler(schedules.MultiStepLR, milestones=[[1, 3], [2], [2, 4]], gamma=0.5)
    array.scheduler(schedules.ReduceLROnPlateau, patience=1)
    array.loss_scaler(init_scale=8.0, growth_interval=2)
    return array


def train(array: FusedArray, steps: int = 2) -> list[list[float]]:
    found = []
    scaler, (by_step, by_loss) = array.scalers[0], array.schedulers
    for _ in range(steps):
        losses = array.losses(X, squared)
        scaler.scale(losses).sum().backward()
        scaler.step(array.optimizers[0])
        scaler.update()
        array.optimizers[0].zero_grad()
        by_step.step()
        by_loss.step(losses)
        found.append(losses.tolist())
    return found


def everything(array: FusedArray) -> list[Any]:
    """All that can be saved of an array."""
    each = range(len(array))
    return [
        array.state_dict(),
        *[array.member(index).checkpoint() for index in each],
        *[array.member(index).state_dict() for index in each],
        *[optimizer.member_state_dict(index) for optimizer in array.optimizers for index in each],
    ]


def assert_same(mine: Any, theirs: Any) -> None:
    mine_leaves, mine_spec = pytree.tree_flatten(mine)
    their_leaves, their_spec = pytree.tree_flatten(theirs)
    assert mine_spec == their_spec
    for a, b in zip(mine_leaves, their_leaves, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@named
def test_what_was_saved_does_not_change_with_training(factory: Any, options: dict[str, Any]) -> None:
    array = ready(factory, options)
    train(array)
    array.stop(2)
    saved = everything(array)
    at_once = copy.deepcopy(saved)
    train(array)
    assert_same(saved, at_once)


@named
def test_what_was_loaded_is_not_kept_and_goes_on_bit_exact(factory: Any, options: dict[str, Any]) -> None:
    array = ready(factory, options)
    train(array)
    array.stop(2)
    saved = array.state_dict()
    at_once = copy.deepcopy(saved)
    expected = train(array)
    other = ready(factory, options)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), at_once)
    for leaf in pytree.tree_leaves(saved):
        if isinstance(leaf, Tensor):
            leaf.zero_()
    assert_same(other.state_dict(), at_once)
    assert train(other) == expected
    assert_same(other.state_dict(), array.state_dict())


@named
def test_a_resumed_member_keeps_nothing_of_its_checkpoint(factory: Any, options: dict[str, Any]) -> None:
    array = ready(factory, options)
    train(array)
    saved = array.member(1).checkpoint()
    at_once = copy.deepcopy(saved)
    other = ready(factory, options)
    other.resume_member(0, saved)
    assert_same(other.member(0).checkpoint(), at_once)
    train(other)
    assert_same(saved, at_once)


@pytest.mark.parametrize("rate", [torch.tensor(0.5), [torch.tensor(0.5)] * 3], ids=["one", "the same in a list"])
@pytest.mark.parametrize("factory", [optim.Adam, optim.NAdam])
def test_a_rate_that_is_one_tensor_is_scheduled_for_each_member_apart(factory: Any, rate: Any) -> None:
    array = fuse(built(model, 3), X)
    array.optimizer(factory, lr=rate)
    schedule = array.scheduler(schedules.ExponentialLR, gamma=[0.5, 1.0, 0.25])
    schedule.step()
    assert schedule.get_last_lr() == [0.25, 0.5, 0.125]


def test_a_schedule_of_another_size_is_refused() -> None:
    array = ready(optim.SGD, {})
    saved = array.schedulers[0].state_dict()
    array.drop(0)
    with pytest.raises(FusionError, match="saved with 3 members; this one has 2"):
        array.schedulers[0].load_state_dict(saved)


def test_a_checkpoint_of_other_shapes_or_another_optimizer_is_refused() -> None:
    """A row would be spread over a matrix without a word, a momentum be lost."""
    narrow, wide = (fuse(built(lambda seed, n=n: nn.Linear(6, n), 2), X) for n in (1, 3))  # type: ignore[misc]
    with pytest.raises(FusionError, match=r"'weight' for member 0 has shape \[1, 6\]; it must have \[3, 6\]"):
        wide.load_state_dict(narrow.state_dict())
    adam, sgd = (fuse(built(model, 2), X) for _ in range(2))
    adam.optimizer(optim.Adam), sgd.optimizer(optim.SGD)
    for one in (
        lambda: sgd.load_state_dict(adam.state_dict()),
        lambda: sgd.resume_member(0, adam.member(0).checkpoint()),
    ):
        before = sgd.state_dict()["members"]
        with pytest.raises(FusionError, match="checkpoint is of Adam, the array has SGD"):
            one()
        torch.testing.assert_close(sgd.state_dict()["members"], before, rtol=0, atol=0)
    with pytest.raises(FusionError, match="not one of SGD: it has no 'dampening'"):
        sgd.optimizers[0].load_member_state_dict(0, adam.optimizers[0].member_state_dict(0))


def test_numbers_may_be_numpys_and_are_saved_as_pythons() -> None:
    array = fuse(built(model, 3), X, seeds=np.array([4, 5, 6]))  # type: ignore[arg-type]
    options = {"lr": np.logspace(-3, -1, 3), "betas": [(np.float64(0.9), 0.99)] * 3, "eps": np.float32(0.5)}
    optimizer = array.optimizer(optim.Adam, **options)
    array.scheduler(schedules.ExponentialLR, gamma=list(np.linspace(0.5, 0.9, 3)))
    array.drop(np.int64(0))  # type: ignore[arg-type]
    array.admit(built(model, 1)[0], lr=np.float32(0.25))
    array.losses(X, squared).sum().backward()
    optimizer.step()
    array.schedulers[0].step()
    file = io.BytesIO()
    torch.save({"whole": array.state_dict(), "one": array.member(0).checkpoint()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert optimizer.lr == pytest.approx([0.01 * 0.7, 0.1 * 0.9, 0.25 * 0.7])
    array.load_state_dict(saved["whole"])
    array.resume_member(0, saved["one"])
