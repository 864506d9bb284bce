"""`verify=True`: refuses models whose own code trains otherwise than the array, and takes those that are right."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.errors import FusionError
from burstpool.fusion import fuse, uncaptured
from burstpool.fusion.rules import RULES, Call, Lowered, Rule
from burstpool.fusion.rules.fallback import fallback
from burstpool.fusion.rules.pointwise import pointwise

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Warming(nn.Module):
    """Its strength grows with each call, in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last, self.calls = nn.Linear(4, 4), nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.last(self.inner(x) * (1 - 0.5**self.calls))
        return y


class Perturbed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class Reversal(torch.autograd.Function):
    """The gradient turned round, as adversarial training of features has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(Reversal.apply(self.features(x)))
        return y


def with_parameter_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model[0].weight.register_hook(lambda gradient: gradient * 0)  # type: ignore[union-attr, operator]
    return model


def with_accumulated_hook() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def with_backward_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].register_full_backward_hook(lambda module, into, out: tuple(g * 0 for g in into))  # type: ignore[arg-type]
    return model


def with_growing_forward_hook() -> nn.Module:
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), []

    def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * len(calls)

    model[0].register_forward_hook(hook)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Warming, r"step 2 member 0's own module gives another output .*first in module 'last'.*Python state"),
        (lambda: Perturbed(4, 3), r"another output .*random numbers that are not torch's"),
        (with_parameter_hook, r"gives '0.weight' another gradient .*hooks on parameter '0.weight'"),
        (with_accumulated_hook, r"'weight' of member 0 has a hook on its accumulated gradient"),
        (with_backward_hook, r"gives '0.weight' another gradient .*hooks on module '1'"),
        (with_growing_forward_hook, r"first in module '0'.*hooks on module '0'"),
    ],
)
def test_verify_refuses_what_a_captured_graph_does_not_hold(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        fuse([build(), build()], X, verify=True)


@pytest.mark.parametrize("verify", [True, False])
def test_a_backward_of_the_users_own_is_refused_verified_or_not(verify: bool) -> None:
    with pytest.raises(
        FusionError, match=r"member 0: cannot trace Adversarial: it calls Reversal, an autograd.Function"
    ):
        fuse([Adversarial(), Adversarial()], X, verify=verify)


def test_verify_refuses_a_hook_of_a_later_member_alone() -> None:
    with pytest.raises(FusionError, match=r"member 1's own module gives '0.weight' another gradient"):
        fuse([nn.Sequential(nn.Linear(4, 3), nn.Tanh()), with_parameter_hook()], X, verify=True)


def test_verify_takes_what_differs_by_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = uncaptured.alone

    def rounded(*args: Any) -> list[Any]:
        """As if a GPU multiplied in TF32 in one of the two runs."""
        return [y * 1.001 if y.dtype is torch.float32 else y for y in exact(*args)]

    monkeypatch.setattr(uncaptured, "alone", rounded)
    fuse([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Tanh()) for _ in range(2)], X, verify=True)
    with pytest.raises(FusionError, match="step 2 member 0's own module gives another output"):
        fuse([Warming(), Warming()], X, verify=True)


class SingleOnly(nn.Module):
    """Makes much of the last digit, and has no form in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError("in single precision only")
        return (2e3 * self.inner(x)).sin()


@pytest.mark.parametrize(("factor", "is_rounding"), [(1 + 4e-7, True), (1.01, False)])
def test_of_a_module_without_double_precision_verify_takes_what_other_last_digits_change(
    factor: float, is_rounding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = nn.Linear.forward

    def other(self: nn.Linear, x: Tensor) -> Tensor:
        """As if a GPU used another kernel once the graph is captured."""
        return exact(self, x) * factor

    array = fuse([SingleOnly(), SingleOnly()], X)
    monkeypatch.setattr(nn.Linear, "forward", other)
    if is_rounding:
        array.verify()
    else:
        with pytest.raises(FusionError, match="member 0's own module gives another output"):
            array.verify()


def test_verify_takes_hooks_that_change_nothing() -> None:
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model[0].weight.register_hook(lambda gradient: seen.append(gradient))  # type: ignore[union-attr, operator]
    model[1].register_forward_hook(lambda module, arguments, output: output * 2)
    fuse([model], X, verify=True)
    assert seen


def test_verify_leaves_members_and_all_random_streams_as_they_were() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))

    array = fuse([build(), build()], X)
    before, streams = array.member(1).state_dict(), array.streams.states()
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    array.verify()
    assert all(torch.equal(value, before[key]) for key, value in array.member(1).state_dict().items())
    assert all(map(torch.equal, array.streams.states(), streams))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


@pytest.mark.parametrize("training", [True, False])
def test_verify_takes_dropout_state_and_shared_weights_in_either_mode(training: bool) -> None:
    class Net(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 4)
            self.norm = nn.BatchNorm1d(4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, p, batch_first=True)
            self.gru = nn.GRU(4, 4, 2, batch_first=True, dropout=p)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.norm(self.table(x).transpose(1, 2)).transpose(1, 2)
            y = F.dropout(self.gru(self.layer(y))[0], 0.1, self.training)
            return {"out": self.head(y), "best": y.argmax(-1)}

    models = [Net(0.1), Net(0.4)]
    for model in models:
        model.train(training)
    fuse(models, torch.arange(12).view(4, 3) % 7, verify=True)


def test_verify_takes_the_mode_that_the_models_were_not_given_in() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(2)]
    fuse(models, X).eval().verify()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_verify_takes_models_of_other_types(dtype: torch.dtype) -> None:
    fuse([nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(dtype) for _ in range(2)], X.to(dtype), verify=True)


def test_verify_under_autocast_compares_what_was_captured_outside_of_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fuse([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)], X, verify=True)


class Filling(nn.Module):
    """Writes into memory that is new, part by part; some of it in a region, some never read before it is written."""

    def __init__(self, make: Callable[..., Tensor] = torch.empty) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Tensor:
        out = self.make(x.shape[0], 8)
        out[:, :4] = self.linear(x)
        out[:, 4:] = x
        with torch.no_grad():
            scale = torch.empty(4)
            scale[:2] = 1.0
            scale[2:] = 2.0
        return out[:, :4] * scale + out[:, 4:]


class Cell(nn.Module):
    """The last c is used by nobody, the last h by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x)
        h: Tensor = self.cell(x, state)[0]
        return h


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(self.linear(x)) * torch.fft.fft(self.linear.weight[0])).real


class Complex(nn.Module):
    """Complex weights, and a complex result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight


@pytest.mark.parametrize("build", [Filling, lambda: Filling(torch.zeros), Cell, Spectrum, Complex])
def test_verify_raises_no_false_alarm(build: Callable[[], nn.Module]) -> None:
    fuse([build() for _ in range(3)], X, verify=True)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_verify_takes_bags(mode: str) -> None:
    array = fuse([nn.EmbeddingBag(9, 4, mode=mode) for _ in range(2)], torch.arange(12).view(3, 4) % 9, verify=True)
    assert {operator.way for operator in array.explain().operators if "bag" in operator.operator} == {"rule"}


def test_verify_takes_sparse_gradients() -> None:
    fuse([nn.Embedding(9, 4, sparse=True) for _ in range(2)], torch.arange(12).view(3, 4) % 9, verify=True)


def test_verify_takes_the_log_probabilities_of_adaptive_softmax() -> None:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(4, 20, [5, 10], div_value=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax.log_prob(x)

    fuse([Adaptive() for _ in range(2)], X, verify=True)


def spoilt(right: Rule, change: Callable[[Tensor], Tensor]) -> Rule:
    """The rule with a result that is wrong."""

    def rule(call: Call) -> Lowered | None:
        lowered = right(call)
        assert lowered is not None
        return Lowered(kernel=lambda run, *a: change(lowered.kernel(run, *a)), way=lowered.way)

    return rule


def test_verify_sees_a_wrong_imaginary_part(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = spoilt(fallback, lambda y: torch.complex(y.real, y.imag * 1.001))
    monkeypatch.setitem(RULES, torch.ops.aten.fft_fft, wrong)
    with pytest.raises(FusionError, match=r"fft_fft.*another result than alone \(largest difference 0\.0"):
        fuse([Spectrum() for _ in range(2)], X, verify=True)


def test_verify_sees_a_part_of_new_memory_that_was_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, torch.ops.aten.copy_, spoilt(pointwise, lambda y: y.detach().zero_()))
    with pytest.raises(FusionError, match=r"aten.copy_.*another result than alone"):
        fuse([Filling() for _ in range(2)], X, verify=True)


class Judge(nn.Module):
    """Gives truth values beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = self.linear(x)
        return y, (y > 0).any(1)


class Converted(nn.Module):
    """A copy in another type, before its source is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        first = y.to(torch.float64)
        second = y.type_as(first)
        y.add_(1.0)
        return y, first, second


@pytest.mark.parametrize("build", [Judge, Converted])
def test_verify_takes_truth_values_and_conversions(build: Callable[[], nn.Module]) -> None:
    fuse([build() for _ in range(2)], X, verify=True)


def test_verify_sees_wrong_running_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES[torch.ops.aten.batch_norm]

    def rule(call: Call) -> Lowered | None:
        lowered = right(call)
        assert lowered is not None

        def kernel(run: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, *rest: Any) -> Any:
            return lowered.kernel(run, x, weight, bias, mean.clone(), *rest)  # the running mean stays what it was

        return Lowered(kernel=kernel)

    monkeypatch.setitem(RULES, torch.ops.aten.batch_norm, rule)
    with pytest.raises(FusionError, match=r"leaves member 0 another '1.running_mean' than alone"):
        fuse([nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2)], X, verify=True)


class Counting(nn.Module):
    """Writes into a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 2), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y: Tensor = self.linear(x) * self.calls
        return y


class Measuring(nn.Module):
    """A norm whose statistics are no buffers."""

    def __init__(self, norm: Callable[..., Tensor] = F.batch_norm) -> None:
        super().__init__()
        self.linear, self.mean, self.variance, self.norm = nn.Linear(4, 2), torch.zeros(2), torch.ones(2), norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).unsqueeze(2).expand(-1, -1, 3) * x[:, None, :3]
        if self.norm is F.batch_norm:
            return F.batch_norm(y, self.mean, self.variance, training=self.training)
        return F.instance_norm(y, self.mean, self.variance, use_input_stats=self.training)


class DrawsAside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 2), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) + torch.randn(2, generator=self.generator)
        return y


def test_statistics_that_only_are_read_may_be_any_tensors() -> None:
    fuse([Measuring().eval(), Measuring().eval()], torch.randn(3, 4), verify=True)


class TakesAny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, **options: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * options["scale"]
        return y


class WritesData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.mean.data.mul_(0.9).add_(y.detach().mean(0))
        return y - self.mean


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Counting, r"Counting writes into 'calls', a tensor that is no parameter and no buffer; .*register_buffer"),
        (Measuring, r"Measuring writes into 'mean', a tensor that is no parameter and no buffer"),
        (lambda: Measuring(F.instance_norm), r"Measuring writes into 'mean', a tensor that is no parameter"),
        (DrawsAside, r"DrawsAside draws from a torch\.Generator of its own; leave it out"),
        (TakesAny, r"forward takes 'scale' by \*\*options; name it in forward's signature"),
        (WritesData, r"as by \.data; use torch\.no_grad\(\)"),
    ],
)
def test_models_that_cannot_be_captured_are_refused_with_what_to_do(
    build: Callable[[], nn.Module], message: str
) -> None:
    example = {"x": torch.randn(3, 4), **({"scale": torch.rand(3, 1)} if build is TakesAny else {})}
    with pytest.raises(FusionError, match=message):
        fuse([build(), build()], example)
