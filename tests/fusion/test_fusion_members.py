"""Members that come, go, pause, fail and move: each trains as if nothing had happened to the others."""

import copy
import dataclasses
import io
from functools import partial
from typing import Any

import pytest
import torch
from fusion_nets import Net, X, Y, nets, ready, trained
from torch import nn
from torch.nn import functional as F

from burstpool.fusion import FusedArray, FusionError, fuse
from burstpool.job import load_job


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


def test_a_mode_first_run_under_autocast_still_admits_members_outside_of_it() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1)) for _ in range(2)], x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert array.eval()(x).dtype == torch.bfloat16
    array.admit(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.2)))
    assert array(x).dtype == torch.float32
