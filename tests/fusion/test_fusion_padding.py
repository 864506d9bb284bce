"""Products whose rows are padded for a GPU's matrix units: the same numbers, and gradients that are not copied."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from burstpool.fusion import fuse, padding
from burstpool.fusion.rules import matmul
from burstpool.fusion.rules.base import Run
from burstpool.fusion.streams import Streams

MEMBERS, SAMPLES, TOKENS, INPUTS, OUTPUTS = 2, 3, 4, 5, 13


@pytest.fixture
def _padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pads here as on a GPU."""
    monkeypatch.setattr(matmul, "_missing", lambda outputs, like: -outputs % padding.ALIGNED)


def run() -> Run:
    return Run(members=MEMBERS, streams=Streams([], torch.device("cpu")))


def operands() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (MEMBERS, SAMPLES, TOKENS, INPUTS), (MEMBERS, OUTPUTS, INPUTS), (MEMBERS, OUTPUTS)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def logits_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.matmul(x, weight.unsqueeze(1).transpose(2, 3)) + bias[:, None, None]


@pytest.mark.usefixtures("_padded")
def test_a_padded_product_is_the_plain_one() -> None:
    given = operands()
    y = matmul.linear_batched(run(), *given)
    wanted = logits_of(*given)
    assert y.stride(-2) == 16
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
    g = torch.randn_like(wanted)
    for mine, theirs in zip(torch.autograd.grad(y, given, g), torch.autograd.grad(wanted, given, g), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.usefixtures("_padded")
@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 0, 3, 5), (2, 3, 0, 5), (2, 5)])
def test_a_padded_product_takes_batches_of_any_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    _, weight, bias = operands()
    y = matmul.linear_batched(run(), x, weight, bias)
    assert y.shape == (*shape[:-1], OUTPUTS)
    for g, given in zip(torch.autograd.grad(y.sum(), (x, weight, bias)), (x, weight, bias), strict=True):
        assert g.shape == given.shape


@pytest.mark.usefixtures("_padded")
def test_a_users_code_may_write_to_a_padded_result() -> None:
    given = operands()
    y = matmul.linear_batched(run(), *given).mul_(2).masked_fill_(torch.arange(OUTPUTS) == 4, 1.0)
    wanted = (logits_of(*given) * 2).masked_fill(torch.arange(OUTPUTS) == 4, 1.0)
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
    for mine, theirs in zip(
        torch.autograd.grad(y.square().sum(), given), torch.autograd.grad(wanted.square().sum(), given), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_lies_behind_a_gradient_is_not_believed_to_be_zero() -> None:
    rows = torch.full((6, 16), 7.0)
    strangers = rows[:, :13].view(2, 3, 13)
    found = padding.whole(strangers, 16)
    assert (found[..., 13:] == 0).all()
    assert torch.equal(found[..., :13], strangers)


@pytest.mark.parametrize(
    "other",
    [
        lambda g: g.view(3, 2, 13).transpose(0, 1),  # rows in another order
        lambda g: g[3:].view(1, 3, 13),  # some of the rows
        lambda g: g.clone().view(2, 3, 13),
    ],
)
def test_a_gradient_that_lies_otherwise_is_copied(other: Any) -> None:
    zeros_behind = F.pad(torch.rand(6, 13), (0, 3))
    g = other(padding.with_zeros_behind(zeros_behind, 13))
    found = padding.whole(g, 16)
    assert found.data_ptr() != g.data_ptr()
    assert torch.equal(found, F.pad(g, (0, 3)))


def test_only_small_gaps_are_padding() -> None:
    assert padding.row_width(torch.rand(4, 16)[:, :13]) == 16
    assert padding.row_width(torch.rand(4, 64)[:, :13]) == 13
    assert padding.row_width(torch.rand(4, 15)[:, :13]) == 13
    assert padding.row_width(torch.rand(4 * 16 - 3).as_strided((4, 13), (16, 1))) == 13  # the last row ends before
    assert padding.row_width(torch.rand(13, 4).t()) == 13
    assert padding.row_width(torch.rand(4, 13)) == 13


@pytest.mark.parametrize("sides", [(5, 40), (40, 5), (30, 40), (5, 6)])
def test_factors_laid_along_the_sum_have_the_same_product(
    monkeypatch: pytest.MonkeyPatch, sides: tuple[int, int]
) -> None:
    monkeypatch.setattr(matmul, "_rounds", lambda like: True)
    monkeypatch.setattr(matmul, "_WORTH_A_COPY", 16)
    torch.manual_seed(0)
    g, x = (torch.randn(2, 8, side) for side in sides)
    laid = matmul._along_the_sum(g, x)
    assert [t.stride(1) == 1 for t in laid] == [max(sides) == 40 and side == 5 for side in sides]
    for a, b in zip(laid, (g, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("_padded")
def test_arrays_with_padded_layers_have_the_losses_and_gradients_of_models_alone() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(INPUTS, 7), nn.ReLU(), nn.Linear(7, OUTPUTS)).double() for _ in range(3)]
    x, y = torch.randn(6, INPUTS, dtype=torch.float64), torch.randint(OUTPUTS, (6,))
    array = fuse(models, x)
    mine = array.losses(x, F.cross_entropy, y)
    mine.sum().backward()
    alone = torch.stack([F.cross_entropy(model(x), y) for model in models])
    alone.sum().backward()
    torch.testing.assert_close(mine, alone, rtol=1e-12, atol=1e-12)
    for key, parameter in array.state.parameters.items():
        wanted = torch.stack([model.get_parameter(key).grad for model in models])
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-12)
