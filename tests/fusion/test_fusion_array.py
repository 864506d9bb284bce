"""The array's own promises: checkpoints, batches, losses, clipping, loss scales, modes and explanations."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from fusion_nets import Net, X, Y, nets, ready, trained
from torch import Tensor, nn
from torch.nn import functional as F

from burstpool.fusion import FusedArray, FusionError, fuse
from burstpool.fusion.loss import member_losses
from burstpool.fusion.rules import RULES
from burstpool.fusion.rules.base import Call, Lowered
from burstpool.fusion.step import RecordedStep
from burstpool.fusion.streams import Streams
from burstpool.fusion.verify import verify
from burstpool.job import load_job


def test_the_issue_s_five_lines_train() -> None:
    array = fuse(nets(), X)
    optimizer = array.optimizer(torch.optim.Adam, lr=[1e-1, 1e-2, 1e-3])
    for _ in range(3):
        losses = array.losses(X, lambda out: F.cross_entropy(out, Y))
        losses.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses.shape == (3,)
    assert list(array.member(0).state_dict()) == list(Net().state_dict())
    assert array(X).shape == (3, 4, 3)


def test_member_state_goes_in_and_out_bit_exact() -> None:
    models = nets()
    array = fuse(models, X)
    for index, model in enumerate(models):
        for key, value in array.member(index).state_dict().items():
            assert torch.equal(value, model.state_dict()[key])
    other = nets(4)[3].state_dict()
    array.load_member(1, other)
    assert all(torch.equal(value, other[key]) for key, value in array.member(1).state_dict().items())
    assert torch.equal(array.member(2).state_dict()["fc.weight"], models[2].state_dict()["fc.weight"])


def test_member_module_is_a_plain_module_with_tensors_of_its_own() -> None:
    array = ready()
    trained(array, 2)
    module = array.member(1).module()
    assert type(module) is Net
    assert module.again.weight is module.fc.weight
    module.eval()
    torch.testing.assert_close(module(X), array.eval()(X)[1])
    with torch.no_grad():
        module.fc.weight.zero_()
    assert array.member(1).state_dict()["fc.weight"].abs().sum() > 0


class Renamed(nn.Sequential):
    """Its state dict has other keys than its tensors have names, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2))
        self._register_state_dict_hook(_renamed)
        self._register_load_state_dict_pre_hook(_named_back)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 2}


def _renamed(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> dict[str, Any]:
    return {key.replace("0.", "layer."): value for key, value in state.items()}


def _named_back(state: dict[str, Any], *rest: Any) -> None:
    for key in list(state):
        state[key.replace("layer.", "0.")] = state.pop(key)


def test_a_module_with_a_state_dict_of_its_own_making_goes_in_and_out() -> None:
    models, x = [Renamed() for _ in range(2)], torch.ones(4, 3)
    array, wanted = fuse(models, x), models[0].state_dict()
    found = array.member(0).state_dict()
    assert found.keys() == wanted.keys() == {"layer.weight", "layer.bias", "_extra_state"}
    assert torch.equal(found["layer.weight"], wanted["layer.weight"])
    Renamed().load_state_dict(found)
    for move in (
        lambda: array.load_member(1, wanted),
        lambda: array.resume_member(1, array.member(0).checkpoint()),
    ):
        with torch.no_grad():
            array.state.parameters["0.weight"][1] = 0.0
        move()
        assert torch.equal(array(x)[1], array(x)[0])
    with pytest.raises(FusionError, match=r'member 1 refuses the state: .*Missing key.* "0\.weight"'):
        array.load_member(1, {})


def test_eval_mode_is_captured_when_asked_for_and_training_goes_on() -> None:
    models = nets()
    array = fuse(models, X)
    expected = [copy.deepcopy(model).eval()(X) for model in models]
    torch.testing.assert_close(array.eval()(X), torch.stack(expected))
    assert array.train()(X).shape == (3, 4, 3)


def test_array_resumes_bit_exact_with_optimizer_schedule_and_streams() -> None:
    first = ready()
    first.scheduler(torch.optim.lr_scheduler.StepLR, step_size=[1, 2, 3], gamma=0.5)
    trained(first, 4)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    expected = trained(first, 4, start=4)
    second = ready()
    second.scheduler(torch.optim.lr_scheduler.StepLR, step_size=[1, 2, 3], gamma=0.5)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert trained(second, 4, start=4) == expected
    for index in range(3):
        theirs = first.member(index).state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in second.member(index).state_dict().items())


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast_do_so_over_one_members_output_alone() -> None:
    """Three members, batches of three: a target's shape may look like one with the members, or without."""
    for out, own, shared in (
        (torch.randn(3, 3, 4), (torch.randn(3, 4),), ()),
        (torch.randn(3, 4), (), (torch.randn(3, 4),)),
    ):
        expected = [F.mse_loss(out[i], *(o[i] for o in own), *shared) for i in range(3)]
        streams = Streams([0, 1, 2], out.device)
        torch.testing.assert_close(member_losses(F.mse_loss, out, own, shared, streams), torch.stack(expected))


def test_members_may_have_batches_of_their_own() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    inputs, targets = [X, X * 2, X - 1], [Y, (Y + 1) % 3, (Y + 2) % 3]
    losses = array.losses(inputs, F.cross_entropy, targets, per_member=True)
    stacked = array.losses(torch.stack(inputs), F.cross_entropy, torch.stack(targets), per_member=True)
    expected = [F.cross_entropy(model(x), y) for model, x, y in zip(models, inputs, targets, strict=True)]
    torch.testing.assert_close(losses, torch.stack(expected))
    torch.testing.assert_close(stacked, losses)


def test_any_loss_function_of_one_members_output_works() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    outputs = [model(X) for model in models]

    def looping(out: Tensor) -> Tensor:  # vmap cannot follow it
        return out.sum() if out.sum().item() > 0 else -out.sum()

    def weighted(out: Tensor) -> Tensor:
        return F.cross_entropy(out, Y, weight=torch.tensor([1.0, 2.0, 3.0])) + 0.1 * out.square().mean()

    for function in (
        looping,
        weighted,
        lambda out: F.cross_entropy(out, Y, reduction="sum", label_smoothing=0.1, ignore_index=1),
        lambda out: F.mse_loss(out, torch.ones(4, 3)),
        lambda out: F.cross_entropy(out, Y) * 2,
        lambda out: F.nll_loss(out.log_softmax(1), Y),
    ):
        expected = torch.stack([function(out) for out in outputs])
        torch.testing.assert_close(array.losses(X, function), expected)
    with pytest.raises(FusionError, match="must return one number"):
        array.losses(X, lambda out: out.sum(1))


@pytest.mark.filterwarnings("ignore:size_average and reduce:UserWarning")
def test_torchs_old_words_for_a_reduction_are_known() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    for loss in (F.cross_entropy, nn.CrossEntropyLoss(size_average=False)):
        old = {} if isinstance(loss, nn.Module) else {"size_average": False}
        expected = torch.stack([F.cross_entropy(model(X), Y, reduction="sum") for model in models])
        torch.testing.assert_close(array.losses(X, lambda out, loss=loss, old=old: loss(out, Y, **old)), expected)
    with pytest.raises(FusionError, match="must return one number"):
        array.losses(X, lambda out: F.mse_loss(out, torch.ones(4, 3), reduce=False))


def test_two_forward_passes_may_share_one_backward_pass() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    (array.losses(X, F.cross_entropy, Y) + array.losses(X * 2, F.cross_entropy, Y)).sum().backward()
    (F.cross_entropy(models[1](X), Y) + F.cross_entropy(models[1](X * 2), Y)).backward()
    torch.testing.assert_close(array.state.parameters["conv.weight"].grad[1], models[1].conv.weight.grad)  # type: ignore[index]
    assert int(array.member(1).state_dict()["norm.num_batches_tracked"]) == 2


def test_frozen_parameters_stay_and_keep_their_place_in_the_optimizer() -> None:
    models = nets(2)
    for model in models:
        model.conv.weight.requires_grad_(False)
    array = fuse(models, X)
    array.optimizer(torch.optim.Adam, lr=0.1)
    trained(array, 2)
    assert torch.equal(array.member(0).state_dict()["conv.weight"], models[0].conv.weight)
    theirs = torch.optim.Adam(models[0].parameters(), lr=0.1)
    theirs.load_state_dict(array.optimizers[0].member_state_dict(0))
    assert theirs.state[models[0].fc.weight]["exp_avg"].shape == models[0].fc.weight.shape


def test_clipping_is_each_members_own() -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    array.losses(X * 50, lambda out: F.cross_entropy(out * 30, Y)).sum().backward()
    unclipped = {name: parameter.grad.clone() for name, parameter in array.named_parameters()}  # type: ignore[union-attr]
    norms = array.clip_grad_norm_([0.01, None, 1e9])
    for index, limit in enumerate((0.01, None, 1e9)):
        F.cross_entropy(models[index](X * 50) * 30, Y).backward()
        expected = torch.nn.utils.clip_grad_norm_(models[index].parameters(), limit or float("inf"))
        torch.testing.assert_close(norms[index], expected, rtol=1e-4, atol=0.0)
        for name, parameter in models[index].named_parameters():
            torch.testing.assert_close(array.state.parameters[name].grad[index], parameter.grad, rtol=2e-3, atol=1e-5)
    assert all(torch.equal(array.state.parameters[n].grad[1], g[1]) for n, g in unclipped.items())


@pytest.mark.parametrize("limits", [[0.01, None, 1e-4], torch.tensor([0.01, torch.inf, 1e-4]), 0.01])
def test_clipping_by_value_is_each_members_own(limits: Any) -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    array.losses(X, lambda out: F.cross_entropy(out, Y)).sum().backward()
    array.clip_grad_value_(limits)
    for index, model in enumerate(models):
        F.cross_entropy(model(X), Y).backward()
        limit = limits if isinstance(limits, float) else limits[index]
        torch.nn.utils.clip_grad_value_(model.parameters(), float("inf") if limit is None else float(limit))
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(array.state.parameters[name].grad[index], parameter.grad, rtol=1e-4, atol=1e-6)


def test_an_overflow_skips_one_members_step_and_no_others() -> None:
    array, reference = ready(p=0.0), ready(p=0.0)
    scaler = array.loss_scaler(init_scale=[1024.0, 2.0**120, 512.0], growth_interval=2)
    before = array.member(1).state_dict()
    for step in range(2):
        losses = array.losses(X * (1 + step), lambda out: F.cross_entropy(out, Y))
        (scaler.scale(losses).sum() * 2.0**10).backward()
        for parameter in array.parameters():
            parameter.grad.div_(2.0**10)  # type: ignore[union-attr]
        scaler.step(array.optimizers[0])
        scaler.update()
        array.optimizers[0].zero_grad()
        reference.losses(X * (1 + step), lambda out: F.cross_entropy(out, Y)).sum().backward()
        reference.optimizers[0].step()
        reference.optimizers[0].zero_grad()
    assert scaler.overflowed() == [False, True, False]
    assert scaler.scale_M.tolist() == [2048.0, 2.0**118, 1024.0]
    assert torch.equal(array.member(1).state_dict()["fc.weight"], before["fc.weight"])
    assert array.optimizers[0].member_state_dict(1)["state"] == {}, "as torch's own, whose first step was skipped"
    for index in (0, 2):
        theirs = reference.member(index).state_dict()
        for key, value in array.member(index).state_dict().items():
            torch.testing.assert_close(value, theirs[key])


def test_a_loss_scale_is_torchs_step_by_step_and_a_stopped_members_stays() -> None:
    array = fuse([nn.Linear(2, 2), nn.Linear(2, 2)], torch.ones(2, 2))
    optimizer = array.optimizer(torch.optim.SGD, lr=0.1)
    options = {"init_scale": 2.0**124, "growth_interval": 2}
    scaler, alone = array.loss_scaler(**options), torch.amp.GradScaler("cpu", **options)
    weight = nn.Parameter(torch.zeros(1))
    wanted = []
    for step in range(12):  # gradients of zero, so that the scale grows to the largest there is, and one overflow
        factor = float("inf") if step == 2 else 0.0
        weight.grad = torch.full_like(weight, factor)
        for parameter in array.parameters():
            parameter.grad = torch.full_like(parameter, factor)
        alone.scale(torch.zeros(())), alone.step(torch.optim.SGD([weight])), alone.update()
        scaler.step(optimizer), scaler.update()
        wanted.append(alone.get_scale())
        assert scaler.scale_M[0] == wanted[-1]
        assert scaler.scale_M[1] == wanted[min(step, 1)]
        if step == 1:
            array.stop(1)
    assert max(wanted) == 2.0**127


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_close_as_half_precision_allows(dtype: torch.dtype) -> None:
    models = nets(p=0.0)
    array = fuse(models, X)
    with torch.autocast("cpu", dtype=dtype):
        losses = array.losses(X, lambda out: F.cross_entropy(out.float(), Y))
        expected = [F.cross_entropy(model(X).float(), Y) for model in models]
    losses.sum().backward()
    torch.testing.assert_close(losses, torch.stack(expected), rtol=2e-2, atol=2e-2)
    for index, loss in enumerate(expected):
        loss.backward()
        mine = array.state.parameters["out.weight"].grad[index]  # type: ignore[index]
        torch.testing.assert_close(mine, models[index].out.weight.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("mode", ["measured", "fastest", "serial"])
def test_every_mode_trains_the_same_models(mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path))
    expected = trained(ready(), 3)
    for _ in range(2):  # the second time from the cache
        array = fuse(nets(), X, mode=mode)
        array.optimizer(torch.optim.Adam, lr=[0.01, 0.02, 0.03])
        torch.testing.assert_close(torch.tensor(trained(array, 3)), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert bool(list(tmp_path.glob("lowerings/*.json"))) == (mode != "serial")


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
def test_a_compiled_array_has_the_same_losses_and_gradients() -> None:
    models = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2)]
    x = torch.randn(5, 3)
    plain, compiled = fuse(copy.deepcopy(models), x), fuse(models, x)
    compiled.compile(backend="aot_eager")  # what the default one makes of the operators is torch's
    found = [array.losses(x, lambda out: out.square().mean()) for array in (plain, compiled)]
    torch.testing.assert_close(found[0], found[1])
    for losses in found:
        losses.sum().backward()
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_recorded_step_on_the_cpu_is_the_plain_step() -> None:
    array, reference = ready(p=0.0), ready(p=0.0)
    step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
    found = [step(X * (1 + 0.1 * i), Y).tolist() for i in range(3)]
    assert found == trained(reference, 3)
    array.drop(0)
    with pytest.raises(FusionError, match="recorded for 3 members"):
        step(X, Y)


def test_recording_undoes_its_warm_up_in_place() -> None:
    for steps_before in (0, 2):
        array, reference = ready(), ready()
        trained(array, steps_before), trained(reference, steps_before)
        step = RecordedStep(array, array.optimizers[0], F.cross_entropy, X, Y)
        saved = array.state_dict()
        for _ in range(3):
            step._step(X, (Y,))
        slots = [slot for bucket in array.optimizers[0].buckets for slot in bucket.slots.values()]  # type: ignore[attr-defined]
        step._rewind(saved)
        after = [slot for bucket in array.optimizers[0].buckets for slot in bucket.slots.values()]  # type: ignore[attr-defined]
        assert all(a is b for a, b in zip(slots, after, strict=True))
        assert trained(array, 3, start=2) == trained(reference, 3, start=2)


def test_verification_can_leave_dropout_out() -> None:
    array = fuse(nets(p=0.5), X)
    verify(array, ((X,), {}), tolerance=1e-9, dropout=False)
    other = fuse([Net(p=0.5), Net(p=0.1)], X)
    verify(other, ((X,), {}), tolerance=1e-9, dropout=False)


def test_array_from_a_job_has_its_optimizer_seeds_and_schedule(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(
        "import torch\nfrom burstpool.job import Job\nfrom burstpool.data import digits\n"
        "from burstpool.model.zoo.tiny import TinyMLP\n"
        "def job(lr: float = 0.1, seed: int = 0, dropout: float = 0.0) -> Job:\n"
        "    loss = torch.nn.functional.cross_entropy\n"
        "    return Job(model=lambda: TinyMLP(dropout=dropout), loss=loss, data=digits(),\n"
        "        optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),\n"
        "        scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 1 - lr), batch=8, seed=seed)\n"
    )
    settings = [{"lr": 0.1, "seed": 3, "dropout": 0.5}, {"lr": 0.01, "seed": 4}]
    array = FusedArray.from_job(str(file), settings)
    jobs = [load_job(str(file), one) for one in settings]
    x, y = jobs[0].samples(8)
    for _ in range(4):
        array.losses(x, jobs[0].loss, y).sum().backward()
        array.optimizers[0].step()
        array.optimizers[0].zero_grad()
        array.schedulers[0].step()
    for index, job in enumerate(jobs):
        model = job.build_model()
        optimizer = job.optimizer(model.parameters())
        schedule = job.scheduler(optimizer)  # type: ignore[misc]
        torch.manual_seed(job.seed)
        for _ in range(4):
            job.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(array.member(index).state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_explain_says_for_every_operator_which_way_and_why() -> None:
    array = fuse(nets(), X)
    text = str(array.explain())
    assert "conv2d.default" in text
    assert "members share the input: one convolution, M times the filters" in text
    assert {operator.way for operator in array.explain().operators} <= {"rule", "vmap", "loop", "shared"}


def test_verify_names_the_operator_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES[torch.ops.aten.linear]

    def wrong(call: Call) -> Lowered | None:
        lowered = right(call)
        assert lowered is not None
        return Lowered(kernel=lambda run, *a: lowered.kernel(run, *a).flip(0), why="mixes up the members")

    def no_gradient(call: Call) -> Lowered | None:
        lowered = right(call)
        assert lowered is not None
        return Lowered(kernel=lambda run, x, w, b: lowered.kernel(run, x, w, b.detach()), why="forgets the bias")

    fuse(nets(), X, verify=True)
    monkeypatch.setitem(RULES, torch.ops.aten.linear, wrong)
    with pytest.raises(FusionError, match=r"aten.linear.default.*of module 'fc'.*another result than alone"):
        fuse(nets(), X, verify=True)
    monkeypatch.setitem(RULES, torch.ops.aten.linear, no_gradient)
    with pytest.raises(FusionError, match=r"aten.linear.default.*gradient"):
        fuse(nets(), X, verify=True)


def test_a_copied_graph_keeps_its_names_also_that_of_an_input_called_input() -> None:
    """`verify` finds inputs by name; copying a node called as one of Python's functions renames it."""
    from burstpool.fusion.double import doubled_mode

    mode = fuse([nn.Sequential(nn.Linear(3, 2))], torch.randn(2, 3)).mode
    given = next(node for node in mode.capture.graph.nodes if node.name in mode.capture.inputs)
    given.name = "input"
    copied = doubled_mode(mode).capture.graph
    assert [node.name for node in copied.nodes] == [node.name for node in mode.capture.graph.nodes]


def test_verify_takes_a_region_with_its_own_setting_as_a_whole() -> None:
    """Rotary embeddings of today's language models switch autocast off around what still passes gradients on."""

    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                turned = (x * self.weight).sin().cumsum(1)
            return turned * self.weight

    fuse([Region() for _ in range(2)], torch.randn(4, 3), verify=True)


def test_verify_does_not_compare_memory_that_nobody_has_written_yet() -> None:
    """Stochastic depth draws into new memory."""

    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            kept = torch.empty(x.shape[0], 1, dtype=x.dtype).bernoulli_(0.5)
            return x + self.linear(x) * kept

    fuse([Depth() for _ in range(2)], torch.randn(4, 3), verify=True)


def test_verify_takes_results_that_are_written_into_through_views() -> None:
    """As EfficientNet's head: alone, flatten is a view of the pooled map; fused it may be a copy."""

    def net() -> nn.Module:
        pool = [nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*pool, nn.Dropout(0.2, inplace=True), nn.Linear(4, 2))

    fuse([net() for _ in range(2)], torch.randn(4, 3, 6, 6), verify=True)


def test_indexing_with_each_members_own_indices_runs() -> None:
    class Table(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))
            self.register_buffer("places", torch.arange(4) % (seed + 2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight[self.places].sum(0)

    fuse([Table(seed) for seed in range(2)], torch.randn(4, 3), verify=True)
