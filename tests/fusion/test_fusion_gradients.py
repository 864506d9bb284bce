"""Gradients of a recorded step may be written to, whatever memory autograd gave them: members train as alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from fusion_alone import built
from torch import Tensor, nn

from burstpool.fusion import fuse
from burstpool.fusion.compiled import APART, TOGETHER, compiled_ways
from burstpool.fusion.gradients import leave_gradients
from burstpool.fusion.step import WRITTEN, RecordedStep

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own code


class OneGradient(nn.Module):
    """Two parameters with one gradient, two with parts of it, one whose gradient is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.same, self.few, self.rest, self.each = (
            nn.Parameter(torch.randn(size)) for size in (4, 4, 1, 3, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        shift = self.whole + self.same + torch.cat([self.few, self.rest])
        return (x * shift).square().mean() + self.each.sum()


def itself(out: Tensor) -> Tensor:
    return out


@pytest.mark.parametrize("way", [WRITTEN, TOGETHER, APART])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RAdam])
def test_clipped_members_train_as_alone_where_gradients_share_memory(
    way: str, optimizer: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compile", lambda function, **_: function)
    x = torch.randn(5, 4).double()
    models = built(lambda seed: OneGradient(), 3)
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, x)
    step = RecordedStep(array, array.optimizer(optimizer, lr=0.1), itself, x, max_norm=0.01)
    step._ways, _ = compiled_ways(array, itself)
    step.way = way
    for _ in range(3):
        step(x)
    array.optimizers[0].zero_grad(set_to_none=False)
    for index, model in enumerate(alone):
        mine = optimizer(model.parameters(), lr=0.1)
        for _ in range(3):
            mine.zero_grad()
            model(x).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()  # torch lets a part of another's share its memory, too
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            mine.step()
        for key, value in array.member(index).state_dict().items():
            torch.testing.assert_close(value, model.state_dict()[key], msg=lambda words, key=key: f"{key}: {words}")


def test_only_gradients_that_share_memory_are_copied() -> None:
    parameters = [nn.Parameter(torch.zeros(2, 3)) for _ in range(5)]
    whole = torch.randn(4, 3)
    apart = torch.randn(3, 2).t()
    gradients = [whole[:2], whole[2:], whole[1:3], apart, None]
    leave_gradients(parameters, gradients)
    kept = [
        p.grad is not None and g is not None and p.grad.data_ptr() == g.data_ptr()
        for p, g in zip(parameters, gradients[:4], strict=False)
    ]
    assert kept == [True, True, False, True]
    assert parameters[3].grad is not None
    assert parameters[3].grad.stride() == apart.stride()
    assert parameters[4].grad is None
    torch.testing.assert_close(parameters[2].grad, whole[1:3])
