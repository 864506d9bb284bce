"""Estimates for other devices: exact where the roofline is the truth, and how far off where devices were measured."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from burstpool.cluster.catalogue import DeviceType, device_type
from burstpool.errors import ProfileError
from burstpool.profiling.estimate import check_device, compare, estimate
from burstpool.profiling.importers import import_profile
from burstpool.profiling.profile import LayerProfile, Profile

DATA = Path(__file__).parents[3] / "shared" / "data"


def device(name: str, *, flops_per_s: float, memory_bytes_per_s: float, number_format: str = "fp32") -> DeviceType:
    return DeviceType(
        name=name,
        memory_bytes=2**34,
        memory_bytes_per_s=memory_bytes_per_s,
        flops_per_s={number_format: flops_per_s},  # type: ignore[dict-item]
        source="made up",
    )


OLD = device("old", flops_per_s=1e12, memory_bytes_per_s=1e11)
NEW = device("new", flops_per_s=4e12, memory_bytes_per_s=2e11)


def on_roofline(rates: DeviceType, *, efficiency: float = 0.5, launch_s: float = 0.0) -> Profile:
    """A convolution bound by computing and a ReLU bound by memory, each at a fixed part of the device's roofline."""
    flops_per_s, memory = rates.flops_per_s["fp32"], rates.memory_bytes_per_s

    def seconds(operations: float, moved_bytes: float) -> float:
        return max(operations / flops_per_s, moved_bytes / memory) / efficiency + launch_s / efficiency

    layers = []
    for name, inputs, flops, input_bytes, output_bytes, parameters in (
        ("conv", ("input",), 10**9, 0, 1000, 5000),
        ("relu", ("conv",), 0, 1000, 1000, 0),
    ):
        moved = {batch: (input_bytes + output_bytes) * batch + parameters for batch in (1, 8)}
        back = {batch: (2 * input_bytes + output_bytes) * batch + 2 * parameters for batch in (1, 8)}
        layers.append(
            LayerProfile(
                name=name,
                inputs=inputs,
                parameter_bytes=parameters,
                output_bytes_per_sample=output_bytes,
                flops_per_sample=flops,
                forward_s={batch: seconds(flops * batch, moved[batch]) for batch in (1, 8)},
                backward_s={batch: seconds(2 * flops * batch, back[batch]) for batch in (1, 8)},
                forward_spread_s={1: 0.1, 8: 0.1},
                activation_bytes={1: 10, 8: 80},
            )
        )
    return Profile(
        model="two",
        device=rates.name,
        source="made up",
        layers=tuple(layers),
        step_s={8: 1.0},
        loss_forward_s={1: 0.1, 8: 0.1},
    )


def test_devices_that_follow_the_roofline_are_estimated_exactly() -> None:
    estimated = estimate(on_roofline(OLD), NEW, measured_on=OLD, launch_s=0.0)
    accuracy = compare(estimated, on_roofline(NEW))
    assert accuracy.worst == pytest.approx(0, abs=1e-12)
    assert estimated.forward_s("conv", 8) == pytest.approx(on_roofline(OLD).forward_s("conv", 8) / 4)
    assert estimated.forward_s("relu", 8) == pytest.approx(on_roofline(OLD).forward_s("relu", 8) / 2)


def test_with_a_launch_time_tiny_layers_hardly_get_faster() -> None:
    launch_s = 1e-3
    estimated = estimate(on_roofline(OLD, launch_s=launch_s), NEW, measured_on=OLD, launch_s=launch_s)
    assert compare(estimated, on_roofline(NEW, launch_s=launch_s)).worst == pytest.approx(0, abs=1e-12)
    ratio = estimated.forward_s("relu", 1) / on_roofline(OLD, launch_s=launch_s).forward_s("relu", 1)
    assert 0.99 < ratio < 1


def test_an_estimate_says_so_and_keeps_sizes_but_no_measured_step() -> None:
    original = on_roofline(OLD)
    estimated = estimate(original, NEW, measured_on=OLD, launch_s=0.0)
    assert (estimated.device, estimated.estimated_from) == ("new", "old")
    assert estimated.source.startswith("estimated from old by the ratio of rooflines")
    assert estimated.step_s == {}
    assert estimated.layers[0].activation_bytes == original.layers[0].activation_bytes
    assert estimated.layers[1].forward_spread_s[8] == pytest.approx(0.05)
    assert estimated.loss_forward_s[8] == pytest.approx(0.05)
    assert Profile.from_json(estimated.to_json()) == estimated


def test_an_estimate_of_an_estimate_is_refused() -> None:
    estimated = estimate(on_roofline(OLD), NEW, measured_on=OLD)
    with pytest.raises(ProfileError, match="itself an estimate; estimate from the one measured on old"):
        estimate(estimated, "H100")


def test_for_its_own_device_a_profile_is_unchanged() -> None:
    original = replace(on_roofline(OLD), device="A100")
    assert estimate(original, "a100") is original


def test_devices_may_be_named_as_the_catalogue_does() -> None:
    original = replace(on_roofline(OLD), device="V100")
    assert estimate(original, "P100") == estimate(original, device_type("P100"))
    check_device(original)
    with pytest.raises(ProfileError, match="profile of two: device type 'old' is not in the catalogue"):
        check_device(on_roofline(OLD))
    with pytest.raises(ProfileError, match="device type 'Z9' is not in the catalogue"):
        estimate(original, "Z9")


def test_a_device_without_the_number_format_is_refused_except_for_tf32_which_runs_as_fp32() -> None:
    original = replace(on_roofline(OLD), device="A100")
    with pytest.raises(ProfileError, match="V100 has no bf16 rate, in which two was measured; it has: "):
        estimate(replace(original, autocast="bf16"), "V100")
    assert estimate(replace(original, dtype="tf32"), "V100").device == "V100"


def test_where_number_formats_differ_only_the_roofline_changes_rate() -> None:
    tensor_cores = device("old", flops_per_s=8e12, memory_bytes_per_s=1e11, number_format="tf32")
    layer = LayerProfile(
        name="conv",
        inputs=(),
        parameter_bytes=0,
        output_bytes_per_sample=0,
        flops_per_sample=8 * 10**9,
        forward_s={1: 5e-3},  # 1 ms at the peak, 4 ms above it
        backward_s={1: 2e-3},  # at its peak
    )
    original = Profile(model="one", device="old", source="made up", layers=(layer,), dtype="tf32")
    estimated = estimate(original, NEW, measured_on=tensor_cores, launch_s=0.0)
    assert estimated.forward_s("conv", 1) == pytest.approx(2e-3 + 4e-3 / 2)
    assert estimated.backward_s("conv", 1) == pytest.approx(4e-3)


def test_a_layer_of_which_nothing_is_known_is_taken_for_bound_by_memory() -> None:
    layer = LayerProfile(
        name="x", inputs=(), parameter_bytes=0, output_bytes_per_sample=0, forward_s={1: 1.0}, backward_s={1: 2.0}
    )
    estimated = estimate(Profile(model="one", device="old", source="", layers=(layer,)), NEW, measured_on=OLD)
    assert estimated.step_time_s(1) == pytest.approx(1.5)


def test_compare_gives_signed_errors_by_layer_and_batch() -> None:
    measured = on_roofline(NEW)
    slow = tuple(
        replace(layer, forward_s={batch: 2 * time for batch, time in layer.forward_s.items()})
        if layer.name == "relu"
        else layer
        for layer in measured.layers
    )
    accuracy = compare(replace(measured, layers=slow), measured)
    assert (accuracy.worst, accuracy.worst_layer) == (pytest.approx(1.0), "relu")
    assert accuracy.median == 0
    assert accuracy.by_layer["conv"] == 0
    assert 0 < accuracy.by_layer["relu"] < 1
    assert set(accuracy.by_batch) == {1, 8}
    assert "worst +100% (relu)" in str(accuracy)


def test_compare_refuses_profiles_that_are_not_alike() -> None:
    one, other = on_roofline(OLD), on_roofline(NEW)
    with pytest.raises(ProfileError, match="different layers"):
        compare(one, replace(other, layers=other.layers[:1]))
    layers = tuple(
        replace(layer, forward_s={2: 1.0}, backward_s={2: 1.0}, forward_spread_s={}, activation_bytes={})
        for layer in other.layers
    )
    with pytest.raises(ProfileError, match="no batch in common: 1, 8 and 2"):
        compare(one, replace(other, layers=layers, step_s={}, loss_forward_s={}))


# --- Against devices that others have measured -------------------------------------------------------------------


def shared(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the public measurements are not here: {path}")
    return path


def convolutions_at_128(a100: Profile, v100: Profile) -> tuple[Profile, Profile]:
    """Inception-v3's 94 convolutions in both profiles, paired by their parameter and output bytes."""
    of_size: dict[tuple[int, int], list[LayerProfile]] = defaultdict(list)
    for layer in v100.layers:
        of_size[layer.parameter_bytes, layer.output_bytes_per_sample].append(layer)
    ours, theirs = [], []
    for layer in a100.layers:
        if layer.kind != "conv2d":
            continue
        ours.append(
            replace(
                layer,
                inputs=(),
                forward_s={128: a100.forward_s(layer.name, 128, extrapolate=True)},
                backward_s={128: a100.backward_s(layer.name, 128, extrapolate=True)},
            )
        )
        twin = of_size[layer.parameter_bytes, layer.output_bytes_per_sample].pop(0)
        theirs.append(replace(layer, inputs=(), forward_s=twin.forward_s, backward_s=twin.backward_s))
    return replace(a100, layers=tuple(ours)), replace(v100, layers=tuple(theirs))


def test_inceptions_convolutions_from_an_a100_with_tf32_to_a_v100_without() -> None:
    a100 = import_profile(shared("deeppool_a100/A100_inception.prof"))
    v100 = import_profile(shared("placement_graphs/inceptionv3_training.json"))
    estimated = estimate(a100, "V100")
    accuracy = compare(*convolutions_at_128(estimated, v100))
    assert len(accuracy.by_layer) == 94
    # Found: the step 10% too fast, the median layer 13% off. The two groups measured with other software, years
    # apart, and batch 128 is extrapolated from 64: no closer agreement is to be had.
    assert abs(accuracy.by_batch[128]) < 0.20
    assert accuracy.median < 0.25


def gavel_step_s(gavel: Any, gpu: str, job: str) -> float:
    return 1 / float(gavel[gpu][f"('{job}', 1)"]["null"])


@pytest.mark.parametrize(
    ("old", "new", "tolerance"),
    [
        # Found: -15% to +13%.
        ("P100", "V100", 0.20),
        # Found: +62% to +88%: a K80 does not hold the clock that its peak rate is given for.
        ("K80", "P100", 1.0),
    ],
)
def test_resnet50_steps_on_older_devices(old: str, new: str, tolerance: float) -> None:
    """Whole steps as one layer bound by computing: 4.1 billion multiply-adds a sample."""
    gavel = json.loads(shared("colocation/gavel_throughputs.json").read_text())
    batches = (16, 32, 64, 128)
    steps = {
        gpu: {batch: gavel_step_s(gavel, gpu.lower(), f"ResNet-50 (batch size {batch})") for batch in batches}
        for gpu in (old, new)
    }

    def whole(gpu: str) -> Profile:
        layer = LayerProfile(
            name="resnet50",
            inputs=("input",),
            parameter_bytes=25_557_032 * 4,
            output_bytes_per_sample=4000,
            flops_per_sample=2 * 4_089_000_000,
            forward_s={batch: seconds / 3 for batch, seconds in steps[gpu].items()},
            backward_s={batch: seconds * 2 / 3 for batch, seconds in steps[gpu].items()},
        )
        return Profile(model="resnet50", device=gpu, source="gavel", layers=(layer,))

    accuracy = compare(estimate(whole(old), new), whole(new))
    assert set(accuracy.by_batch) == set(batches)
    assert max(abs(error) for error in accuracy.by_batch.values()) < tolerance
