"""Timelines as a trace that ui.perfetto.dev and chrome://tracing open.

Takes Timelines, returns the JSON object of the Trace Event Format: a process for each device, predicted and measured
apart; a thread for each lane. Slices of a thread must nest, so what overlaps in a lane goes to another thread of it.
Times are microseconds, cut to whole nanoseconds. Perfetto colours slices by their name; `cname` is for Chrome's viewer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from burstpool.report.overlay import LANES, tracks
from burstpool.report.timeline import Event, Timeline

COLOURS = {
    "forward": "thread_state_runnable",
    "backward": "rail_response",
    "step": "generic_work",
    "reduce": "rail_idle",
    "send": "rail_load",
    "receive": "good",
    "push": "bad",
    "pull": "terrible",
}
"""Kind → one of the names that Chrome's viewer knows."""
_THREADS_PER_LANE = 10_000


def trace(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """The trace of all steps of the timelines, device by device."""
    events: list[dict[str, Any]] = []
    first_process = 1
    for timeline in timelines:
        of_device: dict[int, list[Event]] = defaultdict(list)
        for event in timeline.events:
            of_device[event.device].append(event)
        for device in range(timeline.num_devices):
            name = f"{timeline.source} device {device}"
            events += _process(first_process + device, name, of_device[device])
        first_process += timeline.num_devices
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(process: int, name: str, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, name=name)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    for place, lane in enumerate(LANES):
        of_lane = sorted((event for event in events if event.lane == lane), key=lambda event: event.start_s)
        spans = [(_microseconds(event.start_s), _microseconds(event.stop_s)) for event in of_lane]
        numbers = tracks(spans)
        for number in sorted(set(numbers)):
            thread = place * _THREADS_PER_LANE + number + 1
            yield _metadata("thread_name", process, thread, name=f"{lane} {number + 1}" if number else lane)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
        for event, (start, stop), number in zip(of_lane, spans, numbers, strict=True):
            yield _slice(event, start, stop, process, place * _THREADS_PER_LANE + number + 1)


def _metadata(name: str, process: int, thread: int, /, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _slice(event: Event, start: float, stop: float, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{event.kind} {event.block}".strip(),
        "cat": event.kind,
        "ts": start,
        "dur": round(max(0.0, stop - start), 3),
        "pid": process,
        "tid": thread,
        "cname": "grey" if event.lane == "background" else COLOURS.get(event.kind, "generic_work"),
        "args": {"block": event.block, "minibatch": event.minibatch, "step": event.step},
    }


def _microseconds(value_s: float) -> float:
    return round(value_s * 1e6, 3)
