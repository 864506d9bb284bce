"""On a CUDA device: verified in double precision there, and a recorded step trains what the plain step trains."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from burstpool.fusion import fuse
from burstpool.fusion.compiled import APART, TOGETHER
from burstpool.fusion.step import WRITTEN, RecordedStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def nets(count: int, p: float = 0.0) -> list[nn.Module]:
    """No bias before the norm: its gradient is rounding and nothing else, which Adam makes steps of."""
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        parts = [
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 1),
            nn.Flatten(),
            nn.Dropout(p),
        ]
        models.append(nn.Sequential(*parts, nn.Linear(288, 5)).cuda())
    return models


def test_a_fused_array_verifies_on_the_device() -> None:
    fuse(nets(3, p=0.2), torch.randn(4, 3, 8, 8, device="cuda"), verify=True)


def test_what_cannot_be_recorded_runs_as_written_where_that_is_allowed() -> None:
    x, y = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (4,), device="cuda")

    def waiting(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()  # which a capture refuses
        return F.cross_entropy(out, target)

    plain, other = fuse(nets(2, p=0.1), x), fuse(nets(2, p=0.1), x)
    optimizer, second = (array.optimizer(torch.optim.Adam, lr=0.01) for array in (plain, other))
    step = RecordedStep(other, second, waiting, x, y, must_record=False)
    for _ in range(3):
        losses = plain.losses(x, F.cross_entropy, y)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        torch.testing.assert_close(step(x, y), losses.detach(), rtol=1e-3, atol=1e-4)


def test_a_member_that_is_stopped_stays_as_it_is_in_a_recorded_step() -> None:
    x, y = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (4,), device="cuda")
    array = fuse(nets(2), x)
    optimizer = array.optimizer(torch.optim.Adadelta, lr=0.1)
    step = RecordedStep(array, optimizer, F.cross_entropy, x, y)
    step(x, y)
    array.stop(1)
    before = array.member(1).checkpoint()
    step(x, y)
    after = array.member(1).checkpoint()
    assert all(torch.equal(after["state"][key], value) for key, value in before["state"].items())
    for place, slots in before["optimizers"][0]["state"].items():
        assert all(torch.equal(after["optimizers"][0]["state"][place][name], slot) for name, slot in slots.items())


def test_a_recorded_step_trains_what_the_plain_step_trains() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (6, 4), device="cuda")
    plain, replayed = fuse(nets(3), x[0]), fuse(nets(3), x[0])
    rates = [0.01, 0.02, 0.03]
    optimizer, other = (array.optimizer(torch.optim.Adam, lr=rates) for array in (plain, replayed))
    schedules = [array.scheduler(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5) for array in (plain, replayed)]
    step = RecordedStep(replayed, other, F.cross_entropy, x[0], y[0], max_norm=[1.0, None, 0.5])
    for i in range(6):
        losses = plain.losses(x[i], F.cross_entropy, y[i])
        optimizer.zero_grad()
        losses.sum().backward()
        plain.clip_grad_norm_([1.0, None, 0.5])
        optimizer.step()
        torch.testing.assert_close(step(x[i], y[i]), losses.detach(), rtol=1e-3, atol=1e-4)
        for schedule in schedules:
            schedule.step()
    for index in range(3):
        theirs = plain.member(index).state_dict()
        for key, value in replayed.member(index).state_dict().items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("way", [TOGETHER, APART])
def test_compiled_ways_train_what_the_written_one_trains(
    way: str, autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else one rounds a convolution's factors where the other has a product of whole numbers.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    x, y = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (4,), device="cuda")
    found = []
    for chosen in (WRITTEN, way):
        array = fuse(nets(3), x)
        optimizer = array.optimizer(torch.optim.SGD, lr=[0.03, 0.02, 0.01])
        step = RecordedStep(array, optimizer, F.cross_entropy, x, y, autocast=autocast, compiled=chosen != WRITTEN)
        if chosen != WRITTEN:
            assert not step.left_out
            step._record([chosen])
        found.append(torch.stack([step(x, y).clone() for _ in range(5)]))
    tolerance = 1e-4 if autocast is None else 3e-2
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")
def test_a_model_whose_gradients_have_other_layouts_than_the_compilers_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PointNet: products with channels innermost between batch norms."""
    from burstpool.job import load_job

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    job = load_job("zoo:pointnet_segmentation")
    x, y = (value.cuda() for value in job.samples(2))
    found = []
    for compiled in (False, True):
        array = fuse([job.build_model().cuda() for _ in range(2)], x)
        step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=1e-3), job.loss, x, y, compiled=compiled)
        if compiled:
            assert TOGETHER not in step.left_out, step.left_out
            step._record([TOGETHER])
        found.append(torch.stack([step(x, y).clone() for _ in range(3)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_compiled_dropout_draws_each_members_own_masks_anew() -> None:
    x, y = torch.randn(64, 3, 8, 8, device="cuda"), torch.randint(0, 5, (64,), device="cuda")
    losses = {}
    for seeds in ([1, 2], [2, 1]):
        one = nets(1, p=0.5)[0]
        array = fuse([one, copy.deepcopy(one)], x, seeds=seeds)
        optimizer = array.optimizer(torch.optim.SGD, lr=0.0)
        step = RecordedStep(array, optimizer, F.cross_entropy, x, y, compiled=True)
        step._record([TOGETHER])
        losses[tuple(seeds)] = torch.stack([step(x, y).clone() for _ in range(3)])
    mine, swapped = losses.values()
    assert len(set(mine.flatten().tolist())) == 6
    torch.testing.assert_close(mine, swapped.flip(1), rtol=1e-5, atol=1e-6)


def test_a_recorded_step_draws_new_dropout_masks_every_time() -> None:
    x, y = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (4,), device="cuda")
    array = fuse(nets(2, p=0.5), x)
    step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.0), F.cross_entropy, x, y, autocast=torch.bfloat16)
    losses = [copy.copy(step(x, y).tolist()) for _ in range(3)]
    assert losses[0] != losses[1] != losses[2]


def test_a_tiny_gpt_with_dropout_trains_under_bf16_autocast() -> None:
    from burstpool.job import load_job

    small = {"width": 32, "layers": 2, "heads": 2, "vocabulary": 64, "tokens": 16, "dropout": 0.1}
    jobs = [load_job("zoo:gpt_small", {**small, "seed": seed}) for seed in range(3)]
    x, y = (value.cuda() for value in jobs[0].samples(8))
    array = fuse([job.build_model().cuda() for job in jobs], x)
    step = RecordedStep(array, array.optimizer(torch.optim.AdamW, lr=1e-2), jobs[0].loss, x, y, autocast=torch.bfloat16)
    losses = [step(x, y).clone() for _ in range(30)]
    assert torch.isfinite(torch.stack(losses)).all()
    assert (losses[-1] < losses[0]).all()


def test_the_fastest_way_may_be_to_run_members_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is chosen trains the same."""
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))
    x, y = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(0, 5, (4,), device="cuda")
    losses = []
    for choice in ("fused", "serial", "streams"):
        array = fuse(nets(3), x, mode="fastest")
        monkeypatch.setattr("burstpool.fusion.lowering._Tuner._whole", lambda *_, choice=choice, **__: choice)
        step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.01), F.cross_entropy, x, y)
        losses.append(torch.stack([step(x, y).clone() for _ in range(4)]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(losses[2], losses[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sums_are_cut_into_parts_that_add_up(dtype: torch.dtype) -> None:
    from burstpool.fusion.rules import products

    torch.manual_seed(0)
    g, x = (torch.randn(4, 40_000, channels, device="cuda", dtype=dtype) for channels in (50, 64))
    assert products._parts(g, x) > 1
    assert products._parts(g.transpose(0, 1).contiguous().transpose(0, 1), x) == 1  # members between rows
    wanted = torch.bmm(g.double().transpose(1, 2), x.double())
    scale = float(wanted.abs().max())
    torch.testing.assert_close(products._summed(g, x).double(), wanted, rtol=0, atol=scale * 0.01)


class Segmenter(nn.Module):
    """Each point's features with those of its cloud; without biases that the norm takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.cloud, self.norm = nn.Conv1d(3, 16, 1), nn.Linear(16, 40, bias=False), nn.BatchNorm1d(24)
        self.both, self.head = nn.Conv1d(56, 24, 1, bias=False), nn.Conv1d(24, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.points(x))
        everywhere = self.cloud(x.mean(2)).unsqueeze(2).expand(-1, -1, x.shape[2])
        y: torch.Tensor = self.head(F.silu(self.norm(self.both(torch.cat((x, everywhere), 1)))))
        return y


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_product_over_a_concatenation_is_the_same_in_parts(own: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    models = [Segmenter().cuda() for _ in range(3)]
    x, y = torch.randn(3, 6, 3, 33, device="cuda"), torch.randint(0, 5, (6, 33), device="cuda")
    x = x if own else x[0]
    found = []
    for way in ("", "apart"):
        array = fuse(copy.deepcopy(models), x[0] if own else x, mode="measured")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            array(x, per_member=own)
            steps = [s for plan in array.mode.plans() for s in plan.steps if "concatenat" in s.lowered.why]
            assert len(steps) == 1
            for plan in array.mode.plans():
                for step in plan.steps:
                    if step in steps:
                        step.choose(way)
                plan.recompile()
            losses = array.losses(x, lambda out: F.cross_entropy(out, y), per_member=own)
        losses.sum().backward()
        found.append([losses.detach(), *(p.grad for p in array.parameters())])
    for mine, theirs in zip(*found, strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0, atol=scale * (0.05 if autocast else 0.005) + 1e-6)
