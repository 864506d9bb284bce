"""Compiled ways of a step: the same losses, gradients and buffers as the written one, for models of many kinds."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from burstpool.errors import FusionError
from burstpool.fusion import fuse
from burstpool.fusion.alike import Seen, unlike
from burstpool.fusion.compiled import (
    APART,
    TOGETHER,
    CompiledTogether,
    compiled_ways,
    compiler_options,
    of_any_layout,
)
from burstpool.fusion.rules import PerMember, Run
from burstpool.fusion.rules.dropout import scaled_mask
from burstpool.fusion.rules.matmul import _BatchedLinear, linear_batched
from burstpool.fusion.serial import draws
from burstpool.fusion.step import WRITTEN, RecordedStep
from burstpool.fusion.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own code


class Tied(nn.Module):
    """One weight in two places, a part without gradients, a part that is detached, batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm, self.frozen, self.unused = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(2, 2)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.first(x)))
        with torch.no_grad():
            scale = self.second(hidden).mean()
        return self.frozen(self.second(hidden)) * scale + hidden.detach()


def convolutions() -> nn.Module:
    parts = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*parts)


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {"tied": (Tied, (5, 6)), "convolutions": (convolutions, (5, 2, 5, 5))}


@pytest.fixture(autouse=True)
def _quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed over is tested here; what Inductor makes of it is torch's."""
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="aot_eager"))


def members(make: Any, count: int = 3) -> list[nn.Module]:
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(make().double())
    return models


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def trained(way: str, name: str, *, own: bool, stop: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    make, shape = CASES[name]
    torch.manual_seed(7)
    x = torch.randn(4, *((3, *shape) if own else shape), dtype=torch.float64)
    array = fuse(members(make), x[0][0] if own else x[0])
    optimizer = array.optimizer(torch.optim.SGD, lr=[0.1, 0.05, 0.02], momentum=0.9)
    step = RecordedStep(array, optimizer, square, x[0], per_member=own)
    step._ways, left_out = compiled_ways(array, square, per_member=own)
    assert not left_out
    step.way = way
    if stop:
        array.stop(1)
    losses = torch.stack([step(batch).clone() for batch in x])
    return losses, {f"{i}.{k}": v for i in range(3) for k, v in array.member(i).state_dict().items()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", [TOGETHER, APART])
def test_a_compiled_way_trains_what_the_written_one_trains(way: str, name: str, own: bool) -> None:
    expected, found = trained(WRITTEN, name, own=own), trained(way, name, own=own)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", [TOGETHER, APART])
def test_a_stopped_member_stays_as_it_is_in_a_compiled_way(way: str) -> None:
    _, before = trained(way, "convolutions", own=False, stop=True)
    for key, value in members(convolutions)[1].state_dict().items():
        assert torch.equal(before[f"1.{key}"], value)


def test_the_fastest_way_is_chosen_and_changes_nothing() -> None:
    x = torch.randn(5, 6, dtype=torch.float64)
    states = []
    for compiled in (False, True):
        array = fuse(members(Tied), x)
        step = RecordedStep(array, array.optimizer(torch.optim.Adam, lr=0.01), square, x, compiled=compiled)
        assert set(step.times_s) == ({WRITTEN, TOGETHER, APART} if compiled else set())
        assert step.way == min(step.times_s, key=step.times_s.__getitem__, default=WRITTEN)
        step(x)
        states.append(array.member(2).state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-9, atol=1e-12)


WRONG = {
    "a member's gradient": "'first.weight' of member 1 has a gradient of norm",
    "not a number": "'first.weight' of member 1 has a gradient of norm nan",
    "a loss": "the loss of member 2 is",
    "no gradient": "'first.weight' has a gradient in one of them only",
}


@pytest.mark.parametrize(
    ("wrong", "known", "max_norm"),
    [
        *((wrong, False, None) for wrong in WRONG),
        ("a member's gradient", True, None),
        ("a member's gradient", False, 1.0),
    ],
)
def test_a_compiled_way_that_does_something_else_is_left_out(
    wrong: str, known: bool, max_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CompiledTogether.__call__

    def mistaken(self: CompiledTogether, inputs: Any, targets: Any) -> Tensor:
        losses = right(self, inputs, targets)
        parameter = self.array.state.parameters["first.weight"]
        assert parameter.grad is not None
        parameter.grad[1] *= {"a member's gradient": 1000.0, "not a number": torch.nan}.get(wrong, 1.0)
        if wrong == "no gradient":
            parameter.grad = None
        return losses + torch.tensor([0.0, 0.0, 2.0 if wrong == "a loss" else 0.0])

    monkeypatch.setattr(CompiledTogether, "__call__", mistaken)
    if known:
        monkeypatch.setattr(RecordedStep, "_ways_to_try", lambda self: [TOGETHER])
    x = torch.randn(5, 6, dtype=torch.float64)
    array = fuse(members(Tied), x)
    before = array.member(1).state_dict()
    optimizer = array.optimizer(torch.optim.SGD, lr=0.01)
    step = RecordedStep(array, optimizer, square, x, compiled=True, max_norm=max_norm)
    assert step.way in ((WRITTEN,) if known else (WRITTEN, APART))
    assert list(step.left_out) == [TOGETHER]
    assert WRONG[wrong] in step.left_out[TOGETHER]
    torch.testing.assert_close(array.member(1).state_dict(), before, rtol=0, atol=0)


def test_what_is_compiled_for_a_gpu_has_no_padded_rows() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    unpadded = {"comprehensive_padding": False}
    assert compiler_options(cpu, {"mode": "reduce-overhead"}) == {"dynamic": False, "mode": "reduce-overhead"}
    assert compiler_options(gpu) == {"dynamic": False, "options": unpadded}
    assert compiler_options(gpu, {"backend": "aot_eager"}) == {"dynamic": False, "backend": "aot_eager"}
    given = compiler_options(gpu, {"mode": "max-autotune-no-cudagraphs", "dynamic": True})
    assert given == {"dynamic": True, "options": {**unpadded, "max_autotune": True, "coordinate_descent_tuning": True}}
    assert compiler_options(gpu, {"options": {"max_autotune": True}})["options"] == {**unpadded, "max_autotune": True}


def test_a_way_that_was_chosen_before_is_taken_if_it_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedStep, "_ways_to_try", lambda self: [TOGETHER])
    x = torch.randn(5, 6, dtype=torch.float64)
    array = fuse(members(Tied), x)
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.01), square, x, compiled=True)
    assert (step.way, step.left_out) == (TOGETHER, {})


class Scaled(nn.Module):
    """A parameter that is one number, and gradients that are zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(2.0)), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).mean(1) + self.scale


@pytest.mark.parametrize("loss", [square, torch.mean])
def test_numbers_and_rounding_are_no_reason_to_leave_a_way_out(loss: Any) -> None:
    x = torch.randn(5, 6)
    array = fuse([module.float() for module in members(Scaled)], x)
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.01), loss, x, compiled=True)
    assert not step.left_out


def test_steps_are_alike_where_they_differ_by_rounding_or_in_what_hardly_counts() -> None:
    def with_norms(**norms: Any) -> Seen:
        changed = {key: None if value is None else torch.tensor(value) for key, value in norms.items()}
        given = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-6, 1e-6]), "c": None}
        return Seen(torch.tensor([1.0, 1.0]), {**given, **changed})

    right = with_norms()
    assert not unlike(with_norms(a=[1.5, 0.9]), right, random=False)
    assert not unlike(with_norms(b=[1e-3, 0.0]), right, random=False)
    assert "'b' of member 0" in unlike(with_norms(b=[0.1, 0.0]), right, random=False)
    assert "'a' of member 1" in unlike(with_norms(a=[1.0, 0.0]), right, random=False)
    assert "'c'" in unlike(with_norms(c=[0.0, 0.0]), right, random=False)
    assert not unlike(with_norms(a=[0.0, 0.0], b=[0.5, 0.5]), right, random=True)
    assert "the gradient of member 1" in unlike(with_norms(b=[0.5, 1e3]), right, random=True)
    assert "the gradient of member 0" in unlike(with_norms(b=[torch.nan, 0.0]), right, random=True)
    empty = Seen(torch.tensor([0.0]), {"c": None})
    assert not unlike(empty, empty, random=False)
    assert "the loss of member 0" in unlike(Seen(torch.tensor([torch.nan]), {"c": None}), empty, random=True)


def test_what_draws_random_numbers_is_not_compiled_on_the_cpu() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(2)], x)
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.1), square, x, compiled=True)
    assert step.way == WRITTEN
    assert step.left_out == {TOGETHER: "it draws random numbers", APART: "it draws random numbers"}


def test_writing_a_member_down_leaves_its_random_stream_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    models = members(lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)), 2)
    expected = []
    for seed, model in zip((3, 4), models, strict=True):
        torch.manual_seed(seed)
        expected.append([square(model(x)).item() for _ in range(3)])
    array = fuse(models, x, seeds=[3, 4])
    with monkeypatch.context() as patched:  # the CPU refuses what draws; a GPU's masks would not be those of alone
        patched.setattr("burstpool.fusion.compiled.draws", lambda mode: False)
        way = compiled_ways(array, square)[0][APART]
    before = torch.get_rng_state()
    found = torch.stack([way(x, ()) for _ in range(3)], 1)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", [TOGETHER, APART])
def test_a_loss_that_draws_is_not_compiled_and_torchs_own_stream_stays_where_it_was(way: str) -> None:
    """Compiled, it would draw from torch's own stream, not from the members'."""
    x = torch.randn(4, 6, dtype=torch.float64)
    array = fuse(members(lambda: nn.Linear(6, 3), 2), x)
    made = compiled_ways(array, lambda out: F.dropout(out, 0.5).square().mean())[0][way]
    before = torch.get_rng_state()
    with pytest.raises(FusionError, match="draws"):
        made(x, ())
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_that_is_off_draws_nothing() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.0)) for _ in range(2)], x)
    assert not RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.1), square, x, compiled=True).left_out


@pytest.mark.parametrize(("layers", "p"), [(1, 0.0), (2, 0.0), (2, 0.5)])
def test_recurrent_layers_draw_only_for_their_dropout(layers: int, p: float) -> None:
    array = fuse(
        [nn.LSTM(6, 4, num_layers=layers, dropout=p, batch_first=True) for _ in range(2)], torch.randn(3, 2, 6)
    )
    assert draws(array.mode) == (p > 0)
    assert draws(array.eval().mode) is False


def test_masks_from_seeds_have_the_members_own_chances_and_depend_on_the_seed_alone() -> None:
    seeds = torch.tensor([11, 12345678901234, 11])

    def masks(p: float) -> Tensor:
        run = Run(members=3, streams=Streams([], torch.device("cpu")), seeded=[seeds])
        return scaled_mask(run, (200, 500), p, torch.empty(0))

    mask = masks(0.3)
    kept = (mask > 0).double().mean(dim=(1, 2))
    torch.testing.assert_close(kept, torch.full((3,), 0.7, dtype=torch.float64), rtol=0, atol=0.01)
    torch.testing.assert_close(mask.mean(dim=(1, 2)), torch.ones(3), rtol=0, atol=0.02)
    assert torch.equal(mask[0], mask[2])
    both = ((mask[0] > 0) & (mask[1] > 0)).double().mean()  # as independent draws
    assert abs(both.item() - 0.49) < 0.01
    assert (masks(1.0) == 0).all()


def test_a_batched_linear_layer_has_torchs_gradients_to_the_second_order() -> None:
    x, w, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4), (2, 5, 4), (2, 5)))
    layer = lambda x, w, b: _BatchedLinear.apply(x, w, b, (2, 3, 5))  # noqa: E731
    assert torch.autograd.gradcheck(layer, (x, w, b))
    assert torch.autograd.gradgradcheck(layer, (x, w, b))
    torch.testing.assert_close(layer(x, w, b)[1], F.linear(x[1], w[1], b[1]))


def test_a_padded_linear_layer_has_torchs_gradients_to_the_second_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burstpool.fusion.rules.matmul._missing", lambda outputs, like: -outputs % 8)
    run = Run(members=2, streams=Streams([], torch.device("cpu")))
    shapes = (2, 3, 2, 4), (2, 5, 4), (2, 5)
    x, w, b = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    layer = functools.partial(linear_batched, run)
    assert torch.autograd.gradcheck(layer, (x, w, b))
    assert torch.autograd.gradgradcheck(layer, (x, w, b))
    assert torch.autograd.gradgradcheck(lambda x, w: layer(x, w, None), (x, w))
    torch.testing.assert_close(layer(x, w, b)[1], F.linear(x[1], w[1], b[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seeded", [False, True])
def test_what_dropout_keeps_is_scaled_as_torch_scales_it(dtype: torch.dtype, seeded: bool) -> None:
    ps = (0.15, 0.35, 0.1)
    streams = Streams([0, 1, 2], torch.device("cpu"))
    run = Run(members=3, streams=streams, seeded=[torch.arange(3)] if seeded else None)
    masks = scaled_mask(run, (100,), PerMember(ps), torch.empty(0, dtype=dtype))
    for mask, p in zip(masks, ps, strict=True):
        assert mask.max() == torch.ones((), dtype=dtype).div_(1 - p)


def test_models_stay_apart_from_their_copies() -> None:
    models = members(Tied)
    kept = copy.deepcopy(models[0].state_dict())
    x = torch.randn(5, 6, dtype=torch.float64)
    array = fuse(models, x)
    RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.1), square, x, compiled=True)(x)
    torch.testing.assert_close(models[0].state_dict(), kept, rtol=0, atol=0)


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2))


@pytest.mark.parametrize("way", [WRITTEN, TOGETHER, APART, "serial"])
def test_a_model_that_writes_into_its_input_finds_it_as_it_was_given(way: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    models = members(WritesItsInput)
    expected = torch.stack([square(model(x.clone())) for model in models])
    array = fuse(models, x.clone(), mode="serial" if way == "serial" else "rules")
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.0), square, x)
    step._ways, _ = compiled_ways(array, square)
    step.way = WRITTEN if way == "serial" else way
    for _ in range(2):
        given = x.clone()
        torch.testing.assert_close(step(given), expected)
        torch.testing.assert_close(given, 2 * x)  # as alone


@pytest.mark.parametrize("way", [TOGETHER, APART])
def test_a_compiled_way_takes_batches_of_another_size_and_other_values(way: str) -> None:
    def scaled(out: Tensor, factor: float) -> Tensor:
        return factor * out.square().mean()

    x = torch.randn(8, 6, dtype=torch.float64)
    found = {}
    for chosen in (WRITTEN, way):
        array = fuse(members(lambda: nn.Linear(6, 3)), x)
        step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.1), scaled, x, 1.0)
        step._ways, _ = compiled_ways(array, scaled)
        step.way = chosen
        found[chosen] = torch.stack([step(x, 1.0), step(x[:1], 1.0), step(x[:3], 0.5), step(x, 0.5)])
    torch.testing.assert_close(found[way], found[WRITTEN])


@pytest.mark.parametrize("way", [TOGETHER, APART])
def test_targets_that_a_loss_closes_over_are_not_those_of_the_first_batch_for_ever(way: str) -> None:
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    array = fuse(members(lambda: nn.Linear(6, 3)), x)
    loss = lambda out: F.mse_loss(out, y)  # noqa: E731 -- as users write it
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.1), loss, x)
    step._ways, _ = compiled_ways(array, loss)
    step.way = way
    step(x)
    y = y + 1
    with pytest.raises(FusionError, match="takes 'y' from its surroundings"):
        step(x)


def test_a_view_that_was_written_down_for_one_layout_holds_for_another() -> None:
    written = make_fx(lambda x: x.view(6, 4).sin())(torch.randn(2, 3, 4))
    x = torch.randn(3, 2, 4).transpose(0, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        written(x)
    torch.testing.assert_close(of_any_layout(written)(x), x.reshape(6, 4).sin())


def test_a_view_that_is_written_to_stays_one() -> None:
    def function(x: Tensor) -> Tensor:
        x.view(6, 4).add_(1.0)
        return x * 1.0

    written = of_any_layout(make_fx(function)(torch.randn(2, 3, 4)))
    x = torch.zeros(2, 3, 4)
    assert torch.equal(written(x), torch.ones(2, 3, 4))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        written(torch.zeros(3, 2, 4).transpose(0, 1))  # a copy would be written to, and nobody would see it


def test_a_compiled_step_is_refused_after_members_have_changed() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(slope)) for slope in (0.1, 0.2)], x)
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.1), square, x)
    step._ways, _ = compiled_ways(array, square)
    step.way = TOGETHER
    step(x)
    array.drop(0)
    array.admit(nn.Sequential(nn.Linear(6, 3), nn.LeakyReLU(0.4)))
    with pytest.raises(FusionError, match="left or joined"):
        step(x)


def test_parameters_that_are_frozen_later_have_no_gradients_in_a_compiled_way() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Linear(6, 3) for _ in range(2)], x)
    way = compiled_ways(array, square)[0][TOGETHER]
    way(x, ())
    before = array.state.parameters["bias"].grad
    array.state.parameters["weight"].requires_grad_(False)
    array.state.parameters["weight"].grad = None
    way(x, ())
    assert array.state.parameters["weight"].grad is None
    torch.testing.assert_close(array.state.parameters["bias"].grad, before)


def test_an_array_keeps_few_of_the_compiled_ways_of_losses_written_anew() -> None:
    x = torch.randn(4, 6)
    array = fuse([nn.Linear(6, 3) for _ in range(2)], x)
    first = compiled_ways(array, square)[0]
    for _ in range(20):
        compiled_ways(array, lambda out: out.sum())
        assert compiled_ways(array, square)[0] == first
    assert len(array.compiled_ways) <= 8
