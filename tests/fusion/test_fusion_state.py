"""A member's optimizer state: what it brings into an array and takes away is what torch's own would have."""

import copy
from typing import Any

import pytest
import torch
from fusion_alone import built
from torch import Tensor, nn

from burstpool import Job
from burstpool.errors import FusionError
from burstpool.fusion import FusedArray, fuse

X = torch.linspace(-1.0, 1.0, 12).view(4, 3)


def make(seed: int) -> nn.Module:
    return nn.Linear(3, 2)


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


def train(array: FusedArray, steps: int = 1) -> None:
    for _ in range(steps):
        array.losses(X.double(), squared).sum().backward()
        array.optimizers[0].step()
        array.optimizers[0].zero_grad()


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        squared(model(X.double())).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("cls", "plain", "with_momentum"),
    [
        (torch.optim.SGD, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.RMSprop, {"lr": 0.01}, {"lr": 0.01, "momentum": 0.9}),
    ],
)
def test_momentum_enters_an_array_that_had_none(cls: Any, plain: dict[str, Any], with_momentum: dict[str, Any]) -> None:
    (model,) = built(make, 1)
    theirs = fuse([copy.deepcopy(model)], X.double())
    theirs.optimizer(cls, **with_momentum)
    train(theirs, 3)
    array = fuse(built(make, 2), X.double())
    array.optimizer(cls, **plain)
    train(array)
    array.resume_member(1, theirs.member(0).checkpoint())
    train(array, 2)
    train(theirs, 2)
    torch.testing.assert_close(array.member(1).state_dict()["weight"], theirs.member(0).state_dict()["weight"])


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_checkpoint_from_before_the_first_step_starts_the_optimizer_anew(cls: Any) -> None:
    options = {"lr": 0.05, **({"momentum": 0.9} if cls is torch.optim.SGD else {})}
    array = fuse(built(make, 2), X.double())
    optimizer = array.optimizer(cls, **options)
    fresh = array.member(1).checkpoint()
    train(array, 3)
    array.resume_member(1, fresh)
    train(array, 2)
    model = built(make, 2)[1]
    train_one(model, cls(model.parameters(), **options), 2)
    torch.testing.assert_close(array.member(1).state_dict()["weight"], model.state_dict()["weight"])
    assert optimizer.member_state_dict(1)["state"][0].get("step", 2) == 2


def test_a_member_that_has_not_stepped_has_no_state_as_torchs() -> None:
    array = fuse(built(make, 2), X.double())
    optimizer = array.optimizer(torch.optim.Adam, lr=0.1)
    array.stop(1)
    train(array)
    assert optimizer.member_state_dict(0)["state"].keys() == {0, 1}
    assert optimizer.member_state_dict(1)["state"] == {}


def test_weight_decay_that_comes_later_is_applied() -> None:
    models = built(make, 2)
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, X.double())
    optimizer = array.optimizer(torch.optim.SGD, lr=0.1)
    theirs = [torch.optim.SGD(model.parameters(), lr=0.1) for model in alone]
    for decay in (0.0, 0.5):
        for group in [*[p.param_groups[0] for p in optimizer.proxies], *[t.param_groups[0] for t in theirs]]:
            group["weight_decay"] = decay
        optimizer.pull()
        train(array, 2)
        for model, own in zip(alone, theirs, strict=True):
            train_one(model, own, 2)
    for index, model in enumerate(alone):
        torch.testing.assert_close(array.member(index).state_dict()["weight"], model.state_dict()["weight"])


def frozen_and_grouped(lr: float = 0.1) -> Job:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        made[0].requires_grad_(False)
        return made

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        wanted = [p for p in parameters if p.requires_grad]
        return torch.optim.SGD([{"params": wanted[:2]}, {"params": wanted[2:], "lr": lr / 2}], lr=lr, momentum=0.9)

    data = torch.utils.data.TensorDataset(X, torch.tensor([0, 1, 0, 1]))
    return Job(model=model, loss=nn.CrossEntropyLoss(), data=data, optimizer=optimizer, batch=4)


def test_frozen_parameters_and_several_groups_go_together() -> None:
    from burstpool.sweeping.trial_array import TrialArray

    trial_array = TrialArray(device=torch.device("cpu"), mode="rules", batch=None)
    for number, lr in enumerate((0.1, 0.2)):
        job = frozen_and_grouped(lr)
        trial_array.place(number, job, job.build_model(), None)
    trial_array.run(2, [0, 0], lambda: False)
    assert trial_array.array is not None
    job = frozen_and_grouped(0.2)
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    for _ in range(2):
        nn.functional.cross_entropy(model(X), torch.tensor([0, 1, 0, 1])).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = trial_array.array.member(1).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(mine[key], value)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.Muon])
def test_a_jobs_optimizer_may_take_some_parameters_in_its_own_order(cls: Any) -> None:
    def job(lr: float) -> Job:
        def model() -> nn.Module:
            made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
            made[0].bias.requires_grad_(False), made[2].bias.requires_grad_(False)
            return made

        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return cls([p for p in reversed(list(parameters)) if p.requires_grad], lr=lr)

        data = torch.utils.data.TensorDataset(X.double(), torch.tensor([0, 1, 0, 1]))
        return Job(model=model, loss=nn.CrossEntropyLoss(), data=data, optimizer=optimizer, batch=4)

    array = FusedArray.from_job(None, [job(0.1), job(0.02)])  # type: ignore[list-item]
    model = job(0.02).build_model()
    own = job(0.02).optimizer(model.parameters())
    train(array, 2), train_one(model, own, 2)
    model.load_state_dict(array.member(1).state_dict())
    own.load_state_dict(array.optimizers[0].member_state_dict(1))
    train(array, 2), train_one(model, own, 2)
    torch.testing.assert_close(array.member(1).state_dict(), dict(model.state_dict()), rtol=1e-9, atol=1e-12)
    array.optimizers[0].load_member_state_dict(0, own.state_dict())
    mine, theirs = (array.optimizers[0].member_state_dict(0), own.state_dict())
    torch.testing.assert_close(mine["state"], theirs["state"], rtol=0, atol=0)


def test_averages_decay_by_one_minus_beta_in_double_precision() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    array = fuse([copy.deepcopy(model)], X)
    array.optimizer(torch.optim.Adam, lr=1e-3, betas=(0.9, 0.9999))
    array.losses(X, squared).sum().backward()
    array.optimizers[0].step()
    own = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.9999), foreach=False)
    squared(model(X)).backward()
    own.step()
    mine = array.optimizers[0].member_state_dict(0)["state"][0]["exp_avg_sq"]
    # A few roundings of float32; 1 - 0.9999 in float32 alone is off by 1.7e-5.
    torch.testing.assert_close(mine, own.state_dict()["state"][0]["exp_avg_sq"], rtol=1e-6, atol=0)


def test_loading_a_state_keeps_the_optimizers_tensors_where_a_recorded_step_finds_them() -> None:
    array = fuse(built(make, 2), X.double())
    optimizer: Any = array.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    before = array.state_dict()
    train(array)
    saved = array.state_dict()
    slot, steps = optimizer.buckets[0].slots["momentum_buffer"], optimizer.buckets[0].step_M
    kept = slot.clone()
    train(array)
    array.load_state_dict(saved)
    assert optimizer.buckets[0].slots["momentum_buffer"] is slot
    assert optimizer.buckets[0].step_M is steps
    assert torch.equal(slot, kept)
    array.load_state_dict(before)
    assert optimizer.buckets[0].slots["momentum_buffer"] is slot
    assert not slot.any()
    assert not steps.any()


@pytest.mark.parametrize("options", [{}, {"nesterov": [True, True, False]}], ids=["fused", "one after another"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_what_a_new_member_is_not_given_is_what_the_first_of_the_present_ones_was(
    options: dict[str, Any], scheduled: bool
) -> None:
    array = fuse(built(make, 3), X.double())
    optimizer = array.optimizer(torch.optim.SGD, lr=[0.1, 0.2, 0.4], momentum=[0.5, 0.6, 0.7], **options)
    if scheduled:
        array.scheduler(torch.optim.lr_scheduler.StepLR, step_size=[1, 2, 3], gamma=[0.5, 0.25, 0.125])
    train(array)
    if scheduled:
        array.schedulers[0].step(), array.schedulers[0].step()
    array.drop(0)
    new = array.admit(built(make, 4)[3])
    group = optimizer.proxies[new].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.2, 0.6)
    if scheduled:
        assert (array.schedulers[0].schedulers[new].step_size, array.schedulers[0].schedulers[new].gamma) == (2, 0.25)
    array.admit(built(make, 5)[4], momentum=0.9)
    away = array.split([3, 1])  # the one with momentum 0.9 comes first
    away.admit(built(make, 6)[5])
    assert [p.param_groups[0]["momentum"] for p in away.optimizers[0].proxies] == [0.9, 0.7, 0.9]
    assert [p.param_groups[0]["momentum"] for p in optimizer.proxies] == [0.6, 0.6]
    train(array), train(away)


def test_a_new_members_groups_have_the_rates_that_the_first_ones_were_given() -> None:
    array = fuse(built(make, 2), X.double())
    groups = [{"keys": ["weight"], "lr": [0.5, 0.25]}, {"keys": ["bias"]}]
    optimizer = array.optimizer(torch.optim.SGD, lr=0.1, groups=groups)
    array.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5).step()
    array.drop(0)
    array.admit(built(make, 3)[2])
    assert [group["lr"] for group in optimizer.proxies[1].param_groups] == [0.25, 0.1]


def test_an_option_that_every_group_has_its_own_of_is_refused_for_a_new_member() -> None:
    array = fuse(built(make, 2), X.double())
    groups = [{"keys": ["weight"], "lr": [0.5, 0.25]}, {"keys": ["bias"], "lr": 0.1}]
    optimizer = array.optimizer(torch.optim.SGD, lr=0.1, groups=groups)
    with pytest.raises(FusionError, match=r"lr=0.3 would have no effect"):
        array.admit(built(make, 3)[2], lr=0.3)
    assert len(array) == len(optimizer.proxies) == 2
    array.admit(built(make, 3)[2], momentum=0.5)
    assert [group["momentum"] for group in optimizer.proxies[2].param_groups] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "dampening": 0.3}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
)
def test_momentum_that_comes_and_goes_leaves_the_buffer_as_torch_does(cls: Any, options: dict[str, Any]) -> None:
    """By hand, or by a schedule that cycles it: without momentum torch neither reads nor writes the buffer."""
    first = [0.5, 0.0] if cls is torch.optim.SGD else [0.5, 0.9]  # torch's RMSprop makes its buffer at the first step
    models = built(make, 2)
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, X.double())
    optimizer = array.optimizer(cls, momentum=first, **options)
    theirs = [cls(model.parameters(), momentum=first[i], **options) for i, model in enumerate(alone)]
    for momenta in (first, [0.0, 0.9], [0.5, 0.0], [0.9, 0.9]):
        for index, momentum in enumerate(momenta):
            for group in (optimizer.proxies[index].param_groups[0], theirs[index].param_groups[0]):
                group["momentum"] = momentum
        optimizer.pull()
        train(array, 2)
        for index, (model, own) in enumerate(zip(alone, theirs, strict=True)):
            train_one(model, own, 2)
            torch.testing.assert_close(array.member(index).state_dict(), dict(model.state_dict()), rtol=1e-12, atol=0)
            theirs_now = own.state_dict()["state"]
            mine_now = optimizer.member_state_dict(index)["state"]
            assert mine_now.keys() == theirs_now.keys()
            for place, slots in theirs_now.items():
                torch.testing.assert_close(mine_now[place]["momentum_buffer"], slots["momentum_buffer"])


def test_adagrads_state_before_its_first_step_is_torchs() -> None:
    """torch's begins with one, and cannot step from a state that has none."""
    array = fuse(built(make, 2), X.double())
    optimizer = array.optimizer(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=[0.0, 0.5])
    model = built(make, 2)[1]
    own = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    mine = optimizer.member_state_dict(1)
    torch.testing.assert_close(mine["state"], own.state_dict()["state"])
    own.load_state_dict(mine)
    train(array), train_one(model, own)
    torch.testing.assert_close(array.member(1).state_dict(), dict(model.state_dict()))


def test_a_member_that_an_optimizer_refuses_leaves_the_array_as_it_was() -> None:
    other = fuse(built(make, 1), X.double())
    other.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    train(other)
    array = fuse(built(make, 2), X.double())
    array.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    schedule = array.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    other.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1)
    train(array)
    before = array.state_dict()["members"]
    with pytest.raises(FusionError, match="that is no number"):
        array.resume_member(0, other.member(0).checkpoint())
    torch.testing.assert_close(array.state_dict()["members"], before, rtol=0, atol=0)
    schedule.step()
    assert array.optimizers[0].lr == [0.05, 0.05]


def test_an_array_whose_members_that_differed_have_left_resumes_in_one_whose_never_did() -> None:
    array = fuse(built(make, 3), X.double())
    array.optimizer(torch.optim.SGD, lr=[0.1, 0.2, 0.3], momentum=0.9, nesterov=[True, False, True])
    train(array, 2)
    array.drop(1)
    other = fuse(built(make, 2), X.double())
    other.optimizer(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True)
    train(other)
    other.load_state_dict(array.state_dict())
    assert other.optimizers[0].lr == array.optimizers[0].lr == [0.1, 0.3]
    train(array, 2), train(other, 2)
    for index in range(2):
        torch.testing.assert_close(
            other.member(index).state_dict(), array.member(index).state_dict(), rtol=1e-12, atol=1e-13
        )
