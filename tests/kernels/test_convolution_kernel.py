"""Convolutions of all members in one kernel against torch's own, and against members alone."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, DTYPES, MARKS, QUICK, members_between, members_outermost
from torch import Tensor, nn

from burstpool.fusion import fuse

pytestmark = MARKS


@pytest.mark.parametrize("layout", [members_between, members_outermost] if QUICK else [members_between])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "outputs", "taps", "stride", "padding", "dilation"),
    [
        ((3, 5, 24, 7, 6), 40, (3, 3), (1, 1), (1, 1), (1, 1)),
        ((2, 3 if QUICK else 1, 130, 9, 8), 33, (3, 3), (2, 2), (1, 1), (1, 1)),
        ((4, 300 if QUICK else 2, 16, 8, 8), 16, (4, 4), (2, 2), (1, 1), (1, 1)),
        ((2, 2, 17, 9, 9), 64, (3, 2), (1, 1), (2, 1), (2, 3)),
        ((1, 2, 64, 11, 10), 16, (2, 3), (3, 2), (0, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize(("transposed", "more"), [(False, 0), (True, 0), (True, 1)])
def test_convolutions_of_all_members_in_one_kernel_are_torchs(
    layout: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    outputs: int,
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    transposed: bool,
    more: int,
) -> None:
    from burstpool.fusion.kernels.convolution import Geometry, convolved

    if more and max(*stride, *dilation) == 1:
        pytest.skip("torch has no output padding here")

    torch.manual_seed(0)
    members, _, channels = shape[:3]
    # Factors that rounding to TF32 or 16 bits leaves as they are: then only sums are rounded.
    x = layout(shape).bfloat16().to(dtype).detach().requires_grad_()
    weight = torch.randn(members, *((channels, outputs) if transposed else (outputs, channels)), *taps, device=DEVICE)
    weight = weight.bfloat16().to(dtype).requires_grad_()
    options: Any = (None, stride, padding, more, 1, dilation) if transposed else (None, stride, padding, dilation)
    exact = F.conv_transpose2d if transposed else F.conv2d
    wanted = torch.stack([exact(x[i].double(), weight[i].double(), *options) for i in range(members)])
    size = tuple(wanted.shape[3:]) if transposed else None
    geometry = Geometry(taps, stride, padding, dilation)
    y = convolved(x.movedim(2, -1), weight.movedim(2, -1).contiguous(), geometry, size).movedim(-1, 2)
    gradient = torch.randn_like(wanted).bfloat16().to(dtype)
    mine = y, *torch.autograd.grad(y, [x, weight], gradient)
    theirs = wanted, *torch.autograd.grad(wanted, [x, weight], gradient.double())
    for a, b in zip(mine, theirs, strict=True):
        scale = float(b.detach().abs().max())
        rounded = 2**-7 if dtype.itemsize == 2 else 1e-5  # the result to 8 bits, or float32 sums in another order
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=scale * rounded)


def test_factors_of_32_bits_are_rounded_to_the_nearest_not_cut() -> None:
    from burstpool.fusion.kernels.convolution import Geometry, convolved

    def nearest(x: Tensor) -> Tensor:
        return ((x.detach().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32).double()

    torch.manual_seed(0)
    x = (torch.rand(1, 2, 6, 6, 16, device=DEVICE) + 0.5).requires_grad_()
    weight = (torch.rand(1, 16, 3, 3, 16, device=DEVICE) + 0.5).requires_grad_()
    y = convolved(x, weight, Geometry((3, 3), (1, 1), (1, 1), (1, 1)))
    g = torch.rand_like(y) + 0.5
    exact = [nearest(tensor).requires_grad_() for tensor in (x, weight)]
    wanted = F.conv2d(exact[0][0].movedim(-1, 1), exact[1][0].movedim(-1, 1), padding=1)
    theirs = torch.autograd.grad(wanted, exact, nearest(g[0]).movedim(-1, 1))
    for a, b in zip((y[0].movedim(-1, 1), *torch.autograd.grad(y, [x, weight], g)), (wanted, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=0)
    x.data[0, 0, 0, 0, 0], x.data[0, 1, 0, 0, 0] = float("nan"), float("inf")
    y = convolved(x, weight, Geometry((3, 3), (1, 1), (1, 1), (1, 1)))
    assert y[0, 0, 0, 0].isnan().all()
    assert y[0, 1, 0, 0].isinf().all()


class Maps(nn.Module):
    """Convolutions that the kernel takes: with a bias, transposed, and one whose outer taps only see padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False)
        self.up, self.down = nn.ConvTranspose2d(24, 16, 4, 2, 1), nn.Conv2d(16, 8, 3, stride=4, padding=1)
        self.cropped, self.head = nn.Conv2d(8, 8, 5, padding=2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.up(F.silu(self.second(F.silu(self.first(x))))))  # smooth: rounding changes no branch
        y: Tensor = self.head(self.cropped(F.silu(self.down(x))).mean((2, 3)))
        return y


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [False, True] if QUICK else [False])
def test_members_whose_convolutions_run_in_one_kernel_have_the_gradients_they_have_alone(
    layout: torch.memory_format, autocast: bool
) -> None:
    torch.manual_seed(0)
    models = [Maps().to(DEVICE).to(memory_format=layout) for _ in range(3)]
    x = torch.randn(4 if QUICK else 2, 3, 8, 8, device=DEVICE)
    array = fuse(models, x)
    setting = torch.autocast(DEVICE, torch.bfloat16, enabled=autocast)
    with setting:
        array(x)
    chosen = 0
    for plan in array.mode.plans():
        for step in plan.steps:
            if "conv" in str(step.node.target) and "kernel" in step.lowered.others:
                step.choose("kernel")
                chosen += 1
        plan.recompile()
    assert chosen == 4
    with setting:
        losses = array.losses(x, lambda out: out.square().mean())
    losses.sum().backward()
    exact = [copy.deepcopy(model).double() for model in models]
    for index, model in enumerate(exact):
        loss = model(x.double()).square().mean()
        loss.backward()
        torch.testing.assert_close(losses[index].double(), loss, rtol=3e-2 if autocast else 1e-2, atol=0)
        for key, parameter in model.named_parameters():
            mine = array.state.parameters[key].grad[index].double()
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(mine, parameter.grad, rtol=0, atol=scale * (0.1 if autocast else 0.02))
