"""What an array cannot take is refused in one line that says why, and changes nothing."""

import copy
import io
import threading
from functools import partial
from typing import Any

import pytest
import torch
from fusion_nets import Net, X, Y, nets, ready, trained
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import FusionError, fuse
from burstpool.fusion.group import group_models
from burstpool.fusion.step import RecordedStep


def test_one_sample_is_refused_where_batch_norm_would_have_one_value_a_channel() -> None:
    """torch refuses it; the captured operator would write NaN into the running variance."""
    array = fuse([nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2)], torch.ones(4, 3))
    before = array.member(0).state_dict()
    with pytest.raises(FusionError, match="one value a channel in a batch of one sample"):
        array(torch.ones(1, 3))
    torch.testing.assert_close(array.member(0).state_dict(), before)
    assert array.eval()(torch.ones(1, 3)).shape == (2, 1, 4)
    assert ready()(X[:1]).shape == (3, 1, 3), "nine values a channel"


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Selecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w)[(x * self.w) > 0]


class Tied(nn.Module):
    """Two layers with one weight: the parameter itself, its memory, or none."""

    def __init__(self, by: str = "") -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if by == "parameter":
            self.b.weight = self.a.weight
        if by == "memory":
            self.b.weight.data = self.a.weight.data
        if by == "view":
            self.register_buffer("first_row", self.a.weight.data[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_members_that_share_other_weights_are_refused() -> None:
    """The one's second weight would be lost, or the other's taken for one of its own."""
    x, tied = torch.ones(2, 3), "'b.weight' of member {} is its 'a.weight', of member {} it is not"
    for first, second, numbers in (("parameter", "", (0, 1)), ("", "parameter", (1, 0))):
        with pytest.raises(FusionError, match=tied.format(*numbers)):
            fuse([Tied(first), Tied(second)], x)
        array = fuse([Tied(first)], x)
        with pytest.raises(FusionError, match=tied.format(*numbers)):
            array.admit(Tied(second))
        assert len(array) == 1


@pytest.mark.parametrize(("by", "key"), [("memory", "b.weight"), ("view", "first_row")])
def test_a_tensor_in_the_memory_of_a_trained_parameter_is_refused(by: str, key: str) -> None:
    """Alone it changes with each step of the optimizer; stacked it would not."""
    message = f"'{key}' of member 1 lies in the memory of 'a.weight'"
    array = fuse([Tied()], torch.ones(2, 3))
    with pytest.raises(FusionError, match=message):
        array.admit(Tied(by))
    with pytest.raises(FusionError, match=message.replace("1", "0")):
        fuse([Tied(by), Tied(by)], torch.ones(2, 3))
    for parameter in (frozen := Tied(by)).parameters():
        parameter.requires_grad = False
    fuse([frozen], torch.ones(2, 3), verify=True)


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def test_plain_values_that_differ_between_members_are_refused() -> None:
    """Tensors may; of others the first member's would be taken for all."""
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    array = fuse([Scaled(3, 3), Scaled(3, 3)], (x, 2.0))

    def losses(weights: Any) -> Tensor:
        both = [(x, 2.0), (x, 2.0)]
        return array.losses(both, lambda out, y, w: w * F.mse_loss(out, y), [y, y], weights, per_member=True)

    for weights in ([1.0, 3.0], [1.0, torch.tensor(3.0)], [torch.ones(2).numpy(), torch.ones(2).numpy()]):
        with pytest.raises(FusionError, match="different values that are no tensors"):
            losses(weights)
    torch.testing.assert_close(losses(torch.tensor([1.0, 3.0])), losses([1.0, 1.0]) * torch.tensor([1.0, 3.0]))
    with pytest.raises(FusionError, match="different values that are no tensors"):
        array([(x, 2.0), (x, 3.0)], per_member=True)
    with pytest.raises(FusionError, match=r"captured with 2\.0; called with 3\.0"):
        array([(x, 3.0), (x, 3.0)], per_member=True)
    with pytest.raises(FusionError, match=r"captured with 2\.0"):
        array((x, torch.ones(2)))


class Locked(nn.Linear):
    """What has a lock cannot be copied."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.lock = threading.Lock()


class OwnNorm(nn.BatchNorm1d):
    """Not torch's own forward, of which is known what it does without momentum."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)))


def test_bad_input_is_refused_with_the_member_and_the_difference() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: fuse([], X), "no models"),
        (
            lambda: fuse([Net(), Net(width=5)], X),
            r"'conv.weight' of member 1 has shape \[5, 1, 3, 3\], of member 0 \[4",
        ),
        (lambda: fuse([Net(), Net().double()], X), "has dtype torch.float64"),
        (lambda: fuse([Net(), Net().eval()], X), "is in eval mode"),
        (lambda: fuse([Net(), nn.Linear(3, 3)], X), "member 1 has none|member 0 has none"),
        (lambda: fuse([nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())], X), "member 1 runs aten.tanh"),
        (lambda: fuse([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())], X), "member 1 runs"),
        (lambda: fuse([Net()] * 2, X), "same object"),
        (lambda: fuse(nets(2), X, seeds=[1]), "1 seeds for 2 members"),
        (lambda: fuse(nets(2), X, mode="quick"), "is unknown"),  # type: ignore[arg-type]
        (lambda: fuse([old_weight_norm()], torch.ones(2, 3)), r"'weight' of module '0'.*parametrizations.weight_norm"),
        (lambda: fuse([OwnNorm(3, momentum=None)], torch.ones(2, 3)), "module 'itself' has momentum=None"),
        (lambda: fuse([Locked()], torch.ones(2, 3)), "Locked cannot be copied .*lock"),
        (lambda: fuse([Branching(), Branching()], X), "member 0: cannot trace Branching.*branches on"),
        (lambda: fuse([Selecting(), Selecting()], torch.ones(2, 3))(torch.ones(2, 3)), "size depends on values"),
        (lambda: ready().optimizer(torch.optim.SGD, lr=[0.1, 0.2]), "lr has 2 values for 3 members"),
        (lambda: ready().optimizer(torch.optim.SGD, lr=-1.0), "refuses"),
        (lambda: ready().optimizer(torch.optim.SGD, lr=0.1, groups=[{"keys": ["no"]}]), "no parameter 'no'"),
        (lambda: fuse(nets(2), X).scheduler(torch.optim.lr_scheduler.StepLR, step_size=1), "needs an optimizer"),
        (lambda: ready().scheduler(torch.optim.lr_scheduler.StepLR), "refuses"),
        (lambda: ready().clip_grad_norm_([1.0]), "1 norms for 3 members"),
        (lambda: ready().member(3), "no member 3"),
        (lambda: ready().drop([0, 1, 2]), "would be empty"),
        (lambda: ready().admit(Net(width=5)), "of member 3 has shape"),
        (lambda: ready().admit(Net(), nesterov=True), "refuses"),
        (lambda: ready().load_member(0, {}), "lacks 'conv.weight'"),
        (lambda: ready().load_member(0, {**Net().state_dict(), "x": X}), "has 'x'"),
        (lambda: ready().load_member(0, Net(width=5).state_dict()), "has shape"),
        (lambda: ready()((X, X)), "not like the example"),
        (lambda: ready()(X[:, :, :4]), r"has shape \[4, 1, 4, 5\]; the models were captured for \['N', 1, 5, 5\]"),
        (lambda: ready()("text"), "input 'x' has type str; the models were captured with a tensor"),
        (lambda: ready()(["a"] * 3, per_member=True), "input 'x' has type str"),
        (lambda: ready()([X, X], per_member=True), "2 inputs for 3 members"),
        (lambda: ready()([X, X, X[:2]], per_member=True), "different shapes"),
        (lambda: ready()(X, per_member=True), "members first"),
        (lambda: ready(2).load_state_dict(ready(3).state_dict()), "3 members, the array 2"),
        (lambda: fuse(nets(3), X).load_state_dict(ready(3).state_dict()), "1 optimizers, the array 0"),
        (lambda: ready().load_state_dict({"schema_version": 9}), "schema 9"),
        (lambda: ready().loss_scaler(scale=1.0), "no option 'scale'"),
    ]
    for call, message in cases:
        with pytest.raises(FusionError, match=message):
            call()


def test_wrong_arguments_are_refused_in_one_line_and_change_nothing() -> None:
    array, smaller = ready(), ready(2)
    step, scaler = partial(RecordedStep, array), smaller.loss_scaler()
    plateau = smaller.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau)
    cases: list[tuple[Any, str]] = [
        (lambda: array.loss_scaler(init_scale="large"), "takes numbers"),
        (lambda: (scaler.unscale(), scaler.unscale()), "unscaled already"),
        (lambda: fuse(Net(), X), "models is one Net; pass a list"),  # type: ignore[arg-type]
        (lambda: fuse(nets(2), X, seeds=[0.5, 1]), "a seed is a whole number"),  # type: ignore[list-item]
        (lambda: array.optimizer("Adam"), "optimizer's class is needed"),  # type: ignore[arg-type]
        (lambda: array.optimizer(torch.optim.LBFGS), "LBFGS needs a closure"),
        (lambda: array.optimizer(torch.optim.SGD, groups=[{"params": ["fc.bias"]}]), "groups are a list of dicts"),
        (lambda: array.optimizer(torch.optim.SGD, groups=["fc.bias"]), "groups are a list of dicts"),
        (lambda: array.optimizer(torch.optim.SGD, groups=3), "groups are a list of dicts"),
        (lambda: array.optimizers[0].step(lambda: 0.5), "takes no closure"),  # type: ignore[arg-type]
        (lambda: fuse(nets(2), X).optimizer(torch.optim.NAdam).step(lambda: 0.5), "takes no closure"),  # type: ignore[arg-type]
        (lambda: fuse(None, X), "models is a NoneType; pass a list"),  # type: ignore[arg-type]
        (lambda: fuse([nn.LazyLinear(3)], X), "'weight' of member 0 has no shape yet"),
        (lambda: fuse(nets(2), X[:0]), "the example has no samples"),
        (lambda: fuse(nets(2), X, seeds=[0, 2**64]), "seed 18446744073709551616 is outside"),
        (lambda: array.losses(X, 3), "the loss is a int"),  # type: ignore[arg-type]
        (lambda: array.scheduler(torch.optim.lr_scheduler.StepLR, optimizer=smaller.optimizers[0]), "not this"),
        (lambda: plateau.step(), "watches a metric"),
        (lambda: plateau.step(0.5), "1 metrics for 2"),  # type: ignore[arg-type]
        (lambda: array.member("0"), "named by its number"),  # type: ignore[arg-type]
        (lambda: array.split([]), "0 of 3 members to split off"),
        (lambda: array.split([0, 0]), "name each once"),
        (lambda: array.admit(nn.LazyLinear(3)), "'weight' of member 3 has no shape yet"),
        (lambda: array.admit(Net), "member 3 is a type"),  # type: ignore[arg-type]
        (lambda: fuse(nets(2), X).admit(Net(), lr=0.1), "'lr' is for an optimizer"),
        (lambda: array.admit(Net(), scheduler={"gamma": 0.1}), "'gamma' is for a schedule"),
        (lambda: array.load_member(0, Net()), "is a Net; pass a state dict"),  # type: ignore[arg-type]
        (lambda: array.load_member(0, dict.fromkeys(Net().state_dict(), 1)), "is a int; it must be a tensor"),  # type: ignore[arg-type]
        (lambda: array.load_state_dict(array.member(0).checkpoint()), "not one that array.state_dict"),
        (lambda: array.resume_member(0, Net().state_dict()), r"not one that member\(i\).checkpoint"),
        (lambda: array([X, (X, X), X], per_member=True), "inputs of member 1 have another structure"),
        (lambda: group_models(nets(2), [X]), "1 examples for 2 models"),
        (lambda: array.clip_grad_norm_(["far", 1.0, 2.0]), "are no norms to clip to"),  # type: ignore[list-item]
        (lambda: step(smaller.optimizers[0], F.cross_entropy, X, Y), "not this array's"),
        (lambda: copy.deepcopy(array), "save array.state_dict"),
        (lambda: torch.save(array, io.BytesIO()), "save array.state_dict"),
        (lambda: step(array.optimizers[0], F.cross_entropy, X, Y, autocast=True), "pass a type such as"),
    ]
    for call, message in cases:
        with pytest.raises(FusionError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert trained(array, 2) == trained(ready(), 2)
