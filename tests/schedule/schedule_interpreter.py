"""Runs a schedule on a toy model with whole numbers: the truth that lowering and validating are held against.

Every block computes x = its sample's own number + all values it takes, and makes values p·x + 1, p being the sum of its
parameters; x is also its part of the loss, so that every gradient is more than 0 and a lost one shows. Knows what
actions mean (`actions.py`) and nothing of soundness: a wrong schedule ends in an error or in wrong parameters.
"""

from collections import defaultdict
from typing import Any

from schedule_cases import block, on, plan

from burstpool.model.graph import LayerGraph
from burstpool.plan.dataflow import Dataflow, dataflow
from burstpool.plan.plan import Plan
from burstpool.schedule.actions import Action, Kind, Schedule

RATE = 3
"""A step takes so many times the gradient off a parameter."""


class BrokenScheduleError(Exception):
    """An action that cannot run, or devices that wait forever."""


class Toy:
    """The model's numbers, and who owns which parameter."""

    def __init__(self, plan: Plan, model: LayerGraph, flow: Dataflow) -> None:
        self.plan, self.model, self.flow = plan, model, flow
        layers = {layer.name: layer for layer in model.layers}
        self.parameters = {
            block.name: sorted({key for name in block.layers for key in layers[name].parameters})
            for block in plan.blocks
        }
        self.owners: dict[str, str] = {}
        for name, keys in self.parameters.items():
            for key in keys:
                self.owners.setdefault(key, name)

    def owned(self, block: str) -> list[str]:
        return [key for key, owner in self.owners.items() if owner == block]


class Device:
    """One device's tensors."""

    def __init__(self, toy: Toy) -> None:
        self.weights = {key: 5 + place for place, key in enumerate(sorted(toy.owners))}
        self.gradients: dict[str, int] = defaultdict(int)
        self.values: dict[tuple[str, int, int], int] = {}
        """(value, minibatch, sample); sample -1 of a value without samples."""
        self.value_gradients: dict[tuple[str, int, int], int] = defaultdict(int)
        self.inside: dict[tuple[str, int, int], int] = {}
        """(block, minibatch, sample) → x."""


class Interpreter:
    """Runs one step of a schedule."""

    def __init__(self, schedule: Schedule, toy: Toy) -> None:
        self.schedule, self.toy, self.flow = schedule, toy, toy.flow
        self.devices = [Device(toy) for _ in schedule.devices]
        self.places = [0] * len(schedule.devices)
        self.messages: dict[tuple[Any, ...], dict[int, int]] = {}
        self.lanes: list[list[str]] = [[] for _ in schedule.devices]
        self.given: dict[str, dict[int, dict[str, int]]] = defaultdict(dict)
        """Reduction → member → its gradients when it started."""
        self.sums: dict[str, dict[str, int]] = {}
        self.met: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        self.backwards: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        """(block, minibatch) → sums of the gradients of all its x and p."""

    def run(self) -> list[dict[str, int]]:
        """Device → its parameters after the step."""
        moved = True
        while moved:
            moved = False
            for device, actions in enumerate(self.schedule.devices):
                while self.places[device] < len(actions) and self._act(device, actions[self.places[device]]):
                    self.places[device] += 1
                    moved = True
        if any(place < len(actions) for place, actions in zip(self.places, self.schedule.devices, strict=True)):
            raise BrokenScheduleError("deadlock")
        return [device.weights for device in self.devices]

    def _act(self, device: int, action: Action) -> bool:
        """False where it must wait."""
        if action.kind in (Kind.FORWARD, Kind.BACKWARD):
            if self.flow.blocks[action.block].joint and not self._all_met(device, action):
                return False
            run = self._forward if action.kind is Kind.FORWARD else self._backward
            for sample in range(action.start, action.stop):
                run(self.devices[device], action.block, action.minibatch, sample)
            return True
        if action.kind is Kind.SEND:
            self._send(device, action)
            return True
        if action.kind is Kind.RECEIVE:
            return self._receive(device, action)
        if action.kind is Kind.REDUCE:
            self._reduce(device, action)
            return True
        return self._step(device, action)

    def _all_met(self, device: int, action: Action) -> bool:
        met = self.met[action.kind, action.block, action.minibatch]
        met.add(device)
        return len(met) == len(self.toy.plan.block(action.block).devices)

    def _weight(self, device: Device, block: str) -> int:
        return 1 + sum(device.weights[key] for key in self.toy.parameters[block])

    def _forward(self, device: Device, block: str, minibatch: int, sample: int) -> None:
        x = 10 * minibatch + sample + 1
        for name in self.flow.blocks[block].takes:
            key = (name, minibatch, sample if self.flow.values[name].has_samples else -1)
            if key not in device.values:
                raise BrokenScheduleError(f"no {key}")
            x += device.values[key]
        device.inside[block, minibatch, sample] = x
        for name in self.flow.blocks[block].makes:
            if self.flow.values[name].has_samples:
                device.values[name, minibatch, sample] = self._weight(device, block) * x + 1
            else:
                device.values[name, minibatch, -1] = self._weight(device, block)

    def _backward(self, device: Device, block: str, minibatch: int, sample: int) -> None:
        if (block, minibatch, sample) not in device.inside:
            raise BrokenScheduleError("backward before forward")
        x = device.inside[block, minibatch, sample]
        gradient_x, gradient_p = 1, x
        for name in self.flow.blocks[block].makes:
            if self.flow.values[name].has_samples:
                gradient = device.value_gradients[name, minibatch, sample]
                gradient_x += self._weight(device, block) * gradient
                gradient_p += x * gradient
            else:  # the same for all samples: its whole gradient counts once
                gradient_p += device.value_gradients.pop((name, minibatch, -1), 0)
        sums = self.backwards[block, minibatch]
        sums[0], sums[1] = sums[0] + gradient_x, sums[1] + gradient_p
        for key in self.toy.parameters[block]:
            device.gradients[key] += gradient_p
        for name in self.flow.blocks[block].takes:
            if self.flow.values[name].differentiable:
                key = (name, minibatch, sample if self.flow.values[name].has_samples else -1)
                device.value_gradients[key] += gradient_x

    def _send(self, device: int, action: Action) -> None:
        table = self.devices[device].value_gradients if action.gradient else self.devices[device].values
        keys = {sample: (action.value, action.minibatch, sample) for sample in range(action.start, action.stop)}
        if not action.gradient and any(key not in table for key in keys.values()):
            raise BrokenScheduleError("sent before it was made")
        content = {sample: table[key] for sample, key in keys.items()}
        self.messages[_route(action, device, action.peer)] = content

    def _receive(self, device: int, action: Action) -> bool:
        content = self.messages.get(_route(action, action.peer, device))
        if content is None:
            return False
        for sample, number in content.items():
            key = (action.value, action.minibatch, sample)
            if action.gradient:
                self.devices[device].value_gradients[key] += number
            else:
                self.devices[device].values[key] = number
        return True

    def _reduce(self, device: int, action: Action) -> None:
        gradients = self.devices[device].gradients
        self.given[action.block][device] = {key: gradients[key] for key in self.toy.owned(action.block)}
        self.lanes[device].append(action.block)
        while ended := [lane[0] for lane in self.lanes if lane and self._at_all_heads(lane[0], action)]:
            given = self.given[ended[0]].values()
            self.sums[ended[0]] = {key: sum(some[key] for some in given) for key in self.toy.owned(ended[0])}
            for member in self.toy.plan.block(ended[0]).devices:
                self.lanes[member].pop(0)

    def _at_all_heads(self, block: str, action: Action) -> bool:
        return all(self.lanes[member][:1] == [block] for member in self.toy.plan.block(block).devices)

    def _step(self, device: int, action: Action) -> bool:
        gradients: dict[str, int] = self.devices[device].gradients
        if len(self.toy.plan.block(action.block).devices) > 1:
            if action.block not in self.sums:
                return False
            gradients = self.sums[action.block]
        for key in self.toy.owned(action.block):
            self.devices[device].weights[key] -= RATE * gradients[key]
        return True


def _route(action: Action, source: int, destination: int) -> tuple[Any, ...]:
    return (source, destination, action.value, action.minibatch, action.start, action.stop, action.gradient)


def one_device(plan_: Plan, toy: Toy) -> Interpreter:
    """A step of the plain loop: forward, backward, minibatch after minibatch, then step."""
    actions = [
        Action(kind=kind, block=name, minibatch=minibatch, start=0, stop=plan_.batch)
        for minibatch in range(plan_.num_minibatches)
        for kind, names in ((Kind.FORWARD, [*toy.flow.blocks]), (Kind.BACKWARD, [*reversed(toy.flow.blocks)]))
        for name in names
    ]
    actions += [Action(kind=Kind.STEP, block=name) for name in toy.flow.blocks if toy.owned(name)]
    alone = plan(*(block(x.name, on(plan_.batch, 0), *x.layers) for x in plan_.blocks), batch=plan_.batch)
    toy = Toy(alone, toy.model, toy.flow)
    return Interpreter(Schedule(devices=(tuple(actions),)), toy)


def trains_the_same(schedule: Schedule, plan_: Plan, model: LayerGraph) -> bool:
    """Whether a step of the schedule changes every parameter, wherever it is used, as one device would.

    Gradients of blocks without parameters count, too.
    """
    toy = Toy(plan_, model, dataflow(plan_, model))
    alone, together = one_device(plan_, toy), Interpreter(schedule, toy)
    wanted = alone.run()[0]
    try:
        found = together.run()
    except BrokenScheduleError:
        return False
    return alone.backwards == together.backwards and all(
        found[device][key] == wanted[key]
        for some in plan_.blocks
        for device in some.devices
        for key in toy.parameters[some.name]
    )
