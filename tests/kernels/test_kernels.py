"""Our kernels against torch's own operators, and arrays that use them against arrays that do not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, MARKS, QUICK, members_between, members_outermost, needs_gpu
from torch import Tensor, nn

from burstpool.fusion import fuse, kernels
from burstpool.fusion.optim import make_optimizer
from burstpool.fusion.step import RecordedStep

pytestmark = MARKS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "silu": F.silu,
}
SOME = ACTIVATIONS if QUICK else ("hardswish",)
"""Those that are tried with all else, where that takes no minutes."""


@pytest.mark.parametrize("layout", [members_between, members_outermost])
@pytest.mark.parametrize(("activation", "summed"), [("relu", True), ("leaky_relu", True), *[(a, False) for a in SOME]])
@pytest.mark.parametrize("shape", [(3, 17, 24, 5, 5), (2, 300, 130), (5, 64, 3, 9)])
def test_batch_norm_in_one_kernel_is_torchs(layout: Any, activation: str, summed: bool, shape: tuple[int, ...]) -> None:
    from burstpool.fusion.kernels.batchnorm import batch_norm, rows_of

    torch.manual_seed(0)
    members, samples, channels, *space = shape
    x = layout(shape).requires_grad_()
    residual = members_outermost(shape).requires_grad_() if summed else None
    weight, bias = (torch.randn(members, channels, device=DEVICE, requires_grad=True) for _ in range(2))
    offset = torch.randn(members, channels, device=DEVICE)
    mine = [torch.zeros(members, channels, device=DEVICE), torch.ones(members, channels, device=DEVICE)]
    theirs = [t.clone() for t in mine]
    rows = None if residual is None else rows_of(residual)
    state = (weight, bias, mine[0], mine[1])
    y = batch_norm(rows_of(x), rows, offset, state, momentum=0.1, eps=1e-5, activation=activation, slope=0.2)
    y = y.unflatten(1, (samples, *space)).movedim(-1, 2)
    moved = x + offset.view(members, 1, channels, *[1] * len(space))
    flat = [t.view(-1) for t in (*theirs, weight, bias)]
    wanted = F.batch_norm(moved.transpose(0, 1).flatten(1, 2), *flat, True, 0.1, 1e-5)
    wanted = wanted.view(samples, members, channels, *space).transpose(0, 1)
    wanted = ACTIVATIONS[activation](wanted if residual is None else wanted + residual)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    leaves = [x, weight, bias, *([] if residual is None else [residual])]
    gradient = torch.randn_like(wanted)
    pairs = zip(torch.autograd.grad(y, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)  # sums of thousands of float32 in another order
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [members_between, members_outermost])
@pytest.mark.parametrize("activation", SOME)
@pytest.mark.parametrize("shape", [(3, 17, 24, 45), (2, 5, 130, 2500 if QUICK else 100), (2, 9, 3, 1), (4, 1, 64, 33)])
def test_batch_norm_and_the_maximum_over_rows_in_one_are_torchs(
    layout: Any, activation: str, shape: tuple[int, ...]
) -> None:
    from burstpool.fusion.kernels.batchnorm import rows_of
    from burstpool.fusion.kernels.normmax import batch_norm_max

    torch.manual_seed(0)
    members, samples, channels, _ = shape
    x = layout(shape).requires_grad_()
    weight, bias = (torch.randn(members, channels, device=DEVICE, requires_grad=True) for _ in range(2))
    offset = torch.randn(members, channels, device=DEVICE)
    mine = [torch.zeros(members, channels, device=DEVICE), torch.ones(members, channels, device=DEVICE)]
    theirs = [t.clone() for t in mine]
    state = (weight, bias, mine[0], mine[1])
    y = batch_norm_max(rows_of(x), samples, offset, state, momentum=0.1, eps=1e-5, activation=activation, slope=0.2)
    moved = x + offset.view(members, 1, channels, 1)
    flat = [t.view(-1) for t in (*theirs, weight, bias)]
    wanted = F.batch_norm(moved.transpose(0, 1).flatten(1, 2), *flat, True, 0.1, 1e-5)
    wanted = ACTIVATIONS[activation](wanted.view(samples, members, channels, -1).transpose(0, 1)).max(3).values
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    gradient, leaves = torch.randn_like(wanted), [x, weight, bias]
    pairs = zip(torch.autograd.grad(y, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_maximum_after_batch_norm_is_nan_where_the_channel_is() -> None:
    from burstpool.fusion.kernels.batchnorm import rows_of
    from burstpool.fusion.kernels.normmax import batch_norm_max

    x = members_outermost((2, 4, 6, 10))
    x[1, 2, 3, 4] = torch.nan
    ones, zeros = (torch.full((2, 6), value, device=DEVICE) for value in (1.0, 0.0))
    state = (ones, zeros, zeros.clone(), ones.clone())
    y = batch_norm_max(rows_of(x), 4, None, state, momentum=0.1, eps=1e-5, activation="relu")
    assert y[1, :, 3].isnan().all()
    assert int(y.isnan().sum()) == 4


@pytest.mark.parametrize("features", [5, 200, 1000])
def test_layer_norm_in_one_kernel_is_torchs(features: int) -> None:
    from burstpool.fusion.kernels.layernorm import layer_norm

    torch.manual_seed(0)
    x = torch.randn(3, 7, 11, features, device=DEVICE).requires_grad_()
    weight, bias = (torch.randn(3, features, device=DEVICE, requires_grad=True) for _ in range(2))
    y = layer_norm(x, weight, bias, 1e-5, torch.float32)
    wanted = torch.stack([F.layer_norm(x[i], [features], weight[i], bias[i]) for i in range(3)])
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)
    gradient = torch.randn_like(y)
    leaves = [x, weight, bias]
    for a, b in zip(
        torch.autograd.grad(y, leaves, gradient), torch.autograd.grad(wanted, leaves, gradient), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_a_residual_of_another_type_is_left_to_torch() -> None:
    from burstpool.fusion.rules.norms import norm_in_one

    x = members_outermost((2, 8, 4))
    one, zero = torch.ones(2, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    arguments = (x, one, zero, zero.clone(), one.clone(), True, 0.1, 1e-5, True)
    assert norm_in_one(arguments, x) is not None
    assert norm_in_one(arguments, x.bfloat16()) is None


def test_batch_norm_and_amsgrad_pass_nan_on_as_torch_does() -> None:
    from burstpool.fusion.kernels.batchnorm import batch_norm

    x = torch.randn(2, 30, 5, device=DEVICE)
    x[1, 3, 2] = torch.nan
    one, zero = torch.ones(2, 5, device=DEVICE), torch.zeros(2, 5, device=DEVICE)
    running = (zero.clone(), one.clone())
    y = batch_norm(x, None, None, (one, zero, *running), momentum=0.1, eps=1e-5, activation="relu")
    assert bool(y[1, :, 2].isnan().all())
    assert int(y.isnan().sum()) == 30
    assert bool(running[1][1, 2].isnan())
    models = [nn.Linear(8, 8).to(DEVICE) for _ in range(2)]
    array = fuse(models, torch.ones(2, 8, device=DEVICE))
    optimizer: Any = array.optimizer(torch.optim.Adam, lr=0.1, amsgrad=True)
    optimizer.recorded = True  # so small a parameter has the kernel only then
    for parameter in array.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.grad[1].fill_(torch.nan)
    optimizer.step()
    weight = array.state.parameters["weight"]
    assert bool(weight[0].isfinite().all())
    assert bool(weight[1].isnan().all())


def test_a_members_dropout_depends_on_its_own_seed_and_probability_alone() -> None:
    from burstpool.fusion.kernels.dropout import dropout

    x = torch.ones(3, 40_000, device=DEVICE, requires_grad=True)
    seeds, chances = torch.tensor([7, 8, 9], device=DEVICE), torch.tensor([0.1, 0.5, 1.0], device=DEVICE)
    y = dropout(x, seeds, chances)
    torch.testing.assert_close((y == 0).float().mean(1), chances, rtol=0, atol=0.02)
    torch.testing.assert_close(y[:2].mean(1), torch.ones(2, device=DEVICE), rtol=0, atol=0.03)
    alone = dropout(x[1:2], seeds[1:2], chances[1:2])
    assert torch.equal(alone[0], y[1])
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient, y)


@pytest.mark.parametrize("dtype", kernels.NARROW)
def test_members_whose_loss_is_not_finite_stop_and_no_others(dtype: torch.dtype) -> None:
    from burstpool.fusion.kernels.finite import stop_not_finite

    losses = torch.randn(600, device=DEVICE).to(dtype)
    losses[[1, 300, 599]] = torch.tensor([torch.nan, torch.inf, -torch.inf], device=DEVICE).to(dtype)
    active = torch.ones(600, dtype=torch.bool, device=DEVICE)
    active[[0, 300]] = False
    wanted = active & torch.isfinite(losses)
    stop_not_finite(active, losses)
    assert torch.equal(active, wanted)


class Residual(nn.Module):
    """Convolutions with a bias, sums, a map of one point: all that is merged or cropped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.third, self.norm3 = nn.Conv2d(16, 24, 3, stride=4, padding=1), nn.BatchNorm2d(24)
        self.short, self.norm4 = nn.Conv2d(16, 24, 1, stride=4), nn.BatchNorm2d(24)
        self.point, self.head = nn.Conv2d(24, 24, 3, padding=1), nn.Linear(24, 150)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = self.norm2(self.second(x))
        y += x
        y = F.relu(y, inplace=True)
        z = F.relu(self.norm4(self.short(y)) + self.norm3(self.third(y)))
        return self.head(F.hardswish(self.point(z)).flatten(1))


class Points(nn.Module):
    """A cloud's points through products and norms, and the largest of them, with an activation and without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.second, self.norm2 = nn.Conv1d(16, 40, 1), nn.BatchNorm1d(40)
        self.third, self.norm3 = nn.Conv1d(16, 24, 1), nn.BatchNorm1d(24)
        self.head = nn.Linear(64, 150)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        active = F.relu(self.norm2(self.second(y))).max(2).values
        return self.head(torch.cat([active, self.norm3(self.third(y)).max(-1, keepdim=True)[0].squeeze(2)], 1))


@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_the_largest_of_a_clouds_points_is_the_same_in_one_kernel(
    autocast: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, y, results = torch.randn(12, 3, 100, device=DEVICE), torch.randint(0, 150, (12,), device=DEVICE), []
    for merges in (False, True):
        torch.manual_seed(0)
        array = fuse([Points().to(DEVICE) for _ in range(3)], x)
        plan = array.mode.plan(frozenset())
        if merges:
            plan.merge()
            assert sum("max that follows" in step.lowered.why for step in plan.steps) == 2
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
            losses = array.losses(x, F.cross_entropy, y)
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad for p in array.parameters()), *array.state.buffers.values()])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-2 if autocast else 1e-4, atol=1e-4)
    # Of points that 16 bits do not tell apart, another may be the largest, and has the gradient.
    share = 0.2 if autocast else 1e-3
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).float().norm() <= share * theirs.float().norm() + 1e-2


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": [0.01, 0.02, 0.03], "momentum": 0.9, "weight_decay": [0.0, 1e-2, 0.1]}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": [0.9, 0.5, 0.0], "dampening": 0.1}),
    (torch.optim.Adam, {"lr": [1e-2, 1e-3, 1e-4], "eps": 1e-3, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "betas": [(0.9, 0.99), (0.5, 0.9), (0.8, 0.999)]}),
]


@pytest.mark.parametrize("recorded", [False, True] if QUICK else [True])
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS if QUICK else OPTIMIZERS[1:3])
def test_an_array_with_kernels_trains_what_one_without_trains(
    cls: Any, options: dict[str, Any], recorded: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    results = []
    for with_kernels in (True, False):
        monkeypatch.setattr("burstpool.fusion.optim._LARGE", 200)
        if not with_kernels:
            monkeypatch.setattr(kernels, "usable", lambda *tensors: False)
        torch.manual_seed(0)
        models = [Residual().to(DEVICE) for _ in range(3)]
        x, y = torch.randn(5, 12, 3, 8, 8, device=DEVICE), torch.randint(0, 150, (5, 12), device=DEVICE)
        array = fuse(models, x[0], mode="measured" if with_kernels else "rules")
        optimizer = array.optimizer(cls, **options)
        if recorded and with_kernels:
            step: Any = RecordedStep(array, optimizer, F.cross_entropy, x[0], y[0])
        else:
            step = plain_step(array, optimizer)
        results.append((torch.stack([step(x[i], y[i]).clone() for i in range(5)]), array))
    (mine, fast), (theirs, slow) = results
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    for (key, a), (_, b) in zip(fast.named_parameters(), slow.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3, msg=lambda m, key=key: f"{key}: {m}")
    for index in range(3):
        states = [array.optimizers[0].member_state_dict(index)["state"] for array in (fast, slow)]
        torch.testing.assert_close(*states, rtol=1e-2, atol=2e-2)


def plain_step(array: Any, optimizer: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = array.losses(x, F.cross_entropy, y)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach()

    return step


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_gradients_with_gaps_between_members_update_as_others_do(optimizer: Any) -> None:
    found = []
    for apart in (False, True):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(3, 5, 4, device=DEVICE))
        made = make_optimizer(
            optimizer, {"w": weight}, {"lr": 0.1}, active=torch.ones(3, dtype=torch.bool, device=DEVICE)
        )
        made.recorded = True
        for _ in range(3):
            gradient = torch.randn(3, 8, 4, device=DEVICE)[:, :5]
            weight.grad = gradient if apart else gradient.contiguous()
            made.step()
        found.append(weight.detach().clone())
    assert torch.equal(found[0], found[1])
