"""The zoo's models, many steps in double precision: every weight, buffer and optimizer slot as if trained alone.

Each member has hyper-parameters of its own, one is dropped and one admitted on the way. The optimizers' eps is not
tiny where a gradient is zero but for rounding (a bias before batch norm, a key's bias): there Adam would make a full
step of the rounding's sign.
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_alone import built, train_alone
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion import fuse
from burstpool.fusion.apply import apply_at_once
from burstpool.job import Job, load_job
from burstpool.model import zoo

STEPS = int(os.environ.get("BURSTPOOL_FUSION_STEPS", "24"))
"""100 for the whole proof: `BURSTPOOL_FUSION_STEPS=100 pytest tests/fusion/test_fusion_training.py`."""
BATCH = 6
RTOL = 1e-9

BETAS = [(0.9, 0.99), (0.8, 0.999), (0.5, 0.9), (0.9, 0.95)]
RATES = [3e-3, 1e-3, 1e-2, 2e-3]
DECAYS = [0.0, 0.1, 0.01, 0.3]
ADAM = (torch.optim.Adam, {"lr": RATES, "betas": BETAS, "eps": [1e-3, 1e-2, 1e-3, 3e-3], "weight_decay": DECAYS})
# Batch norm over six samples and the largest of PointNet's points magnify rounding from step to step, alone as fused:
# small steps keep it below the tolerance for 100 of them.
GENTLE_ADAM = (torch.optim.Adam, {"lr": [1e-3, 5e-4, 3e-4, 2e-4], "betas": BETAS, "eps": 0.1, "weight_decay": DECAYS})
ADAMW = (torch.optim.AdamW, {**ADAM[1], "amsgrad": True})
SGD = (
    torch.optim.SGD,
    {
        "lr": [3e-2, 1e-2, 3e-3, 1e-3],
        "momentum": [0.9, 0.0, 0.5, 0.8],
        "weight_decay": [0.0, 1e-3, 1e-2, 0.0],
        "dampening": [0.0, 0.3, 0.1, 0.0],
    },
)
GENTLE_SGD = (torch.optim.SGD, {**SGD[1], "lr": [3e-3, 1e-3, 3e-4, 1e-4]})
RMSPROP = (
    torch.optim.RMSprop,
    {
        "lr": [3e-4, 1e-4, 2e-4, 3e-4],
        "alpha": [0.9, 0.99, 0.8, 0.95],
        "eps": [1e-2, 0.1, 1e-2, 1e-2],
        "momentum": [0.0, 0.9, 0.5, 0.1],
    },
)

MODELS: dict[str, tuple[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]], dict[str, list[float]]]] = {
    "tiny_mlp": (ADAM, {"dropout": [0.0, 0.2, 0.5, 0.1]}),
    "tiny_vgg": (SGD, {"dropout": [0.3, 0.2, 0.5, 0.1]}),
    "dcgan_generator": (ADAM, {}),
    "dcgan_discriminator": (RMSPROP, {}),
    "pointnet_classification": (GENTLE_ADAM, {}),
    "pointnet_segmentation": (GENTLE_ADAM, {}),
    "resnet18": (GENTLE_SGD, {}),
    "mobilenet_v3_large": (GENTLE_SGD, {}),
    "transformer": (ADAM, {"dropout": [0.1, 0.2, 0.3, 0.0]}),
    "bert_medium": (ADAMW, {"dropout": [0.1, 0.2, 0.3, 0.0]}),
    "tiny_lstm": (ADAM, {}),
    "gpt_small": (ADAMW, {"dropout": [0.2, 0.1, 0.0, 0.3]}),
}


def jobs_of(name: str, own: dict[str, list[float]]) -> list[Job]:
    """Four: the first three start together, the last is admitted."""
    settings = [{**zoo.SMALL[name], "seed": i, **{k: v[i] for k, v in own.items()}} for i in range(4)]
    return [load_job(f"zoo:{name}", one) for one in settings]


def batches_of(job: Job, count: int) -> list[tuple[Any, Any]]:
    """Different samples a step, in double precision."""
    inputs, target = job.samples(BATCH * 3)

    def part(value: Any, start: int) -> Any:
        if isinstance(value, dict):
            return {key: part(item, start) for key, item in value.items()}
        if isinstance(value, tuple | list):
            return tuple(part(item, start) for item in value)
        value = value[start : start + BATCH]
        return value.double() if value.is_floating_point() else value

    return [(part(inputs, BATCH * (i % 3)), part(target, BATCH * (i % 3))) for i in range(count)]


def option(options: dict[str, Any], member: int) -> dict[str, Any]:
    return {name: value[member] if isinstance(value, list) else value for name, value in options.items()}


@pytest.mark.parametrize("name", MODELS)
def test_members_train_as_they_would_alone(name: str) -> None:
    (factory, options), own = MODELS[name]
    jobs = jobs_of(name, own)
    models = [job.build_model().double() for job in jobs]
    alone = [copy.deepcopy(model) for model in models]
    batches = batches_of(jobs[0], STEPS)

    array = fuse(models[:3], batches[0][0], verify=True)
    first = {key: value[:3] if isinstance(value, list) else value for key, value in options.items()}
    optimizer = array.optimizer(factory, **first)
    losses: dict[int, list[float]] = {i: [] for i in range(4)}
    present = [0, 1, 2]
    for step, (inputs, target) in enumerate(batches):
        if step == STEPS // 3:
            array.drop(1)
            present.remove(1)
        if step == STEPS // 2:
            array.admit(models[3], seed=3, **option(options, 3))
            present.append(3)
        values = array.losses(inputs, lambda out, target=target: jobs[0].loss(out, target))
        values.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for member, value in zip(present, values.tolist(), strict=True):
            losses[member].append(value)

    spans = {0: (0, STEPS), 2: (0, STEPS), 3: (STEPS // 2, STEPS)}
    for place, member in enumerate(present):
        start, end = spans[member]
        theirs = factory(alone[member].parameters(), **option(options, member))
        torch.manual_seed(member)
        expected = train_alone([alone[member]], [theirs], batches[start:end], jobs[0].loss)[0]
        mine, others = (torch.tensor(values, dtype=torch.float64) for values in (losses[member], expected))
        torch.testing.assert_close(mine, others, rtol=RTOL, atol=RTOL)
        assert_same_state(array.member(place).state_dict(), alone[member].state_dict())
        assert_same_slots(optimizer.member_state_dict(place), theirs.state_dict())


def assert_same_state(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Keys, order, shapes, types, values."""
    assert list(mine) == list(theirs)
    for key, value in theirs.items():
        assert mine[key].dtype == value.dtype
        close(mine[key], value, key)


def close(mine: Tensor, theirs: Tensor, what: str) -> None:
    # Relative to the tensor's largest value: where a weight has cancelled to nothing, only rounding is left of it.
    scale = float(theirs.double().abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(
        mine, theirs, rtol=RTOL, atol=RTOL * max(scale, 1e-3), msg=lambda text: f"{what}: {text}"
    )


def assert_same_slots(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """torch's own format."""
    for index, slots in theirs["state"].items():
        for name, value in slots.items():
            if value is None:
                continue
            close(torch.as_tensor(mine["state"][index][name]), torch.as_tensor(value), f"slot {name} of {index}")
    for a, b in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert a["params"] == b["params"]
        assert a["lr"] == b["lr"]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": [0.1, 0.01, 0.03]}),
    (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": [0.9, 0.0, 0.5], "dampening": [0.1, 0.2, 0.0], "weight_decay": [0.1, 0, 0.3]},
    ),
    (torch.optim.SGD, {"lr": [0.1, 0.01, 0.03], "momentum": [0.9, 0.8, 0.5], "nesterov": True, "maximize": True}),
    (
        torch.optim.Adam,
        {"lr": [0.1, 0.01, 0.03], "betas": [(0.9, 0.99), (0.5, 0.9), (0.0, 0.999)], "eps": [1e-8, 1e-3, 0.1]},
    ),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": [0.0, 0.1, 0.2]}),
    (torch.optim.AdamW, {"lr": [0.1, 0.01, 0.03], "weight_decay": [0.0, 0.1, 0.2], "amsgrad": True}),
    (torch.optim.AdamW, {"lr": [0.1, 0.01, 0.03]}),
    (
        torch.optim.Adadelta,
        {"lr": [1.0, 0.1, 0.5], "rho": [0.9, 0.5, 0.99], "eps": [1e-6, 1e-3, 1e-5], "weight_decay": 0.1},
    ),
    (
        torch.optim.RMSprop,
        {"lr": [0.1, 0.01, 0.03], "alpha": [0.9, 0.5, 0.99], "momentum": [0.0, 0.5, 0.9], "centered": True},
    ),
    (torch.optim.RMSprop, {"lr": 0.01, "eps": [1e-8, 1e-3, 0.1], "weight_decay": [0.0, 0.1, 0.2]}),
    (
        torch.optim.Adagrad,
        {"lr": [0.1, 0.01, 0.03], "lr_decay": [0.0, 0.1, 0.2], "initial_accumulator_value": [0.0, 0.1, 1.0]},
    ),
    (torch.optim.NAdam, {"lr": [0.1, 0.01, 0.03], "momentum_decay": [0.004, 0.1, 0.01]}),
    (torch.optim.Rprop, {"lr": [0.1, 0.01, 0.03]}),
    (torch.optim.Adamax, {"lr": [0.1, 0.01, 0.03]}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": [True, False, True]}),
    (
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": [0.0, 0.1, 1.0], "maximize": [True, False, True]},
    ),
]


@pytest.mark.parametrize("way", ["in chunks", "at once", "in tiny chunks"])
@pytest.mark.parametrize(("factory", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", str(v)))
def test_optimizer_equals_torch_on_the_member_alone(
    factory: Callable[..., Any], options: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "at once":  # as on a GPU
        monkeypatch.setattr("burstpool.fusion.optim.apply_in_chunks", apply_at_once)
    if way == "in tiny chunks":
        monkeypatch.setattr("burstpool.fusion.apply._CHUNK_BYTES", 8)
    models = [Two().double() for _ in range(3)]
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, torch.randn(5, 3).double())
    optimizer = array.optimizer(factory, **options)
    theirs = [factory(model.parameters(), **option(options, index)) for index, model in enumerate(alone)]
    for _ in range(12):
        for name, stacked in array.named_parameters():
            stacked.grad = torch.randn_like(stacked)
            for index, model in enumerate(alone):
                model.get_parameter(name).grad = stacked.grad[index].clone()
        optimizer.step()
        for one in theirs:
            one.step()
    for index, model in enumerate(alone):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(array.member(index).state_dict()[key], value, rtol=1e-12, atol=1e-13)
        assert_same_slots(optimizer.member_state_dict(index), theirs[index].state_dict())


def unbiased(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False))


def test_muon_trains_members_as_alone_and_they_come_and_go() -> None:
    """It takes matrices only: what checks the options has to see parameters of the members' own shapes."""
    models, x = built(unbiased, 4), torch.randn(6, 3).double()
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models[:3], x)
    optimizer = array.optimizer(torch.optim.Muon, lr=[0.1, 0.02, 0.03], momentum=[0.9, 0.5, 0.95])
    schedule = array.scheduler(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=[0.5, 0.25, 0.5])
    for step in range(6):
        if step == 3:
            array.drop(0)
            saved = array.state_dict()
            array.admit(models[3], lr=0.04)
        array.losses(x, lambda out: out.square().mean()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    options = {1: {"lr": 0.02, "momentum": 0.5}, 2: {"lr": 0.03, "momentum": 0.95}, 3: {"lr": 0.04, "momentum": 0.5}}
    gammas, steps = {1: 0.25, 2: 0.5, 3: 0.25}, {1: 6, 2: 6, 3: 3}
    for place, member in enumerate((1, 2, 3)):
        theirs = torch.optim.Muon(alone[member].parameters(), **options[member])  # type: ignore[arg-type]
        rates = torch.optim.lr_scheduler.StepLR(theirs, step_size=2, gamma=gammas[member])
        for _ in range(steps[member]):
            alone[member](x).square().mean().backward()
            theirs.step()
            theirs.zero_grad()
            rates.step()
        # Muon's own products are in bfloat16; of gradients that agree to 1e-15 they are the same, nearly always.
        assert_same_state(array.member(place).state_dict(), alone[member].state_dict())
        assert_same_slots(optimizer.member_state_dict(place), theirs.state_dict())
    array.drop(2)
    array.load_state_dict(saved)
    torch.testing.assert_close(array.state_dict()["optimizers"], saved["optimizers"], rtol=0, atol=0)


def test_muon_refuses_vectors_in_one_sentence() -> None:
    array = fuse(built(lambda seed: Two(), 2), torch.randn(5, 3).double())
    with pytest.raises(FusionError, match=r"Muon refuses .*: Muon only supports 2D parameters .*\[4\]"):
        array.optimizer(torch.optim.Muon, lr=[0.1, 0.2])
    assert array.optimizers == []


def test_a_parameter_in_two_groups_is_refused() -> None:
    array = fuse(built(lambda seed: Two(), 2), torch.randn(5, 3).double())
    groups = [{"keys": ["a.weight"], "lr": 0.5}, {"keys": ["a.weight", "b.weight"]}]
    with pytest.raises(FusionError, match="more than one parameter group"):
        array.optimizer(torch.optim.SGD, lr=0.1, groups=groups)


def test_parameters_without_gradients_are_passed_over_as_torch_does() -> None:
    models = [Two().double() for _ in range(2)]
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, torch.randn(5, 3).double())
    optimizer = array.optimizer(torch.optim.Adam, lr=[0.1, 0.01], weight_decay=0.1)
    theirs = [
        torch.optim.Adam(m.parameters(), lr=lr, weight_decay=0.1) for m, lr in zip(alone, (0.1, 0.01), strict=True)
    ]
    for present in (
        ("b.weight", "b.bias"),
        ("a.weight", "a.bias", "b.weight", "b.bias"),
        ("a.weight", "b.bias"),
        ("a.weight",),
    ):
        for index, model in enumerate(alone):
            for name, parameter in model.named_parameters():
                stacked = array.state.parameters[name]
                gradient = torch.randn_like(parameter) if name in present else None
                parameter.grad = gradient
                if index == 0:
                    stacked.grad = None if gradient is None else torch.zeros_like(stacked)
                if stacked.grad is not None and gradient is not None:
                    stacked.grad[index] = gradient
        optimizer.step()
        for one in theirs:
            one.step()
    for index, model in enumerate(alone):
        assert_same_state(array.member(index).state_dict(), model.state_dict())
        assert_same_slots(optimizer.member_state_dict(index), theirs[index].state_dict())


def test_groups_have_options_of_their_own() -> None:
    models = [Two().double() for _ in range(2)]
    alone = [copy.deepcopy(model) for model in models]
    x = torch.randn(5, 3).double()
    array = fuse(models, x)
    groups = [{"keys": ["a.bias", "b.bias"], "weight_decay": 0.0, "lr": [0.5, 0.05]}]
    optimizer = array.optimizer(torch.optim.AdamW, lr=[0.1, 0.01], weight_decay=[0.3, 0.2], groups=groups)
    for _ in range(4):
        array.losses(x, lambda out: out.square().mean()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for index, model in enumerate(alone):
        weights = {"params": [model.a.weight, model.b.weight]}
        biases = {"params": [model.a.bias, model.b.bias], "weight_decay": 0.0, "lr": (0.5, 0.05)[index]}
        theirs = torch.optim.AdamW([weights, biases], lr=(0.1, 0.01)[index], weight_decay=(0.3, 0.2)[index])
        train_alone([model], [theirs], [(x, None)] * 4, lambda out, _: out.square().mean())
        assert_same_state(array.member(index).state_dict(), model.state_dict())


SCHEDULES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (torch.optim.lr_scheduler.StepLR, {"step_size": [1, 2, 3], "gamma": [0.1, 0.5, 0.9]}),
    (torch.optim.lr_scheduler.MultiStepLR, {"milestones": [[1, 2], [3], [2, 4]]}),
    (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": [3, 5, 7]}),
    (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": [0.1, 0.2, 0.3], "total_steps": 8}),
    (torch.optim.lr_scheduler.ExponentialLR, {"gamma": [0.1, 0.5, 0.9]}),
    (torch.optim.lr_scheduler.LambdaLR, {"lr_lambda": [lambda s: 0.5**s, lambda s: 1.0, lambda s: 1 / (s + 1)]}),
]


@pytest.mark.parametrize(("schedule", "settings"), SCHEDULES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.Adam])
def test_schedule_equals_torch_on_the_member_alone(
    schedule: Callable[..., Any], settings: dict[str, Any], factory: Callable[..., Any]
) -> None:
    models = [Two().double() for _ in range(3)]
    alone = [copy.deepcopy(model) for model in models]
    x = torch.randn(5, 3).double()
    array = fuse(models, x)
    momentum = {"momentum": 0.9} if factory is torch.optim.SGD else {}
    optimizer = array.optimizer(factory, lr=[0.1, 0.01, 0.03], **momentum)
    scheduler = array.scheduler(schedule, **settings)
    for _ in range(6):
        array.losses(x, lambda out: out.square().mean()).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for index, model in enumerate(alone):
        theirs = factory(model.parameters(), lr=(0.1, 0.01, 0.03)[index], **momentum)
        theirs_schedule = schedule(theirs, **option(settings, index))
        for _ in range(6):
            model(x).square().mean().backward()
            theirs.step()
            theirs_schedule.step()
            theirs.zero_grad()
        assert_same_state(array.member(index).state_dict(), model.state_dict())
        assert scheduler.get_last_lr()[index] == theirs_schedule.get_last_lr()[0]


def test_plateau_schedule_watches_each_members_own_metric() -> None:
    array = fuse([Two(), Two()], torch.randn(5, 3))
    array.optimizer(torch.optim.SGD, lr=[0.1, 1.0])
    scheduler = array.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=[0.5, 0.1])
    for step in range(3):
        scheduler.step(torch.tensor([1.0, -step]))
    assert scheduler.get_last_lr() == [0.025, 1.0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_train_with_the_optimizers_that_torch_has_for_them(factory: Any) -> None:
    models, x = built(lambda seed: Words(), 3), torch.tensor([[0, 1], [5, 1]])
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, x)
    optimizer = array.optimizer(factory, lr=[0.1, 0.2, 0.3])
    for step in range(3):
        array.losses(x + step // 2, lambda out: out.square().mean()).sum().backward()
        if step == 1:
            array.drop(0)
        optimizer.step()
        optimizer.zero_grad()
    theirs = [factory(model.parameters(), lr=0.1 * (i + 1)) for i, model in enumerate(alone)]
    batches = [(x + step // 2, None) for step in range(3)]
    train_alone(alone, theirs, batches, lambda out, _: out.square().mean())
    for place, member in enumerate((1, 2)):
        assert_same_state(array.member(place).state_dict(), alone[member].state_dict())


def test_sparse_gradients_are_refused_in_one_line_where_torch_refuses_them() -> None:
    x = torch.tensor([[0, 1], [5, 1]])
    for factory in (torch.optim.Adam, torch.optim.NAdam):
        array = fuse(built(lambda seed: Words(), 2), x)
        optimizer = array.optimizer(factory)
        array.losses(x, lambda out: out.square().mean()).sum().backward()
        with pytest.raises(FusionError, match="sparse gradients"):
            array.clip_grad_norm_(1.0)
        with pytest.raises(FusionError, match=f"{factory.__name__} .* sparse gradients"):
            optimizer.step()


class ChannelsLast(nn.Module):
    """As one makes it for speed: weights and activations with channels last, dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.point, self.norm = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.point(self.conv(x.to(memory_format=torch.channels_last))))).clone()
        rows = y.permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)  # of the same memory, as channels are last
        y.mul_(2.0)
        result: Tensor = self.head(y.contiguous(memory_format=torch.channels_last).mean((2, 3)) + rows.amax(1))
        return result


@pytest.mark.parametrize("mode", ["rules", "serial"])
@pytest.mark.parametrize("per_member", [False, True])
def test_models_with_channels_last_train_as_alone_also_on_one_sample(mode: Any, per_member: bool) -> None:
    models = built(lambda seed: ChannelsLast(), 3)
    alone = [copy.deepcopy(model) for model in models]
    torch.manual_seed(7)
    batches = [torch.randn(size, 3, 5, 5, dtype=torch.float64) for size in (4, 1, 3, 4)]
    array = fuse(models[:2], batches[0], mode=mode)
    array.admit(models[2])
    optimizer = array.optimizer(torch.optim.Adam, lr=[1e-2, 3e-3, 2e-2], eps=1e-3)
    for x in batches:
        array.losses([x] * 3 if per_member else x, lambda y: y.square().mean(), per_member=per_member).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for index, (model, lr) in enumerate(zip(alone, (1e-2, 3e-3, 2e-2), strict=True)):
        torch.manual_seed(index)
        train_alone(
            [model], [torch.optim.Adam(model.parameters(), lr=lr, eps=1e-3)], [(x, None) for x in batches], squares
        )
        for key, value in array.member(index).state_dict().items():
            wanted = model.state_dict()[key]
            torch.testing.assert_close(value, wanted, rtol=RTOL, atol=1e-12)
            assert value.stride() == wanted.stride()
    array.verify()


def squares(y: Tensor, _: Any) -> Tensor:
    return y.square().mean()
