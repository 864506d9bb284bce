"""What earlier systems got wrong (HFTA, Hydro), each as a test."""

import copy
import warnings

import pytest
import torch
from fusion_alone import assert_same_step, built
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import fuse


def test_padding_row_is_zeroed_in_no_member_and_takes_no_gradient_in_any() -> None:
    models = built(lambda seed: nn.Embedding(4, 3, padding_idx=1), 3)
    for model in models:
        nn.init.constant_(model.weight, 2.0)
    array = fuse(models, torch.tensor([[0, 1], [1, 3]]))
    array(torch.tensor([[0, 1], [1, 3]])).sum().backward()
    weight = array.state.parameters["weight"]
    assert torch.equal(weight, torch.full_like(weight, 2.0))
    assert weight.grad is not None
    assert torch.equal(weight.grad[:, 1], torch.zeros(3, 3).double())
    assert bool((weight.grad[:, [0, 3]] == 1).all())


def test_prelu_slopes_are_not_shared() -> None:
    array = fuse([nn.PReLU(init=0.1), nn.PReLU(init=0.7)], -torch.ones(2, 1))
    torch.testing.assert_close(array(-torch.ones(2, 1))[:, 0, 0], torch.tensor([-0.1, -0.7]))


def test_softmax_over_dimension_one_does_not_normalise_over_members_or_samples() -> None:
    array = fuse([nn.Sequential(nn.Linear(3, 4), nn.Softmax(1)) for _ in range(2)], torch.ones(5, 3))
    torch.testing.assert_close(array(torch.ones(5, 3)).sum(2), torch.ones(2, 5))


def test_initial_weights_do_not_depend_on_the_size_of_the_array() -> None:
    def make(seed: int) -> nn.Module:
        model = nn.Conv2d(2, 3, 3)
        nn.init.kaiming_normal_(model.weight, mode="fan_out")
        return model

    alone = built(make, 3)
    for size in (1, 3):
        array = fuse(built(make, size), torch.ones(2, 2, 4, 4).double())
        assert torch.equal(array.member(0).state_dict()["weight"], alone[0].state_dict()["weight"])


def test_losses_are_not_scaled_by_one_over_the_members() -> None:
    models = built(lambda seed: nn.Linear(3, 2), 4)
    array = fuse([copy.deepcopy(model) for model in models], torch.ones(5, 3).double())
    array.losses(torch.ones(5, 3).double(), lambda out: out.square().mean()).sum().backward()
    models[2](torch.ones(5, 3).double()).square().mean().backward()
    torch.testing.assert_close(array.state.parameters["weight"].grad[2], models[2].weight.grad)  # type: ignore[index]


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x), 1)
        return self.fc(x.view(x.size(0), -1))


def test_view_sizes_and_functional_pooling_are_one_members() -> None:
    assert_same_step(lambda seed: Flat(), torch.randn(3, 1, 4, 4).double())


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_padding_modes_and_same_padding(mode: str) -> None:
    def make(seed: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 2, 3, padding="same", padding_mode=mode), nn.GroupNorm(1, 2), nn.Conv2d(2, 2, 3)
        )

    assert_same_step(make, torch.randn(3, 1, 5, 5).double())


def test_attention_does_not_ignore_the_key_padding_mask() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, bias=False, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            y: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            return y

    padding = torch.tensor([[False, False, True]] * 2)
    assert_same_step(lambda seed: Padded(), (torch.randn(2, 3, 4).double(), padding))


def test_feedforward_of_an_encoder_layer_may_have_any_width() -> None:
    assert_same_step(
        lambda seed: nn.TransformerEncoderLayer(4, 2, 6, 0.1, batch_first=True), torch.randn(2, 3, 4).double()
    )


def test_step_schedule_takes_each_members_rate() -> None:
    array = fuse([nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(2, 2))
    array.optimizer(torch.optim.Adam, lr=[0.1, 0.01])
    scheduler = array.scheduler(torch.optim.lr_scheduler.StepLR, step_size=[1, 2], gamma=[0.5, 0.1])
    scheduler.step()
    assert scheduler.get_last_lr() == [0.05, 0.01]


def test_batch_norm_momentum_is_each_members_own() -> None:
    assert_same_step(lambda seed: nn.BatchNorm1d(3, momentum=(0.1, 0.5, 0.9)[seed]), torch.randn(4, 3).double())


def test_batch_norm_without_momentum_averages_over_all_batches() -> None:
    def make(seed: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=None), nn.ReLU())

    array = assert_same_step(make, torch.randn(3, 1, 5, 5).double())
    assert array.member(0).state_dict()["1.num_batches_tracked"] == 2
    array.verify()
    array.eval().verify()
    models = built(make, 2)
    fuse(models, torch.randn(3, 1, 5, 5).double())
    assert "forward" not in vars(models[0][1])  # type: ignore[index]


def test_optimizer_state_survives_repacking() -> None:
    array = fuse([nn.Linear(2, 2) for _ in range(3)], torch.ones(2, 2))
    optimizer = array.optimizer(torch.optim.Adam, lr=[0.1, 0.2, 0.3])
    array.losses(torch.ones(2, 2), lambda out: out.square().sum()).sum().backward()
    optimizer.step()
    before = optimizer.member_state_dict(2)
    array.drop(0)
    after = optimizer.member_state_dict(1)
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])
    assert after["state"][0]["step"] == 1
    assert after["param_groups"][0]["lr"] == 0.3


def test_a_target_of_each_members_own_is_not_taken_for_a_sample() -> None:
    models = built(lambda seed: nn.Linear(3, 2), 3)
    x, target = torch.randn(3, 3).double(), torch.randn(3, 2).double()  # as many samples as members
    array = fuse([copy.deepcopy(model) for model in models], x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that a target is spread
        losses = array.losses(torch.stack([x] * 3), F.mse_loss, target, per_member=True)
        wanted = torch.stack([F.mse_loss(model(x), mine) for model, mine in zip(models, target, strict=True)])
        torch.testing.assert_close(losses, wanted)
        stacked = torch.randn(3, 3, 2).double()
        losses = array.losses(x, lambda out: F.mse_loss(out, stacked))
        torch.testing.assert_close(losses, torch.stack([F.mse_loss(model(x), stacked) for model in models]))
