"""Measured timelines: from the times each device wrote down to the same events the simulator makes.

Takes the recorded steps of all devices. A message spans from when its source sent it until its destination had it; a
reduction from when its last member started it until it ended here. Pure.
"""

import statistics
from collections.abc import Mapping, Sequence

from burstpool.report.timeline import Event, Lane, Timeline
from burstpool.run.links import key_of
from burstpool.run.recorder import RecordedStep
from burstpool.schedule.actions import Action, Kind, Schedule

_LANES: Mapping[Kind, Lane] = {Kind.FORWARD: "compute", Kind.BACKWARD: "compute", Kind.STEP: "compute"}
"""All else is communication."""


def measured_timeline(
    schedule: Schedule, recorded: Sequence[Sequence[RecordedStep]], *, step_times_s: Sequence[float]
) -> Timeline | None:
    """Events of the steps that every working device recorded, from the first of them on; None where there are none.

    `recorded` is by device; times must be on a clock that all devices share.
    """
    working = [device for device, actions in enumerate(schedule.devices) if actions]
    steps = [{step.step: step for step in recorded[device]} for device in range(len(schedule.devices))]
    common = sorted(set.intersection(*(set(steps[device]) for device in working))) if working else []
    if not common:
        return None
    events: list[tuple[int, int, int, Action, int]] = []
    for number in common:
        of_device = {device: steps[device][number] for device in working}
        shared = _shared_spans(schedule, of_device)
        for device, step in of_device.items():
            for index, action in enumerate(schedule.devices[device]):
                start, stop = step.starts_ns[index], step.stops_ns[index]
                if (key := _shared_key(device, action)) is not None:
                    first, last = shared[key]
                    start, stop = first, (last if action.kind is not Kind.REDUCE else stop or last)
                events.append((start, max(start, stop), device, action, number))
    events.sort(key=lambda event: event[0])
    begin = events[0][0]
    return Timeline(
        source="measured",
        num_devices=len(schedule.devices),
        step_time_s=statistics.median(step_times_s) if step_times_s else 0.0,
        events=tuple(_event(*event, begin=begin) for event in events),
    )


SharedKey = tuple[object, ...]


def _shared_key(device: int, action: Action) -> SharedKey | None:
    """The same for all devices that take part in one communication."""
    if action.kind is Kind.SEND:
        return (device, action.peer, key_of(action))
    if action.kind is Kind.RECEIVE:
        return (action.peer, device, key_of(action))
    if action.kind is Kind.REDUCE:
        return ("reduce", action.block)
    return None


def _shared_spans(schedule: Schedule, steps: Mapping[int, RecordedStep]) -> dict[SharedKey, tuple[int, int]]:
    """From when all that must start it had started it, until it had ended wherever that was seen."""
    starts: dict[SharedKey, int] = {}
    stops: dict[SharedKey, int] = {}
    for device, step in steps.items():
        for index, action in enumerate(schedule.devices[device]):
            key = _shared_key(device, action)
            if key is None:
                continue
            if action.kind is not Kind.RECEIVE:  # a receive is posted at any time; the message starts with its send
                starts[key] = max(starts.get(key, 0), step.starts_ns[index])
            if action.kind is not Kind.SEND:  # a send is over when its bytes are handed on, not when they are there
                stops[key] = max(stops.get(key, 0), step.stops_ns[index])
    return {key: (start, stops.get(key, start)) for key, start in starts.items()}


def _event(start: int, stop: int, device: int, action: Action, step: int, *, begin: int) -> Event:
    return Event(
        device=device,
        lane=_LANES.get(action.kind, "communication"),
        kind=action.kind.value,
        block=action.block,
        start_s=(start - begin) / 1e9,
        stop_s=(stop - begin) / 1e9,
        minibatch=action.minibatch,
        step=step,
    )
