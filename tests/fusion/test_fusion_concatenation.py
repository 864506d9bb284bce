"""Products over a concatenation with a part that is the same at all points: which are parted, and that they agree.

Plans are only merged on CUDA otherwise; here it is asked for, and what runs is the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_alone import built, weighted_sum
from torch import Tensor, nn

from burstpool.fusion import FusedArray, fuse, kernels, lowering
from burstpool.fusion.plan import Plan
from burstpool.fusion.rules import Run
from burstpool.fusion.rules.products import point_product
from burstpool.fusion.rules.window import Window
from burstpool.fusion.streams import Streams
from burstpool.job import load_job
from burstpool.model import zoo

MEMBERS = 3
LOCAL = 4
"""Channels of each part: `a` differs between points, `b` is of one point."""
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SPACE = {"conv1d": (5,), "conv2d": (2, 3), "conv3d": (2, 1, 3), "linear": (5,), "linear over two": (2, 3)}
CONVOLUTIONS = {"conv1d": nn.Conv1d, "conv2d": nn.Conv2d, "conv3d": nn.Conv3d}


class Joined(nn.Module):
    """A local feature and that of the whole sample, joined by `join(model, a, b, x)`, through one layer."""

    def __init__(self, kind: str, join: Callable[..., Any], parts: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.join, self.is_linear, self.points = join, kind not in CONVOLUTIONS, SPACE[kind]
        if self.is_linear:
            self.lift, self.layer = nn.Linear(LOCAL, LOCAL), nn.Linear(parts * LOCAL, 6, **options)
        else:
            convolution = CONVOLUTIONS[kind]
            self.lift = convolution(LOCAL, LOCAL, 1)
            self.layer = convolution(parts * LOCAL, 6, **{"kernel_size": 1, **options})
        self.token = nn.Parameter(torch.randn(1, LOCAL, *[1] * len(self.points)))
        self.norm = nn.BatchNorm1d(LOCAL if join is norm_between else 6)

    def forward(self, x: Tensor) -> Any:
        a = self.lift(x)
        return self.join(self, a, torch.tanh(self.mean(a)), x)

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(tuple(range(1, x.dim() - 1) if self.is_linear else range(2, x.dim())), keepdim=True)

    def cat(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, -1 if self.is_linear else 1)

    def everywhere(self, b: Tensor) -> Tensor:
        return b.expand(b.shape[0], *self.points, -1) if self.is_linear else b.expand(-1, -1, *self.points)


def first(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(a, m.everywhere(b)))


def last(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(m.everywhere(b), a))


def both_sides(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(a.square(), m.everywhere(b), a))


def two_spread(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(m.everywhere(b), a, m.everywhere(b.square())))


def shared_local(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(x, m.everywhere(b)))


def shared_and_own(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(x, m.everywhere(b), m.everywhere(m.mean(x)), a))


def shared_spread(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(m.everywhere(m.mean(x)), a))


def all_shared(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(x, m.everywhere(x[:, :, :1])))


def read_elsewhere(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    wide = m.everywhere(b)
    return m.layer(m.cat(a, wide)).sum() + (wide * a).sum()


def repeated(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(a, b.repeat(1, 1, *m.points)))


def tiled(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(torch.concat((a, b.tile(1, 1, *m.points)), -2))


def expanded_as(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(b.expand_as(a), a))


def broadcast(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(torch.broadcast_to(b, a.shape), a))


def one_sample(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(a, m.token.expand(a.shape[0], -1, *m.points)))


def normed(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return torch.relu(m.norm(m.layer(m.cat(a, m.everywhere(b)))))


def transposed(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Channels innermost, as a product leaves them."""
    a = (a.transpose(1, 2).contiguous() * 2.0).transpose(1, 2)
    return m.layer(m.cat(a, m.everywhere(b)))


def something_else_written(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    other, joined = a * 2.0, m.cat(a, m.everywhere(b))
    other.add_(1.0)
    return m.layer(joined).sum() + other.sum()


MERGED = [
    *[(kind, first, 2, {}) for kind in SPACE],
    *[(kind, last, 2, {}) for kind in ("conv1d", "conv2d", "linear")],
    *[(kind, both_sides, 3, {}) for kind in ("conv1d", "conv2d", "linear")],
    *[(kind, two_spread, 3, {}) for kind in ("conv1d", "linear")],
    *[(kind, join, 2, {}) for kind in ("conv2d", "linear") for join in (shared_local, shared_spread)],
    *[(kind, shared_and_own, 4, {}) for kind in ("conv1d", "linear")],
    *[("conv1d", join, 2, {}) for join in (repeated, tiled, expanded_as, broadcast, one_sample, all_shared)],
    *[("conv1d", join, 2, {}) for join in (read_elsewhere, normed, transposed, something_else_written)],
    ("conv2d", first, 2, {"bias": False}),
    ("linear", first, 2, {"bias": False}),
]


@pytest.mark.parametrize(("kind", "join", "parts", "options"), MERGED)
def test_a_part_that_is_the_same_at_all_points_is_multiplied_apart(
    kind: str, join: Callable[..., Any], parts: int, options: dict[str, Any]
) -> None:
    array = made(kind, join, parts, options)
    for per_member in (False, True):
        plan, x = plan_of(array, per_member=per_member), input_of(kind, per_member=per_member)
        apart, count = results(array, x), len(plan.steps)
        merge(plan)
        (one,) = parted(plan)
        assert not [step for step in plan.steps if step.node.name.startswith(("cat", "concat"))]
        # The concatenation is gone, what is spread as well unless someone else reads it; so is relu behind a norm.
        assert len(plan.steps) <= count - (1 if join is read_elsewhere else 3 if join is normed else 2)
        assert (one.arguments[2] is None) == (join is normed or "bias" in options)
        for way in ("", "apart"):
            one.choose(way)
            plan.recompile()
            torch.testing.assert_close(results(array, x), apart, **EXACT)


def joined_read_twice(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    joined = m.cat(a, m.everywhere(b))
    return m.layer(joined).sum() + joined.square().sum()


def joined_returned(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    joined = m.cat(a, m.everywhere(b))
    return m.layer(joined), joined


def over_one_dimension(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(a, a.mean(3, keepdim=True).expand_as(a)))


def over_channels(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(a, b.mean(1, keepdim=True).expand_as(a)))


def only_spread(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(m.everywhere(b), m.everywhere(b.square())))


def along_points(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(torch.cat((a, m.everywhere(b)), 2))


def local_written(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a = a * 2.0
    joined = m.cat(a, m.everywhere(b))
    a.add_(1.0)
    return m.layer(joined).sum() + a.sum()


def view_written(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    a = a * 2.0
    joined = m.cat(a, m.everywhere(b))
    a[:, 1].add_(1.0)
    return m.layer(joined).sum() + a.sum()


def written_behind(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The layer's gradient needs what it has read."""
    a = a * 2.0
    y = m.layer(m.cat(a, m.everywhere(b)))
    a.add_(1.0)
    return y.sum() + a.sum()


def source_written(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    b = b * 2.0
    wide = b.repeat(1, 1, *m.points)
    b.mul_(3.0)
    return m.layer(m.cat(a, wide)).sum() + b.sum()


def spread_written(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    wide = b.repeat(1, 1, *m.points)
    wide.add_(1.0)
    return m.layer(m.cat(a, wide))


def samples_repeated(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return m.layer(m.cat(torch.cat((a, a * 2.0)), b.repeat(2, 1, *m.points))).view(-1, 2, 6, *m.points)


def norm_between(m: Joined, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The norm moves its statistics after they were joined."""
    statistics = m.norm.running_mean.view(1, -1, 1).expand(a.shape[0], -1, *m.points)
    joined = m.cat(a, statistics)
    return m.norm(a).sum() + m.layer(joined).sum()


LEFT = [
    *[("conv1d", join, 2, {}) for join in (joined_read_twice, joined_returned, only_spread, over_channels)],
    ("conv1d", samples_repeated, 2, {}),
    *[("conv1d", join, 2, {}) for join in (local_written, view_written, source_written, spread_written, norm_between)],
    *[("linear", join, 2, {}) for join in (joined_returned, written_behind)],
    ("conv1d", along_points, 1, {}),
    ("conv2d", over_one_dimension, 2, {}),
    ("conv1d", first, 2, {"kernel_size": 3, "padding": 1}),
    ("conv1d", first, 2, {"padding": 1}),
    ("conv1d", first, 2, {"padding": "same"}),
    ("conv2d", first, 2, {"stride": 2}),
    ("conv1d", first, 2, {"groups": 2}),
]


@pytest.mark.parametrize(("kind", "join", "parts", "options"), LEFT)
def test_what_could_not_be_parted_alike_stays_as_it_is(
    kind: str, join: Callable[..., Any], parts: int, options: dict[str, Any]
) -> None:
    array, x = made(kind, join, parts, options), input_of(kind)
    plan = plan_of(array)
    apart = results(array, x)
    merge(plan)
    assert not parted(plan)
    assert [step for step in plan.steps if step.node.name == "cat"]
    torch.testing.assert_close(results(array, x), apart, **EXACT)


@pytest.mark.parametrize(("join", "per_member"), [(first, False), (shared_local, False), (shared_local, True)])
def test_a_compiler_is_given_the_same_in_plain_operators(join: Callable[..., Any], per_member: bool) -> None:
    array, x = made("conv2d", join, 2, {}), input_of("conv2d", per_member=per_member)
    plan = plan_of(array, per_member=per_member)
    apart = results(array, x)
    merge(plan)
    assert len(parted(plan)) == 1
    with kernels.plain_operators():
        torch.testing.assert_close(results(array, x), apart, **EXACT)


@pytest.mark.parametrize("kind", ["conv1d", "linear"])
def test_under_autocast_the_result_has_the_layers_type(kind: str) -> None:
    array, x = made(kind, first, 2, {}, dtype=torch.float32), input_of(kind).float()
    plan = plan_of(array)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        apart = array(x)
        merge(plan)
        assert len(parted(plan)) == 1
        found = array(x)
    assert found.dtype == apart.dtype == torch.bfloat16
    # Sums of 8 products of numbers near 1, in numbers of 8 bits.
    torch.testing.assert_close(found.float(), apart.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("order", ["members, points, channels", "points, members, channels", "channels, points"])
def test_a_product_that_begins_with_something_lies_in_memory_as_its_input(order: str) -> None:
    x = torch.randn(4, 5, MEMBERS, LOCAL, dtype=torch.float64).permute(2, 0, 3, 1)
    if order != "points, members, channels":
        x = x.movedim(2, -1).contiguous().movedim(-1, 2) if "members" in order else x.contiguous()
    w, start = (torch.randn(*shape, dtype=torch.float64) for shape in ((MEMBERS, 6, LOCAL, 1), (MEMBERS, 4, 6)))
    window = Window((0,), (1,), (0,), (1,), (1,), (5,), whole=True)
    given = [tensor.requires_grad_() for tensor in (x, w, start)]
    y = point_product(window, True)(Run(MEMBERS, Streams([], torch.device("cpu"))), x, w, None, start_MNO=start)
    expected = torch.einsum("mncp,moc->mnop", x, w[..., 0]) + start.unsqueeze(-1)
    torch.testing.assert_close(y, expected, **EXACT)
    assert y.stride(2) == 1
    assert (y.stride(0) < y.stride(3)) == (order == "points, members, channels")
    weights = torch.randn_like(y)
    for mine, theirs in zip(*(torch.autograd.grad((z * weights).sum(), given) for z in (y, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("kind", ["conv1d", "linear"])
def test_both_ways_are_measured(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Merging(lowering._Tuner):
        def tune(self, *arguments: Any, **options: Any) -> None:
            merge(self.plan)
            super().tune(*arguments, **options)

    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(lowering, "_Tuner", Merging)
    array, measured = (made(kind, first, 2, {}, mode=mode) for mode in ("rules", "measured"))
    x = input_of(kind)
    torch.testing.assert_close(results(measured, x), results(array, x), **EXACT)
    (one,) = [step for plan in measured.mode.plans() for step in parted(plan)]
    times_s = lowering.Choices(torch.device("cpu")).times_s
    assert [set(ways) for key, ways in times_s.items() if key.startswith(str(one.node.target) + " [[[")] == [
        {"", "apart"}
    ]


def test_explain_says_what_was_parted() -> None:
    array = made("conv1d", first, 2, {})
    merge(plan_of(array))
    rows = {row.operator: row for row in array.explain().operators}
    assert "once a sample" in rows["conv1d.default"].why
    assert "cat.default" not in rows
    assert "expand.default" not in rows


def test_pointnets_segmentation_trains_alike() -> None:
    job = load_job("zoo:pointnet_segmentation", zoo.SMALL["pointnet_segmentation"])
    torch.manual_seed(3)
    x, y, found = torch.randn(4, 3, 32, dtype=torch.float64), torch.randint(0, 4, (4, 32)), []
    for merges in (False, True):
        array = fuse(built(lambda seed: job.model(), MEMBERS), x)
        optimizer = array.optimizer(torch.optim.SGD, lr=[0.1, 0.01, 0.001])
        plan = plan_of(array)
        if merges:
            merge(plan)
            assert len(parted(plan)) == 1
            assert not [step for step in plan.steps if step.node.name in ("cat", "expand")]
        steps = []
        for _ in range(2):
            optimizer.zero_grad()
            losses = array.losses(x, job.loss, y)
            losses.sum().backward()
            optimizer.step()
            steps.append(losses.detach())
        found.append([*steps, *array.parameters(), *array.state.buffers.values()])
    # The first step's rounding goes through a dozen norms over four samples.
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


def made(
    kind: str,
    join: Callable[..., Any],
    parts: int,
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    mode: Any = "rules",
) -> FusedArray:
    models = [model.to(dtype) for model in built(lambda seed: Joined(kind, join, parts, options), MEMBERS)]
    return fuse(models, input_of(kind).detach().to(dtype), mode=mode)


def input_of(kind: str, *, per_member: bool = False) -> Tensor:
    """One for all members, or [M, …]; samples are not as many as members."""
    torch.manual_seed(7)
    shape = (4, LOCAL, *SPACE[kind]) if kind in CONVOLUTIONS else (4, *SPACE[kind], LOCAL)
    return torch.randn((MEMBERS, *shape) if per_member else shape, dtype=torch.float64, requires_grad=True)


def plan_of(array: FusedArray, *, per_member: bool = False) -> Plan:
    return array.mode.plan(frozenset(n for n in array.mode.capture.inputs if n) if per_member else frozenset())


def merge(plan: Plan) -> None:
    """As on a CUDA device, where norms have a kernel."""
    for step in plan.steps:
        if step.node.target is torch.ops.aten.batch_norm.default:
            step.lowered.others["kernel"] = step.lowered.kernel
    plan.merge()


def parted(plan: Plan) -> list[Any]:
    return [step for step in plan.steps if "once a sample" in step.lowered.why]


def results(array: FusedArray, x: Tensor) -> list[Tensor]:
    """Losses, gradients of parameters and input, buffers; the array is left as it was."""
    before = {name: buffer.clone() for name, buffer in array.state.buffers.items()}
    losses = array.losses(x, weighted_sum, per_member=x.shape[0] == MEMBERS)
    losses.sum().backward()
    found = [losses.detach(), x.grad, *(p.grad for p in array.parameters() if p.grad is not None)]
    found += [buffer.clone() for buffer in array.state.buffers.values()]
    x.grad = None
    for parameter in array.parameters():
        parameter.grad = None
    for name, buffer in array.state.buffers.items():
        buffer.copy_(before[name])
    return found
