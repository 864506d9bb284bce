"""Symbolic run: does the order of a schedule's actions work?

Takes a schedule whose actions have been checked one by one (`validate.py`). Runs it with names in place of tensors:
sends never wait, receives wait for their send, steps for their reduction, a reduction for all its members and for the
reductions before it on each of them, batch norm over several devices for all of these. Raises ScheduleError where an
action comes before what it needs, or where devices wait forever. Ignores time.
"""

from collections import defaultdict, deque
from typing import NoReturn

from burstpool.errors import ScheduleError
from burstpool.plan.dataflow import Dataflow
from burstpool.plan.plan import Plan, Share
from burstpool.schedule.actions import Action, Kind, Schedule
from burstpool.schedule.samples import missing
from burstpool.schedule.text import format_action

Event = tuple[object, ...]
"""What a device can wait for."""


class SymbolicRun:
    """One run; use it once."""

    def __init__(self, schedule: Schedule, plan: Plan, flow: Dataflow) -> None:
        self.schedule, self.plan, self.flow = schedule, plan, flow
        self.shares: dict[str, dict[int, Share]] = {
            block.name: {share.device: share for share in block.shares} for block in plan.blocks
        }
        self.places = [0] * len(schedule.devices)
        self.happened: set[Event] = set()
        """Messages that were sent, reductions that ended, passes for which all devices are there."""
        self.waiting: dict[Event, list[int]] = defaultdict(list)
        self.ready: list[int] = []
        """Devices that can go on."""
        self.passed: set[tuple[Kind, int, str, int]] = set()
        """(kind, device, block, minibatch) of forwards, backwards and reduces."""
        self.left: dict[tuple[int, str], int] = defaultdict(int)
        """(device, block) → backwards to come, in all minibatches."""
        self.held: dict[tuple[int, str, int], list[tuple[int, int]]] = defaultdict(list)
        """(device, value, minibatch) → samples received."""
        self.owed: dict[tuple[int, str, int], int] = defaultdict(int)
        """(device, value, minibatch) → gradients that the device is still to receive."""
        self.lanes: list[deque[str]] = [deque() for _ in schedule.devices]
        """Reductions a device has started, in order."""
        self.heads: dict[str, int] = defaultdict(int)
        """Reduction → members for which it is the next."""
        self.met: dict[Event, int] = defaultdict(int)
        """Pass of a block → devices that have come to it."""

    def run(self) -> None:
        """To the end, or to the first thing that is wrong."""
        for device, actions in enumerate(self.schedule.devices):
            for action in actions:
                if action.kind is Kind.SEND and not action.gradient and self.flow.values[action.value].differentiable:
                    self.owed[device, action.value, action.minibatch] += 1
                elif action.kind is Kind.BACKWARD:
                    self.left[device, action.block] += 1
        self.ready = list(reversed(range(len(self.schedule.devices))))
        while self.ready:
            self._advance(self.ready.pop())
        for device, place in enumerate(self.places):
            if place < len(self.schedule.devices[device]):
                self._fail(device, "it waits forever: what it waits for comes only after it")

    def _advance(self, device: int) -> None:
        """Runs the device until it must wait."""
        actions = self.schedule.devices[device]
        while self.places[device] < len(actions):
            action = actions[self.places[device]]
            wanted = self._wanted(device, action)
            if wanted is not None and wanted not in self.happened:
                self.waiting[wanted].append(device)
                return
            self._run_action(device, action)
            self.places[device] += 1

    def _happen(self, event: Event) -> None:
        self.happened.add(event)
        self.ready += self.waiting.pop(event, ())

    def _wanted(self, device: int, action: Action) -> Event | None:
        """What the action waits for, if it waits."""
        if action.kind is Kind.RECEIVE:
            return _message(action, source=action.peer, destination=device)
        if action.kind is Kind.STEP and len(self.shares[action.block]) > 1:
            if (Kind.REDUCE, device, action.block, 0) not in self.passed:
                self._fail(device, "the block's reduce comes after it")
            return (Kind.REDUCE, action.block)
        if action.kind in (Kind.FORWARD, Kind.BACKWARD) and self.flow.blocks[action.block].joint:
            return self._meet(action)
        return None

    def _meet(self, action: Action) -> Event:
        """Batch norm over a block's samples: its devices run it together."""
        event = (action.kind, action.block, action.minibatch)
        if event not in self.happened:
            self.met[event] += 1
            if self.met[event] == len(self.shares[action.block]):
                self._happen(event)
        return event

    def _run_action(self, device: int, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            self._forward(device, action)
        elif action.kind is Kind.BACKWARD:
            self._backward(device, action)
        elif action.kind is Kind.SEND:
            self._send(device, action)
        elif action.kind is Kind.RECEIVE:
            key = (device, action.value, action.minibatch)
            if action.gradient:
                self.owed[key] -= 1
            else:
                self.held[key].append((action.start, action.stop))
        else:
            self._agree(device, action)

    def _forward(self, device: int, action: Action) -> None:
        for name in self.flow.blocks[action.block].takes:
            value = self.flow.values[name]
            made = self.shares[value.maker].get(device)
            has = list(self.held.get((device, name, action.minibatch), ()))
            if made is not None and (Kind.FORWARD, device, value.maker, action.minibatch) in self.passed:
                has.append((made.start, made.stop) if value.has_samples else (action.start, action.stop))
            if lacking := missing((action.start, action.stop), has):
                self._fail(device, f"samples {lacking[0][0]}:{lacking[0][1]} of value {name!r} are not there yet")
        self.passed.add((Kind.FORWARD, device, action.block, action.minibatch))

    def _backward(self, device: int, action: Action) -> None:
        if (Kind.FORWARD, device, action.block, action.minibatch) not in self.passed:
            self._fail(device, "its forward comes after it")
        for name in self.flow.blocks[action.block].makes:
            if not self.flow.values[name].differentiable:
                continue
            if self.owed.get((device, name, action.minibatch)):
                self._fail(device, f"gradients of value {name!r} have not come back from all devices")
            self._check_takers(device, action, name)
        self.passed.add((Kind.BACKWARD, device, action.block, action.minibatch))
        self.left[device, action.block] -= 1

    def _send(self, device: int, action: Action) -> None:
        if action.gradient:
            self._check_takers(device, action, action.value)
        elif (Kind.FORWARD, device, action.block, action.minibatch) not in self.passed:
            self._fail(device, "the value is made only after it")
        self._happen(_message(action, source=device, destination=action.peer))

    def _check_takers(self, device: int, action: Action, name: str) -> None:
        """All blocks of the device that took these samples of the value have their gradients."""
        value = self.flow.values[name]
        for taker in value.takers:
            share = self.shares[taker].get(device)
            if share is None or (value.has_samples and not (share.start < action.stop and action.start < share.stop)):
                continue
            if (Kind.BACKWARD, device, taker, action.minibatch) not in self.passed:
                self._fail(device, f"the backward of block {taker!r}, which took value {name!r}, comes after it")

    def _agree(self, device: int, action: Action) -> None:
        block = self.flow.blocks[action.block]
        for name in (block.name, *block.sharers):
            if self.left[device, name]:
                self._fail(device, f"a backward of block {name!r} comes after it")
        if action.kind is Kind.STEP:
            return
        self.passed.add((Kind.REDUCE, device, action.block, 0))
        self.lanes[device].append(action.block)
        if len(self.lanes[device]) == 1:
            self._at_head(action.block)

    def _at_head(self, name: str) -> None:
        """One more member has this reduction next; when all have, it ends and makes room for others."""
        arrived = [name]
        while arrived:
            name = arrived.pop()
            self.heads[name] += 1
            if self.heads[name] < len(self.shares[name]):
                continue
            self._happen((Kind.REDUCE, name))
            for member in self.shares[name]:
                self.lanes[member].popleft()
                if self.lanes[member]:
                    arrived.append(self.lanes[member][0])

    def _fail(self, device: int, why: str) -> NoReturn:
        place = self.places[device]
        action = self.schedule.devices[device][place]
        raise ScheduleError(f"device {device}, action {place} ({format_action(action)}): {why}")


def _message(action: Action, *, source: int, destination: int) -> Event:
    return (source, destination, action.value, action.minibatch, action.start, action.stop, action.gradient)
