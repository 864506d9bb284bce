"""Measuring: what a profile of a real model says, and how little measuring disturbs."""

import copy
import dataclasses
import gc
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import burstpool
from burstpool.errors import ProfileError
from burstpool.job import load_job
from burstpool.profiling import cache
from burstpool.profiling.in_step import usual_steps
from burstpool.profiling.measure import profile_job
from burstpool.profiling.profile import Profile
from burstpool.profiling.session import Session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        return self.norm(self.b(y) + self.c(y))


@pytest.fixture
def traced() -> burstpool.TracedModel:
    return burstpool.trace(Net(), torch.randn(4, 32))


def test_a_profile_has_every_layers_time_bytes_and_memory(traced: burstpool.TracedModel) -> None:
    found = burstpool.profile(traced, batches=[2, 8])
    assert found.batches == (2, 8)
    assert [layer.name for layer in found.layers] == [layer.name for layer in traced.layers]
    a = found.layer("a")
    assert a.inputs == ("x",)
    assert a.parameter_bytes == (32 * 64 + 64) * 4
    assert a.output_bytes_per_sample == 64 * 4
    assert a.flops_per_sample == 2 * 32 * 64
    assert all(layer.forward_s[8] > 0 for layer in found.layers)
    assert all(found.layer(name).backward_s[8] > 0 for name in ("a", "b", "c", "norm"))
    assert (found.device, found.dtype, found.autocast) == ("cpu-core", "fp32", None)
    assert found.versions["torch"] == torch.__version__
    assert set(found.step_s) == {2, 8}
    assert found.loss_forward_s[8] > 0


def test_kept_memory_counts_each_tensor_once(traced: burstpool.TracedModel) -> None:
    found = burstpool.profile(traced, batches=[8])
    value_bytes = 8 * 64 * 4
    # relu keeps its result, which b and c keep too; norm keeps its input (the sum) and two statistics of 64 floats.
    assert found.layer("a").activation_bytes[8] == value_bytes
    assert found.layer("b").activation_bytes[8] == 0
    assert found.layer("add").activation_bytes[8] == value_bytes
    assert found.layer("norm").activation_bytes[8] == 2 * 64 * 4
    inputs, weights = 8 * 32 * 4, (32 * 64 + 64) * 4
    assert found.layer("a").peak_memory_bytes[8] >= inputs + 2 * weights + 2 * value_bytes


class OperatorClock(TorchDispatchMode):
    """Stands in for `time`: every operator takes a millisecond, however busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now_s = 0.0
        for module in ("in_step", "rest", "timing"):
            monkeypatch.setattr(f"burstpool.profiling.{module}.time", self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now_s += 1e-3
        return func(*args, **(kwargs or {}))

    def perf_counter(self) -> float:
        return self.now_s


def test_layers_add_up_to_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # By a clock of operators: nothing is missing and nothing counted twice. The benchmark holds the bar of 10% in time.
    with OperatorClock(monkeypatch):
        found = profile_job(load_job("zoo:tiny_vgg"), batches=[16])
    assert found.sum_over_step(16) == pytest.approx(1, abs=0.1)


def test_a_job_is_measured_with_as_many_samples_of_its_own_as_a_batch_has() -> None:
    job = load_job("zoo:tiny_vgg")
    example, target = job.samples(2)
    traced = burstpool.trace(job.build_model(), example)
    alone = Session(traced=traced, device=torch.device("cpu"), autocast=None, loss=job.loss, target=target)
    known = dataclasses.replace(alone, job=job)
    for session, distinct in ((alone, 2), (known, 16)):
        (images,), _ = session.arguments(16)
        assert len(images) == len(session.targets(16)) == 16
        assert len(images.flatten(1).unique(dim=0)) == distinct


def test_layers_add_up_to_a_usual_step_even_if_every_step_has_another_slow_one() -> None:
    # 9 layers of 1 s, one of them 3 s: 11 s a step. Some steps are stalled by 50 s, and the first, which warms up.
    parts = [[3.0 if step % 9 == layer else 1.0 for step in range(101)] for layer in range(9)]
    for step in (0, *range(5, 100, 5)):
        parts[0][step] += 50.0
    steps = usual_steps([*parts, []])
    assert 0 not in steps
    assert sum(statistics.fmean(part[step] for step in steps) for part in parts) == pytest.approx(11)
    assert sum(statistics.median(part) for part in parts) == pytest.approx(9)


def test_measuring_leaves_the_model_and_the_random_numbers_as_they_were(traced: burstpool.TracedModel) -> None:
    before = copy.deepcopy(traced.model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    burstpool.profile(traced, batches=[2])
    assert torch.equal(torch.rand(1), expected)
    assert torch.get_num_threads() == threads
    assert all(torch.equal(value, before[key]) for key, value in traced.model.state_dict().items())
    assert all(parameter.grad is None for parameter in traced.model.parameters())


def test_a_second_call_measures_nothing_and_is_equal_and_new_batches_are_added(
    traced: burstpool.TracedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = burstpool.profile(traced, batches=[2, 4])
    with monkeypatch.context() as patched:
        patched.setattr("burstpool.profiling.measure._Measurement.run", lambda *_: pytest.fail("it measures again"))
        assert burstpool.profile(traced, batches=[4, 2]) == first
    more = burstpool.profile(traced, batches=[2, 8])
    assert more.batches == (2, 8)
    assert more.layer("a").forward_s[2] == first.layer("a").forward_s[2]
    assert len(list(cache.folder().iterdir())) == 1
    assert burstpool.profile(traced, batches=[2], use_cache=False) != cache.selected(first, [2])


def test_other_weights_hit_the_cache_and_other_layers_miss_it(traced: burstpool.TracedModel) -> None:
    first = burstpool.profile(traced, batches=[2])
    assert burstpool.profile(burstpool.trace(Net(), torch.randn(4, 32)), batches=[2]) == first
    wider = Net()
    wider.b = nn.Linear(64, 64, bias=False)
    assert burstpool.profile(burstpool.trace(wider, torch.randn(4, 32)), batches=[2]) != first


def test_a_spoilt_cache_file_is_measured_again(traced: burstpool.TracedModel) -> None:
    burstpool.profile(traced, batches=[2])
    (file,) = cache.folder().iterdir()
    file.write_text(file.read_text()[:100])
    assert burstpool.profile(traced, batches=[2]).batches == (2,)
    assert Profile.load(file).batches == (2,)


def test_progress_goes_from_nothing_to_all(traced: burstpool.TracedModel) -> None:
    told: list[tuple[int, int]] = []
    burstpool.profile(traced, batches=[2, 4], progress=lambda done, total, what: told.append((done, total)))
    assert told[0][0] == 0
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_layers_that_do_the_same_work_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from burstpool.profiling import sweep

    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    runs = []
    real = sweep._run_alone
    monkeypatch.setattr(sweep, "_run_alone", lambda *args: runs.append(1) or real(*args))
    burstpool.profile(burstpool.trace(model, torch.randn(4, 8)), batches=[2])
    assert len(runs) == 2  # the first one's input needs no gradient, nor has the last another consumer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "cuda:99"}, "this machine has"),
        ({"device": "tpu9"}, "unknown device 'tpu9'"),
        ({"device": "meta"}, "pass cpu, cuda or cuda:N"),
        ({"batches": []}, "no batches"),
        ({"batches": [0]}, "batch 0 must be at least 1"),
        ({"autocast": "int8"}, "autocast='int8' is not one of bf16, fp16"),
        ({"threads": 0}, "threads=0 must be 1 to"),
        ({"threads": 100_000}, "threads=100000 must be 1 to"),
        ({"batches": [1]}, "cannot run a step of batch 1: Expected more than 1 value per channel"),
    ],
)
def test_bad_options_end_in_one_line(traced: burstpool.TracedModel, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileError, match=says) as caught:
        burstpool.profile(traced, **options)
    assert "\n" not in str(caught.value)


def test_autocast_halves_what_layers_hand_on(traced: burstpool.TracedModel) -> None:
    found = burstpool.profile(traced, batches=[4], autocast="bf16")
    assert found.autocast == "bf16"
    assert found.layer("b").output_bytes_per_sample == 64 * 2


def test_large_models_are_swept_without_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from burstpool.profiling import measure

    monkeypatch.setattr(measure, "_WHOLE_STEP_BYTES", 1)  # as if nothing fitted
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    found = burstpool.profile(burstpool.trace(model, torch.randn(4, 64)), batches=[8])
    assert found.step_s == {}
    assert all(layer.forward_s[8] > 0 for layer in found.layers)


def test_a_sweep_frees_each_value_after_its_last_use() -> None:
    from burstpool.profiling.session import Session
    from burstpool.profiling.sweep import sweep

    width, batch, num_layers = 64, 256, 12
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers)])
    traced = burstpool.trace(model, torch.randn(4, width))
    session = Session(
        traced=traced, device=torch.device("cpu"), autocast=None, loss=lambda output, _: output.sum(), target=None
    )
    value_bytes = batch * width * 4
    most = 0

    def look(what: str) -> None:
        nonlocal most
        gc.collect()
        living = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in gc.get_objects()
            if type(x) is Tensor and x.untyped_storage().nbytes() == value_bytes
        }
        most = max(most, sum(living.values()))

    gc.collect()
    gc.freeze()  # what earlier tests have left is not looked at, which takes most of the time
    try:
        sweep(session, traced.blocks(), batch, watch=None, report=look)
    finally:
        gc.unfreeze()
    assert 0 < most <= 3 * value_bytes < num_layers * value_bytes


def test_what_a_layer_keeps_is_counted_whole_however_often_memory_is_used_again() -> None:
    class Long(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = x.exp().sin()  # each keeps its input, exp its result: one tensor a turn that nobody else sees
            return x

    model = nn.Sequential(nn.Linear(64, 64), Long())
    traced = burstpool.trace(model, torch.randn(4, 64))
    found = [burstpool.profile(traced, batches=[64], use_cache=False).layers for _ in range(3)]
    kept = [sum(layer.activation_bytes[64] for layer in layers) for layers in found]
    assert kept[0] == kept[1] == kept[2] >= 6 * 64 * 64 * 4


def test_losses_frozen_layers_and_settings_do_not_share_a_cached_profile(traced: burstpool.TracedModel) -> None:
    first = burstpool.profile(traced, batches=[2], loss=lambda output, target: output.sum())
    other = burstpool.profile(traced, batches=[2], loss=lambda output, target: (output**2).mean())
    assert other.loss_forward_s != first.loss_forward_s
    traced.model.b.requires_grad_(False)
    frozen = burstpool.profile(traced, batches=[2], loss=lambda output, target: output.sum())
    assert frozen.layer("b").backward_s != first.layer("b").backward_s


def test_a_model_with_nothing_to_train_is_measured_forward() -> None:
    found = burstpool.profile(
        burstpool.trace(nn.Sequential(nn.Tanh(), nn.MaxPool1d(2)), torch.randn(4, 3, 8)), batches=[2]
    )
    assert found.layers[0].forward_s[2] > 0
    assert found.layers[0].backward_s[2] == 0


def test_an_unwritable_cache_loses_no_measurement(
    traced: burstpool.TracedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BURSTPOOL_CACHE", "/proc/nowhere")
    assert burstpool.profile(traced, batches=[2]).batches == (2,)
    assert "not kept for another time" in caplog.text


def test_an_interruption_keeps_the_batches_that_were_finished(traced: burstpool.TracedModel) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        burstpool.profile(traced, batches=[2, 4], progress=interrupt)
    (file,) = cache.folder().iterdir()
    assert Profile.load(file).batches == (4,)


def test_with_a_job_loading_and_the_optimizer_are_measured_and_its_parameters_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = load_job("zoo:tiny_lstm")
    traced = burstpool.trace(job.build_model().train(), job.samples(5)[0])
    before = [parameter.detach().clone() for parameter in traced.model.parameters()]
    options = {"loss": job.loss, "target": job.samples(5)[1], "job": job, "use_cache": False}
    with OperatorClock(monkeypatch):
        found = burstpool.profile(traced, batches=[2, 8], **options)
    assert found.load_s[8] > found.load_s[2] > 0
    assert found.update_bytes_per_s is not None
    assert all(torch.equal(a, b) for a, b in zip(before, traced.model.parameters(), strict=True))
    assert Profile.from_json(found.to_json()) == found
