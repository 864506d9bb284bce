"""What a report draws, before it is drawn: figures, overlays, axes, series."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import contents, event, timeline

from burstpool.errors import ArtifactError
from burstpool.report.charts import axis, layer_bars, loss_curve, skyline, step_time_curve, thinned, time_axis
from burstpool.report.contents import LayerTime, PlannedWork, TrainedStep
from burstpool.report.figures import block_seconds, figures
from burstpool.report.html import page
from burstpool.report.overlay import SHOWN_OF_MANY, overlay, shown_step, tracks
from burstpool.report.timeline import Timeline
from burstpool.report.words import number, runs, seconds, signed_percent


def test_figures_compare_predicted_with_measured() -> None:
    found = figures(contents())
    assert (found.predicted_step_s, found.measured_step_s, found.step_error) == (4.5, 9.0, -0.5)
    assert (found.predicted_samples_per_s, found.measured_samples_per_s) == (2.0, 1.0)
    assert (found.num_devices, found.num_used_devices, found.num_steps) == (4, 2, 60)
    # Device 0 computes 3.5 of 4.5 s, device 1 3 s.
    assert found.predicted_utilisation == pytest.approx(3.25 / 4.5)
    assert (found.first_loss, found.last_loss) == (2.0, 2.0 / 60)


def test_a_device_is_never_busy_for_more_than_the_steps_that_were_measured() -> None:
    drawn = replace(timeline("measured", steps=3), step_time_s=1.0)  # most steps of the run were faster than these
    span_s = drawn.stop_s - drawn.start_s
    assert drawn.utilisation() == pytest.approx([busy_s / span_s for busy_s in drawn.all_busy_s()])
    assert max(drawn.utilisation()) <= 1
    assert figures(contents(measured=drawn)).measured_utilisation == pytest.approx(sum(drawn.utilisation()) / 2)


def test_a_run_whose_loss_is_no_number_at_the_end_does_not_show_an_earlier_one() -> None:
    diverged = contents(
        trained=tuple(TrainedStep(step=step, loss=3.25 if step < 5 else math.nan, time_s=9.0) for step in range(9))
    )
    found = figures(diverged)
    assert (found.first_loss, found.last_loss) == (3.25, None)
    assert "not finite" in page(diverged)


def test_figures_are_none_where_nobody_knows() -> None:
    found = figures(contents(predicted=None, measured=None, trained=(), samples_per_step=None))
    assert (found.predicted_step_s, found.measured_step_s, found.step_error, found.last_loss) == (None,) * 4
    only_losses = figures(contents(predicted=None, measured=None, predicted_step_s=18.0))
    assert (only_losses.measured_step_s, only_losses.step_error) == (9.0, 1.0)


def test_timelines_cannot_be_mistaken_for_each_other() -> None:
    with pytest.raises(ArtifactError, match="given as predicted is measured"):
        contents(predicted=timeline("measured"))


def test_a_block_takes_the_time_of_its_slowest_device_in_a_usual_step() -> None:
    events = [event(0, "forward", 0, 1), event(1, "forward", 0, 3), event(1, "forward", 3, 4, minibatch=1)]
    events += [event(0, "forward", 10, 16, step=1), event(0, "forward", 20, 25, step=2)]
    some = Timeline(source="measured", num_devices=2, step_time_s=5.0, events=tuple(events))
    assert block_seconds(some) == {("a", "forward"): 5.0}  # of 4, 6 and 5


def test_an_overlay_aligns_the_usual_step_of_each() -> None:
    measured = timeline("measured", steps=3, slow=2.0)
    late = replace(measured.events[-1], stop_s=measured.events[-1].stop_s + 50)
    shown = overlay([timeline(), replace(measured, events=(*measured.events[:-1], late))])
    assert shown is not None
    assert shown.sources == ("predicted", "measured")
    assert shown.steps == {"predicted": 0, "measured": 1}  # the last one was late
    assert shown.length_s == 9.0
    strips = {(strip.lane, strip.source): strip for strip in shown.rows[0].strips}
    assert list(strips) == [
        ("compute", "predicted"),
        ("compute", "measured"),
        ("communication", "predicted"),
        ("communication", "measured"),
    ]
    for (_, source), strip in strips.items():
        slow = 2.0 if source == "measured" else 1.0
        kinds = ("forward", "backward", "step") if strip.lane == "compute" else ("reduce",)
        spans = {"forward": (0, 1), "backward": (1, 3), "reduce": (3, 4), "step": (4, 4.5)}
        found = [(bar.kind, bar.start_s, bar.stop_s) for bar in strip.bars]
        assert found == [(kind, spans[kind][0] * slow, spans[kind][1] * slow) for kind in kinds]


def test_nothing_overlays_to_none() -> None:
    empty = Timeline(source="measured", num_devices=1, step_time_s=0.0, events=())
    assert overlay([]) is None
    assert overlay([empty]) is None


def test_a_background_lane_is_there_only_where_it_is_used() -> None:
    work = event(1, "slice", 0, 1, lane="background")
    measured = timeline("measured")
    shown = overlay([timeline(), replace(measured, events=(work, *measured.events))])
    assert shown is not None
    assert [(strip.lane, strip.source) for strip in shown.rows[0].strips][-1] == ("background", "measured")
    assert [len(row.strips[-1].bars) for row in shown.rows] == [0, 1]


def test_overlapping_messages_lie_on_different_tracks() -> None:
    assert tracks([(0, 2), (1, 3), (2, 4), (2.5, 5), (9, 9)]) == (0, 1, 0, 2, 0)
    assert max(tracks([(0, 9)] * 10, most=3)) == 2


def test_many_devices_are_represented_by_some_of_each_kind() -> None:
    events = [event(device, "forward", 0, 1 + device / 1000) for device in range(200)]
    events += [event(device, "backward", 2, 3, block="b") for device in range(2)]
    some = Timeline(source="measured", num_devices=200, step_time_s=3.0, events=tuple(events))
    shown = overlay([some])
    assert shown is not None
    devices = [row.device for row in shown.rows]
    assert len(devices) == SHOWN_OF_MANY
    assert {0, 1, 2, 199} <= set(devices)  # both that differ; of the rest the least and the most busy
    few = overlay([timeline(num_devices=64)])
    assert few is not None
    assert len(few.rows) == 64


@pytest.mark.parametrize("most_bars", [1, 40, 1000])
def test_very_many_events_are_put_together_without_losing_time(most_bars: int) -> None:
    events = []
    for place in range(3000):
        events.append(event(0, "forward", place, place + 0.6, block=f"b{place}"))
        events.append(event(0, "reduce", place, place + 1.5))
    events.append(event(1, "backward", 0, 2500))
    some = Timeline(source="measured", num_devices=2, step_time_s=3000.0, events=tuple(events))
    shown = overlay([some], most_bars=most_bars)
    assert shown is not None
    bars = [bar for row in shown.rows for strip in row.strips for bar in strip.bars]
    assert len(bars) <= max(most_bars, 3)  # a strip that has anything keeps one
    assert sum(bar.count for bar in bars) == len(events)
    assert shown.num_merged == len(events) - len(bars)
    assert min(bar.start_s for bar in bars) == 0
    assert max(bar.stop_s for bar in bars) == 3000.5


def test_the_shown_step_is_the_last_usual_one() -> None:
    assert shown_step(timeline(steps=4)) == 3


@given(st.floats(1e-9, 1e6), st.integers(1, 12))
def test_ticks_are_few_rising_and_inside(high: float, most: int) -> None:
    found = axis(0.0, high, most=most)
    values = [value for value, _ in found.ticks]
    assert 1 <= len(values) <= most + 1
    assert values == sorted(set(values))
    assert all(0 <= found.place(value) <= 1 + 1e-9 for value in values)
    labels = [label for _, label in time_axis(high, most=most).ticks]
    assert len(set(labels)) == len(labels)


def test_an_axis_without_length_still_has_one() -> None:
    assert axis(3.0, 3.0).place(3.0) == 0.0
    assert axis(0.0, 0.0).high == 1.0


def test_the_skyline_is_as_wide_as_blocks_take_and_as_high_as_their_devices() -> None:
    blocks = (
        PlannedWork(name="a", num_layers=2, devices=(0, 1), samples=(1, 1)),
        PlannedWork(name="b", num_layers=1, devices=(0,), samples=(2,)),
    )
    more = replace(timeline(), events=(*timeline().events, event(0, "forward", 5, 6, block="b")))
    found = skyline(contents(blocks=blocks, predicted=more))
    assert found is not None
    assert [(t.name, t.start_s, t.stop_s, t.num_devices) for t in found.towers] == [("a", 0, 3, 2), ("b", 3, 4, 1)]
    assert (found.source, found.devices.high) == ("predicted", 4.0)
    measured = skyline(contents(predicted=None))
    assert measured is not None
    assert (measured.source, measured.towers[0].stop_s) == ("measured", 6.0)
    layers = skyline(contents(predicted=None, measured=None, blocks=blocks))
    assert layers is not None
    assert (layers.source, layers.towers[-1].stop_s) == ("layers", 3.0)
    assert skyline(contents(blocks=())) is None


def test_narrow_towers_of_very_many_become_one() -> None:
    blocks = tuple(PlannedWork(name=f"b{i}", num_layers=1, devices=(0,), samples=(1,)) for i in range(5000))
    found = skyline(contents(predicted=None, measured=None, blocks=blocks))
    assert found is not None
    assert len(found.towers) <= 800
    assert sum(tower.num_layers for tower in found.towers) == 5000
    assert found.towers[-1].stop_s == 5000


def test_a_curve_keeps_its_ends_and_its_extremes() -> None:
    points = [(float(step), math.sin(step / 50)) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thinned(points, most=200)
    assert len(kept) <= 200
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert (4321.0, 99.0) in kept
    assert list(kept) == sorted(kept)


def test_losses_that_are_no_number_are_left_out_and_counted() -> None:
    trained = [TrainedStep(step=step, loss=1.0 + step, time_s=1.0) for step in range(5)]
    trained[2] = replace(trained[2], loss=math.nan)
    found = loss_curve(contents(trained=tuple(trained)))
    assert found is not None
    assert (len(found.points), found.num_left_out, found.smooth) == (4, 1, ())
    assert loss_curve(contents(trained=tuple(trained[:1]))) is None
    smooth = loss_curve(contents())
    assert smooth is not None
    assert len(smooth.smooth) == 60


def test_slow_first_steps_do_not_flatten_the_step_times() -> None:
    trained = tuple(TrainedStep(step=step, loss=1.0, time_s=100.0 if step == 0 else 1.0) for step in range(9))
    found = step_time_curve(contents(trained=trained), 1.5)
    assert found is not None
    assert (found.num_left_out, found.line) == (1, 1.5)
    assert found.values.high < 2
    far = step_time_curve(contents(trained=trained), 1e9)
    assert far is not None
    assert far.line is None


def test_layer_bars_show_the_costliest_in_the_order_of_the_model() -> None:
    layers = tuple(LayerTime(name=f"l{i}", kind="", forward_s=0.0, backward_s=float(i % 50)) for i in range(100))
    found = layer_bars(contents(layers=layers), most=10)
    assert found is not None
    assert [layer.name for layer in found.layers] == [f"l{i}" for i in (*range(45, 50), *range(95, 100))]
    assert found.num_others == 90
    assert found.others_share == pytest.approx(1 - 2 * (45 + 46 + 47 + 48 + 49) / (49 * 50))
    nothing = layer_bars(contents(layers=(replace(layers[0], backward_s=0.0),)))
    assert nothing is not None
    assert nothing.others_share == 0.0


def test_numbers_are_written_as_people_read_them() -> None:
    assert [seconds(x) for x in (0.0, 1.5, 0.00124, 5.6e-5, 3e-9, None)] == [
        "0 s",
        "1.5 s",
        "1.24 ms",
        "56 µs",
        "3 ns",
        "",
    ]
    assert [number(x) for x in (0.0, 0.25, 12300.0, 1e9, 1e-6)] == ["0", "0.25", "12,300", "1e+09", "1e-06"]
    assert runs([0, 1, 2, 8, 10, 12, 14]) == "0–2, 8, 10, 12, …"
    assert signed_percent(-0.031) == "−3.1%"
