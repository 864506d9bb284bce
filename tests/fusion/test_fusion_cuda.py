"""On a CUDA device: verified in double precision there, and a recorded step trains what the plain step trains."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from burstpool.fusion import fuse
from burstpool.fusion.step import RecordedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def nets(count: int, p: float = 0.0) -> list[nn.Module]:
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Dropout(p)]
        models.append(nn.Sequential(*parts, nn.Linear(288, 5)).cuda())
    return models


def test_a_fused_array_verifies_on_the_device() -> None:
    fuse(nets(3, p=0.2), torch.randn(4, 3, 8, 8, device="cuda"), verify=True)


def test_a_recorded_step_trains_what_the_plain_step_trains() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (6, 4), device="cuda")
    plain, replayed = fuse(nets(3), x[0]), fuse(nets(3), x[0])
    rates = [0.01, 0.02, 0.03]
    optimizer, other = (array.optimizer(torch.optim.Adam, lr=rates) for array in (plain, replayed))
    schedules = [array.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5) for array in (plain, replayed)]
    step = RecordedStep(replayed, other, F.cross_entropy, x[0], y[0], max_norm=[1.0, None, 0.5])
    for i in range(6):
        losses = plain.losses(x[i], F.cross_entropy, y[i])
        optimizer.zero_grad()
        losses.sum().backward()
        plain.clip_grad_norm_([1.0, None, 0.5])
        optimizer.step()
        torch.testing.assert_close(step(x[i], y[i]), losses.detach(), rtol=1e-3, atol=1e-4)
        for schedule in schedules:
            schedule.step()
    for index in range(3):
        theirs = plain.member(index).state_dict()
        for key, value in replayed.member(index).state_dict().items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-2, atol=1e-3)


def test_a_recorded_step_draws_new_dropout_masks_every_time() -> None:
    x, y = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (4,), device="cuda")
    array = fuse(nets(2, p=0.5), x)
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.0), F.cross_entropy, x, y, autocast=torch.bfloat16)
    losses = [copy.copy(step(x, y).tolist()) for _ in range(3)]
    assert losses[0] != losses[1] != losses[2]
