"""Which models and jobs are one array, how many fit, and what happens when memory runs out."""

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from fusion_nets import Net, X, Y, nets, ready, trained
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import FusedArray, FusionError, fuse
from burstpool.fusion.group import BackingOff, Groups, array_size, group_jobs, group_models, knee, member_bytes
from burstpool.fusion.same import same_function
from burstpool.job import Job, load_job


def test_running_out_of_memory_halves_the_array_and_loses_nothing() -> None:
    array, reference = ready(4), ready(4)
    trained(array, 2), trained(reference, 2)
    backing_off = BackingOff(array)

    def forward_backward(one: FusedArray) -> Tensor:
        losses = one.losses(X, lambda out: F.cross_entropy(out, Y))  # moves buffers and streams before it fails
        if len(one) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        losses.sum().backward()
        return losses.detach()

    found = torch.cat(backing_off.run(forward_backward))
    expected = reference.losses(X, lambda out: F.cross_entropy(out, Y))
    torch.testing.assert_close(found, expected.detach())
    assert [len(one) for one in backing_off.arrays] == [2, 2]
    with pytest.raises(FusionError, match="one member alone does not fit"):
        BackingOff(ready(1)).run(lambda one: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))


def test_gradients_of_earlier_passes_are_not_lost_where_a_later_one_runs_out_of_memory() -> None:
    array, reference = ready(2, p=0.0), ready(2, p=0.0)
    backing_off = BackingOff(array)
    for fits in (2, 1):

        def forward_backward(one: FusedArray, fits: int = fits) -> None:
            one.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
            if len(one) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        backing_off.run(forward_backward)
        reference.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
    assert [len(one) for one in backing_off.arrays] == [1, 1]
    for index, one in enumerate(backing_off.arrays):
        for key, parameter in reference.named_parameters():
            torch.testing.assert_close(one.state.parameters[key].grad[0], parameter.grad[index])  # type: ignore[index]


class Hidden(nn.Module):
    """Keeps a module where torch does not see it."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.kept = [nn.Dropout(p)]

    def forward(self, x: Tensor) -> Tensor:
        return self.kept[0](x * self.w)


def test_numbers_in_modules_that_torch_does_not_see_are_found() -> None:
    array = fuse([Hidden(0.0), Hidden(1.0)], torch.ones(2, 3))
    assert array(torch.ones(2, 3))[:, 0, 0].tolist() == [1.0, 0.0]


def test_models_group_by_the_shape_of_their_graphs() -> None:
    models = [Net(), Net(width=6), Net(p=0.7), nn.Sequential(nn.Flatten(), nn.Linear(25, 3)), Net(width=6)]
    grouping = group_models(models, [X] * 5)
    assert grouping.groups == ((0, 2), (1, 4), (3,))
    assert "has shape [6, 1, 3, 3]" in grouping.reasons[1]
    assert "array 2: 3 — apart because" in str(grouping)


def test_a_model_that_is_apart_says_why_by_the_array_it_is_nearest_to() -> None:
    def model(width: int, activation: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), activation)

    given = [model(5, nn.ReLU()), model(8, nn.ReLU()), model(4, nn.ReLU()), model(8, nn.Tanh())]
    grouping = group_models(given, [torch.zeros(2, 6)] * 4)
    assert grouping.groups == ((0,), (1,), (2,), (3,))
    reason = grouping.reasons[3]
    assert "member 3 runs aten.tanh" in reason
    assert "member 1 runs aten.relu" in reason
    assert "array of member 1" in reason


def test_jobs_group_by_model_optimizer_and_batch() -> None:
    names = [
        ("tiny_mlp", {"lr": 0.1}),
        ("tiny_mlp", {"lr": 0.2, "dropout": 0.5}),
        ("tiny_mlp", {"batch": 8}),
        ("tiny_lstm", {}),
    ]
    grouping = group_jobs([load_job(f"zoo:{name}", settings) for name, settings in names])
    assert grouping.groups == ((0, 1), (2,), (3,))
    assert "batch 8" in grouping.reasons[2]


def test_jobs_whose_optimizers_group_parameters_otherwise_are_apart() -> None:
    """They cannot be one array: its groups are those of all members."""

    def sorted_into(job: Job, sizes: tuple[int, ...]) -> Job:
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            left = iter(parameters)
            groups = [{"params": [next(left) for _ in range(size)]} for size in sizes]
            return torch.optim.SGD([*groups, {"params": list(left)}], lr=0.1)

        return dataclasses.replace(job, optimizer=optimizer)

    job = load_job("zoo:tiny_mlp")
    jobs = [sorted_into(job, sizes) for sizes in ((), (1,), (), (1,), (2,))]
    grouping = group_jobs(jobs)
    assert grouping.groups == ((0, 2), (1, 3), (4,))
    assert "groups of [1," in grouping.reasons[1]
    for group in grouping.groups:
        FusedArray.from_job(None, [jobs[index] for index in group])  # type: ignore[arg-type]
    with pytest.raises(FusionError, match="groups parameters unlike"):
        FusedArray.from_job(None, jobs)  # type: ignore[arg-type]
    with pytest.raises(FusionError, match="settings are a list"):
        FusedArray.from_job("zoo:tiny_mlp", {"lr": [0.1, 0.2]})  # type: ignore[arg-type]


def test_a_job_joins_a_group_whose_first_model_has_gone_to_a_device() -> None:
    groups = Groups()
    for settings in ({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3, "dropout": 0.5}):
        job = load_job("zoo:tiny_mlp", settings)
        model = job.build_model()
        assert groups.place(job, model) == 0, groups.reasons
        model.to("meta")  # as its array does, on a GPU


def test_sizes_come_from_memory_and_from_the_knee() -> None:
    assert array_size(one_bytes=30, two_bytes=40, memory_bytes=200) == 16
    assert array_size(one_bytes=300, two_bytes=400, memory_bytes=200) == 1
    assert knee({1: 10.0, 2: 19.0, 4: 35.0, 8: 36.0, 16: 80.0}) == 4
    array = fuse(nets(), X)
    assert member_bytes(array, samples=8) > member_bytes(array, samples=4) > 0


def test_a_losses_closure_tells_jobs_apart() -> None:
    def smoothed(by: float) -> Any:
        return lambda output, target: F.cross_entropy(output, target, label_smoothing=by)

    job = load_job("zoo:tiny_mlp")
    jobs = [dataclasses.replace(job, loss=smoothed(by)) for by in (0.1, 0.1, 0.2)]
    assert group_jobs(jobs).groups == ((0, 1), (2,))
    assert same_function(partial(F.mse_loss, reduction="sum"), partial(F.mse_loss, reduction="sum"))
    assert not same_function(partial(F.mse_loss, reduction="sum"), partial(F.mse_loss, reduction="mean"))
    assert same_function(nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert not same_function(nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(weight=torch.zeros(3)))


class Laid(nn.Module):
    """A tensor that is laid anew in some members and not in others, as torch's export may leave it out."""

    def __init__(self, anew: bool) -> None:
        super().__init__()
        self.linear, self.anew = nn.Linear(4, 6).double(), anew

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).view(x.shape[0], 2, 3).transpose(1, 2)
        return (y.contiguous() if self.anew else y).reshape(x.shape[0], 6).tanh()


@pytest.mark.parametrize("mode", ["rules", "serial"])
@pytest.mark.parametrize("first", [True, False])
def test_members_that_differ_in_how_a_tensor_lies_are_one_array(first: bool, mode: Any) -> None:
    models, x = [Laid(first), Laid(not first)], torch.randn(5, 4, dtype=torch.float64)
    array = fuse(models, x, verify=True, mode=mode)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]), rtol=1e-12, atol=1e-12)
