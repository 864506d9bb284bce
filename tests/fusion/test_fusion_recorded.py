"""A recorded step that no longer fits says so; what fails leaves an array as it was."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fusion_alone import built
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.errors import FusionError
from burstpool.fusion import FusedArray, fuse
from burstpool.fusion.compiled import APART, TOGETHER
from burstpool.fusion.step import WRITTEN, RecordedStep

X, Y = torch.linspace(-1.0, 1.0, 24).view(8, 3).double(), torch.tensor([0, 1] * 4)


def net(seed: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


class Replaying:
    """Does what a CUDA graph does, on the CPU: the recorded step on the batch that lies where it was recorded."""

    def __init__(self, step: RecordedStep) -> None:
        self.step, self.way, self.replays = step, step.way, 0
        step._keeps_state = step.optimizer.keeps_state

    def replay(self) -> None:
        self.replays += 1
        inputs, targets = self.step._static
        self.step.array.recording = True
        self.step._losses = self.step._step(inputs, targets)
        self.step.array.recording = False


def recorded(array: FusedArray) -> RecordedStep:
    step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
    step._graph = Replaying(step)  # type: ignore[assignment]
    return step


def ready() -> FusedArray:
    array = fuse(built(net, 3), X)
    array.optimizer(torch.optim.SGD, lr=[0.1, 0.2, 0.3], momentum=0.9)
    return array


def test_a_step_that_was_recorded_before_members_changed_is_refused() -> None:
    array = ready()
    step = recorded(array)
    step(X, Y)
    array.drop(0)
    array.admit(net(0).double())
    with pytest.raises(FusionError, match="left or joined"):
        step(X, Y)


def test_a_batch_that_is_written_where_the_step_reads_it_trains_as_one_that_is_given() -> None:
    given, written = recorded(ready()), recorded(ready())
    for factor in (1.0, 2.0, 3.0):
        wanted = given(factor * X, Y)
        inputs, targets = written.batch
        inputs.copy_(factor * X)
        assert torch.equal(written(inputs, *targets), wanted)


def test_a_batch_of_another_shape_is_refused_with_both_shapes() -> None:
    step = recorded(ready())
    with pytest.raises(FusionError, match=r"\[8, 3\], it was given one of shape \[1, 3\]"):
        step(X[:1], Y)
    with pytest.raises(FusionError, match="recorded with 2 inputs and targets, it was given 1"):
        step(X)


def test_a_member_that_is_stopped_keeps_its_buffers_and_the_step_is_recorded_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    array = ready()
    step = recorded(array)
    first: Any = step._graph
    step(X, Y)
    monkeypatch.setattr(RecordedStep, "_record", lambda self, ways: setattr(self, "_graph", Replaying(self)))
    array.stop(1)
    before = array.member(1).state_dict()
    step(2 * X, Y)
    assert (first.replays, step._graph.replays) == (1, 1)  # type: ignore[union-attr]
    for key, value in array.member(1).state_dict().items():
        assert torch.equal(value, before[key]), key


def test_a_member_that_one_mode_refuses_is_in_no_mode() -> None:
    class Odd(nn.Module):
        def __init__(self, odd: bool) -> None:
            super().__init__()
            self.layer, self.odd = nn.Linear(3, 2).double(), odd

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y.relu() if self.odd and not self.training else y

    array = fuse([Odd(False), Odd(False)], X)
    array.eval()(X)
    array.train()
    with pytest.raises(FusionError):
        array.admit(Odd(True))
    assert len(array) == len(array.mode.operators) == 2
    assert array(X).shape == (2, 8, 2)
    assert array.admit(Odd(False)) == 2
    assert array(X).shape == (3, 8, 2)


def test_a_second_derivative_that_would_be_wrong_is_refused() -> None:
    from burstpool.fusion.rules.products import _PointProduct

    x, w = torch.randn(2, 5, 3, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
    for y in (_PointProduct.apply(x, w, None).square(), _PointProduct.apply(x, w, None)):
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        for differentiated in (lambda g: g.backward(retain_graph=True), lambda g: torch.autograd.grad(g, w)):
            with pytest.raises(RuntimeError, match="no second derivative"):
                differentiated(gradient.square().sum())


def test_a_member_whose_schedule_cannot_be_made_leaves_the_array_as_it_was() -> None:
    def raising(step: int) -> float:
        raise ValueError("no such schedule")

    array, reference = ready(), ready()
    for each in (array, reference):
        each.scheduler(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
    for turn in range(3):
        for each in (array, reference):
            step = RecordedStep(each, each.optimizers[0], F.cross_entropy, X, Y)
            step(X, Y)
            each.schedulers[0].step()
        if turn == 1:
            with pytest.raises(FusionError, match="no such schedule"):
                array.admit(net(0).double(), scheduler={"lr_lambda": raising})
    assert len(array) == 3
    for (key, mine), (_, theirs) in zip(array.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), key


def failing(step: RecordedStep, error: Exception, *ways: str) -> None:
    """Stands for a device whose recordings of these ways fail, after the warm-up."""

    def capture(saved: Any) -> None:
        inputs, targets = step._static
        step.optimizer.recorded, step._keeps_state = True, step.optimizer.keeps_state  # type: ignore[attr-defined]
        step._step(inputs, targets)
        if step.way in ways:
            raise error
        step._graph = Replaying(step)  # type: ignore[assignment]

    step._warm_up_and_capture = capture  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [FusionError("no"), torch.OutOfMemoryError("no"), RuntimeError("no")])
def test_a_recording_that_fails_leaves_the_array_as_it_was(error: Exception) -> None:
    array = ready()
    before = array.state_dict()
    step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
    failing(step, error, WRITTEN)
    with pytest.raises(type(error), match="no"):
        step._record([WRITTEN])
    for mine, theirs in zip(array.state_dict()["members"], before["members"], strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not array.recording
    assert not array.optimizers[0].recorded  # type: ignore[attr-defined]


def test_a_compiled_way_that_cannot_be_recorded_anew_gives_way_to_the_written_one() -> None:
    array = ready()
    step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
    step._ways = {TOGETHER: lambda inputs, targets: array.losses(inputs, F.cross_entropy, *targets)}
    failing(step, RuntimeError("no memory"), TOGETHER)
    step._record([TOGETHER])
    assert (step.way, step.left_out) == (WRITTEN, {TOGETHER: "RuntimeError: no memory"})
    assert step._graph is not None


def test_ways_are_compared_at_the_same_time_each_with_the_fastest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = {WRITTEN: 1.0, TOGETHER: 0.9, APART: 0.99}
    slower = iter([1.0, 2.0, 4.0])  # the device has other work to do, too

    def replay_times(graphs: Sequence[Any], device: torch.device) -> list[float]:
        factor = next(slower)
        return [factor * times_s[graph.way] for graph in graphs]

    monkeypatch.setattr("burstpool.fusion.step.replay_times", replay_times)
    array = ready()
    step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
    step._ways = dict.fromkeys(
        (TOGETHER, APART), lambda inputs, targets: array.losses(inputs, F.cross_entropy, *targets)
    )
    failing(step, RuntimeError("none does"))
    step._record([WRITTEN, TOGETHER, APART])
    assert step.way == TOGETHER
    assert step.times_s == pytest.approx(times_s)


def test_a_step_computes_in_what_autocast_says_where_it_is_made() -> None:
    array = fuse([nn.Linear(3, 2) for _ in range(2)], X.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = RecordedStep(array, array.optimizer(torch.optim.SGD, lr=0.0), lambda out: out.sum(), X.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = array.losses(X.float(), lambda out: out.sum()).detach()
    assert step.autocast is torch.bfloat16
    torch.testing.assert_close(step(X.float()), expected, rtol=0, atol=0)


def test_a_step_clips_by_value_as_the_array_does() -> None:
    mine, theirs = ready(), ready()
    RecordedStep(mine, mine.optimizers[0], F.cross_entropy, X, Y, max_value=[1e-3, None, 1e-4])(X, Y)
    theirs.losses(X, F.cross_entropy, Y).sum().backward()
    theirs.clip_grad_value_([1e-3, None, 1e-4])
    theirs.optimizers[0].step()
    for index in range(3):
        torch.testing.assert_close(mine.member(index).state_dict(), theirs.member(index).state_dict())
