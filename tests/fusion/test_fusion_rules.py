"""Every operator family: fused gives each member the result, the gradients and the buffers it has alone."""

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fusion_alone import assert_same_step, built
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.errors import FusionError
from burstpool.fusion import fuse
from burstpool.fusion.rules import Run
from burstpool.fusion.rules.depthwise import depthwise_kernel
from burstpool.fusion.rules.fallback import without_vmaps_loop
from burstpool.fusion.rules.window import _touched
from burstpool.fusion.streams import Streams

pytestmark = pytest.mark.filterwarnings("ignore:dropout2d. Received a 2-D input")


class Calls(nn.Module):
    """A weight and a function of it."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape) if shape else torch.randn(()))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.weight, *inputs)


def image(channels: int = 4, size: int = 6, dims: int = 2) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(3, channels, *[size] * dims, dtype=torch.float64)


def rows(*shape: int) -> Tensor:
    torch.manual_seed(7)
    return torch.randn(3, *shape, dtype=torch.float64)


CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), 1),
    "1d point": (lambda: nn.Conv1d(4, 6, 1), 1),
    "2d": (lambda: nn.Conv2d(4, 6, 3), 2),
    "2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), 2),
    "2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), 2),
    "2d stride dilation": (lambda: nn.Conv2d(4, 6, 2, stride=2, dilation=2), 2),
    "2d same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), 2),
    "2d reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), 2),
    "2d circular": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="circular"), 2),
    "2d replicate": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), 2),
    "2d point": (lambda: nn.Conv2d(4, 6, 1), 2),
    "3d": (lambda: nn.Conv3d(4, 2, 2), 3),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), 1),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1, bias=False), 2),
    "transposed 2d groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2), 2),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 2, 2), 3),
}


SMALL_MAPS = {
    "one point under 3 by 3": (lambda: nn.Conv2d(4, 6, 3, padding=1), 1),
    "two points, stride 2": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), 2),
    "two points under 5 by 5": (lambda: nn.Conv2d(4, 6, 5, padding=2), 2),
    "the whole map": (lambda: nn.Conv2d(4, 6, 4), 4),
    "the whole map, dilated": (lambda: nn.Conv2d(4, 6, 2, dilation=3), 4),
    "a point with a stride": (lambda: nn.Conv2d(4, 6, 1, stride=2, bias=False), 5),
    "depthwise on one point": (lambda: nn.Conv2d(4, 4, 5, padding=2, groups=4), 1),
    "a transposed point": (lambda: nn.ConvTranspose2d(4, 6, 4), 1),
    "a transposed point with a stride": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), 1),
}


@pytest.mark.parametrize("name", SMALL_MAPS)
def test_convolution_of_a_small_map_gives_each_member_its_own(name: str) -> None:
    make, size = SMALL_MAPS[name]
    # The second convolution's input is each member's own, of the size that matters.
    model = lambda seed: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), make())  # noqa: E731
    assert_same_step(model, image(4, size), lowerings=("", "channels_last", "loop", "product", "grouped"))


@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution_of_one_sample_with_channels_last_gives_each_member_its_own(kernel: int) -> None:
    model = lambda seed: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 6, kernel))  # noqa: E731
    assert_same_step(model, image(4, 6)[:1], lowerings=("channels_last",))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_cropped_kernel_gives_the_same_results(size: int, kernel: int, stride: int) -> None:
    for padding, dilation in itertools.product((0, 1, 2), (1, 2)):
        if size + 2 * padding >= dilation * (kernel - 1) + 1:  # torch refuses others
            check_cropped(size, kernel, stride, padding, dilation)


def check_cropped(size: int, kernel: int, stride: int, padding: int, dilation: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, size, dtype=torch.float64), torch.randn(4, 3, kernel, dtype=torch.float64)
    wanted = F.conv1d(x, weight, None, stride, padding, dilation)
    start, taps, left, out = _touched(size, kernel, stride, padding, dilation)
    found = F.conv1d(x, weight[..., start : start + taps], None, stride, left, dilation)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert out == wanted.shape[2]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_gives_each_member_its_own(name: str) -> None:
    make, dims = CONVOLUTIONS[name]
    # The second convolution's input is each member's own.
    model = lambda seed: nn.Sequential(make(), nn.Tanh(), Resized(4, 6), make())  # noqa: E731
    array = assert_same_step(model, image(4, 6, dims), lowerings=("", "channels_last", "loop", "product", "grouped"))
    others = {name for step in array.mode.plan(frozenset()).steps for name in step.lowered.others}
    assert ("product" in others) == ("point" in name)
    assert ("channels_last" in others) == (dims > 1)


class Resized(nn.Module):
    """The first channel, several times, at the size that a second convolution takes."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.channels, self.size = channels, size

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :1].expand(-1, self.channels, *x.shape[2:])
        return F.interpolate(x, size=self.size)


NORMS = {
    "batch 1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch 1d of sequences": (lambda: nn.BatchNorm1d(4, momentum=0.3), (4, 5)),
    "batch 2d": (lambda: nn.BatchNorm2d(4, eps=1e-3), (4, 3, 3)),
    "batch 2d without weights": (lambda: nn.BatchNorm2d(4, affine=False), (4, 3, 3)),
    "batch 2d without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 3)),
    "batch 3d": (lambda: nn.BatchNorm3d(4), (4, 2, 2, 2)),
    "layer": (lambda: nn.LayerNorm(5), (4, 5)),
    "layer over two": (lambda: nn.LayerNorm([4, 5]), (4, 5)),
    "layer without bias": (lambda: nn.LayerNorm(5, bias=False), (4, 5)),
    "layer without weights": (lambda: nn.LayerNorm(5, elementwise_affine=False), (4, 5)),
    "group": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "group without weights": (lambda: nn.GroupNorm(2, 4, affine=False), (4, 3)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "instance with statistics": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (4, 5)),
    "rms": (lambda: nn.RMSNorm(5), (4, 5)),
    "local response": (lambda: nn.LocalResponseNorm(2), (4, 3, 3)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NORMS)
def test_norm_gives_each_member_its_own(name: str, training: bool) -> None:
    make, shape = NORMS[name]
    assert_same_step(lambda seed: nn.Sequential(Scale(), make(), nn.Tanh(), make()), rows(*shape), training=training)


class ByDomain(nn.Module):
    """Batch norm with one of several domains' statistics, rows or columns of one buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.scale = Scale()
        self.register_buffer("statistics", torch.ones(2, 4) if dim == 0 else torch.ones(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.statistics.unbind(self.dim)
        return F.batch_norm(self.scale(x), mean, var, training=self.training)


@pytest.mark.parametrize("dim", [0, 1])
def test_statistics_that_are_a_part_of_a_buffer_are_each_members_own(dim: int) -> None:
    assert_same_step(lambda seed: ByDomain(dim), rows(4, 3)).verify()


def test_batch_norm_by_formula_gives_each_member_its_own() -> None:
    assert_same_step(lambda seed: nn.Sequential(Scale(), nn.BatchNorm2d(4)), image(), lowerings=("formula",))


class Scale(nn.Module):
    """Makes the value each member's own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


POOLS = {
    "max 1d": (nn.MaxPool1d(2), 1),
    "max 2d": (nn.MaxPool2d(3, 2, 1), 2),
    "max 2d with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True)[0], 2),
    "max 3d": (nn.MaxPool3d(2), 3),
    "average 1d": (nn.AvgPool1d(2), 1),
    "average 2d": (nn.AvgPool2d(3, padding=1, count_include_pad=False), 2),
    "average 3d": (nn.AvgPool3d(2), 3),
    "adaptive average": (nn.AdaptiveAvgPool2d((2, 3)), 2),
    "adaptive max": (nn.AdaptiveMaxPool2d(2), 2),
    "power average": (nn.LPPool2d(2, 2), 2),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 2),
    "pixel shuffle": (nn.PixelShuffle(2), 2),
    "unfold": (nn.Unfold(2), 2),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("after_convolution", [True, False])
def test_pooling_gives_each_member_its_own(name: str, after_convolution: bool) -> None:
    pool, dims = POOLS[name]
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]

    def make(seed: int) -> nn.Module:
        first = nn.Sequential(conv(4, 4, 1), conv(4, 4, 1)) if after_convolution else Scale()
        return nn.Sequential(first, Calls(lambda w, x: pool(x) * w))

    assert_same_step(make, image(4, 6, dims))


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (lambda w, x: x @ w, (5, 4), (6, 5)),
    "matmul from the left": (lambda w, x: w @ x, (4, 6), (6, 5)),
    "matmul by a vector": (lambda w, x: x @ w, (5,), (6, 5)),
    "bmm": (lambda w, x: torch.bmm(x * w.sum(), x.transpose(1, 2) + w[0]), (5, 1), (6, 5)),
    "addmm": (lambda w, x: torch.addmm(w[0], x, w, beta=0.5, alpha=2.0), (5, 5), (5,)),
    "einsum": (lambda w, x: torch.einsum("nti,io->nto", x, w), (5, 4), (6, 5)),
    "einsum of members": (lambda w, x: torch.einsum("nti,nsi->nts", x * w, x + w), (5,), (6, 5)),
    "softmax over classes": (lambda w, x: torch.softmax(x * w, dim=1), (5,), (6, 5)),
    "softmax over the last": (lambda w, x: torch.log_softmax(x * w, dim=-1), (5,), (6, 5)),
    "flatten by view": (lambda w, x: (x * w).view(x.shape[0], -1), (5,), (6, 5)),
    "view of the batch": (lambda w, x: (x * w).view(-1, 5).reshape(x.shape[0], 6, 5), (5,), (6, 5)),
    "transposes": (lambda w, x: (x * w).permute(2, 0, 1).transpose(0, -1).contiguous(), (5,), (6, 5)),
    "cat with shared": (lambda w, x: torch.cat([x, x * w], dim=-1), (5,), (6, 5)),
    "stack": (lambda w, x: torch.stack([x, x * w, w.expand_as(x)], dim=1), (5,), (6, 5)),
    "split": (lambda w, x: torch.cat((x * w).split([2, 3], dim=2)[::-1], 2), (5,), (6, 5)),
    "chunk and unbind": (lambda w, x: (x * w).chunk(3, 1)[1].unbind(2)[0], (5,), (6, 5)),
    "sum and mean": (lambda w, x: (x * w).sum(1) + (x * w).mean(dim=(1, 2), keepdim=True).squeeze(1), (5,), (6, 5)),
    "over everything": (lambda w, x: (x * w).sum() + (x * w).mean() + (x * w).max() + (x * w).norm(), (5,), (6, 5)),
    "variance": (lambda w, x: (x * w).var(1) + (x * w).std(dim=1, unbiased=False), (5,), (6, 5)),
    "max with indices": (lambda w, x: (x * w).max(dim=1).values, (5,), (6, 5)),
    "sort and topk": (lambda w, x: (x * w).sort(dim=1).values[:, :2] + (x * w).topk(2, dim=1).values, (5,), (6, 5)),
    "cumsum": (lambda w, x: (x * w).cumsum(1).logsumexp(-1), (5,), (6, 5)),
    "select and slices": (lambda w, x: (x * w)[:, 1:5:2, -1] + w[2], (5,), (6, 5)),
    "index by tensor": (lambda w, x: (x * w)[:, torch.tensor([0, 2, 2])], (5,), (6, 5)),
    "index by two tensors": (lambda w, x: (x * w)[torch.tensor([0, 2]), :, torch.tensor([1, 3])], (5,), (6, 5)),
    "gather": (lambda w, x: (x * w).gather(1, x.argsort(1)), (5,), (6, 5)),
    "gather by the member's own": (lambda w, x: x.gather(1, (x * w).argsort(1)) * w, (5,), (6, 5)),
    "where": (lambda w, x: torch.where(x > w, x * w, w * 2), (5,), (6, 5)),
    "rows filled with the member's own": (
        lambda w, x: x.index_fill(1, torch.tensor([0, 2]), w.sum()) * w,
        (5,),
        (6, 5),
    ),
    "windows by strides": (
        lambda w, x: F.linear(x, w).as_strided((x.shape[0], 2, 4, 5), (30, 10, 5, 1)),
        (5, 5),
        (6, 5),
    ),
    "strides of a transpose": (
        lambda w, x: F.linear(x, w).transpose(0, 2).as_strided((3, 4), (1, 7), 2),
        (5, 5),
        (6, 5),
    ),
    "strides of a weight": (lambda w, x: x + w.as_strided((2, 5), (1, 2), 3).sum(0), (5, 5), (6, 5)),
    "written by strides": (lambda w, x: _written_by_strides(w, x), (5, 5), (6, 5)),
    "loss of two numbers": (lambda w, x: x + F.l1_loss(w.sum(), (w * w).sum()), (5,), (6, 5)),
    "product of no rows": (lambda w, x: x + (torch.zeros(0, 5, dtype=x.dtype) @ w).sum(), (5, 5), (6, 5)),
    "masked fill": (lambda w, x: (x * w).masked_fill(x > 0, -1.0), (5,), (6, 5)),
    "in place": (lambda w, x: (x * w).add_(w).relu_(), (5,), (6, 5)),
    "in place into a shared tensor": (lambda w, x: torch.zeros_like(x).add_(x).add_(w), (5,), (6, 5)),
    "written through a view": (lambda w, x: _written(w, x), (5,), (6, 5)),
    "written into a new tensor": (lambda w, x: _assigned(w, x), (5,), (6, 5)),
    "index put": (lambda w, x: (x * w).index_put((torch.tensor([0, 1]),), w.expand(2, 6, 5)), (5,), (6, 5)),
    "repeat and expand": (lambda w, x: w.expand(6, -1).repeat(2, 1)[:6] * x, (5,), (6, 5)),
    "squeeze": (lambda w, x: (x * w).unsqueeze(0).unsqueeze(-1).squeeze(-1).squeeze(), (5,), (6, 5)),
    "roll and flip": (lambda w, x: torch.flip((x * w).roll(1, 1), (2,)), (5,), (6, 5)),
    "triu": (lambda w, x: torch.triu(x * w) + torch.tril(x), (5,), (6, 5)),
    "outer rank": (lambda w, x: x[..., None] * w + w[None, :4], (4,), (6, 5)),
    "a scalar parameter": (lambda w, x: x * w + w, (), (6, 5)),
    "cosine": (lambda w, x: F.cosine_similarity(x, w, dim=-1), (5,), (6, 5)),
    "normalise": (lambda w, x: F.normalize(x * w, dim=1), (5,), (6, 5)),
    "pad": (lambda w, x: F.pad(x * w, (1, 2, 0, 1), value=0.5), (5,), (6, 5)),
    "pad by reflection": (lambda w, x: F.pad(x * w, (2, 1), mode="reflect"), (5,), (6, 5)),
    "bilinear": (lambda w, x: F.bilinear(x, x, w), (3, 5, 5), (6, 5)),
    "distance": (lambda w, x: torch.cdist(x, w), (4, 5), (6, 5)),
    "glu": (lambda w, x: F.glu(x * w, dim=1), (5,), (6, 5)),
    "no grad": (lambda w, x: x * w + _without_gradient(w, x), (5,), (6, 5)),
    "detach": (lambda w, x: x * w.detach() + w, (5,), (6, 5)),
    "mse": (lambda w, x: F.mse_loss(x * w, x), (5,), (6, 5)),
    "smooth l1, sum": (lambda w, x: F.smooth_l1_loss(x * w, x, reduction="sum"), (5,), (6, 5)),
    "cross-entropy": (
        lambda w, x: F.cross_entropy((x * w).transpose(1, 2), x.argmax(2), label_smoothing=0.1),
        (5,),
        (6, 5),
    ),
    "a weight in the type of a larger tensor": (lambda w, x: w.type_as(x).sum(0) * x, (5,), (6, 5)),
    "a shared tensor in the type of a weight": (lambda w, x: (x > 0).type_as(w).mean(0) * w, (5,), (6, 5)),
    "rows of limited length": (lambda w, x: x @ torch.renorm(w, 2, 0, 0.5).t(), (4, 5), (6, 5)),
    "differences with more in front": (lambda w, x: torch.diff(x * w, prepend=x[..., :1]), (5,), (6, 5)),
    "filled with a weight": (
        lambda w, x: (x * w).masked_fill(x > 0, w[0]) + torch.zeros_like(x).fill_(w[1]),
        (5,),
        (6, 5),
    ),
    "filled with a weight in place": (lambda w, x: (x * w).masked_fill_(x[..., :1] > 0, w[0]), (5,), (6, 5)),
    "a weight fills a shared tensor": (lambda w, x: x.masked_fill(x > 0, w), (), (6, 5)),
    "copies whose source is written to": (lambda w, x: _copied_first(w, x), (5,), (6, 5)),
    "copies that are written to": (lambda w, x: _copied_and_written(w, x), (5,), (6, 5)),
    "an alias by type that is written to": (lambda w, x: _written_alias(w, x), (5,), (6, 5)),
    "turned in place": (lambda w, x: (x * w).transpose_(1, 2).unsqueeze_(1).squeeze_(1), (5,), (6, 5)),
    "a square turned in place": (lambda w, x: x * w + torch.outer(w, w * 2).t_().detach_()[0], (5,), (6, 5)),
    "cat with nothing": (lambda w, x: torch.cat([torch.tensor([]), x * w, x], dim=1), (5,), (6, 5)),
    "real and imaginary parts": (
        lambda w, x: torch.fft.ifft(x * w).imag + torch.fft.fft(x * w).conj().real,
        (5,),
        (6, 5),
    ),
    "keys of one sample": (
        lambda w, x: F.scaled_dot_product_attention((x * w[0]).unsqueeze(1), w.view(1, 1, 4, 5), w.view(1, 1, 4, 5)),
        (4, 5),
        (6, 5),
    ),
    "queries of one sample": (lambda w, x: F.scaled_dot_product_attention(w.unsqueeze(0), x, x * w[0]), (4, 5), (6, 5)),
    "norms by columns of a weight": (
        lambda w, x: (
            F.batch_norm(x, None, None, w[:, 0], w[:, 1], training=True) + F.group_norm(x, 2, w[:, 2], w[:, 3])
        ),
        (6, 4),
        (6, 5),
    ),
    "kl": (lambda w, x: F.kl_div((x * w).log_softmax(-1), x.softmax(-1), reduction="batchmean"), (5,), (6, 5)),
}


def _written(w: Tensor, x: Tensor) -> Tensor:
    y = x * w
    y[:, 0].mul_(3.0)
    y.view(x.shape[0], -1)[:, 4] = 2.0
    return y * 2


def _copied_first(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    turned, flat = y.transpose(1, 2).contiguous(), y.transpose(1, 2).reshape(x.shape[0], -1)
    y.mul_(2.0)
    return y, turned, flat


def _copied_and_written(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    turned = y.transpose(1, 2).contiguous()
    rows = turned.view(x.shape[0], -1)
    turned.add_(1.0)
    y.mul_(3.0)
    return y, turned, rows


def _written_by_strides(w: Tensor, x: Tensor) -> Tensor:
    y = F.linear(x, w)
    y.as_strided((3, 2), (5, 1)).mul_(2.0)
    return y


def _written_alias(w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = x * w
    rows = y.view(x.shape[0], -1)
    y.to(x.dtype).type_as(x).add_(1.0)
    return y, rows


def _assigned(w: Tensor, x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 6, 5, dtype=x.dtype)
    y[:, 1] = w
    y[:, 2:4] = x[:, 2:4] * w
    return y


def _without_gradient(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (x * w).sum(-1, keepdim=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_gives_each_member_its_own(name: str) -> None:
    function, weight, shape = FUNCTIONS[name]
    assert_same_step(lambda seed: Calls(function, *weight), rows(*shape))


class Numbers(nn.Module):
    """A function of a weight and of two numbers that are buffers."""

    def __init__(self, function: Callable[..., Tensor], first: Tensor, second: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(5))
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.function(x, self.first, self.second)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x, a, b: ((x > 0) * a).to(x.dtype), torch.int64),
        (lambda x, a, b: torch.where(x > 0, a, b).to(x.dtype), torch.int64),
        (lambda x, a, b: ((x > 0) * a).abs(), torch.float32),
        (lambda x, a, b: (x.to(torch.complex64) * a).abs(), torch.float32),
        (lambda x, a, b: (x * a).abs(), torch.complex64),
        (lambda x, a, b: (x.float() * a).abs(), torch.complex128),
        (lambda x, a, b: a * torch.tensor(1 / 3, dtype=torch.float64) + x, torch.float32),
    ],
)
def test_numbers_that_are_each_members_own_do_not_change_a_tensors_type(
    function: Callable[..., Tensor], kind: torch.dtype
) -> None:
    def number(value: float) -> Tensor:
        return torch.tensor(complex(value, value) if kind.is_complex else value).to(kind)

    x = rows(5)
    models = [Numbers(function, number(3.0 + seed), number(7.0 + seed)) for seed in range(3)]
    array = fuse(models, x)
    for index, model in enumerate(models):
        mine, alone = array(x)[index], model(x)
        assert mine.dtype is alone.dtype
        torch.testing.assert_close(mine, alone, rtol=0, atol=0)


def test_slopes_that_differ_are_each_members_own_in_place_too() -> None:
    def make(seed: int) -> nn.Module:
        return nn.Sequential(Scale(), nn.LeakyReLU(0.1 * (seed + 1), inplace=True), Scale(), nn.ELU(1.0 + seed, True))

    assert_same_step(make, rows(6, 4))
    assert_same_step(lambda seed: nn.Sequential(Scale(), nn.RReLU(0.1, 0.3, inplace=True)), rows(6, 4))


def test_an_operator_that_changes_a_shape_in_place_and_has_no_rule_is_refused() -> None:
    models = [Calls(lambda w, x: x * (w * 2).as_strided_((2,), (1,)), 5) for _ in range(2)]
    with pytest.raises(FusionError, match=r"as_strided_.* changes a tensor's shape in place"):
        fuse(models, rows(2)).explain()


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: x * torch.as_strided_copy(w * 2, (1,), (1,), 1),
        lambda w, x: x * torch.as_strided_scatter(w, w[:1], (1,), (1,), 1)[:2],
        lambda w, x: x * w[::2].as_strided((1,), (1,), 1),
        lambda w, x: x * w[:2].as_strided((1,), (1,), 3),
    ],
)
def test_an_operator_that_reads_memory_where_members_lie_otherwise_is_refused(function: Callable[..., Tensor]) -> None:
    with pytest.raises(FusionError, match=r"reads (memory by strides|beyond its tensor)"):
        fuse([Calls(function, 5) for _ in range(2)], rows(2))(rows(2))


def test_one_member_after_another_reads_its_own_memory_by_strides() -> None:
    """A member's slice of the stacked weight does not begin where the memory does."""
    for function in (lambda w, x: x * w.as_strided((2,), (2,), 1), lambda w, x: x * w[1:].as_strided((2,), (2,), 2)):
        models = built(lambda seed, function=function: Calls(function, 5), 3)
        results = fuse(models, rows(2), mode="serial")(rows(2))
        torch.testing.assert_close(results, torch.stack([model(rows(2)) for model in models]), rtol=0, atol=0)


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.1), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(),
    nn.Mish(), nn.Softplus(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh(), nn.Tanh(), nn.Sigmoid(), nn.LogSigmoid(),
    nn.Softshrink(0.1), nn.Hardshrink(0.1), nn.Tanhshrink(), nn.Softsign(), nn.Threshold(0.1, 0.2), nn.Softmax(1),
    nn.LogSoftmax(-1), nn.Softmin(1), nn.GLU(1), nn.ReLU(inplace=True), nn.Hardswish(inplace=True),
]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_activation_gives_each_member_its_own(activation: nn.Module) -> None:
    array = assert_same_step(lambda seed: nn.Sequential(Scale(), activation), rows(6, 4))
    assert "loop" not in array.explain().counts(), str(array.explain())


@pytest.mark.parametrize("shape", [(4,), (4, 5), (4, 3, 3)])
@pytest.mark.parametrize("count", [1, 4])
def test_prelu_slopes_are_each_members_own(shape: tuple[int, ...], count: int) -> None:
    assert_same_step(lambda seed: nn.Sequential(nn.PReLU(count, init=0.1 * seed), nn.PReLU(count)), rows(*shape))


INDICES = torch.tensor([[0, 2, 1], [2, 2, 3], [1, 0, 4]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 2},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"padding_idx": 0, "scale_grad_by_freq": True},
    ],
)
def test_embedding_gives_each_member_its_own(options: dict[str, object]) -> None:
    assert_same_step(lambda seed: nn.Sequential(nn.Embedding(5, 4, **options), nn.Linear(4, 2)), INDICES)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["rules", "serial"])
def test_rows_of_a_table_are_cut_to_each_members_own_norm(mode: Any) -> None:
    models = built(lambda seed: nn.Embedding(5, 4, max_norm=0.5 + 0.2 * seed), 3)
    array = fuse([copy.deepcopy(model) for model in models], INDICES, mode=mode)
    array(INDICES).square().sum().backward()
    for index, model in enumerate(models):
        model(INDICES).square().sum().backward()
        torch.testing.assert_close(array.member(index).state_dict()["weight"], model.weight, rtol=1e-12, atol=0)
        torch.testing.assert_close(array.state.parameters["weight"].grad[index], model.weight.grad)  # type: ignore[index]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_bag_gives_each_member_its_own(mode: str, padding: int | None) -> None:
    assert_same_step(lambda seed: nn.EmbeddingBag(5, 4, mode=mode, padding_idx=padding), INDICES)


class Recurrent(nn.Module):
    """Uses outputs and final states."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.network.batch_first
        y, states = self.network(x if first else x.transpose(0, 1))
        return (y, *states) if isinstance(states, tuple) else (y, states)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False, "num_layers": 2, "dropout": 0.4},
    ],
    ids=str,
)
def test_recurrent_network_gives_each_member_its_own(kind: type[nn.Module], options: dict[str, object]) -> None:
    array = assert_same_step(lambda seed: Recurrent(kind(4, 5, **options)), rows(6, 4))
    assert "loop" not in array.explain().counts(), str(array.explain())


def test_rnn_with_relu_and_lstm_with_projection_give_each_member_its_own() -> None:
    assert_same_step(lambda seed: Recurrent(nn.RNN(4, 5, nonlinearity="relu")), rows(6, 4))
    array = assert_same_step(lambda seed: Recurrent(nn.LSTM(4, 5, proj_size=2)), rows(6, 4))
    assert array.explain().counts()["loop"] == 1


class Cell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0])
        state = self.cell(x[:, 1], state)
        return state[0] if isinstance(state, tuple) else state


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cell_gives_each_member_its_own(kind: type[nn.Module]) -> None:
    assert_same_step(lambda seed: Cell(kind(4, 5)), rows(6, 4))


class Attends(nn.Module):
    """nn.MultiheadAttention with any of its arguments."""

    def __init__(self, *, padding: bool = False, mask: str = "", weights: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dropout=dropout)
        self.padding, self.mask, self.weights = padding, mask, weights

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        padding = torch.arange(6).expand(x.shape[0], 6) > 3 if self.padding else None
        masks = {"": None, "bool": torch.ones(6, 6, dtype=torch.bool).triu(1), "float": torch.ones(6, 6, dtype=x.dtype)}
        y, weights = self.attention(
            x, x, x, key_padding_mask=padding, attn_mask=masks[self.mask], need_weights=self.weights
        )
        return (y, weights) if self.weights else (y,)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True},
        {"mask": "bool"},
        {"mask": "float"},
        {"weights": True},
        {"padding": True, "mask": "bool", "weights": True},
        {"dropout": 0.3, "mask": "bool"},
        {"dropout": 0.3, "weights": True},
    ],
    ids=str,
)
def test_multihead_attention_gives_each_member_its_own(options: dict[str, object]) -> None:
    array = assert_same_step(lambda seed: Attends(**options), rows(6, 4))  # type: ignore[arg-type]
    assert "loop" not in array.explain().counts(), str(array.explain())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_scale_of_attention_is_each_members_own(dropout: float) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 12), scale

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.linear(x).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, scale=self.scale, dropout_p=dropout, is_causal=True)

    assert_same_step(lambda seed: Scaled(0.3 + 0.2 * seed), rows(6, 4))


def attention(**options: object) -> Callable[..., Tensor]:
    def function(w: Tensor, x: Tensor) -> Tensor:
        q, k, v = ((x * w[i]).view(x.shape[0], 6, 2, 2).transpose(1, 2) for i in range(3))
        return F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]

    return function


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"scale": 0.3}, {"dropout_p": 0.5, "is_causal": True}, {"dropout_p": 0.2, "scale": 0.5}],
    ids=str,
)
def test_attention_gives_each_member_its_own(options: dict[str, object]) -> None:
    assert_same_step(lambda seed: Calls(attention(**options), 3, 4), rows(6, 4))


def test_encoder_layer_in_training_and_eval() -> None:
    for training in (True, False):
        assert_same_step(
            lambda seed: nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True), rows(6, 4), training=training
        )


DROPOUTS = {
    "plain": (nn.Dropout, (6, 4)),
    "1d": (nn.Dropout1d, (6, 4)),
    "2d": (nn.Dropout2d, (4, 3, 3)),
    "3d": (nn.Dropout3d, (2, 2, 2, 2)),
    "alpha": (nn.AlphaDropout, (6, 4)),
    "feature alpha": (nn.FeatureAlphaDropout, (6, 4)),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_has_each_members_own_probability_and_stream(name: str) -> None:
    kind, shape = DROPOUTS[name]
    ps = [0.1, 0.5, 0.9]
    assert_same_step(lambda seed: nn.Sequential(kind(ps[seed]), Scale(), kind(ps[seed])), rows(*shape))


def test_dropout_that_is_off_for_one_member_draws_nothing_for_it() -> None:
    ps = [0.0, 0.5, 1.0]
    assert_same_step(lambda seed: nn.Sequential(Scale(), nn.Dropout(ps[seed]), nn.Dropout(0.3, inplace=True)), rows(5))


def test_dropout_of_a_transposed_tensor_draws_what_it_draws_alone() -> None:
    assert_same_step(lambda seed: Calls(lambda w, x: F.dropout((x * w).transpose(1, 2), 0.5), 5), rows(6, 5))


def test_other_random_numbers_come_from_the_members_own_stream() -> None:
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return x * w + torch.randn_like(x) + torch.rand(x.shape[0], 6, 5, dtype=x.dtype) + F.rrelu(x * w, training=True)

    assert_same_step(lambda seed: Calls(noisy, 5), rows(6, 5))


@pytest.mark.parametrize("dim", [0, 1, None])
def test_lengths_of_weights_are_each_members_own(dim: int | None) -> None:
    def make(seed: int) -> nn.Module:
        weight_norm = nn.utils.parametrizations.weight_norm
        return nn.Sequential(weight_norm(nn.Conv1d(4, 6, 3), dim=dim), weight_norm(nn.Linear(3, 2), dim=dim))

    array = assert_same_step(make, rows(4, 5))
    assert {one.way for one in array.explain().operators if one.operator == "_weight_norm.default"} == {"rule"}


def test_where_vmap_would_loop_by_itself_our_loop_runs_and_nothing_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    array = assert_same_step(lambda seed: nn.EmbeddingBag(9, 4, padding_idx=1), torch.randint(0, 9, (3, 4)))
    [bag] = [one for one in array.explain().operators if one.operator.startswith("embedding_bag")]
    assert bag.way == "loop"
    assert "would loop more slowly" in bag.why
    assert "performance drop" not in capfd.readouterr().err


def test_numbers_may_differ_between_members() -> None:
    def make(seed: int) -> nn.Module:
        norm = nn.BatchNorm1d(4, momentum=0.1 * (seed + 1), eps=10.0 ** -(seed + 3))
        return nn.Sequential(Scale(), norm, nn.LeakyReLU(0.1 * seed), Multiplied(1.5 + seed))

    array = assert_same_step(make, rows(4))
    ways = {operator.operator: operator for operator in array.explain().operators}
    assert ways["batch_norm.default"].way == "loop"
    assert "different momentum, eps" in ways["batch_norm.default"].why
    assert ways["mul.Tensor"].way == "rule"


class Multiplied(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.table = torch.full((4,), factor, dtype=torch.float64)  # a tensor that is no buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.table


def test_a_number_tensor_does_not_widen_the_type_of_others() -> None:
    def mixed(w: Tensor, x: Tensor) -> Tensor:
        return x.float() * w.sum()  # float32 by a double number stays float32

    array = assert_same_step(lambda seed: Calls(lambda w, x: mixed(w, x).double() * 0 + w, 5), rows(6, 5))
    assert len(array) == 3


@pytest.mark.parametrize("layout", [None, torch.channels_last])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_a_depthwise_kernel_of_a_gpu_gives_each_member_its_own(
    layout: torch.memory_format | None, bias: bool, batched: bool
) -> None:
    """What is chosen on a GPU, here on the CPU: gradients of the input, the weights and the biases included."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=4, bias=bias).double() for _ in range(3)]
    x = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64, requires_grad=True)
    w = torch.stack([layer.weight for layer in layers]).detach().requires_grad_()
    b = torch.stack([layer.bias for layer in layers]).detach().requires_grad_() if bias else None
    run = Run(members=3, streams=Streams([], torch.device("cpu")))
    y = depthwise_kernel(batched, layout)(run, x if batched else x[0], w, b, [2, 2], [1, 1], [1, 1], 4)
    y.square().sum().backward()
    for i, layer in enumerate(layers):
        alone = x.detach()[i if batched else 0].clone().requires_grad_()
        expected = layer(alone)
        torch.testing.assert_close(y[i], expected)
        expected.square().sum().backward()
        torch.testing.assert_close(w.grad[i], layer.weight.grad)
        if bias:
            torch.testing.assert_close(b.grad[i], layer.bias.grad)
        if batched:
            torch.testing.assert_close(x.grad[i], alone.grad)


def test_a_sum_over_rows_in_parts_is_the_whole_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from burstpool.fusion.rules import products

    torch.manual_seed(0)
    g, x = torch.randn(3, 20, 5), torch.randn(3, 20, 7)
    wanted = torch.bmm(g.transpose(1, 2), x)
    torch.testing.assert_close(products._summed(g, x), wanted, rtol=0, atol=0)
    monkeypatch.setattr(products, "_parts", lambda g, x: 4)
    torch.testing.assert_close(products._summed(g, x), wanted, rtol=1e-5, atol=1e-5)


def test_torchs_switch_for_vmap_is_put_back_though_threads_overlap() -> None:
    inside, may_leave, seen = threading.Event(), threading.Event(), []
    switch = torch._C._functorch._is_vmap_fallback_enabled

    def second() -> None:
        with without_vmaps_loop():
            inside.set()
            may_leave.wait(60)
            seen.append(switch())

    assert switch()
    thread = threading.Thread(target=second)
    with without_vmaps_loop():
        thread.start()
        assert inside.wait(60)
    may_leave.set()
    thread.join()
    assert seen == [False]
    assert switch()
