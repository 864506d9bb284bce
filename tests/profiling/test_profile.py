"""The Profile artifact: what it accepts, what it refuses and how it says so, and what it answers between batches."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burstpool.errors import ProfileError
from burstpool.profiling.profile import NUMBER_FORMATS, LayerProfile, Profile


def layer(name: str = "a", inputs: tuple[str, ...] = ("input",), **changes: Any) -> LayerProfile:
    fields: dict[str, Any] = {
        "parameter_bytes": 40,
        "output_bytes_per_sample": 8,
        "forward_s": {1: 1.0, 4: 2.0, 8: 6.0},
        "backward_s": {1: 2.0, 4: 4.0, 8: 12.0},
    }
    return LayerProfile(name=name, inputs=inputs, **(fields | changes))


def profile(*layers: LayerProfile, **changes: Any) -> Profile:
    fields: dict[str, Any] = {"model": "tiny", "device": "A100", "source": "made up"}
    return Profile(layers=layers or (layer(), layer("b", ("a",))), **(fields | changes))


PLAIN: dict[str, Any] = {
    "schema_version": 1,
    "model": "vgg16",
    "device": "A100",
    "source": "somebody",
    "layers": [
        {
            "name": "features.0",
            "inputs": ["input"],
            "parameter_bytes": 7168,
            "output_bytes_per_sample": 12845056,
            "forward_s": {"1": 4.1e-5, "64": 2.157e-3},
            "backward_s": {"1": 8e-5, "64": 4e-3},
        }
    ],
}
"""The format of the design, as others would write it."""


def plain(**changes: Any) -> str:
    """The plain JSON with fields of its only layer changed."""
    return json.dumps(PLAIN | {"layers": [PLAIN["layers"][0] | changes]})


# --- Files -------------------------------------------------------------------------------------------------------


def test_the_plain_json_of_the_design_loads_as_it_is() -> None:
    loaded = Profile.from_json(json.dumps(PLAIN))
    assert loaded.batches == (1, 64)
    assert loaded.graph_inputs == ("input",)
    assert loaded.forward_s("features.0", 64) == 2.157e-3
    assert loaded.dtype == "fp32"
    assert loaded.estimated_from is None


names = st.text(st.characters(codec="utf-8", exclude_characters=":"), min_size=1, max_size=8)
seconds = st.floats(0, 1e3, allow_nan=False)
sizes = st.integers(0, 2**50)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    batches = draw(st.lists(st.integers(1, 4096), min_size=1, max_size=4, unique=True))
    layer_names = draw(st.lists(names, min_size=1, max_size=5, unique=True))
    times, optional_times, optional_sizes = (
        st.fixed_dictionaries(dict.fromkeys(batches, seconds)),
        st.one_of(st.just({}), st.fixed_dictionaries(dict.fromkeys(batches, seconds))),
        st.one_of(st.just({}), st.fixed_dictionaries(dict.fromkeys(batches, sizes))),
    )
    layers = [
        LayerProfile(
            name=name,
            inputs=tuple(draw(st.lists(st.sampled_from(["x!", *layer_names[:index]]), max_size=3))),
            parameter_bytes=draw(sizes),
            output_bytes_per_sample=draw(sizes),
            forward_s=draw(times),
            backward_s=draw(times),
            forward_spread_s=draw(optional_times),
            backward_spread_s=draw(optional_times),
            activation_bytes=draw(optional_sizes),
            peak_memory_bytes=draw(optional_sizes),
            flops_per_sample=draw(sizes),
            kind=draw(st.text(max_size=5)),
        )
        for index, name in enumerate(layer_names)
        if name != "x!"
    ]
    return Profile(
        model=draw(names),
        device=draw(names),
        source=draw(st.text(max_size=8)),
        layers=tuple(layers) or (layer(),),
        dtype=draw(st.sampled_from(NUMBER_FORMATS)),
        autocast=draw(st.sampled_from([None, "bf16", "fp16"])),
        estimated_from=draw(st.none() | names),
        step_s={batches[0]: draw(st.floats(1e-6, 10))} if layers else {},
        loss_forward_s=draw(optional_times) if layers else {},
        versions=draw(st.dictionaries(names, names, max_size=2)),
    )


@given(profiles())
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_a_profile_goes_to_json_and_back_unchanged(original: Profile) -> None:
    text = original.to_json()
    again = Profile.from_json(text)
    assert again == original
    assert again.to_json() == text


def test_a_profile_goes_to_a_file_and_through_pickle_unchanged(tmp_path: Path) -> None:
    original = profile(step_s={4: 13.0})
    assert Profile.load(original.save(tmp_path / "p.json")) == original
    assert pickle.loads(pickle.dumps(original)).forward_s("b", 2) == original.forward_s("b", 2)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_a_truncated_file_is_a_profile_error_wherever_it_is_cut(data: st.DataObject) -> None:
    whole = profile().to_json().rstrip().encode()
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ProfileError):
        Profile.from_json(whole[:cut], source="cut.json")


@given(st.binary(max_size=60))
@settings(deadline=None, max_examples=100)
def test_noise_is_a_profile_error(noise: bytes) -> None:
    with pytest.raises(ProfileError):
        Profile.from_json(noise)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema_version": ' + "1" * 5000 + "}"], ids=["deep", "long number"])
def test_json_that_python_cannot_hold_is_a_profile_error(text: str) -> None:
    with pytest.raises(ProfileError, match="not whole JSON"):
        Profile.from_json(text)


def test_a_newer_schema_is_refused_with_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"schema_version 2, newer than 1.*upgrade burstpool"):
        Profile.from_json(json.dumps(PLAIN | {"schema_version": 2}))


def test_an_unknown_field_is_refused_by_its_place() -> None:
    with pytest.raises(ProfileError, match=r"p\.json: layers\[0\]\.forward_ms: unknown field"):
        Profile.from_json(plain(forward_ms={}), source="p.json")


def test_the_tables_behind_the_queries_are_not_part_of_the_file() -> None:
    assert "_tables" not in profile().to_json()
    with pytest.raises(ProfileError, match="_tables"):
        Profile.from_json(json.dumps(PLAIN | {"_tables": None}))


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": {}}, "p.json: layer 'features.0' has no forward_s"),
        ({"backward_s": {}}, "p.json: layer 'features.0' has no backward_s"),
        ({"backward_s": {"1": 1.0}}, "layer 'features.0' has no backward_s for batch 64, but forward_s"),
        ({"backward_s": {"1": 1.0, "8": 1.0, "64": 1.0}}, "layer 'features.0' has no forward_s for batch 8"),
        ({"forward_s": {"1": -1.0, "64": 1.0}}, "forward_s of layer 'features.0' is -1.0 at batch 1; it must be"),
        ({"forward_s": {"1": float("nan"), "64": 1.0}}, "layers[0].forward_s.1: Input should be a finite number"),
        ({"forward_s": {"1": float("inf"), "64": 1.0}}, "layers[0].forward_s.1: Input should be a finite number"),
        (
            {"forward_s": {"0": 1.0, "64": 1.0}},
            "forward_s of layer 'features.0' has batch 0; batches must be at least 1",
        ),
        ({"forward_s": {"many": 1.0}}, "layers[0].forward_s.many.[key]: Input should be a valid integer"),
        ({"parameter_bytes": -1}, "layer 'features.0' has parameter_bytes=-1; it must be 0 or more"),
        ({"output_bytes_per_sample": -4}, "layer 'features.0' has output_bytes_per_sample=-4"),
        ({"flops_per_sample": -4}, "layer 'features.0' has flops_per_sample=-4"),
        ({"activation_bytes": {"1": 5}}, "layer 'features.0' has no activation_bytes for batch 64, but forward_s"),
        ({"activation_bytes": {"1": 5, "64": -5}}, "activation_bytes of layer 'features.0' is -5 at batch 64"),
        ({"name": ""}, "a layer has no name"),
        ({"inputs": ["features.0"]}, "layer 'features.0' takes 'features.0', which does not come before it"),
        ({"inputs": ["features.0:1"]}, "inputs name layers: write 'features.0'"),
    ],
)
def test_a_layer_that_is_not_sound_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        Profile.from_json(plain(**changes), source="p.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("p.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "missing", ["name", "inputs", "parameter_bytes", "output_bytes_per_sample", "forward_s", "backward_s"]
)
def test_a_layer_without_a_needed_field_is_refused(missing: str) -> None:
    entry = {key: value for key, value in PLAIN["layers"][0].items() if key != missing}
    with pytest.raises(ProfileError, match=rf"layers\[0\]\.{missing}"):
        Profile.from_json(json.dumps(PLAIN | {"layers": [entry]}))


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(ProfileError, match="two layers are named 'a'"):
        profile(layer("a"), layer("a"))


def test_an_input_that_comes_later_is_refused_and_one_that_no_layer_makes_is_the_models() -> None:
    with pytest.raises(ProfileError, match="layer 'a' takes 'b', which does not come before it"):
        profile(layer("a", ("b",)), layer("b"))
    assert profile(layer("a", ("tokens", "mask")), layer("b", ("a", "mask"))).graph_inputs == ("tokens", "mask")


def test_layers_with_different_batches_are_refused_by_name() -> None:
    short = layer("b", forward_s={1: 1.0, 8: 2.0}, backward_s={1: 1.0, 8: 2.0})
    with pytest.raises(ProfileError, match="layer 'b' has no time for batch 4 that layer 'a' has"):
        profile(layer("a"), short)
    other = layer("b", forward_s={1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0}, backward_s={1: 1.0, 2: 2.0, 4: 3.0, 8: 4.0})
    with pytest.raises(ProfileError, match="layer 'a' has no time for batch 2 that layer 'b' has"):
        profile(layer("a"), other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "no layers"),
        ({"model": ""}, "model is empty"),
        ({"device": ""}, "device is empty"),
        ({"dtype": "float32"}, "dtype='float32' is not one of fp64, fp32"),
        ({"autocast": "int8"}, "autocast='int8' is not one of"),
        ({"step_s": {3: 1.0}}, "step_s has batch 3, for which the layers have no time"),
        ({"step_s": {4: 0.0}}, "step_s holds 0"),
        ({"loss_forward_s": {4: 1.0}}, "loss_forward_s has no time for batch 1 that the layers have"),
        ({"step_s": {4: -1.0}}, "step_s is -1.0 at batch 4"),
    ],
)
def test_a_profile_that_is_not_sound_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        replace(profile(), **changes)


def test_a_time_of_zero_is_a_time() -> None:
    assert profile(layer(forward_s={1: 0.0}, backward_s={1: 0.0})).step_time_s(1) == 0


# --- Between and beyond batches ----------------------------------------------------------------------------------


def test_measured_batches_are_given_back_exactly_and_between_them_lies_a_straight_line() -> None:
    p = profile()
    assert [p.forward_s("a", batch) for batch in (1, 4, 8)] == [1.0, 2.0, 6.0]
    assert p.forward_s("a", 2) == pytest.approx(1 + 1 / 3)
    assert p.forward_s("a", 6) == pytest.approx(4.0)
    assert p.backward_s("a", 6) == pytest.approx(8.0)


def test_batches_outside_are_refused_with_those_that_exist_and_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"no measurement for batch 16: measured are 1, 4, 8.*--extrapolate"):
        profile().forward_s("a", 16)
    small = profile(layer(forward_s={4: 1.0}, backward_s={4: 1.0}))
    with pytest.raises(ProfileError, match="no measurement for batch 2: measured are 4"):
        small.times([2])
    with pytest.raises(ProfileError, match="batch 0 must be at least 1"):
        profile().forward_s("a", 0, extrapolate=True)


def test_above_the_range_the_last_slope_goes_on_and_below_it_the_smallest_batch_holds() -> None:
    p = profile(layer(forward_s={4: 2.0, 8: 6.0}, backward_s={4: 9.0, 8: 7.0}))
    assert p.forward_s("a", 12, extrapolate=True) == pytest.approx(10.0)
    assert p.backward_s("a", 12, extrapolate=True) == 7.0  # falling: never below the last
    assert p.forward_s("a", 1, extrapolate=True) == 2.0


def test_the_slope_above_the_range_is_not_taken_between_neighbours_where_noise_would_rule_it() -> None:
    # 0.1 more from 63 to 64 is noise on a line of 1 a sample; it must not become the slope.
    times = {32: 32.0, 63: 63.9, 64: 64.0}
    p = profile(layer(forward_s=times, backward_s=times))
    assert p.forward_s("a", 128, extrapolate=True) == pytest.approx(128.0)


def test_with_one_batch_times_above_it_grow_in_proportion() -> None:
    p = profile(layer(forward_s={4: 2.0}, backward_s={4: 4.0}))
    assert p.forward_s("a", 12, extrapolate=True) == pytest.approx(6.0)
    assert p.forward_s("a", 2, extrapolate=True) == 2.0


def test_memory_is_interpolated_too_and_rounded_up() -> None:
    p = profile(layer(activation_bytes={1: 10, 4: 20, 8: 40}, peak_memory_bytes={1: 1, 4: 2, 8: 3}))
    assert p.activation_bytes("a", 2) == 14
    assert p.peak_memory_bytes("a", 5) == 3
    assert p.activation_bytes("a", 16, extrapolate=True) == 80
    assert isinstance(p.activation_bytes("a", 4), int)


def test_memory_that_was_not_measured_is_an_error_not_a_guess() -> None:
    with pytest.raises(ProfileError, match="layer 'a' has no activation_bytes"):
        profile().activation_bytes("a", 1)


def test_an_unknown_layer_is_an_error_that_names_some_that_exist() -> None:
    with pytest.raises(ProfileError, match="tiny has no layer 'z'; its layers: a, b"):
        profile().forward_s("z", 1)
    with pytest.raises(ProfileError, match="no layer 'z'"):
        profile().layer("z")


@given(profiles(), st.lists(st.integers(1, 10_000), min_size=1, max_size=6))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_many_batches_at_once_give_what_single_queries_give(p: Profile, batches: list[int]) -> None:
    forward, backward = p.times(batches, extrapolate=True)
    assert forward.shape == backward.shape == (len(p.layers), len(batches))
    for i, entry in enumerate(p.layers):
        for j, batch in enumerate(batches):
            assert forward[i, j] == pytest.approx(p.forward_s(entry.name, batch, extrapolate=True))
            assert backward[i, j] == pytest.approx(p.backward_s(entry.name, batch, extrapolate=True))
    assert forward.sum() + backward.sum() >= 0  # no extrapolation goes below zero


def test_numpy_numbers_become_plain_ones() -> None:
    table = {np.int64(2): np.float32(0.5)}
    p = profile(layer(forward_s=table, backward_s=table, activation_bytes={2: np.int64(3)}))
    assert Profile.from_json(p.to_json()) == p


# --- The whole step ----------------------------------------------------------------------------------------------


def test_the_step_is_the_sum_of_layers_and_of_the_loss() -> None:
    assert profile().step_time_s(4) == pytest.approx(12.0)
    assert profile().step_time_s(6) == pytest.approx(24.0)
    with_loss = profile(loss_forward_s={1: 1.0, 4: 2.0, 8: 4.0}, loss_backward_s={1: 0.5, 4: 0.5, 8: 0.5})
    assert with_loss.step_time_s(4) == pytest.approx(14.5)
    assert with_loss.step_time_s(6) == pytest.approx(27.5)


def test_layers_that_do_not_add_up_to_the_step_are_told() -> None:
    good, bad = profile(step_s={4: 11.0, 8: 36.0}), profile(step_s={4: 10.0, 8: 36.0})
    assert good.sum_over_step(4) == pytest.approx(12 / 11)
    assert good.within_tolerance()
    assert good.accuracy_note() is None
    assert not bad.within_tolerance()
    note = bad.accuracy_note()
    assert note is not None
    assert "120% of the whole step at batch 4" in note
    assert "\n" not in note
    assert bad.within_tolerance(0.25)
    assert not good.within_tolerance(0.05)


def test_without_a_measured_step_there_is_nothing_to_be_off_from() -> None:
    assert profile().within_tolerance()
    with pytest.raises(ProfileError, match="no whole step was measured at batch 4; measured batches: none"):
        profile().sum_over_step(4)


# --- For people --------------------------------------------------------------------------------------------------


def test_rows_hold_one_line_a_layer_and_shares_add_up_to_one() -> None:
    rows = profile().rows()
    assert [row.name for row in rows] == ["a", "b"]
    assert rows[0].forward_s == 6.0
    assert rows[0].output_bytes == 64
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert profile().rows(4)[1].backward_s == 4.0


def test_a_profile_prints_its_model_device_and_layers() -> None:
    text = str(profile(layer("a", kind="conv2d+relu"), layer("b", ("a",)), estimated_from="V100"))
    assert text.startswith("tiny on A100 (estimated from V100): 2 layers, batches 1, 4, 8;")
    assert "conv2d+relu" in text
    assert "← a" in text
    assert profile().parameter_bytes == 80
