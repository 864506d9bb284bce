"""The array's own promises: checkpoints, members that come, go and fail, clipping, loss scales, errors that say why."""

import copy
import dataclasses
import io
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import FusedArray, FusionError, fuse
from burstpool.fusion.group import BackingOff, Groups, array_size, group_jobs, group_models, knee, member_bytes
from burstpool.fusion.loss import member_losses
from burstpool.fusion.rules import RULES
from burstpool.fusion.rules.base import Call, Lowered
from burstpool.fusion.same import same_function
from burstpool.fusion.step import RecordedStep
from burstpool.fusion.verify import verify
from burstpool.job import Job, load_job


class Net(nn.Module):
    """A convolution, batch norm, dropout and a tied pair of weights."""

    def __init__(self, width: int = 4, p: float = 0.2) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(p)
        self.fc, self.again = nn.Linear(width, width), nn.Linear(width, width)
        self.again.weight = self.fc.weight
        self.out = nn.Linear(width, 3)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu().mean((2, 3)) * self.scale
        return self.out(self.drop(self.again(self.fc(x).tanh())))


X = torch.linspace(-1, 1, 4 * 25).view(4, 1, 5, 5)
Y = torch.tensor([0, 2, 1, 1])


def nets(count: int = 3, **options: Any) -> list[nn.Module]:
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(Net(**options))
    return models


def trained(array: FusedArray, steps: int, start: int = 0) -> list[list[float]]:
    optimizer = array.optimizers[0]
    found = []
    for step in range(start, start + steps):
        losses = array.losses(X * (1 + 0.1 * step), lambda out: F.cross_entropy(out, Y))
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in array.schedulers:
            scheduler.step()
        found.append(losses.tolist())
    return found


def ready(count: int = 3, **options: Any) -> FusedArray:
    array = fuse(nets(count, **options), X)
    array.optimizer(torch.optim.Adam, lr=[0.01 * (i + 1) for i in range(count)])
    return array


def test_the_issue_s_five_lines_train() -> None:
    array = fuse(nets(), X)
    optimizer = array.optimizer(torch.optim.Adam, lr=[1e-1, 1e-2, 1e-3])
    for _ in range(3):
        losses = array.losses(X, lambda out: F.cross_entropy(out, Y))
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses.shape == (3,)
    assert list(array.member(0).state_dict()) == list(Net().state_dict())
    assert array(X).shape == (3, 4, 3)


def test_member_state_goes_in_and_out_bit_exact() -> None:
    models = nets()
    array = fuse(models, X)
    for index, model in enumerate(models):
        for key, value in array.member(index).state_dict().items():
            assert torch.equal(value, model.state_dict()[key])
    other = nets(4)[3].state_dict()
    array.load_member(1, other)
    assert all(torch.equal(value, other[key]) for key, value in array.member(1).state_dict().items())
    assert torch.equal(array.member(2).state_dict()["fc.weight"], models[2].state_dict()["fc.weight"])


def test_member_module_is_a_plain_module_with_tensors_of_its_own() -> None:
    array = ready()
    trained(array, 2)
    module = array.member(1).module()
    assert type(module) is Net
    assert module.again.weight is module.fc.weight
    module.eval()
    torch.testing.assert_close(module(X), array.eval()(X)[1])
    with torch.no_grad():
        module.fc.weight.zero_()
    assert array.member(1).state_dict()["fc.weight"].abs().sum() > 0


def test_eval_mode_is_captured_when_asked_for_and_training_goes_on() -> None:
    models = nets()
    array = fuse(models, X)
    expected = [copy.deepcopy(model).eval()(X) for model in models]
    torch.testing.assert_close(array.eval()(X), torch.stack(expected))
    assert array.train()(X).shape == (3, 4, 3)


def test_array_resumes_bit_exact_with_optimizer_schedule_and_streams() -> None:
    first = ready()
    first.scheduler(torch.optim.lr_scheduler.StepLR, step_size=[1, 2, 3], gamma=0.5)
    trained(first, 4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    expected = trained(first, 4, start=4)
    second = ready()
    second.scheduler(torch.optim.lr_scheduler.StepLR, step_size=[1, 2, 3], gamma=0.5)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert trained(second, 4, start=4) == expected
    for index in range(3):
        theirs = first.member(index).state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in second.member(index).state_dict().items())


@pytest.mark.parametrize("factory", [torch.optim.Adam, torch.optim.SGD, torch.optim.NAdam])
def test_a_member_moves_to_another_array_and_trains_on(factory: Any) -> None:
    def made(models: list[nn.Module], rates: list[float]) -> FusedArray:
        array = fuse(models, X)
        options = {"momentum": 0.9, "dampening": 0.1} if factory is torch.optim.SGD else {}
        array.optimizer(factory, lr=rates, **options)
        array.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.8)
        return array

    first = made(nets(3), [0.01, 0.02, 0.03])
    trained(first, 3)
    saved = first.member(1).checkpoint()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    second = made(nets(2), [0.5, 0.5])
    second.resume_member(0, torch.load(file, weights_only=True))
    trained(first, 3, start=3), trained(second, 3, start=3)
    theirs = first.member(1).state_dict()
    for key, value in second.member(0).state_dict().items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-7)
    assert second.schedulers[0].get_last_lr()[0] == first.schedulers[0].get_last_lr()[1]


def test_a_member_that_turns_nan_stops_alone_and_the_others_do_not_change_by_one_bit() -> None:
    clean, broken = ready(), ready()
    trained(clean, 2), trained(broken, 2)
    with torch.no_grad():
        broken.state.parameters["fc.weight"][1] = float("nan")
    before = broken.member(1).state_dict()
    mine, theirs = trained(clean, 3, start=2), trained(broken, 3, start=2)
    assert broken.stopped() == [1]
    for a, b in zip(mine, theirs, strict=True):
        assert a[0] == b[0]
        assert a[2] == b[2]
    for index in (0, 2):
        state = clean.member(index).state_dict()
        assert all(torch.equal(value, state[key]) for key, value in broken.member(index).state_dict().items())
    parameters = dict(Net().named_parameters())
    same = [
        torch.equal(broken.member(1).state_dict()[k].nan_to_num(7.0), before[k].nan_to_num(7.0)) for k in parameters
    ]
    assert all(same)


def test_a_stopped_member_keeps_weights_buffers_and_slots_while_others_train_on() -> None:
    array, reference = ready(), ready()
    trained(array, 2), trained(reference, 2)
    array.stop(0)
    state, slots = array.member(0).state_dict(), array.optimizers[0].member_state_dict(0)
    trained(array, 3, start=2), trained(reference, 3, start=2)
    assert array.stopped() == [0]
    assert all(torch.equal(value, state[key]) for key, value in array.member(0).state_dict().items())
    after = array.optimizers[0].member_state_dict(0)
    assert all(torch.equal(after["state"][0][name], slots["state"][0][name]) for name in slots["state"][0])
    theirs = reference.member(1).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in array.member(1).state_dict().items())


def test_a_stopped_member_stays_as_it_is_when_the_array_is_resumed() -> None:
    array, other = ready(), ready()
    trained(array, 2)
    array.stop(0)
    before = array.member(0).checkpoint()
    other.load_state_dict(array.state_dict())
    trained(other, 2, start=2)
    after = other.member(0).checkpoint()
    assert after["active"] is False
    for name, slot in before["optimizers"][0]["state"][0].items():
        assert torch.equal(after["optimizers"][0]["state"][0][name], slot)
    assert all(torch.equal(after["state"][key], value) for key, value in before["state"].items())


@pytest.mark.parametrize("how", ["stopped", "not finite"])
def test_a_member_that_was_saved_in_training_trains_on_where_another_had_stopped(how: str) -> None:
    array, reference = ready(), ready()
    trained(array, 2), trained(reference, 2)
    saved = array.member(1).checkpoint()
    if how == "stopped":
        array.stop(1)
    else:
        array.load_member(1, saved["state"] | {"out.bias": torch.full((3,), torch.nan)})
    trained(array, 1)
    assert array.stopped() == [1]
    array.resume_member(1, saved)
    trained(array, 2, start=2), trained(reference, 2, start=2)
    assert array.stopped() == []
    theirs = reference.member(1).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in array.member(1).state_dict().items())


def test_a_stopped_member_keeps_what_it_is_loaded_with_and_trains_on_from_there_if_started() -> None:
    array = ready()
    trained(array, 2)
    array.stop(1)
    new = nets(5)[4].state_dict()
    new["norm.running_mean"] += 3.0
    array.load_member(1, new)
    trained(array, 1, start=2)
    assert all(torch.equal(value, new[key]) for key, value in array.member(1).state_dict().items())
    array.start(1)
    trained(array, 1, start=3)
    assert array.stopped() == []
    assert not any(
        torch.equal(array.member(1).state_dict()[key], new[key]) for key in ("fc.weight", "norm.running_mean")
    )


def test_a_member_that_pauses_trains_on_as_if_it_had_not() -> None:
    """Its random stream and its schedule stand still, too, also in a checkpoint and where others come and go."""
    array, reference = ready(), ready()
    for one in (array, reference):
        one.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=[0.9, 0.5, 0.8])
    trained(array, 2), trained(reference, 2)
    array.stop(1)
    trained(array, 2, start=7)
    array.drop(0)
    other = ready(2)
    other.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=[0.5, 0.8])
    other.load_state_dict(array.state_dict())
    trained(other, 1, start=9)
    saved = other.member(0).checkpoint()
    other.start(0)
    mine, theirs = trained(other, 2, start=2), trained(reference, 2, start=2)
    torch.testing.assert_close([a[0] for a in mine], [b[1] for b in theirs])
    assert other.schedulers[0].get_last_lr()[0] == reference.schedulers[0].get_last_lr()[1]
    other.resume_member(1, saved)
    assert other.stopped() == [1]
    trained(other, 1, start=9)
    other.start(1)
    torch.testing.assert_close([a[1] for a in trained(other, 2, start=2)], [b[1] for b in theirs])


def test_a_member_at_its_schedules_end_is_stopped_and_the_others_go_on() -> None:
    array = fuse(nets(2), X)
    array.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    schedule = array.scheduler(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=[2, 9])
    schedule.step(), schedule.step()
    with pytest.raises(FusionError, match="schedule of member 0: Tried to step 3 times"):
        schedule.step()
    array.stop(0)
    schedule.step()


def test_a_member_that_turned_nan_trains_on_from_weights_that_are_loaded() -> None:
    """Its optimizer's state is what it was before the loss that was not finite."""
    array, reference = ready(p=0.0), ready(p=0.0)
    trained(array, 2), trained(reference, 2)
    good = array.member(1).state_dict()
    array.load_member(1, good | {"out.bias": torch.full((3,), torch.nan)})
    trained(array, 1)
    assert array.stopped() == [1]
    array.load_member(1, good)
    array.start(1)
    trained(array, 2, start=2), trained(reference, 2, start=2)
    assert array.stopped() == []
    theirs = reference.member(1).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in array.member(1).state_dict().items())


@pytest.mark.parametrize("how", ["drop", "split"])
def test_members_may_leave_between_backward_and_step(how: str) -> None:
    array, reference = ready(p=0.0), ready(p=0.0)
    for one in (array, reference):
        one.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
    rest = array.split([1, 2]) if how == "split" else array
    if how == "drop":
        array.drop(0)
    rest.optimizers[0].step(), reference.optimizers[0].step()
    for index in (1, 2):
        theirs = reference.member(index).state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in rest.member(index - 1).state_dict().items())


def test_a_new_member_does_not_take_the_others_gradients_away() -> None:
    array, reference = ready(p=0.0), ready(p=0.0)
    for one in (array, reference):
        one.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
    array.admit(nets(4, p=0.0)[3])
    array.optimizers[0].step(), reference.optimizers[0].step()
    theirs = reference.member(1).state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in array.member(1).state_dict().items())


def test_one_sample_is_refused_where_batch_norm_would_have_one_value_a_channel() -> None:
    """torch refuses it; the captured operator would write NaN into the running variance."""
    array = fuse([nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2)], torch.ones(4, 3))
    before = array.member(0).state_dict()
    with pytest.raises(FusionError, match="one value a channel in a batch of one sample"):
        array(torch.ones(1, 3))
    torch.testing.assert_close(array.member(0).state_dict(), before)
    assert array.eval()(torch.ones(1, 3)).shape == (2, 1, 4)
    assert ready()(X[:1]).shape == (3, 1, 3), "nine values a channel"


def test_drop_and_split_carry_optimizer_state_and_streams() -> None:
    array, reference = ready(4), ready(4)
    for one in (array, reference):
        one.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=[0.9, 0.8, 0.7, 0.6])
        trained(one, 3)
    half = array.split([1, 3])
    array.drop(0)
    trained(array, 3, start=3), trained(half, 3, start=3), trained(reference, 3, start=3)
    assert (len(array), len(half)) == (1, 2)
    for mine, member in ((array.member(0), 2), (half.member(0), 1), (half.member(1), 3)):
        theirs = reference.member(member).state_dict()
        for key, value in mine.state_dict().items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-5, atol=1e-7)  # other sizes of a product round anew


def test_running_out_of_memory_halves_the_array_and_loses_nothing() -> None:
    array, reference = ready(4), ready(4)
    trained(array, 2), trained(reference, 2)
    backing_off = BackingOff(array)

    def forward_backward(one: FusedArray) -> Tensor:
        losses = one.losses(X, lambda out: F.cross_entropy(out, Y))  # moves buffers and streams before it fails
        if len(one) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        losses.sum().backward()
        return losses.detach()

    found = torch.cat(backing_off.run(forward_backward))
    expected = reference.losses(X, lambda out: F.cross_entropy(out, Y))
    torch.testing.assert_close(found, expected.detach())
    assert [len(one) for one in backing_off.arrays] == [2, 2]
    with pytest.raises(FusionError, match="one member alone does not fit"):
        BackingOff(ready(1)).run(lambda one: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))


def test_gradients_of_earlier_passes_are_not_lost_where_a_later_one_runs_out_of_memory() -> None:
    array, reference = ready(2, p=0.0), ready(2, p=0.0)
    backing_off = BackingOff(array)
    for fits in (2, 1):

        def forward_backward(one: FusedArray, fits: int = fits) -> None:
            one.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
            if len(one) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        backing_off.run(forward_backward)
        reference.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
    assert [len(one) for one in backing_off.arrays] == [1, 1]
    for index, one in enumerate(backing_off.arrays):
        for key, parameter in reference.named_parameters():
            torch.testing.assert_close(one.state.parameters[key].grad[0], parameter.grad[index])  # type: ignore[index]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast_do_so_over_one_members_output_alone() -> None:
    """Three members, batches of three: a target's shape may look like one with the members, or without."""
    for out, own, shared in (
        (torch.randn(3, 3, 4), (torch.randn(3, 4),), ()),
        (torch.randn(3, 4), (), (torch.randn(3, 4),)),
    ):
        expected = [F.mse_loss(out[i], *(o[i] for o in own), *shared) for i in range(3)]
        torch.testing.assert_close(member_losses(F.mse_loss, out, own, shared), torch.stack(expected))


def test_members_may_have_batches_of_their_own() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    inputs, targets = [X, X * 2, X - 1], [Y, (Y + 1) % 3, (Y + 2) % 3]
    losses = array.losses(inputs, F.cross_entropy, targets, per_member=True)
    stacked = array.losses(torch.stack(inputs), F.cross_entropy, torch.stack(targets), per_member=True)
    expected = [F.cross_entropy(model(x), y) for model, x, y in zip(models, inputs, targets, strict=True)]
    torch.testing.assert_close(losses, torch.stack(expected))
    torch.testing.assert_close(stacked, losses)


def test_any_loss_function_of_one_members_output_works() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    outputs = [model(X) for model in models]

    def looping(out: Tensor) -> Tensor:  # vmap cannot follow it
        return out.sum() if out.sum().item() > 0 else -out.sum()

    def weighted(out: Tensor) -> Tensor:
        return F.cross_entropy(out, Y, weight=torch.tensor([1.0, 2.0, 3.0])) + 0.1 * out.square().mean()

    for function in (
        looping,
        weighted,
        lambda out: F.cross_entropy(out, Y, reduction="sum", label_smoothing=0.1, ignore_index=1),
        lambda out: F.mse_loss(out, torch.ones(4, 3)),
        lambda out: F.cross_entropy(out, Y) * 2,
        lambda out: F.nll_loss(out.log_softmax(1), Y),
    ):
        expected = torch.stack([function(out) for out in outputs])
        torch.testing.assert_close(array.losses(X, function), expected)
    with pytest.raises(FusionError, match="must return one number"):
        array.losses(X, lambda out: out.sum(1))


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_torchs_old_words_for_a_reduction_are_known() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(size_average=False)):
        old = {} if isinstance(loss, nn.Module) else {"size_average": False}
        expected = torch.stack([F.cross_entropy(model(X), Y, reduction="sum") for model in models])
        torch.testing.assert_close(array.losses(X, lambda out, loss=loss, old=old: loss(out, Y, **old)), expected)
    with pytest.raises(FusionError, match="must return one number"):
        array.losses(X, lambda out: F.mse_loss(out, torch.ones(4, 3), reduce=False))


def test_two_forward_passes_may_share_one_backward_pass() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    (array.losses(X, F.cross_entropy, Y) + array.losses(X * 2, F.cross_entropy, Y)).sum().backward()
    (F.cross_entropy(models[1](X), Y) + F.cross_entropy(models[1](X * 2), Y)).backward()
    torch.testing.assert_close(array.state.parameters["conv.weight"].grad[1], models[1].conv.weight.grad)  # type: ignore[index]
    assert int(array.member(1).state_dict()["norm.num_batches_tracked"]) == 2


def test_frozen_parameters_stay_and_keep_their_place_in_the_optimizer() -> None:
    models = nets(2)
    for model in models:
        model.conv.weight.requires_grad_(False)
    array = fuse(models, X)
    array.optimizer(torch.optim.Adam, lr=0.1)
    trained(array, 2)
    assert torch.equal(array.member(0).state_dict()["conv.weight"], models[0].conv.weight)
    theirs = torch.optim.Adam(models[0].parameters(), lr=0.1)
    theirs.load_state_dict(array.optimizers[0].member_state_dict(0))
    assert theirs.state[models[0].fc.weight]["exp_avg"].shape == models[0].fc.weight.shape


class Hidden(nn.Module):
    """Keeps a module where torch does not see it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.kept = [nn.Dropout(p)]

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[0](x * self.w)


def test_numbers_in_modules_that_torch_does_not_see_are_found() -> None:
    array = fuse([Hidden(0.0), Hidden(1.0)], torch.ones(2, 3))
    assert array(torch.ones(2, 3))[:, 0, 0].tolist() == [1.0, 0.0]


def test_clipping_is_each_members_own() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    array.losses(X * 50, lambda out: F.cross_entropy(out * 30, Y)).sum().backward()
    unclipped = {name: parameter.grad.clone() for name, parameter in array.named_parameters()}  # type: ignore[union-attr]
    norms = array.clip_grad_norm_([0.01, None, 1e9])
    for index, limit in enumerate((0.01, None, 1e9)):
        F.cross_entropy(models[index](X * 50) * 30, Y).backward()
        expected = torch.nn.utils.clip_grad_norm_(models[index].parameters(), limit or float("inf"))
        torch.testing.assert_close(norms[index], expected, rtol=1e-4, atol=0.0)
        for name, parameter in models[index].named_parameters():
            torch.testing.assert_close(array.state.parameters[name].grad[index], parameter.grad, rtol=2e-3, atol=1e-5)
    assert all(torch.equal(array.state.parameters[n].grad[1], g[1]) for n, g in unclipped.items())


@pytest.mark.parametrize("limits", [[0.01, None, 1e-4], torch.tensor([0.01, torch.inf, 1e-4]), 0.01])
def test_clipping_by_value_is_each_members_own(limits: Any) -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    array.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
    array.clip_grad_value_(limits)
    for index, model in enumerate(models):
        F.cross_entropy(model(X), Y).backward()
        limit = limits if isinstance(limits, float) else limits[index]
        torch.nn.utils.clip_grad_value_(model.parameters(), float("inf") if limit is None else float(limit))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(array.state.parameters[name].grad[index], parameter.grad, rtol=1e-4, atol=1e-6)


def test_an_overflow_skips_one_members_step_and_no_others() -> None:
    array, reference = ready(p=0.0), ready(p=0.0)
    scaler = array.loss_scaler(init_scale=[1024.0, 2.0**120, 512.0], growth_interval=2)
    before = array.member(1).state_dict()
    for step in range(2):
        losses = array.losses(X * (1 + step), lambda out: F.cross_entropy(out, Y))
        (scaler.scale(losses).sum() * 2.0**10).backward()
        for parameter in array.parameters():
            parameter.grad.div_(2.0**10)  # type: ignore[union-attr]
        scaler.step(array.optimizers[0])
        scaler.update()
        array.optimizers[0].zero_grad()
        reference.losses(X * (1 + step), lambda out: F.cross_entropy(out, Y)).sum().backward()
        reference.optimizers[0].step()
        reference.optimizers[0].zero_grad()
    assert scaler.overflowed() == [False, True, False]
    assert scaler.scale_M.tolist() == [2048.0, 2.0**118, 1024.0]
    assert torch.equal(array.member(1).state_dict()["fc.weight"], before["fc.weight"])
    assert array.optimizers[0].member_state_dict(1)["state"] == {}, "as torch's own, whose first step was skipped"
    for index in (0, 2):
        theirs = reference.member(index).state_dict()
        for key, value in array.member(index).state_dict().items():
            torch.testing.assert_close(value, theirs[key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_close_as_half_precision_allows(dtype: torch.dtype) -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    with torch.autocast("cpu", dtype=dtype):
        losses = array.losses(X, lambda out: F.cross_entropy(out.float(), Y))
        expected = [F.cross_entropy(model(X).float(), Y) for model in models]
    losses.sum().backward()
    torch.testing.assert_close(losses, torch.stack(expected), rtol=2e-2, atol=2e-2)
    for index, loss in enumerate(expected):
        loss.backward()
        mine = array.state.parameters["out.weight"].grad[index]  # type: ignore[index]
        torch.testing.assert_close(mine, models[index].out.weight.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("mode", ["measured", "fastest", "serial"])
def test_every_mode_trains_the_same_models(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))
    expected = trained(ready(), 3)
    for _ in range(2):  # the second time from the cache
        array = fuse(nets(), X, mode=mode)
        array.optimizer(torch.optim.Adam, lr=[0.01, 0.02, 0.03])
        torch.testing.assert_close(torch.tensor(trained(array, 3)), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert bool(list(tmp_path.glob("lowerings/*.json"))) == (mode != "serial")


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
def test_a_compiled_array_has_the_same_losses_and_gradients() -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2)]
    x = torch.randn(5, 3)
    plain, compiled = fuse(copy.deepcopy(models), x), fuse(models, x)
    compiled.compile(backend="aot_eager")  # what the default one makes of the operators is torch's
    found = [array.losses(x, lambda out: out.square().mean()) for array in (plain, compiled)]
    torch.testing.assert_close(found[0], found[1])
    for losses in found:
        losses.sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_recorded_step_on_the_cpu_is_the_plain_step() -> None:
    array, reference = ready(p=0.0), ready(p=0.0)
    step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
    found = [step(X * (1 + 0.1 * i), Y).tolist() for i in range(3)]
    assert found == trained(reference, 3)
    array.drop(0)
    with pytest.raises(FusionError, match="recorded for 3 members"):
        step(X, Y)


def test_recording_undoes_its_warm_up_in_place() -> None:
    for steps_before in (0, 2):
        array, reference = ready(), ready()
        trained(array, steps_before), trained(reference, steps_before)
        step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
        saved = array.state_dict()
        for _ in range(3):
            step._step(X, (Y,))
        slots = [slot for bucket in array.optimizers[0].buckets for slot in bucket.slots.values()]  # type: ignore[attr-defined]
        step._rewind(saved)
        after = [slot for bucket in array.optimizers[0].buckets for slot in bucket.slots.values()]  # type: ignore[attr-defined]
        assert all(a is b for a, b in zip(slots, after, strict=True))
        assert trained(array, 3, start=2) == trained(reference, 3, start=2)


def test_verification_can_leave_dropout_out() -> None:
    array = fuse(nets(p=0.5), X)
    verify(array, ((X,), {}), tolerance=1e-9, dropout=False)
    other = fuse([Net(p=0.5), Net(p=0.1)], X)
    verify(other, ((X,), {}), tolerance=1e-9, dropout=False)


def test_array_from_a_job_has_its_optimizer_seeds_and_schedule(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "import torch\nfrom burstpool.job import Job\nfrom burstpool.data import digits\n"
        "from burstpool.model.zoo.tiny import TinyMLP\n"
        "def job(lr: float = 0.1, seed: int = 0, dropout: float = 0.0) -> Job:\n"
        "    loss = torch.nn.functional.cross_entropy\n"
        "    return Job(model=lambda: TinyMLP(dropout=dropout), loss=loss, data=digits(),\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),\n"
        "        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 1 - lr), batch=8, seed=seed)\n"
    )
    settings = [{"lr": 0.1, "seed": 3, "dropout": 0.5}, {"lr": 0.01, "seed": 4}]
    array = FusedArray.from_job(str(file), settings)
    jobs = [load_job(str(file), one) for one in settings]
    x, y = jobs[0].samples(8)
    for _ in range(4):
        array.losses(x, jobs[0].loss, y).sum().backward()
        array.optimizers[0].step()
        array.optimizers[0].zero_grad()
        array.schedulers[0].step()
    for index, job in enumerate(jobs):
        model = job.build_model()
        optimizer = job.optimizer(model.parameters())
        schedule = job.scheduler(optimizer)  # type: ignore[misc]
        torch.manual_seed(job.seed)
        for _ in range(4):
            job.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(array.member(index).state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_explain_says_for_every_operator_which_way_and_why() -> None:
    array = fuse(nets(), X)
    text = str(array.explain())
    assert "conv2d.default" in text
    assert "members share the input: one convolution, M times the filters" in text
    assert {operator.way for operator in array.explain().operators} <= {"rule", "vmap", "loop", "shared"}


def test_verify_names_the_operator_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES[torch.ops.aten.linear]

    def wrong(call: Call) -> Lowered | None:
        lowered = right(call)
        assert lowered is not None
        return Lowered(kernel=lambda run, *a: lowered.kernel(run, *a).flip(0), why="mixes up the members")

    def no_gradient(call: Call) -> Lowered | None:
        lowered = right(call)
        assert lowered is not None
        return Lowered(kernel=lambda run, x, w, b: lowered.kernel(run, x, w, b.detach()), why="forgets the bias")

    fuse(nets(), X, verify=True)
    monkeypatch.setitem(RULES, torch.ops.aten.linear, wrong)
    with pytest.raises(FusionError, match=r"aten.linear.default.*of module 'fc'.*another result than alone"):
        fuse(nets(), X, verify=True)
    monkeypatch.setitem(RULES, torch.ops.aten.linear, no_gradient)
    with pytest.raises(FusionError, match=r"aten.linear.default.*gradient"):
        fuse(nets(), X, verify=True)


def test_models_group_by_the_shape_of_their_graphs() -> None:
    models = [Net(), Net(width=6), Net(p=0.7), nn.Sequential(nn.Flatten(), nn.Linear(25, 3)), Net(width=6)]
    grouping = group_models(models, [X] * 5)
    assert grouping.groups == ((0, 2), (1, 4), (3,))
    assert "has shape [6, 1, 3, 3]" in grouping.reasons[1]
    assert "array 2: 3 — apart because" in str(grouping)


def test_a_model_that_is_apart_says_why_by_the_array_it_is_nearest_to() -> None:
    def model(width: int, activation: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), activation)

    given = [model(5, nn.ReLU()), model(8, nn.ReLU()), model(4, nn.ReLU()), model(8, nn.Tanh())]
    grouping = group_models(given, [torch.zeros(2, 6)] * 4)
    assert grouping.groups == ((0,), (1,), (2,), (3,))
    reason = grouping.reasons[3]
    assert "member 3 runs aten.tanh" in reason
    assert "member 1 runs aten.relu" in reason
    assert "array of member 1" in reason


def test_jobs_group_by_model_optimizer_and_batch() -> None:
    names = [
        ("tiny_mlp", {"lr": 0.1}),
        ("tiny_mlp", {"lr": 0.2, "dropout": 0.5}),
        ("tiny_mlp", {"batch": 8}),
        ("tiny_lstm", {}),
    ]
    grouping = group_jobs([load_job(f"zoo:{name}", settings) for name, settings in names])
    assert grouping.groups == ((0, 1), (2,), (3,))
    assert "batch 8" in grouping.reasons[2]


def test_jobs_whose_optimizers_group_parameters_otherwise_are_apart() -> None:
    """They cannot be one array: its groups are those of all members."""

    def sorted_into(job: Job, sizes: tuple[int, ...]) -> Job:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            left = iter(parameters)
            groups = [{"params": [next(left) for _ in range(size)]} for size in sizes]
            return torch.optim.SGD([*groups, {"params": list(left)}], lr=0.1)

        return dataclasses.replace(job, optimizer=optimizer)

    job = load_job("zoo:tiny_mlp")
    jobs = [sorted_into(job, sizes) for sizes in ((), (1,), (), (1,), (2,))]
    grouping = group_jobs(jobs)
    assert grouping.groups == ((0, 2), (1, 3), (4,))
    assert "groups of [1," in grouping.reasons[1]
    for group in grouping.groups:
        FusedArray.from_job(None, [jobs[index] for index in group])  # type: ignore[arg-type]
    with pytest.raises(FusionError, match="groups parameters unlike"):
        FusedArray.from_job(None, jobs)  # type: ignore[arg-type]
    with pytest.raises(FusionError, match="settings are a list"):
        FusedArray.from_job("zoo:tiny_mlp", {"lr": [0.1, 0.2]})  # type: ignore[arg-type]


def test_a_job_joins_a_group_whose_first_model_has_gone_to_a_device() -> None:
    groups = Groups()
    for settings in ({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3, "dropout": 0.5}):
        job = load_job("zoo:tiny_mlp", settings)
        model = job.build_model()
        assert groups.place(job, model) == 0, groups.reasons
        model.to("meta")  # as its array does, on a GPU


def test_sizes_come_from_memory_and_from_the_knee() -> None:
    assert array_size(one_bytes=30, two_bytes=40, memory_bytes=200) == 16
    assert array_size(one_bytes=300, two_bytes=400, memory_bytes=200) == 1
    assert knee({1: 10.0, 2: 19.0, 4: 35.0, 8: 36.0, 16: 80.0}) == 4
    array = fuse(nets(), X)
    assert member_bytes(array, samples=8) > member_bytes(array, samples=4) > 0


@pytest.mark.parametrize("mode", ["rules", "serial"])
def test_members_that_agree_keep_their_number_when_the_captured_one_is_dropped(mode: str) -> None:
    models = [Net(p=p).double() for p in (0.0, 0.5, 0.5)]
    alone = copy.deepcopy(models[1])
    array = fuse(models, X.double(), seeds=[0, 1, 2], mode=mode)  # type: ignore[arg-type]
    array.drop(0)
    torch.manual_seed(1)
    torch.testing.assert_close(array(X.double())[0], alone(X.double()))


def test_an_array_of_jobs_with_schedules_admits_and_drops_while_it_trains() -> None:
    jobs = [load_job("zoo:tiny_mlp", {"lr": lr}) for lr in (0.1, 0.2)]
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    jobs = [dataclasses.replace(job, scheduler=schedule) for job in jobs]
    array = FusedArray.from_job("", jobs)
    x, y = jobs[0].samples(4)
    array.losses(x, F.cross_entropy, y).sum().backward()
    array.optimizers[0].step()
    array.schedulers[0].step()
    array.admit(jobs[0].build_model(), scheduler={"schedule": schedule}, lr=0.3, job=jobs[0])
    assert array.schedulers[0].get_last_lr() == [0.05, 0.1, 0.3]
    array.drop(0)
    assert len(array.jobs) == 2


def test_a_losses_closure_tells_jobs_apart() -> None:
    def smoothed(by: float) -> Any:
        return lambda output, target: F.cross_entropy(output, target, label_smoothing=by)

    job = load_job("zoo:tiny_mlp")
    jobs = [dataclasses.replace(job, loss=smoothed(by)) for by in (0.1, 0.1, 0.2)]
    assert group_jobs(jobs).groups == ((0, 1), (2,))
    assert same_function(partial(F.mse_loss, reduction="sum"), partial(F.mse_loss, reduction="sum"))
    assert not same_function(partial(F.mse_loss, reduction="sum"), partial(F.mse_loss, reduction="mean"))
    assert same_function(nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert not same_function(nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(weight=torch.zeros(3)))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w)[(x * self.w) > 0]


class Locked(nn.Linear):
    """What has a lock cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.lock = threading.Lock()


class OwnNorm(nn.BatchNorm1d):
    """Not torch's own forward, of which is known what it does without momentum."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))


def test_bad_input_is_refused_with_the_member_and_the_difference() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: fuse([], X), "no models"),
        (
            lambda: fuse([Net(), Net(width=5)], X),
            r"'conv.weight' of member 1 has shape \[5, 1, 3, 3\], of member 0 \[4",
        ),
        (lambda: fuse([Net(), Net().double()], X), "has dtype torch.float64"),
        (lambda: fuse([Net(), Net().eval()], X), "is in eval mode"),
        (lambda: fuse([Net(), nn.Linear(3, 3)], X), "member 1 has none|member 0 has none"),
        (lambda: fuse([nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())], X), "member 1 runs aten.tanh"),
        (lambda: fuse([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())], X), "member 1 runs"),
        (lambda: fuse([Net()] * 2, X), "same object"),
        (lambda: fuse(nets(2), X, seeds=[1]), "1 seeds for 2 members"),
        (lambda: fuse(nets(2), X, mode="quick"), "is unknown"),  # type: ignore[arg-type]
        (lambda: fuse([old_weight_norm()], torch.ones(2, 3)), r"'weight' of module '0'.*parametrizations.weight_norm"),
        (lambda: fuse([OwnNorm(3, momentum=None)], torch.ones(2, 3)), "module 'itself' has momentum=None"),
        (lambda: fuse([Locked()], torch.ones(2, 3)), "Locked cannot be copied .*lock"),
        (lambda: fuse([Branching(), Branching()], X), "member 0: cannot trace Branching.*branches on"),
        (lambda: fuse([Selecting(), Selecting()], torch.ones(2, 3))(torch.ones(2, 3)), "size depends on values"),
        (lambda: ready().optimizer(torch.optim.SGD, lr=[0.1, 0.2]), "lr has 2 values for 3 members"),
        (lambda: ready().optimizer(torch.optim.SGD, lr=-1.0), "refuses"),
        (lambda: ready().optimizer(torch.optim.SGD, lr=0.1, groups=[{"keys": ["no"]}]), "no parameter 'no'"),
        (lambda: fuse(nets(2), X).scheduler(torch.optim.lr_scheduler.StepLR, step_size=1), "needs an optimizer"),
        (lambda: ready().scheduler(torch.optim.lr_scheduler.StepLR), "refuses"),
        (lambda: ready().clip_grad_norm_([1.0]), "1 norms for 3 members"),
        (lambda: ready().member(3), "no member 3"),
        (lambda: ready().drop([0, 1, 2]), "would be empty"),
        (lambda: ready().admit(Net(width=5)), "of member 3 has shape"),
        (lambda: ready().admit(Net(), nesterov=True), "refuses"),
        (lambda: ready().load_member(0, {}), "lacks 'conv.weight'"),
        (lambda: ready().load_member(0, {**Net().state_dict(), "x": X}), "has 'x'"),
        (lambda: ready().load_member(0, Net(width=5).state_dict()), "has shape"),
        (lambda: ready()((X, X)), "not like the example"),
        (lambda: ready()(X[:, :, :4]), r"has shape \[4, 1, 4, 5\]; the models were captured for \['N', 1, 5, 5\]"),
        (lambda: ready()("text"), "input 'x' has type str; the models were captured with a tensor"),
        (lambda: ready()(["a", "b", "c"], per_member=True), "input 'x' has type str"),
        (lambda: ready()([X, X], per_member=True), "2 inputs for 3 members"),
        (lambda: ready()([X, X, X[:2]], per_member=True), "different shapes"),
        (lambda: ready()(X, per_member=True), "members first"),
        (lambda: ready(2).load_state_dict(ready(3).state_dict()), "3 members, the array 2"),
        (lambda: fuse(nets(3), X).load_state_dict(ready(3).state_dict()), "1 optimizers, the array 0"),
        (lambda: ready().load_state_dict({"schema_version": 9}), "schema 9"),
        (lambda: ready().loss_scaler(scale=1.0), "no option 'scale'"),
    ]
    for call, message in cases:
        with pytest.raises(FusionError, match=message):
            call()


def test_wrong_arguments_are_refused_in_one_line_and_change_nothing() -> None:
    array, smaller = ready(), ready(2)
    step, scaler = partial(RecordedStep, array), smaller.loss_scaler()
    plateau = smaller.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau)
    cases: list[tuple[Any, str]] = [
        (lambda: array.loss_scaler(init_scale="large"), "takes numbers"),
        (lambda: (scaler.unscale(), scaler.unscale()), "unscaled already"),
        (lambda: fuse(Net(), X), "models is one Net; pass a list"),  # type: ignore[arg-type]
        (lambda: fuse(nets(2), X, seeds=[0.5, 1]), "a seed is a whole number"),  # type: ignore[list-item]
        (lambda: array.optimizer("Adam"), "optimizer's class is needed"),  # type: ignore[arg-type]
        (lambda: array.optimizer(torch.optim.LBFGS), "LBFGS needs a closure"),
        (lambda: array.optimizer(torch.optim.SGD, groups=[{"params": ["fc.bias"]}]), "groups are a list of dicts"),
        (lambda: array.optimizer(torch.optim.SGD, groups=["fc.bias"]), "groups are a list of dicts"),
        (lambda: array.scheduler(torch.optim.lr_scheduler.StepLR, optimizer=smaller.optimizers[0]), "not this"),
        (lambda: plateau.step(), "watches a metric"),
        (lambda: plateau.step(0.5), "1 metrics for 2"),  # type: ignore[arg-type]
        (lambda: array.member("0"), "named by its number"),  # type: ignore[arg-type]
        (lambda: array.split([]), "0 of 3 members to split off"),
        (lambda: array.split([0, 0]), "name each once"),
        (lambda: array.admit(Net), "member 3 is a type"),  # type: ignore[arg-type]
        (lambda: fuse(nets(2), X).admit(Net(), lr=0.1), "'lr' is for an optimizer"),
        (lambda: array.admit(Net(), scheduler={"gamma": 0.1}), "'gamma' is for a schedule"),
        (lambda: array.load_member(0, Net()), "is a Net; pass a state dict"),  # type: ignore[arg-type]
        (lambda: array.load_member(0, dict.fromkeys(Net().state_dict(), 1)), "is a int; it must be a tensor"),  # type: ignore[arg-type]
        (lambda: array.load_state_dict(array.member(0).checkpoint()), "not one that array.state_dict"),
        (lambda: array.resume_member(0, Net().state_dict()), r"not one that member\(i\).checkpoint"),
        (lambda: array([X, (X, X), X], per_member=True), "inputs of member 1 have another structure"),
        (lambda: group_models(nets(2), [X]), "1 examples for 2 models"),
        (lambda: array.clip_grad_norm_(["far", 1.0, 2.0]), "are no norms to clip to"),  # type: ignore[list-item]
        (lambda: step(smaller.optimizers[0], F.cross_entropy, X, Y), "not this array's"),
        (lambda: copy.deepcopy(array), "save array.state_dict"),
        (lambda: torch.save(array, io.BytesIO()), "save array.state_dict"),
        (lambda: step(array.optimizers[0], F.cross_entropy, X, Y, autocast=True), "pass a type such as"),
    ]
    for call, message in cases:
        with pytest.raises(FusionError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert trained(array, 2) == trained(ready(), 2)


def test_a_copied_graph_keeps_its_names_also_that_of_an_input_called_input() -> None:
    """`verify` finds inputs by name; copying a node called as one of Python's functions renames it."""
    from burstpool.fusion.double import doubled_mode

    mode = fuse([nn.Sequential(nn.Linear(3, 2))], torch.randn(2, 3)).mode
    given = next(node for node in mode.capture.graph.nodes if node.name in mode.capture.inputs)
    given.name = "input"
    copied = doubled_mode(mode).capture.graph
    assert [node.name for node in copied.nodes] == [node.name for node in mode.capture.graph.nodes]


def test_verify_takes_a_region_with_its_own_setting_as_a_whole() -> None:
    """Rotary embeddings of today's language models switch autocast off around what still passes gradients on."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                turned = (x * self.weight).sin().cumsum(1)
            return turned * self.weight

    fuse([Region() for _ in range(2)], torch.randn(4, 3), verify=True)


def test_verify_does_not_compare_memory_that_nobody_has_written_yet() -> None:
    """Stochastic depth draws into new memory."""

    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.empty(x.shape[0], 1, dtype=x.dtype).bernoulli_(0.5)
            return x + self.linear(x) * kept

    fuse([Depth() for _ in range(2)], torch.randn(4, 3), verify=True)


def test_verify_takes_results_that_are_written_into_through_views() -> None:
    """As EfficientNet's head: alone, flatten is a view of the pooled map; fused it may be a copy."""

    def net() -> nn.Module:
        pool = [nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*pool, nn.Dropout(0.2, inplace=True), nn.Linear(4, 2))

    fuse([net() for _ in range(2)], torch.randn(4, 3, 6, 6), verify=True)


def test_indexing_with_each_members_own_indices_runs() -> None:
    class Table(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))
            self.register_buffer("places", torch.arange(4) % (seed + 2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight[self.places].sum(0)

    fuse([Table(seed) for seed in range(2)], torch.randn(4, 3), verify=True)


def test_a_mode_first_run_under_autocast_still_admits_members_outside_of_it() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1)) for _ in range(2)], x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert array.eval()(x).dtype == torch.bfloat16
    array.admit(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2)))
    assert array(x).dtype == torch.float32


class Laid(nn.Module):
    """A tensor that is laid anew in some members and not in others, as torch's export may leave it out."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.linear, self.anew = nn.Linear(4, 6).double(), anew

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).view(x.shape[0], 2, 3).transpose(1, 2)
        return (y.contiguous() if self.anew else y).reshape(x.shape[0], 6).tanh()


@pytest.mark.parametrize("mode", ["rules", "serial"])
@pytest.mark.parametrize("first", [True, False])
def test_members_that_differ_in_how_a_tensor_lies_are_one_array(first: bool, mode: Any) -> None:
    models, x = [Laid(first), Laid(not first)], torch.randn(5, 4, dtype=torch.float64)
    array = fuse(models, x, verify=True, mode=mode)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]), rtol=1e-12, atol=1e-12)
