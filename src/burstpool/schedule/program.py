"""A schedule as numbers: what the simulator's event loop runs.

Takes Schedule, CostModel, Dataflow. Returns a Program: for each class of devices its operations with their seconds, the
transfers with the links they hold, the reductions with their members. Devices that run the same operations on the same
type of device, reduce in the same groups and neither send nor receive can never differ in time: they form one class,
of which one is simulated. This is exact, and a thousand data-parallel devices cost as much as a few.

Where links share the devices' compute, nothing hides behind anything: a reduction then comes right before the step that
needs it, since starting it earlier would only put off the backward it runs beside, and a send keeps its device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from burstpool.errors import ScheduleError
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import Dataflow
from burstpool.schedule.actions import Action, Kind, Schedule

COMPUTE, SEND, RECEIVE, REDUCE, STEP, LOAD = range(6)
"""What an operation does; a step also waits for its reduction; loading samples comes first and is no action."""


class Operation(NamedTuple):
    """One action of a class of devices."""

    code: int
    of: int
    """Of the transfer or reduction it belongs to; -1 for none."""
    seconds: float
    """Of computing, or of sending where the link shares the device's compute."""
    kind: str
    block: str
    minibatch: int
    """As in the action."""


class Transfer(NamedTuple):
    """One message."""

    holds: tuple[int, int]
    """The two directions of links it needs to itself: out of its source, into its destination."""
    hold_s: float
    """For how long: bytes over rate."""
    latency_s: float
    """From the last byte that leaves until the receiver has it."""


@dataclass(slots=True)
class Reduction:
    """One block's gradients, added up among its members."""

    block: str
    group: tuple[int, ...]
    seconds: float
    """Alone, once all members have started it."""
    after: set[int] = field(default_factory=set)
    """Reductions that come before it on some member."""
    holds: tuple[int, ...] = ()
    """The directions of links that it uses and transfers might, too."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that do the same at the same time."""

    members: tuple[int, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All of a step."""

    classes: tuple[DeviceClass, ...]
    """Only devices that have something to do."""
    transfers: tuple[Transfer, ...]
    reductions: tuple[Reduction, ...]
    num_links: int
    """Directions of links: out of and into each device inside its node, out of and into each node."""


def compile_program(schedule: Schedule, cost: CostModel, flow: Dataflow) -> Program:
    """Linear in actions. Trusts the schedule to be sound; what would never end is found when it runs."""
    return _Compiler(cost, flow).compile(schedule)


class _Compiler:
    """Gathers operations, transfers and reductions while it reads the devices' actions one by one."""

    def __init__(self, cost: CostModel, flow: Dataflow) -> None:
        self.cost, self.flow = cost, flow
        self.nodes = [device.node for device in cost.cluster.devices]
        self.operations: list[Operation] = []
        self.known: dict[tuple[object, ...], int] = {}
        self.transfers: list[Transfer] = []
        self.transfer_of: dict[tuple[object, ...], int] = {}
        self.reductions: list[Reduction] = []
        self.reduction_of: dict[str, int] = {}

    def compile(self, schedule: Schedule) -> Program:
        if len(schedule.devices) > len(self.nodes):
            raise ScheduleError(
                f"the schedule is for {len(schedule.devices)} devices, the cluster has {len(self.nodes)}; "
                "simulate it on the cluster it was planned for"
            )
        members: dict[tuple[object, ...], list[int]] = {}
        lonely: set[int] = set()
        for device, actions in enumerate(schedule.devices):
            if not actions:
                continue
            ids, talks = self._device(device, actions)
            if talks:
                lonely.add(device)
            members.setdefault((device if talks else -1, *ids), []).append(device)
        classes = tuple(
            DeviceClass(tuple(devices), tuple(self.operations[i] for i in key[1:]))  # type: ignore[call-overload]
            for key, devices in members.items()
        )
        for device_class in classes:
            self._order_reductions(device_class)
        for reduction in self.reductions:
            reduction.holds = self._held_by(reduction, lonely)
        num_links = 2 * len(self.nodes) + 2 * self.cost.cluster.num_nodes
        return Program(classes, tuple(self.transfers), tuple(self.reductions), num_links)

    def _device(self, device: int, actions: Sequence[Action]) -> tuple[list[int], bool]:
        device_type = self.cost.device_type(device)
        known, ids, talks = self.known, self._loading(device, actions), False
        for action in self._in_order(actions):
            if action.kind is Kind.SEND or action.kind is Kind.RECEIVE:
                talks = True
                ids.append(self._add(self._transfer(device, action)))
                continue
            key = (action.kind, action.block, action.minibatch, action.stop - action.start, device_type)
            found = known.get(key)
            if found is None:
                found = known[key] = self._add(self._operation(device, action))
            if action.kind is Kind.REDUCE:
                self._check_group(device, action)
            ids.append(found)
        return ids, talks

    def _in_order(self, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions, with reductions that share the device's compute right before their steps."""
        late = {a.block: a for a in actions if a.kind is Kind.REDUCE and self.cost.collective(a.group).shares_compute}
        if not late:
            return actions
        found: list[Action] = []
        for action in actions:
            if action.kind is Kind.STEP and action.block in late:
                found.append(late[action.block])
            if not (action.kind is Kind.REDUCE and action.block in late):
                found.append(action)
        return found

    def _loading(self, device: int, actions: Sequence[Action]) -> list[int]:
        """Loading what the first block takes and what the loss compares with, each sample once, all minibatches; and
        what the host does once a step."""
        ends = {next(iter(self.flow.blocks)), self.flow.last.name}
        spans = {(a.minibatch, a.start, a.stop) for a in actions if a.kind is Kind.FORWARD and a.block in ends}
        samples = len({(minibatch, sample) for minibatch, start, stop in spans for sample in range(start, stop)})
        key = ("load", samples, self.cost.device_type(device))
        if key not in self.known:
            seconds = self.cost.load_s(device, samples) + self.cost.host_s(device, 0)
            self.known[key] = self._add(Operation(LOAD, -1, seconds, "load", "", 0)) if seconds else -1
        return [self.known[key]] if self.known[key] >= 0 else []

    def _add(self, operation: Operation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _operation(self, device: int, action: Action) -> Operation:
        block = self.flow.blocks.get(action.block)
        if block is None:
            raise ScheduleError(f"device {device} runs block {action.block!r}, which the plan does not have")
        code, index, seconds, samples = COMPUTE, -1, 0.0, action.stop - action.start
        if action.kind is Kind.FORWARD:
            seconds = self.cost.forward_s(block.layers, device, samples)
            seconds += self.cost.loss_forward_s(device, samples) if block is self.flow.last else 0.0
            seconds += self._host_pass_s(device)
        elif action.kind is Kind.BACKWARD:
            seconds = self.cost.backward_s(block.layers, device, samples)
            seconds += self.cost.loss_backward_s(device, samples) if block is self.flow.last else 0.0
            seconds += self._host_pass_s(device)
        elif action.kind is Kind.REDUCE:
            code, index = REDUCE, self._reduction(action, block.parameter_bytes)
        elif action.kind is Kind.STEP:
            code, index = STEP, self.reduction_of.get(action.block, -1)
            seconds = self.cost.step_s(block.parameter_bytes, device)
        else:
            raise ScheduleError(f"device {device} has to {action.kind} {action.block!r}; waves are not simulated yet")
        return Operation(code, index, seconds, action.kind.value, action.block, action.minibatch)

    def _host_pass_s(self, device: int) -> float:
        """The host's time for a block, half of it forward and half backward."""
        return (self.cost.host_s(device, 1) - self.cost.host_s(device, 0)) / 2

    def _reduction(self, action: Action, parameter_bytes: int) -> int:
        if action.block not in self.reduction_of:
            self.reduction_of[action.block] = len(self.reductions)
            seconds = self.cost.reduce_s(parameter_bytes, action.group)
            self.reductions.append(Reduction(action.block, action.group, seconds))
        return self.reduction_of[action.block]

    def _check_group(self, device: int, action: Action) -> None:
        reduction = self.reductions[self.reduction_of[action.block]]
        if reduction.group is not action.group and reduction.group != action.group:
            raise ScheduleError(f"device {device} reduces block {action.block!r} in another group than the others do")

    def _transfer(self, device: int, action: Action) -> Operation:
        value = self.flow.values.get(action.value)
        if value is None:
            raise ScheduleError(f"device {device} has to {action.kind} value {action.value!r}, which no block hands on")
        source, destination = (device, action.peer) if action.kind is Kind.SEND else (action.peer, device)
        key = (source, destination, action.value, action.minibatch, action.start, action.stop, action.gradient)
        index = self.transfer_of.get(key)
        if index is None:
            index = self.transfer_of[key] = len(self.transfers)
            num_bytes = value.bytes_per_sample * (action.stop - action.start)
            self.transfers.append(self._message(source, destination, num_bytes))
        if action.kind is Kind.RECEIVE:
            return Operation(RECEIVE, index, 0.0, action.kind.value, action.block, action.minibatch)
        link = self.cost.cluster.link(source, destination)
        seconds = link.send_s + self.transfers[index].hold_s if link.shares_compute else 0.0
        return Operation(SEND, index, seconds, action.kind.value, action.block, action.minibatch)

    def _message(self, source: int, destination: int, num_bytes: int) -> Transfer:
        link = self.cost.cluster.link(source, destination)
        return Transfer(self._ends(source, destination), num_bytes / link.bytes_per_s, link.latency_s)

    def _ends(self, source: int, destination: int) -> tuple[int, int]:
        num_devices, a, b = len(self.nodes), self.nodes[source], self.nodes[destination]
        if a == b:
            return 2 * source, 2 * destination + 1
        return 2 * (num_devices + a), 2 * (num_devices + b) + 1

    def _order_reductions(self, device_class: DeviceClass) -> None:
        last = -1
        for operation in device_class.operations:
            if operation.code == REDUCE:
                if last >= 0:
                    self.reductions[operation.of].after.add(last)
                last = operation.of

    def _held_by(self, reduction: Reduction, lonely: set[int]) -> tuple[int, ...]:
        """Links of members that also send or receive, and the networks of all nodes it spans."""
        nodes = self.cost.collective(reduction.group).nodes
        ends = [device for device in reduction.group if device in lonely]
        if len(nodes) > 1:
            ends += [len(self.nodes) + node for node in nodes]
        return tuple(end for place in ends for end in (2 * place, 2 * place + 1))
