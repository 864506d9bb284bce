"""The skyline and the gaps of a plan."""

from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.plan.skyline import describe_burst, draw_skyline, gaps, skyline
from burstpool.report.timeline import Event, Timeline

PLAN = Plan(
    model="two",
    strategy="burst",
    num_devices=4,
    batch=8,
    blocks=(
        PlannedBlock(name="a", layers=("a", "b"), shares=even_shares(8, (0, 1, 2, 3))),
        PlannedBlock(name="c", layers=("c",), shares=even_shares(8, (0,))),
    ),
    step_time_s=0.004,
    device_seconds=0.007,
)


def event(device: int, start_s: float, stop_s: float) -> Event:
    return Event(device=device, lane="compute", kind="forward", block="a", start_s=start_s, stop_s=stop_s)


TIMELINE = Timeline(
    source="predicted",
    num_devices=4,
    step_time_s=0.004,
    events=(event(0, 0.0, 0.004), *(event(device, 0.0, 0.001) for device in (1, 2, 3))),
)


def test_every_layer_has_a_row_with_its_devices() -> None:
    rows = skyline(PLAN)
    assert [(row.layer, row.block, row.num_devices, row.most_samples) for row in rows] == [
        ("a", "a", 4, 2),
        ("b", "a", 4, 2),
        ("c", "c", 1, 8),
    ]


def test_devices_with_the_same_gaps_share_a_row() -> None:
    busy, free = gaps(TIMELINE)
    assert (busy.devices, busy.gap_s, busy.num_gaps) == ((0,), 0.0, 0)
    assert (free.devices, free.num_gaps) == ((1, 2, 3), 1)
    assert abs(free.gap_s - 0.003) < 1e-12
    assert abs(free.longest_gap_s - 0.003) < 1e-12


def test_the_picture_is_as_high_as_the_widest_layer_and_as_wide_as_the_model() -> None:
    assert draw_skyline(PLAN).splitlines() == [
        "      4│██",
        "      2│██",
        "      1│███",
        "devices└───",
        "        a … c",
    ]
    assert draw_skyline(PLAN, columns=1).splitlines()[2] == "      1│█"


def test_the_description_names_times_and_gaps() -> None:
    text = describe_burst(PLAN, TIMELINE, data_parallel=PLAN, one_device_seconds=0.0035)
    assert "devices × layers: 4 × 2 → 1 × 1" in text
    assert "burst: 4.000 ms a step, 7.000 device-ms (2.00 × one device)" in text
    assert "data parallel: 4.000 ms a step" in text
    assert "1-3" in text.splitlines()[-1]
