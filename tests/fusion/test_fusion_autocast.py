"""Under autocast an array's operators have the number formats that they have alone, whichever way they run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burstpool.fusion import fuse

X = torch.linspace(0.25, 0.75, 12).view(4, 3)
EYE = torch.eye(3)

OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mv": (lambda x, v: torch.mv(x, v), [(3,)]),
    "mv of weights": (lambda x, w, v: x * torch.mv(w, v), [(3, 3), (3,)]),
    "dot": (lambda x, v, w: x * torch.dot(v, w), [(3,), (3,)]),
    "vdot": (lambda x, v, w: x * torch.vdot(v, w), [(3,), (3,)]),
    "addmv": (lambda x, v, b: torch.addmv(b.expand(x.shape[0]), x, v), [(3,), (1,)]),
    "vecdot": (lambda x, v: torch.linalg.vecdot(x, v), [(3,)]),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x.unsqueeze(1), w.expand(x.shape[0], 3, 5)), [(3, 5), (1, 1, 5)]),
    "addbmm": (lambda x, w, b: x @ torch.addbmm(b, w, w), [(2, 3, 3), (3, 3)]),
    "matrix power": (lambda x, w: x @ torch.linalg.matrix_power(w, 3), [(3, 3)]),
    "trace": (lambda x, w: x * torch.trace(w @ w), [(3, 3)]),
    "rfft": (lambda x, w: torch.fft.rfft(x @ w).real, [(3, 4)]),
    "eigvalsh": (lambda x, w: x * torch.linalg.eigvalsh(w @ w.t()), [(3, 3)]),
    "svdvals": (lambda x, w: x * torch.linalg.svdvals(w @ w + EYE), [(3, 3)]),
    "poisson loss": (lambda x, w: nn.functional.poisson_nll_loss(x @ w, x), [(3, 3)]),
    "index copy": (lambda x, w: torch.index_copy(x @ w, 0, torch.tensor([1]), (x @ w)[:1]), [(3, 5)]),
    "outer": (lambda x, v, w: x @ torch.outer(v, w), [(3,), (3,)]),
    "cdist": (lambda x, w: torch.cdist(x, w), [(5, 3)]),
}


class Applied(nn.Module):
    """One operator, of the input and parameters."""

    def __init__(self, function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([torch.rand(shape) * 0.5 + 0.25 for shape in shapes])

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights)


@pytest.mark.parametrize("per_member", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("name", OPERATORS)
def test_members_have_the_formats_and_numbers_of_training_alone(name: str, per_member: bool) -> None:
    function, shapes = OPERATORS[name]
    torch.manual_seed(0)
    models = [Applied(function, shapes) for _ in range(3)]
    array = fuse(models, X)
    for _ in range(2):  # what is found out at the first call holds for the next
        with torch.autocast("cpu", dtype=torch.bfloat16):
            together = array([X] * 3 if per_member else X, per_member=per_member)
            alone = [model(X) for model in models]
    together.float().square().sum().backward()
    for index, (model, mine) in enumerate(zip(models, alone, strict=True)):
        assert together.dtype == mine.dtype
        # Within two last digits of the products, 8 bits; those that stay in 32 bits have no such difference.
        digits = {"rtol": 2**-7, "atol": 2**-8 * float(mine.detach().abs().max())}
        torch.testing.assert_close(together[index], mine, **digits)
        mine.float().square().sum().backward()
        for stacked, weight in zip(array.parameters(), model.weights, strict=True):
            assert stacked.grad is not None
            atol = 2**-6 * float(weight.grad.abs().max())
            torch.testing.assert_close(stacked.grad[index], weight.grad, rtol=2**-6, atol=atol)


@pytest.mark.parametrize("name", ["mv", "dot", "vdot", "addmv"])
def test_what_autocast_leaves_in_32_bits_loses_no_digits_in_an_array(name: str) -> None:
    function, shapes = OPERATORS[name]
    torch.manual_seed(0)
    models = [Applied(function, shapes) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        together = fuse(models, X)(X)
        alone = torch.stack([model(X) for model in models])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0)


def test_without_autocast_nothing_is_cast_afterwards() -> None:
    function, shapes = OPERATORS["baddbmm"]
    models = [Applied(function, shapes) for _ in range(2)]
    array = fuse(models, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert array(X).dtype == torch.bfloat16
    torch.testing.assert_close(array(X), torch.stack([model(X) for model in models]))
