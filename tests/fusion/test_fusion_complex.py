"""Complex parameters, as in Fourier neural operators: trained, saved and clipped as torch does it with one model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_alone import assert_same_step
from torch import Tensor, nn

from burstpool.fusion import FusedArray, fuse
from burstpool.fusion.apply import apply_at_once

X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(4, 8).cos()


class Spectral(nn.Module):
    """A filter for each frequency, and a real layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(2, 5, dtype=torch.complex128))
        self.out = nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.filter + self.shift.prod(0)
        return self.out(torch.fft.irfft(spectrum, n=8))


def squared(out: Tensor) -> Tensor:
    return out.square().mean()


OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": [1e-3, 1e-2], "momentum": [0.9, 0.5], "dampening": [0.0, 0.1], "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": [0.1, 0.01], "weight_decay": [0.0, 0.1], "amsgrad": True}),
    (torch.optim.AdamW, {"lr": [0.1, 0.01], "weight_decay": [0.0, 0.1], "maximize": True}),
    (torch.optim.RMSprop, {"lr": [0.01, 0.001], "momentum": [0.9, 0.5], "centered": True}),
    (torch.optim.Adagrad, {"lr": [0.1, 0.01], "initial_accumulator_value": [0.1, 1.0]}),
    (torch.optim.Adadelta, {"lr": [1.0, 0.1], "weight_decay": [0.1, 0.0]}),
    (torch.optim.NAdam, {"lr": [0.1, 0.01]}),
]


def pair(factory: Callable[..., Any], options: dict[str, Any]) -> tuple[FusedArray, list[nn.Module], list[Any]]:
    """An array with its optimizer; the same models alone with theirs."""
    torch.manual_seed(0)
    models: list[nn.Module] = [Spectral() for _ in range(2)]
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, X)
    array.optimizer(factory, **options)
    mine = [{name: v[i] if isinstance(v, list) else v for name, v in options.items()} for i in range(2)]
    return array, alone, [factory(model.parameters(), **own) for model, own in zip(alone, mine, strict=True)]


def train(array: FusedArray, steps: int) -> None:
    for _ in range(steps):
        array.losses(X, squared).sum().backward()
        array.optimizers[0].step()
        array.optimizers[0].zero_grad()


def train_one(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        squared(model(X)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(mine: Any, theirs: Any) -> None:
    # The order of sums differs; no more than a few roundings in double precision.
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ["in chunks", "at once", "in tiny chunks"])
@pytest.mark.parametrize(("factory", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
def test_complex_parameters_train_as_alone(
    factory: Callable[..., Any], options: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "at once":  # as on a GPU
        monkeypatch.setattr("burstpool.fusion.optim.apply_in_chunks", apply_at_once)
    if way == "in tiny chunks":
        monkeypatch.setattr("burstpool.fusion.apply._CHUNK_BYTES", 8)
    array, alone, theirs = pair(factory, options)
    train(array, 5)
    for index, (model, optimizer) in enumerate(zip(alone, theirs, strict=True)):
        train_one(model, optimizer, 5)
        assert_close(array.member(index).state_dict(), dict(model.state_dict()))
        assert_close(array.optimizers[0].member_state_dict(index)["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize(("factory", "options"), OPTIMIZERS, ids=lambda v: getattr(v, "__name__", ""))
def test_complex_state_goes_in_and_out_bit_exact(factory: Callable[..., Any], options: dict[str, Any]) -> None:
    array, alone, theirs = pair(factory, options)
    train_one(alone[1], theirs[1], 3)
    array.load_member(1, alone[1].state_dict())
    array.optimizers[0].load_member_state_dict(1, theirs[1].state_dict())
    out = array.optimizers[0].member_state_dict(1)["state"]
    torch.testing.assert_close(out, theirs[1].state_dict()["state"], rtol=0, atol=0)
    saved = array.state_dict()
    train(array, 2)
    again, _, _ = pair(factory, options)
    again.load_state_dict(saved)
    train(again, 2)
    train_one(alone[1], theirs[1], 2)
    assert_close(array.member(1).state_dict(), dict(alone[1].state_dict()))
    torch.testing.assert_close(again.member(1).state_dict(), array.member(1).state_dict(), rtol=0, atol=0)


def test_a_complex_member_comes_stops_and_goes() -> None:
    array, alone, theirs = pair(torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": [0.1, 1.0]})
    array.stop(0)
    train(array, 1)
    torch.manual_seed(5)
    third = Spectral()
    lone = copy.deepcopy(third)
    array.admit(third, initial_accumulator_value=0.5)
    array.drop(0)
    train(array, 2)
    train_one(alone[1], theirs[1], 3)
    train_one(lone, torch.optim.Adagrad(lone.parameters(), lr=0.1, initial_accumulator_value=0.5), 2)
    assert_close(array.member(0).state_dict(), dict(alone[1].state_dict()))
    assert_close(array.member(1).state_dict(), dict(lone.state_dict()))


@pytest.mark.parametrize("broken", [None, 1.0 + 1j * float("nan"), complex("inf")])
def test_complex_gradients_are_clipped_by_their_moduli(broken: complex | None) -> None:
    array, alone, _ = pair(torch.optim.SGD, {"lr": 0.1})
    array.losses(X, squared).sum().backward()
    if broken is not None:
        dict(array.named_parameters())["filter"].grad[0, 0] = broken  # type: ignore[index]
    gradients = {name: parameter.grad.clone() for name, parameter in array.named_parameters()}
    norms = array.clip_grad_norm_([0.5, 2.0])
    for index, model in enumerate(alone):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][index].clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), [0.5, 2.0][index])
        torch.testing.assert_close(norms[index], norm, equal_nan=True, rtol=1e-12, atol=0)
        for name, parameter in array.named_parameters():
            theirs = model.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad[index], theirs, equal_nan=True, rtol=1e-12, atol=0)  # type: ignore[index]


def test_an_imaginary_overflow_skips_the_members_step() -> None:
    array, _, _ = pair(torch.optim.SGD, {"lr": 0.1})
    scaler = array.loss_scaler(init_scale=2.0)
    before = [array.member(index).state_dict()["filter"] for index in range(2)]
    scaler.scale(array.losses(X, squared)).sum().backward()
    dict(array.named_parameters())["filter"].grad[0, 0] = complex(0.0, float("inf"))  # type: ignore[index]
    scaler.step(array.optimizers[0])
    assert scaler.overflowed() == [True, False]
    assert torch.equal(array.member(0).state_dict()["filter"], before[0])
    assert not torch.equal(array.member(1).state_dict()["filter"], before[1])


class Layers(nn.Module):
    """Complex layers one behind another; the second has each member's own input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers).to(torch.complex128)
        for parameter in self.parameters():
            parameter.data += 0.3j * torch.randn(parameter.shape)

    def double(self) -> "Layers":
        """It is already, with imaginary parts."""
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(self.layers(torch.complex(x, x.flip(1))))


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_complex_layers_are_those_of_their_conjugates(bias: bool) -> None:
    assert_same_step(lambda seed: Layers(nn.Linear(8, 5, bias), nn.Linear(5, 4, bias), nn.Linear(4, 2, bias)), X)
    image = torch.cat([X, 1 - X]).view(4, 4, 2, 2)

    def points(seed: int) -> nn.Module:
        return Layers(nn.Conv2d(4, 5, 1, bias=bias), nn.Conv2d(5, 3, 1, bias=bias))

    assert_same_step(points, image, lowerings=("", "product"))
    assert_same_step(lambda seed: Layers(nn.Conv2d(4, 5, 2, bias=bias), nn.ConvTranspose2d(5, 3, 2, bias=bias)), image)
