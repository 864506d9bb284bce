"""The trace for Perfetto: what the Trace Event Format asks for."""

import json
from collections import defaultdict
from typing import Any

import pytest
from report_cases import event, timeline

from burstpool.report.perfetto import trace
from burstpool.report.timeline import Timeline


def slices(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in found["traceEvents"] if each["ph"] == "X"]


def names(found: dict[str, Any], kind: str) -> dict[tuple[int, int], str]:
    return {
        (each["pid"], each["tid"] if kind == "thread_name" else 0): each["args"]["name"]
        for each in found["traceEvents"]
        if each["ph"] == "M" and each["name"] == kind
    }


def test_a_trace_has_a_process_a_device_and_a_thread_a_lane() -> None:
    found = trace([timeline(), timeline("measured", slow=2.0)])
    assert list(names(found, "process_name").values()) == [
        "predicted device 0",
        "predicted device 1",
        "measured device 0",
        "measured device 1",
    ]
    threads = names(found, "thread_name")
    assert set(threads.values()) == {"compute", "communication"}
    for each in slices(found):
        lane = "communication" if each["cat"] == "reduce" else "compute"
        assert threads[each["pid"], each["tid"]] == lane
    assert json.loads(json.dumps(found)) == found


def test_slices_are_in_microseconds_and_say_what_they_are() -> None:
    (each,) = slices(trace([Timeline(source="predicted", num_devices=1, step_time_s=1, events=(_some(),))]))
    assert each == {
        "ph": "X",
        "name": "backward a",
        "cat": "backward",
        "ts": 500.0,
        "dur": 1250.25,
        "pid": 1,
        "tid": 1,
        "cname": "rail_response",
        "args": {"block": "a", "minibatch": 2, "step": 7},
    }


def _some() -> Any:
    return event(0, "backward", 0.0005, 0.00175025, minibatch=2, step=7)


def test_every_event_is_one_slice() -> None:
    some = timeline(steps=3)
    found = slices(trace([some]))
    assert len(found) == len(some.events)
    assert sum(each["dur"] for each in found) == pytest.approx(sum(e.stop_s - e.start_s for e in some.events) * 1e6)


def test_slices_of_a_thread_never_overlap() -> None:
    # Perfetto drops slices that neither follow nor nest.
    events = tuple(event(0, "send", start / 7, start / 7 + 1.3) for start in range(20))
    found = trace([Timeline(source="measured", num_devices=1, step_time_s=1, events=events)])
    ends: dict[int, float] = defaultdict(float)
    for each in slices(found):
        assert each["ts"] >= ends[each["tid"]] - 1e-6
        ends[each["tid"]] = each["ts"] + each["dur"]
    assert set(names(found, "thread_name").values()) > {"communication", "communication 2"}


def test_devices_without_events_are_named_too() -> None:
    found = trace([Timeline(source="predicted", num_devices=3, step_time_s=1, events=(_some(),))])
    assert len(names(found, "process_name")) == 3
    assert trace([])["traceEvents"] == []
