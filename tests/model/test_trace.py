"""Tracing: layers that, run one by one, do exactly what the model does."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from burstpool import load_job, trace
from burstpool.errors import TraceError
from burstpool.job import model_arguments
from burstpool.model import zoo
from burstpool.model.check import check_step
from burstpool.model.graph import LayerGraph

# Same operators in the same order give the same bits; only sums over several consumers may be added in another order.
GRADIENT_TOLERANCE = 1e-12

pytestmark = pytest.mark.filterwarnings("ignore:.*_flat_weights.*:UserWarning")  # torch.export on an LSTM


def in_fp64(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree
    )


NEEDS_TWO = ("resnet", "inception_v3", "mobilenet", "pointnet")
"""Kinds whose small form has a batch norm over the batch alone, which cannot train on one sample."""


DEEP = ("resnet152", "wide_resnet101_2", "resnet50", "inception_v3", "mobilenet_v3_large")
"""Many layers of the kinds that ResNet-18 and the tiny ones have; once is enough."""


@pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, id=f"{name}-{'train' if training else 'eval'}")
        for name in zoo.names()
        for training in (True, False)
        if training or name not in DEEP
    ],
)
def test_every_zoo_model_runs_the_same_layer_by_layer_with_any_batch(name: str, training: bool) -> None:
    job = load_job(f"zoo:{name}", zoo.SMALL[name])
    traced = trace(job.build_model().double().train(training), in_fp64(job.samples(4)[0]))
    fewest = 2 if training and any(kind in name for kind in NEEDS_TWO) else 1
    for batch in (fewest, 5):
        example, target = in_fp64(job.samples(batch))
        found = check_step(traced, example, batch=batch, loss=lambda output, target=target: job.loss(output, target))
        assert found.within(GRADIENT_TOLERANCE), found
    args, kwargs = model_arguments(example)
    assert type(traced(*args, **kwargs)) is type(traced.model(*args, **kwargs))
    assert LayerGraph.from_json(traced.graph.to_json()) == traced.graph


class Everything(nn.Module):
    """Branches, a residual, in-place writes, a tied weight, an LSTM, attention, several inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.norm = nn.BatchNorm1d(6)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.dropout = nn.Dropout(0.3)

    def forward(self, tokens: Tensor, *, scale: Tensor) -> dict[str, Any]:
        x = self.embedding(tokens) + self.positions
        x = self.norm(x)
        y = self.left(x)
        y += self.right(x)
        y = self.act(y)
        z, (hidden, _) = self.lstm(y)
        mask = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
        z, _ = self.attention(z, z, z, attn_mask=mask, need_weights=False)
        z = self.dropout(z) * scale[:, None, None]
        folded = z.reshape(-1, 8) @ self.embedding.weight.t()
        return {"logits": folded.view(tokens.shape[0], 6, 20), "more": [hidden, y.mean(1)], "count": 6}


@pytest.fixture
def everything() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    example = {"tokens": torch.randint(20, (4, 6)), "scale": torch.rand(4).double()}
    return Everything().double(), example


@pytest.mark.parametrize("batch", [1, 2, 4, 9])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_it_runs_at_batches_it_was_not_traced_with(
    everything: tuple[nn.Module, dict[str, Tensor]], training: bool, batch: int
) -> None:
    model, example = everything
    found = check_step(trace(model.train(training), example), example, batch=batch)
    assert found.within(GRADIENT_TOLERANCE), found


def test_layers_have_the_names_of_the_users_modules(everything: tuple[nn.Module, dict[str, Tensor]]) -> None:
    names = [layer.name for layer in trace(*everything).layers]
    assert {"embedding", "norm", "left", "right", "lstm", "attention"} <= set(names)
    assert len(set(names)) == len(names)


def test_the_graph_says_what_flows_and_what_weighs(everything: tuple[nn.Module, dict[str, Tensor]]) -> None:
    graph = trace(*everything).graph
    assert {value.name: value.shape for value in graph.inputs} == {"tokens": ("batch", 6), "scale": ("batch",)}
    tied = [layer.name for layer in graph.layers if "embedding.weight" in layer.parameters]
    assert len(tied) == 2
    assert graph.parameter_bytes == sum(p.numel() * 8 for p in everything[0].parameters())
    assert graph.layer("left").flops_per_sample == 2 * 6 * 8 * 8
    assert graph.layer("lstm").flops_per_sample == 2 * 6 * (4 * 8 * 8 + 4 * 8 * 8)
    value = graph.layer("left").outputs[0]
    assert (value.sample_dim, value.bytes_per_sample, value.differentiable) == (0, 6 * 8 * 8, True)
    assert graph.layer("norm").mixes_samples
    assert not graph.layer("left").mixes_samples
    assert [layer.name for layer in graph.layers if layer.random] == ["attention"]  # with the dropout that follows it
    assert not any(layer.random for layer in trace(everything[0].eval(), everything[1]).layers)


def test_layers_follow_the_models_parameters_wherever_they_go(
    everything: tuple[nn.Module, dict[str, Tensor]],
) -> None:
    model, example = everything
    traced = trace(model.eval(), example)
    other = Everything().double()
    model.load_state_dict(other.state_dict())
    for expected, found in zip(
        torch.utils._pytree.tree_leaves(other.eval()(**example)),
        torch.utils._pytree.tree_leaves(traced(**example)),
        strict=True,
    ):
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(found))
    model.norm.running_mean = torch.randn(6).double()  # as `model.to(…)` does: a new tensor
    assert torch.equal(model(**example)["logits"], traced(**example)["logits"])


def test_a_block_runs_forward_and_backward_on_its_own(everything: tuple[nn.Module, dict[str, Tensor]]) -> None:
    model, example = everything
    block = trace(model, example).block("left")
    assert (block.inputs, block.outputs) == (("norm",), ("left",))
    x = torch.randn(7, 6, 8).double()
    run = block.run(x)
    expected = model.left(x)
    assert torch.equal(run.outputs[0], expected)
    (gradient,) = run.backward([torch.ones_like(expected)])
    reference = x.clone().requires_grad_()
    F.linear(reference, model.left.weight, model.left.bias).sum().backward()
    assert torch.equal(gradient, reference.grad)
    assert model.left.weight.grad is not None
    assert model.right.weight.grad is None


def test_a_block_takes_other_weights_in_place_of_the_models(
    everything: tuple[nn.Module, dict[str, Tensor]],
) -> None:
    block = trace(*everything).block("left")
    x = torch.randn(2, 6, 8).double()
    weight = torch.randn(8, 8).double()
    (found,) = block(x, state={"left.weight": weight})
    assert torch.equal(found, F.linear(x, weight, everything[0].left.bias))


class WritesAnOldView(nn.Module):
    """Reads a view after its memory was overwritten: what the reader sees is not written in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        view = y[..., 1:]
        self.act(y)
        return self.second(y) + F.pad(view, (1, 0))


class CallsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class SplitsAndFolds(nn.Module):
    """Chunks, and samples folded into another dimension between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x).chunk(2, dim=-1)
        folded = left.reshape(-1, 4)
        return self.c(self.b(folded)).view(x.shape[0], 3, 4) * right


class FrozenAndDetached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.frozen(x)
        with torch.no_grad():
            still = self.a(x)
        return self.b(self.a(x)) + still, x.detach()


class UsesPositionsTwice(nn.Module):
    """Learned values without samples that two layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(3, 4)
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        where = self.positions(torch.arange(3, device=x.device))
        return self.a(x + where) * where


class TwoLayers(nn.Module):
    """Two linear layers and a buffer; what happens between them is each case's own."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m, self.tanh = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()
        self.register_buffer("c", torch.ones(4))


class WritesIntoAConstant(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        k = torch.zeros(4, dtype=x.dtype)
        k[0] = 5.0
        y = self.l(x) + k
        k[1] = 2.0
        return self.m(y) * k


class WritesIntoAConstantOfTheBatch(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        k = torch.ones(x.shape[0], 1, 4, dtype=x.dtype)
        k[..., 0] = 5.0
        return self.m(self.l(x) * k)


class WritesThroughAViewOfABuffer(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        self.c[:2].add_(1.0)
        return self.m(y) * self.c


class FillsWhatItMade(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 3, 8, dtype=x.dtype)
        y[..., :4] = self.l(x)
        y[..., 4:] = self.m(x)
        return self.tanh(y)


class UpdatesABufferWithoutGradient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        with torch.no_grad():
            self.c.copy_(y.mean((0, 1)))
        return self.m(y)


class DrawsNoiseWithoutGradient(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.rand(x.shape[0], 3, 4, dtype=x.dtype)
        return self.m(self.l(x) + noise) * noise


class CopiesOverAnotherLayersResult(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.l(x), self.m(x)
        y[..., 0].copy_(z[..., 1])
        return self.tanh(y)


class FillsALazyBuffer(TwoLayers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.k is None:
            self.k = torch.arange(4, dtype=x.dtype)
        return self.m(self.l(x) * self.k)


class ChangesItsInput(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.m(self.l(x.mul_(2.0)))


class Averages(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.l(x)
        return self.m(y - y.mean(0)).cumsum(0)


@pytest.mark.parametrize(
    "cls",
    [
        WritesAnOldView, CallsTwice, SplitsAndFolds, FrozenAndDetached, UsesPositionsTwice, WritesIntoAConstant,
        WritesIntoAConstantOfTheBatch, WritesThroughAViewOfABuffer, FillsWhatItMade, UpdatesABufferWithoutGradient,
        DrawsNoiseWithoutGradient, CopiesOverAnotherLayersResult, ChangesItsInput, Averages,
    ],
)  # fmt: skip
def test_hard_cases_run_the_same(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, example = cls().double(), torch.randn(4, 3, 4).double()
    traced = trace(model, example)
    for batch in (1, 4, 6):
        found = check_step(traced, example, batch=batch)
        assert found.within(GRADIENT_TOLERANCE), (batch, found)


@pytest.mark.parametrize(
    ("mix", "does"),
    [
        (lambda y: y - y.mean(0), True),
        (lambda y: y.softmax(0), True),
        (lambda y: y.cumsum(0), True),
        (lambda y: y.flip(0), True),
        (lambda y: y @ y.T @ y, True),
        (lambda y: y[torch.arange(y.shape[0] - 1, -1, -1)], True),
        (lambda y: y.softmax(1), False),
        (lambda y: y - y.mean(1, keepdim=True), False),
        (lambda y: y.unsqueeze(0).transpose(0, 1).squeeze(1), False),
        (lambda y: y[:, [1, 0, 3, 2]], False),
    ],
)
def test_layers_that_mix_samples_say_so(mix: Any, does: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(mix(self.a(x)))

    assert any(layer.mixes_samples for layer in trace(Net(), torch.randn(3, 4)).layers) == does


def test_regions_are_looked_into() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.drop(self.norm(self.a(x)))
            return x * 2

    graph = trace(Net(), torch.randn(3, 4)).graph
    assert any(layer.random for layer in graph.layers)
    assert any(layer.mixes_samples for layer in graph.layers)
    assert graph.flops_per_sample == 2 * 4 * 8


def test_calls_that_differ_from_the_example_are_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x.sum((1, 2)) / (x.shape[1] * scale)

    traced = trace(Net(), (torch.randn(3, 8, 8), 3.0))
    with pytest.raises(TraceError, match=r"traced with argument 3\.0, not 5\.0"):
        traced(torch.randn(3, 8, 8), 5.0)
    with pytest.raises(TraceError, match=r"'x' was traced as batch×8×8, not \(3, 16, 8\)"):
        traced(torch.randn(3, 16, 8), 3.0)


def test_tracing_leaves_no_tensor_without_data_in_the_model() -> None:
    model = FillsALazyBuffer()
    trace(model, torch.randn(2, 3, 4))
    assert model.k is None
    assert torch.isfinite(model(torch.randn(2, 3, 4))).all()


def test_a_result_sized_by_values_is_refused_and_one_inside_is_not() -> None:
    class Selects(nn.Module):
        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.a, self.inside = nn.Linear(4, 4), inside

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            chosen = y[y[:, 0] > 0]
            return y + chosen.sum() if self.inside else chosen

    with pytest.raises(TraceError, match="size depends on values"):
        trace(Selects(inside=False), torch.randn(4, 4))
    example = torch.randn(4, 4).double()
    assert check_step(trace(Selects(inside=True).double(), example), example, batch=4).outputs_equal


def test_sizes_that_are_no_multiple_of_the_batch_are_weighed_right() -> None:
    class Pads(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.pad(x, (0, 0, 0, 1)), x * 2

    graph = trace(Pads(), torch.randn(3, 4)).graph
    assert {v.shape[0]: v.bytes_at(8) for layer in graph.layers for v in layer.outputs} == {
        "batch + 1": 9 * 16,
        "batch": 8 * 16,
    }


def test_a_layer_never_changes_what_it_is_given() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(self.act(y)) + y

    traced = trace(Net(), torch.randn(2, 4))
    for block in traced.blocks():
        inputs = [torch.randn(3, 4) for _ in block.inputs]
        before = copy.deepcopy(inputs)
        block(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


class BranchesOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.middle = Undecided()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1000:
            return x
        return self.linear(x)


class FixesTheBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 2, 2).sum(1)


def test_what_cannot_be_traced_names_the_users_line_and_what_to_change() -> None:
    with pytest.raises(TraceError) as caught:
        trace(BranchesOnValues(), torch.randn(2, 4))
    message = str(caught.value)
    assert "test_trace.py:" in message
    assert "if x.sum() > 1000:" in message
    assert "torch.where" in message
    assert 'fallback="modules"' in message
    assert "\n" not in message


def test_a_fixed_batch_is_said_to_be_fixed() -> None:
    with pytest.raises(TraceError, match=r"fixes the batch size; take sizes from the tensors"):
        trace(FixesTheBatch(), torch.randn(4, 4))


class Reversal(torch.autograd.Function):
    """The gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reversing(nn.Module):
    def __init__(self, *, with_gradient: bool = True) -> None:
        super().__init__()
        self.first, self.last, self.with_gradient = nn.Linear(4, 4), nn.Linear(4, 2), with_gradient

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.with_gradient):
            x = Reversal.apply(self.first(x))
        y: Tensor = self.last(x)
        return y


def test_a_backward_of_the_users_own_is_not_dropped_without_a_word() -> None:
    model, example = nn.Sequential(Reversing(), nn.Linear(2, 2)).double(), torch.randn(4, 4).double()
    apply = torch.autograd.Function.apply
    with pytest.raises(TraceError, match=r"it calls Reversal, an autograd.Function, whose own backward"):
        trace(model, example)
    assert torch.autograd.Function.apply == apply
    traced = trace(model, example, fallback="modules")
    assert check_step(traced, example, batch=4).within(GRADIENT_TOLERANCE)


def test_functions_are_taken_where_nobody_asks_for_their_backward_and_checkpoints_where_they_keep_it() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=self.reentrant))
            return y

    with pytest.raises(TraceError, match=r"use_reentrant=True\), whose own backward .*pass use_reentrant=False"):
        trace(Checkpointed(reentrant=True), torch.randn(4, 4))
    for model in (Reversing(with_gradient=False), Checkpointed(reentrant=False)):
        traced = trace(model.double(), torch.randn(4, 4).double())
        assert check_step(traced, torch.randn(4, 4).double(), batch=4).within(GRADIENT_TOLERANCE)


def test_the_fallback_splits_between_modules() -> None:
    torch.manual_seed(0)
    model, example = BranchesOnValues().double(), torch.randn(4, 4).double()
    traced = trace(model, example, fallback="modules")
    assert [layer.name for layer in traced.layers] == ["first.0", "first.1", "middle", "last"]
    for batch in (1, 4, 6):
        assert check_step(traced, example, batch=batch).within(GRADIENT_TOLERANCE)


def test_the_fallback_keeps_whole_what_depends_on_the_batch() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = nn.Linear(4, 4), nn.Linear(4, 4)
            self.large.weight = self.small.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) if x.shape[0] > 4 else self.small(x)

    model, example = nn.Sequential(Undecided(), Chooses()).double(), torch.randn(4, 4).double()
    traced = trace(model, example, fallback="modules")
    for batch in (2, 4, 6):
        assert check_step(traced, example, batch=batch).within(GRADIENT_TOLERANCE)
    assert traced.graph.parameter_bytes == sum(p.numel() * 8 for p in model.parameters())


def test_the_fallback_keeps_a_module_whole_that_does_more_than_call_others() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Undecided()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)

    traced = trace(nn.Sequential(nn.Linear(4, 4), Residual()), torch.randn(2, 4), fallback="modules")
    assert [layer.name for layer in traced.layers] == ["0", "1"]


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ((torch.randn(2, 4), torch.randn(2, 4)), "does not take this example"),
        ((), "no tensor with a batch dimension"),
        (torch.randn(2, 5), "cannot trace Sequential"),
    ],
)
def test_a_wrong_example_is_refused_in_one_line(example: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says) as caught:
        trace(nn.Sequential(nn.Linear(4, 4)), example)
    assert "\n" not in str(caught.value)


def test_unknown_layers_blocks_and_fallbacks_are_refused() -> None:
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    with pytest.raises(TraceError, match=r"no layer 'x'; its layers: 0, 1"):
        traced.block("x")
    with pytest.raises(TraceError, match="no block 1:3"):
        traced.block(1, 3)
    with pytest.raises(TraceError, match="fallback='magic' is unknown"):
        trace(nn.Linear(4, 4), torch.randn(2, 4), fallback="magic")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="differ in structure"):
        traced(torch.randn(2, 4), torch.randn(2, 4))


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    trace(model, torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
