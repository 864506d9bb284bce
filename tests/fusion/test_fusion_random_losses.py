"""A loss that draws random numbers: each member draws those it would draw alone, and nobody else's stream moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_alone import built, train_alone
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.errors import FusionError
from burstpool.fusion import FusedArray, fuse
from burstpool.fusion.step import RecordedStep

X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(4, 6)
Y = torch.tensor([0, 2, 1, 2])
SEEDS = [5, 6, 7]


def label_noise(output: Tensor, target: Tensor) -> Tensor:
    """One of the losses that run at once, of a target that is drawn; no tensor of the output's is asked."""
    return F.cross_entropy(output, torch.where(torch.rand(len(target)) < 0.5, target, torch.randint(0, 3, (4,))))


def noisy_output(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output + 0.1 * torch.randn_like(output), target)


def with_dropout(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.5), target)


def one_by_one(output: Tensor, target: Tensor) -> Tensor:
    """What vmap cannot do, for another reason, before anything is drawn."""
    scale = 2.0 if output.sum().item() > 0 else 0.5
    return scale * F.cross_entropy(F.gumbel_softmax(output), target)


LOSSES = [label_noise, noisy_output, with_dropout, one_by_one]


def plain(seed: int) -> nn.Module:
    return nn.Linear(6, 3)


def random(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.Linear(8, 3))


def trained(array: FusedArray, loss: Callable[..., Tensor], steps: int) -> list[list[float]]:
    optimizer = array.optimizers[0]
    found = []
    for _ in range(steps):
        losses = array.losses(X, loss, Y)
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses.tolist())
    return [list(member) for member in zip(*found, strict=True)]


@pytest.mark.parametrize("mode", ["rules", "serial"])
@pytest.mark.parametrize("make", [plain, random])
@pytest.mark.parametrize("loss", LOSSES)
def test_members_draw_in_the_loss_what_they_draw_alone(loss: Any, make: Any, mode: Any) -> None:
    array = fuse(built(make, 3), X, seeds=SEEDS, mode=mode)
    array.optimizer(torch.optim.SGD, lr=0.1)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = trained(array, loss, 4)
    assert torch.equal(torch.get_rng_state(), before), "torch's own stream is the user's"
    for index, model in enumerate(built(make, 3)):
        torch.manual_seed(SEEDS[index])
        (expected,) = train_alone([model], [torch.optim.SGD(model.parameters(), lr=0.1)], [(X, Y)] * 4, loss)
        assert found[index] == pytest.approx(expected, rel=1e-9)


def test_a_loss_that_draws_goes_on_from_a_checkpoint_and_passes_over_stopped_members() -> None:
    array = fuse(built(plain, 3), X, seeds=SEEDS)
    array.optimizer(torch.optim.SGD, lr=0.1)
    trained(array, noisy_output, 2)
    saved = array.state_dict()
    expected = trained(array, noisy_output, 2)
    array.load_state_dict(saved)
    array.stop(1)
    others = trained(array, noisy_output, 2)
    assert [others[0], others[2]] == [expected[0], expected[2]]
    array.start(1)
    assert trained(array, noisy_output, 2)[1] == expected[1]


def test_a_loss_with_a_generator_of_its_own_is_refused() -> None:
    array, mine = fuse(built(plain, 2), X), torch.Generator()
    with pytest.raises(FusionError, match=r"the loss draws from a torch\.Generator of its own; leave it out"):
        array.losses(X, lambda out: (out * torch.rand(3, generator=mine)).sum())


def test_a_loss_that_draws_is_not_compiled() -> None:
    array = fuse(built(plain, 2), X)
    optimizer = array.optimizer(torch.optim.SGD, lr=0.1)
    step = RecordedStep(array, optimizer, noisy_output, X, Y, compiled=True)
    assert step.way == "as written"
    assert all("draws" in why for why in step.left_out.values())
    assert len(step.left_out) == 2
