"""Chains of operators that are merged into one: which ones are, and that they compute what they did apart.

Without a GPU a merged chain runs its operators one after another; tests/kernels has the kernels.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from fusion_alone import built
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import fuse
from burstpool.fusion.merge import is_training_norm
from burstpool.fusion.rules import RULES, norms

IMAGES = torch.randn(3, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class Chains(nn.Module):
    """Batch norm with all that may follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1) for i in range(5)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(6) for _ in range(5)])
        self.head, self.last = nn.Linear(54, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        parts = [lambda x, i=i: self.norms[i](self.layers[i](x)) for i in range(5)]
        x = parts[0](x).relu_()
        y = F.leaky_relu(parts[1](x), 0.1)
        y = parts[2](y)
        y += x
        y = F.relu(y, inplace=True)
        z = F.relu(parts[3](y) + parts[4](y))
        return F.hardswish(self.last(self.head(z.flatten(1))))


def test_chains_that_were_merged_do_what_their_operators_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the chains run apart; what they are made of, and the bias that goes along, is the same."""
    monkeypatch.setitem(RULES, torch.ops.aten.batch_norm, offering_the_kernel)
    results = []
    for merges in (False, True):
        torch.manual_seed(0)
        models = [Chains().double() for _ in range(3)]
        array = fuse(models, IMAGES)
        plan = array.mode.plan(frozenset())
        if merges:
            count = len(plan.steps)
            plan.merge()
            assert len(plan.steps) == count - 7
        losses = array.losses(IMAGES, lambda out: out.square().mean())
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad for p in array.parameters()), *array.state.buffers.values()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


class Cloud(nn.Module):
    """Points through a norm, and the largest of them; `read` says what of it is."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.layer, self.norm, self.read = nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), read

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        y = y if self.read == "no activation" else torch.relu(y)
        if self.read == "over channels":
            return y.max(1).values
        values, places = y.max(-1, keepdim=self.read == "kept")
        if self.read == "what is between":
            return values + y.mean(2)
        return values + places if self.read == "the places" else values


@pytest.mark.parametrize(
    ("read", "joins"),
    [
        ("", True),
        ("kept", True),
        ("no activation", True),
        ("the places", False),
        ("over channels", False),
        ("what is between", False),
    ],
)
def test_a_maximum_joins_the_norm_where_only_its_values_over_rows_are_read(
    read: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, torch.ops.aten.batch_norm, offering_the_kernel)
    x, results = torch.randn(5, 3, 7, dtype=torch.float64), []
    for chosen in (None, "", "apart", "maximum apart"):
        torch.manual_seed(0)
        array = fuse([Cloud(read).double() for _ in range(3)], x)
        plan = array.mode.plan(frozenset())
        if chosen is not None:
            plan.merge()
            (one,) = [step for step in plan.steps if "in one kernel" in step.lowered.why]
            assert ("max" in one.lowered.why) == joins
            one.kernel = one.lowered.others.get(chosen, one.lowered.kernel)
        losses = array.losses(x, lambda out: out.square().mean())
        losses.sum().backward()
        results.append([losses.detach(), *(p.grad for p in array.parameters()), *array.state.buffers.values()])
    for mine in results[1:]:
        torch.testing.assert_close(mine, results[0], rtol=1e-9, atol=1e-12)


class SharedNorm(nn.Module):
    """A norm that is used twice, or whose statistics are read, before what follows it has run."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 6, 1), nn.Conv1d(3, 6, 1)
        self.norm, self.read = nn.BatchNorm1d(6, momentum=0.5), read

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.norm(self.first(x)))
        if self.read:
            return self.norm.running_mean * 2.0 + a.max(2).values
        b = self.norm(self.second(x))
        return 2 * torch.relu(b).max(2).values + a.max(2).values


@pytest.mark.parametrize("read", [False, True])
def test_a_norm_stays_before_what_else_uses_its_statistics(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, torch.ops.aten.batch_norm, offering_the_kernel)
    x, results = torch.randn(5, 3, 7, dtype=torch.float64), []
    for merges in (False, True):
        torch.manual_seed(0)
        array = fuse([SharedNorm(read).double() for _ in range(2)], x)
        plan = array.mode.plan(frozenset())
        if merges:
            count = len(plan.steps)
            plan.merge()
            assert len(plan.steps) < count
        losses = array.losses(x, lambda out: out.square().mean())
        results.append([losses.detach(), *array.state.buffers.values()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def offering_the_kernel(call: Any) -> Any:
    lowered = norms._folded_norm(call)
    return lowered and dataclasses.replace(lowered, others={**lowered.others, "kernel": lowered.kernel})


class AnotherDimension(nn.Module):
    """A linear layer over the last dimension, normalised over the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.layer(x)))


class SharedBias(nn.Module):
    """Its bias is one for all members: no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.randn(4, 3)), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(F.linear(x, self.weight, x[0, 0] + torch.arange(4).to(x.dtype))))


@pytest.mark.parametrize(
    ("factory", "x"),
    [
        (AnotherDimension, torch.randn(5, 4, 4).double()),
        (SharedBias, torch.randn(6, 3).double()),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(6, 3).double()),
    ],
)
def test_a_bias_is_taken_into_the_norm_only_where_it_is_the_norms_channels(factory: Any, x: Tensor) -> None:
    models = built(lambda seed: factory(), 2)
    alone = [copy.deepcopy(model) for model in models]
    array = fuse(models, x)
    plan = array.mode.plan(frozenset())
    for step in plan.steps:
        if "batch_norm" in str(step.node.target):
            step.lowered.others["kernel"] = step.lowered.kernel  # as on a CUDA device
            assert is_training_norm(step)
    plan.merge()
    found = array(x)
    for index, model in enumerate(alone):
        torch.testing.assert_close(found[index], model(x))
        key = "norm.running_mean" if hasattr(model, "norm") else "1.running_mean"
        torch.testing.assert_close(array.member(index).state_dict()[key], model.state_dict()[key])
