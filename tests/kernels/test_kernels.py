"""Our kernels against torch's own operators, and arrays that use them against arrays that do not.

On a GPU where there is one; else in Triton's interpreter, if TRITON_INTERPRET=1 says so: slowly, and without products
of 16-bit numbers, which it gets wrong.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from burstpool.fusion import fuse, kernels
from burstpool.fusion.optim import make_optimizer
from burstpool.fusion.padding import whole
from burstpool.fusion.rules.base import Run
from burstpool.fusion.rules.losses import MEAN
from burstpool.fusion.rules.losses import cross_entropy as member_cross_entropy
from burstpool.fusion.rules.matmul import linear_batched
from burstpool.fusion.step import RecordedStep
from burstpool.fusion.streams import Streams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not kernels.interpreted(), reason="needs a CUDA device, or Triton and TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # numpy's, interpreting
]
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the rules' choices for a GPU; needs a CUDA device")
QUICK = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16] if QUICK else [torch.float32]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "hardswish": F.hardswish,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "silu": F.silu,
}
SOME = ACTIVATIONS if QUICK else ("hardswish",)
"""Those that are tried with all else, where that takes no minutes."""


def members_between(shape: tuple[int, ...]) -> Tensor:
    """[M, N, C, …] in memory as a grouped convolution with channels last leaves it."""
    members, samples, channels, *space = shape
    x = torch.randn(samples, *space, members, channels, device=DEVICE) * 2 + 5
    return x.movedim(-2, 0).movedim(-1, 2)


def members_outermost(shape: tuple[int, ...]) -> Tensor:
    """[M, N, C, …] in memory as a batched product leaves it."""
    members, samples, channels, *space = shape
    return (torch.randn(members, samples, *space, channels, device=DEVICE) * 2 + 5).movedim(-1, 2)


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


@pytest.mark.parametrize(("classes", "smoothing"), [(130, 0.0), (5000, 0.1), (33_278, 0.0)])
def test_cross_entropy_in_one_kernel_is_torchs(classes: int, smoothing: float) -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    rows = 19 if QUICK else 5
    x = (torch.randn(rows, classes, device=DEVICE) * 3).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=DEVICE)
    target[3] = -100
    y = cross_entropy(x, target, None, -100, smoothing)
    wanted = F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(rows, device=DEVICE)
    (mine,), (theirs,) = (torch.autograd.grad(out, x, gradient) for out in (y, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_cross_entropys_gradient_lies_in_rows_as_its_logits_do() -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    rows = torch.randn(2 * 5, 144, device=DEVICE).requires_grad_()
    target = torch.randint(0, 130, (10,), device=DEVICE)
    y = cross_entropy(rows[:, :130], target, None, -100, 0.0)
    wanted = F.cross_entropy(rows[:, :130], target, reduction="none")
    for a, b in zip(*(torch.autograd.grad(out.sum(), rows) for out in (y, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    part = rows.detach()[:, :130].requires_grad_()
    (g,) = torch.autograd.grad(cross_entropy(part, target, None, -100, 0.0).sum(), part)
    found = whole(g.view(2, 5, 130), 144)
    assert found.data_ptr() == g.data_ptr()
    assert (found[..., 130:] == 0).all()


def test_cross_entropys_gradient_is_scaled_where_rows_weigh_something_else() -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    x = torch.randn(6, 200, device=DEVICE).requires_grad_()
    target = torch.tensor([0, 199, 3, -100, 5, 6], device=DEVICE)
    expected = torch.tensor([0.2, 0.2, 0.2, torch.inf, 0.5, 0.5], device=DEVICE)
    g = torch.tensor([0.2, 0.4, -1.0, 7.0, 0.5, 0.0], device=DEVICE)
    y = cross_entropy(x, target, expected, -100, 0.0)
    (wanted,) = torch.autograd.grad(F.cross_entropy(x, target, reduction="none"), x, g)
    for _ in range(2):  # the second time is reckoned anew, also where the first was written to
        (mine,) = torch.autograd.grad(y, x, g, retain_graph=True)
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-6)
        mine.zero_()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("written_to", [False, True])
def test_a_compiler_gets_the_loss_over_many_classes_as_one_operator(
    monkeypatch: pytest.MonkeyPatch, biased: bool, written_to: bool
) -> None:
    monkeypatch.setattr("burstpool.fusion.rules.losses._OPAQUE_CLASSES", 100)
    monkeypatch.setattr("burstpool.fusion.rules.matmul._missing", lambda outputs, like: -outputs % 16)
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=DEVICE) for shape in ((2, 6, 8), (2, 130, 8), (2, 130))]
    target = torch.randint(130, (2, 6) if written_to else (6,), device=DEVICE)  # each member's own, or shared
    target[..., 1] = -100

    def losses(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        run = Run(members=2, streams=Streams([], torch.device(DEVICE)))
        y = linear_batched(run, x, weight, bias if biased else None)
        return member_cross_entropy(y.mul_(3) if written_to else y, target, -100, 0.0, MEAN)

    def gradients(*given: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        with torch.enable_grad():
            found = losses(*leaves)
            return [found.detach(), *torch.autograd.grad(found.sum(), leaves[: 2 + biased])]

    with kernels.plain_operators():
        graph = make_fx(gradients)(*tensors)
    assert sum("burstpool.cross_entropy" in str(node.target) for node in graph.graph.nodes) == 1
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    y = exact[0] @ exact[1].transpose(1, 2) + (exact[2].unsqueeze(1) if biased else 0)
    own = target.expand(2, 6)
    wanted = torch.stack([F.cross_entropy(one * (3 if written_to else 1), t) for one, t in zip(y, own, strict=True)])
    theirs = [wanted, *torch.autograd.grad(wanted.sum(), exact[: 2 + biased])]
    compiled = torch.compile(graph, backend="inductor" if QUICK else "aot_eager")
    for mine in (graph(*tensors), compiled(*tensors)):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def test_a_scaled_loss_saves_the_small_gradients_of_half_precision() -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    x = torch.randn(4, 3000, device=DEVICE).half().requires_grad_()
    target, tokens, scale = torch.randint(0, 3000, (4,), device=DEVICE), 8192, 2.0**16
    y = cross_entropy(x, target, torch.full((4,), 1 / tokens, device=DEVICE), -100, 0.0)
    (mine,) = torch.autograd.grad(y, x, torch.full_like(y, scale / tokens))
    exact = x.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad(F.cross_entropy(exact, target, reduction="sum") * scale / tokens, exact)
    assert wanted.min() != 0
    assert (wanted / scale).half().eq(0).float().mean() > 0.5, "unscaled they would be gone"
    torch.testing.assert_close(mine.float(), wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("fill", [torch.finfo(torch.float32).min, -1e38, 1e4])
def test_rows_of_extreme_logits_are_torchs(fill: float) -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    x = torch.full((3, 200), fill, device=DEVICE)
    x[1, :100] = torch.randn(100, device=DEVICE)
    x.requires_grad_()
    target = torch.tensor([5, 7, -100], device=DEVICE)
    y, wanted = cross_entropy(x, target, None, -100, 0.0), F.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(loss.sum(), x) for loss in (y, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_losss_second_derivative_is_refused() -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    x = torch.randn(3, 130, device=DEVICE, requires_grad=True)
    weight = torch.randn(130, 130, device=DEVICE, requires_grad=True)
    loss = cross_entropy(x @ weight, torch.arange(3, device=DEVICE), None, -100, 0.0).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), weight)


def test_a_bias_may_lie_in_memory_as_it_likes() -> None:
    from burstpool.fusion.kernels.entropy import _run

    torch.manual_seed(0)
    x, target, weight = torch.randn(6, 200, device=DEVICE), torch.arange(6, device=DEVICE), torch.ones(6, device=DEVICE)
    for bias in (torch.randn(2, 400, device=DEVICE)[:, ::2], torch.randn(2, 1, device=DEVICE).expand(2, 200)):
        loss, _ = _run(x, bias, target, weight, False, 200, 200, -100, 0.0)
        wanted = F.cross_entropy(x + bias.repeat_interleave(3, 0), target, reduction="none")
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)


def test_cross_entropy_takes_masked_logits_and_refuses_no_class_silently() -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    x = torch.randn(4, 200, device=DEVICE)
    x[:, 7:50] = -torch.inf
    target = torch.tensor([0, 199, 3, -100], device=DEVICE)
    leaf = x.requires_grad_()
    y = cross_entropy(leaf, target, None, -100, 0.0)
    wanted = F.cross_entropy(leaf, target, reduction="none")
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    (mine,), (theirs,) = (torch.autograd.grad(out.sum(), leaf) for out in (y, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    beyond = cross_entropy(x.detach(), torch.tensor([200, -1, 3, 1 << 40], device=DEVICE), None, -100, 0.0)
    assert beyond.isnan().tolist() == [True, True, False, True]


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
    x = torch.randn(4, 3, 8, 8, device=DEVICE)
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
