"""Simulator: when would each device do what?

Takes Schedule, CostModel, Dataflow. Returns a Timeline: the events of the first steps, and the time of a step in steady
state. Discrete-event and exact for what it models:

- a device runs its actions in order; sends and reduces start beside its compute, `receive` and `step` wait;
- a link carries one message at a time, in the order in which they leave; a message needs the sender's way out and the
  receiver's way in, inside a node those of the two devices, between nodes those of the two nodes, which all devices
  of a node share. It holds them for bytes / rate and arrives a latency later;
- a reduction begins when all members have started it, their earlier reductions have ended and no other group is using
  the network of its nodes. It lasts as long as `CostModel.reduce_s` says. Messages on its links go first: those that
  wait there already delay it, those that come later pause it.

Not modelled: what the cost model does not; messages that share a link's rate (they queue, which moves as many bytes in
the same time); that a reduction hinders compute; the host's time to start single actions, beyond what it takes a step
and a block; that devices wait for each other inside batch norm; jitter. Waves (push, pull) are not simulated yet.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from burstpool.errors import ScheduleError
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import Dataflow
from burstpool.plan.plan import Plan
from burstpool.report.timeline import Event, Lane, Timeline
from burstpool.schedule.actions import Schedule
from burstpool.schedule.event_loop import EventLoop, Times
from burstpool.schedule.lower import lower
from burstpool.schedule.program import COMPUTE, LOAD, REDUCE, STEP, DeviceClass, Program, compile_program

_TOLERANCE = 1e-9
"""Step times that differ by less, relative to the step, are the same: they are sums of some thousand floats."""
_SETTLING_STEPS = (4, 16, 64)
"""How many steps are tried until each takes as long as the one before."""


def simulate(schedule: Schedule, cost: CostModel, flow: Dataflow, *, steps: int = 1) -> Timeline:
    """The events of the first `steps` steps, and the step time in steady state. Pure and deterministic."""
    if steps < 1:
        raise ScheduleError(f"steps={steps} must be at least 1")
    program = compile_program(schedule, cost, flow)
    times = EventLoop(program, steps).run()
    return Timeline(
        source="predicted",
        num_devices=len(schedule.devices),
        step_time_s=_steady_step_s(program, times),
        events=tuple(_events(program, times, steps)),
    )


def predict(plan: Plan, cost: CostModel, flow: Dataflow) -> Plan:
    """The plan with its step time and device-seconds filled in; faster than a timeline, as no events are made."""
    program = compile_program(lower(plan, flow), cost, flow)
    step_time_s = _steady_step_s(program, EventLoop(program, 1).run())
    busy_s = (
        len(some.members) * sum(x.seconds for x in some.operations if x.code in (COMPUTE, STEP))
        for some in program.classes
    )
    return replace(plan, step_time_s=step_time_s, device_seconds=sum(busy_s))


def _steady_step_s(program: Program, times: Times) -> float:
    if not program.classes:
        return 0.0
    if len(times.finishes) == 1 and _agree(times.finishes[0], times.finishes[0][0]):
        return times.finishes[0][0]  # all are where they were at the start: every step is like this one
    for num_steps in _SETTLING_STEPS:
        if num_steps > len(times.finishes):
            times = EventLoop(program, num_steps).run()
        before, middle, last = ([0.0] * len(program.classes), *times.finishes)[-3:]
        gained = [b - a for a, b in zip(middle, last, strict=True)]
        gained_before = [b - a for a, b in zip(before, middle, strict=True)]
        if _agree(gained, gained[0]) and _agree(gained_before, gained[0]):
            return gained[0]
    # Some rhythms repeat only after several steps, and devices that never meet keep their own: take the mean of the
    # second half, of the slowest.
    half = len(times.finishes) // 2
    spans = zip(times.finishes[half - 1], times.finishes[-1], strict=True)
    return max((last - first) / (len(times.finishes) - half) for first, last in spans)


def _agree(numbers: Sequence[float], wanted: float) -> bool:
    return all(abs(number - wanted) <= _TOLERANCE * abs(wanted) for number in numbers)


Spanned = tuple[float, float, Lane, int, str, str, int, int]
"""Start, stop, lane, class, kind, block, minibatch, step."""


def _events(program: Program, times: Times, steps: int) -> Iterator[Event]:
    """In order of their start; those of a class side by side."""
    found: list[Spanned] = []
    for index, device_class in enumerate(program.classes):
        found += _class_events(index, device_class, times, steps)
    found.sort(key=lambda event: event[0])
    for start_s, stop_s, lane, index, kind, block, minibatch, step in found:
        for device in program.classes[index].members:
            yield Event(
                device=device,
                lane=lane,
                kind=kind,
                block=block,
                start_s=start_s,
                stop_s=stop_s,
                minibatch=minibatch,
                step=step,
            )


def _class_events(index: int, device_class: DeviceClass, times: Times, steps: int) -> Iterator[Spanned]:
    starts = iter(times.starts[index])
    for step in range(steps):
        for code, of, seconds, kind, block, minibatch in device_class.operations:
            if code == LOAD:
                continue
            if code in (COMPUTE, STEP):
                start_s = next(starts)
                yield start_s, start_s + seconds, "compute", index, kind, block, minibatch, step
            else:
                start_s, stop_s = (times.reductions if code == REDUCE else times.transfers)[step, of]
                yield start_s, stop_s, "communication", index, kind, block, minibatch, step
