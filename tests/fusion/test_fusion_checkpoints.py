"""Checkpoints are copies: neither what was saved nor what was loaded changes with the training that goes on."""

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
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


def trained_with(factory: Callable[..., torch.optim.Optimizer]) -> FusedArray:
    array = ready(factory, {})
    train(array)
    array.stop(2)
    return array


def damages(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Callable[[Any], None]]]:
    """Each part of a checkpoint, and ways to spoil it in a copy: without it, and with another thing in its place."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in entries:
        where = (*path, key)
        if isinstance(tree, dict):
            yield where, lambda whole, where=where: holder(whole, where).pop(where[-1])  # type: ignore[misc]
        if isinstance(tree, dict | list):
            yield where, lambda whole, where=where: holder(whole, where).__setitem__(where[-1], "text")  # type: ignore[misc]
        yield from damages(value, where)


def holder(whole: Any, where: tuple[Any, ...]) -> Any:
    for key in where[:-1]:
        whole = whole[key]
    return whole


# What a schedule of torch's keeps is its own: it takes up whatever it is given.
OF_TORCH = "schedulers"


def refused_of(saved: Any, load: Callable[[Any], None], deepest_schedule: int) -> set[tuple[Any, ...]]:
    """The parts without which, or with a text in their place, a checkpoint is not loaded; the others do no harm."""
    refused = set()
    for where, damage in damages(saved):
        if where[0] == OF_TORCH and len(where) > deepest_schedule:
            continue
        spoilt = copy.deepcopy(saved)
        damage(spoilt)
        with contextlib.suppress(FusionError):  # no other error is one of Burstpool's
            load(spoilt)
            continue
        refused.add(where)
    return refused


@pytest.mark.parametrize("factory", [optim.SGD, optim.Adam, optim.NAdam])
def test_an_array_checkpoint_that_is_cut_short_or_foreign_is_loaded_or_refused(factory: Any) -> None:
    array = trained_with(factory)
    refused = refused_of(array.state_dict(), array.load_state_dict, 3)
    top = {"members", "streams", "active", "frozen", "optimizers", "schedulers", "scalers"}
    assert {(name,) for name in top} <= refused
    assert {("streams", 1), ("frozen", 2), ("scalers", 0, "scale"), ("schedulers", 0, "members")} <= refused


@pytest.mark.parametrize("factory", [optim.SGD, optim.Adam, optim.NAdam])
def test_a_member_checkpoint_that_is_cut_short_or_foreign_is_loaded_or_refused(factory: Any) -> None:
    array = trained_with(factory)
    refused = refused_of(array.member(1).checkpoint(), lambda spoilt: array.resume_member(0, spoilt), 2)
    assert {("state",), ("optimizers",), ("schedulers",), ("stream",), ("optimizers", 0, "state")} <= refused


def test_a_refused_checkpoint_says_what_is_missing_and_what_would_be_right_and_changes_nothing() -> None:
    array = trained_with(optim.SGD)
    saved, before = array.state_dict(), copy.deepcopy(array.state_dict())
    cases = {
        "it has no 'streams'": {key: value for key, value in saved.items() if key != "streams"},
        "it has no 'optimizers'": {key: value for key, value in saved.items() if key != "optimizers"},
        r"its \['streams'\] has 2 entries, not 3": {**saved, "streams": saved["streams"][:2]},
        r"its \['streams'\]\[0\] is no random stream": {**saved, "streams": [torch.zeros(3)] * 3},
        r"its \['active'\] is a list, not a Tensor": {**saved, "active": [True] * 3},
        r"its \['frozen'\]\[7\] is of no member": {**saved, "frozen": {7: {}}},
        r"its \['scalers'\]\[0\] has no 'growth'": {**saved, "scalers": [{"scale": torch.ones(3)}]},
        r"its \['optimizers'\]\[0\] has no 'buckets'": {**saved, "optimizers": [{"state": {}, "param_groups": []}]},
    }
    for message, spoilt in cases.items():
        with pytest.raises(FusionError, match=message) as error:
            array.load_state_dict(spoilt)
        assert "load what array.state_dict() of the same models gave" in str(error.value)
        assert "\n" not in str(error.value)
    assert_same(array.state_dict(), before)
