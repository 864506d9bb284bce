"""Cross-entropy over many classes, as a kernel and as an operator for a compiler, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DEVICE, MARKS, QUICK
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from burstpool.fusion import kernels
from burstpool.fusion.padding import whole
from burstpool.fusion.rules.base import Run
from burstpool.fusion.rules.losses import MEAN
from burstpool.fusion.rules.losses import cross_entropy as member_cross_entropy
from burstpool.fusion.rules.matmul import linear_batched
from burstpool.fusion.streams import Streams

pytestmark = MARKS


@pytest.mark.parametrize(("classes", "smoothing"), [(130, 0.0), (256, 0.1), (5000, 0.1), (33_278, 0.0), (50_257, 0.1)])
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


@pytest.mark.parametrize(
    ("fill", "smoothing"), [(torch.finfo(torch.float32).min, 0.0), (-1e38, 0.0), (1e4, 0.0), (1e4, 0.1)]
)
def test_rows_of_extreme_logits_are_torchs(fill: float, smoothing: float) -> None:
    from burstpool.fusion.kernels.entropy import cross_entropy

    torch.manual_seed(0)
    x = torch.full((3, 200), fill, device=DEVICE)
    x[1, :100] = torch.randn(100, device=DEVICE) + (fill if smoothing else 0.0)
    x.requires_grad_()
    target = torch.tensor([5, 7, -100], device=DEVICE)
    y = cross_entropy(x, target, None, -100, smoothing)
    wanted = F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing)
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
