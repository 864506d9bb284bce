"""Validator: proves that a schedule trains what its plan says, or names the action that is wrong.

Takes Schedule, Plan, and the model's dataflow. Returns nothing; raises ScheduleError of one line. Two halves:

here, what can be seen of each action alone and by counting
- every device runs every block it has a share of, forward and backward, once a minibatch, on all of its share;
- every send has its receive, and every receive its send, of the same samples; samples go from the device that made them
  to one that takes them and does not have them, once; gradients go the opposite ways, all of them and no others;
- blocks with parameters are reduced once by all their devices, in one group, and stepped once; nobody else has them;
in `symbolic.py`, what depends on order, by running it with names for tensors
- what an action needs is there when it runs; nobody waits forever.

With `memory`, also that each device's peak fits (`memory.py`). What it accepts runs to its end and gives the same
gradients as one device would; an order that differs but changes nothing is accepted.
"""

from collections import Counter
from collections.abc import Iterator

from burstpool.errors import ScheduleError
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import Dataflow, Source, dataflow
from burstpool.plan.plan import Plan, Share
from burstpool.schedule.actions import Action, Kind, Schedule
from burstpool.schedule.memory import check_memory
from burstpool.schedule.samples import missing, overlap
from burstpool.schedule.symbolic import SymbolicRun
from burstpool.schedule.text import format_action

_COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
_TRANSFER = (Kind.SEND, Kind.RECEIVE)

Route = tuple[int, int, str, int, int, int]
"""Source, destination, value, minibatch, first sample, one past the last."""


def validate(schedule: Schedule, plan: Plan, source: Source, *, memory: CostModel | None = None) -> None:
    """Raises ScheduleError where the schedule is unsound. Pure; about linear in actions."""
    flow = dataflow(plan, source)
    if len(schedule.devices) != plan.num_devices:
        raise ScheduleError(f"the schedule has {len(schedule.devices)} devices, its plan {plan.num_devices}")
    actions = _Actions(schedule, plan, flow)
    actions.check_each()
    actions.check_complete()
    actions.check_transfers()
    SymbolicRun(schedule, plan, flow).run()
    if memory is not None:
        check_memory(schedule, memory, flow)


class _Actions:
    """The checks that need no order."""

    def __init__(self, schedule: Schedule, plan: Plan, flow: Dataflow) -> None:
        self.schedule, self.plan, self.flow = schedule, plan, flow
        self.shares: dict[str, dict[int, Share]] = {
            block.name: {share.device: share for share in block.shares} for block in plan.blocks
        }
        self.groups = {block.name: tuple(sorted(block.devices)) for block in plan.blocks}

    def check_each(self) -> None:
        """Each action makes sense on its device."""
        for device, actions in enumerate(self.schedule.devices):
            for place, action in enumerate(actions):
                if wrong := self._wrong_with(device, action):
                    raise _error(device, place, action, wrong)

    def check_complete(self) -> None:
        """Every device does all it has to, once."""
        for device, actions in enumerate(self.schedule.devices):
            found: Counter[tuple[Kind, str, int]] = Counter()
            for place, action in enumerate(actions):
                if action.kind in _TRANSFER:
                    continue
                key = (action.kind, action.block, action.minibatch)
                found[key] += 1
                if found[key] > 1:
                    raise _error(device, place, action, "it is there twice; remove one")
            for kind, block, minibatch in self._duties(device):
                if (kind, block, minibatch) not in found:
                    missing = f"{kind} of block {block!r}" + (f", minibatch {minibatch}" if kind in _COMPUTE else "")
                    raise ScheduleError(f"device {device} lacks an action: {missing}")

    def check_transfers(self) -> None:
        """Messages match, bring what is needed once, and gradients go back the same ways."""
        sends, receives = self._routes(Kind.SEND), self._routes(Kind.RECEIVE)
        for one, other, what in ((sends, receives, "receive"), (receives, sends, "send")):
            for (gradient, route), (device, place, action) in one.items():
                if (gradient, route) not in other:
                    peer = route[1] if device == route[0] else route[0]
                    raise _error(device, place, action, f"device {peer} has no {what} that matches it")
        held: dict[tuple[int, str, int], list[tuple[int, int]]] = {}
        for (gradient, route), (device, place, action) in receives.items():
            back = (not gradient, (route[1], route[0], *route[2:]))
            if (gradient or self.flow.values[action.value].differentiable) and back not in receives:
                lacking = "the value never went the other way" if gradient else "its gradient never comes back"
                raise _error(device, place, action, lacking)
            if not gradient:
                self._check_needed(device, place, action, held.setdefault((device, action.value, action.minibatch), []))

    def _check_needed(self, device: int, place: int, action: Action, held: list[tuple[int, int]]) -> None:
        span = (action.start, action.stop)
        own = self.shares[action.block].get(device)
        if any(overlap(span, other) for other in held) or (own and overlap(span, (own.start, own.stop))):
            raise _error(device, place, action, "the device has some of these samples already")
        held.append(span)
        takers = [self.shares[name][device] for name in self._takers(action.value, device)]
        if unused := missing(span, [(share.start, share.stop) for share in takers]):
            raise _error(device, place, action, f"no block of device {device} takes sample {unused[0][0]}")

    def _takers(self, value: str, device: int) -> Iterator[str]:
        return (name for name in self.flow.values[value].takers if device in self.shares[name])

    def _routes(self, kind: Kind) -> dict[tuple[bool, Route], tuple[int, int, Action]]:
        found: dict[tuple[bool, Route], tuple[int, int, Action]] = {}
        for device, actions in enumerate(self.schedule.devices):
            for place, action in enumerate(actions):
                if action.kind is not kind:
                    continue
                ends = (device, action.peer) if kind is Kind.SEND else (action.peer, device)
                key = (action.gradient, (*ends, action.value, action.minibatch, action.start, action.stop))
                if key in found:
                    raise _error(device, place, action, "it is there twice; remove one")
                found[key] = (device, place, action)
        return found

    def _duties(self, device: int) -> Iterator[tuple[Kind, str, int]]:
        for name, shares in self.shares.items():
            if device not in shares:
                continue
            for minibatch in range(self.plan.num_minibatches):
                yield Kind.FORWARD, name, minibatch
                yield Kind.BACKWARD, name, minibatch
            if self.flow.blocks[name].parameter_bytes:
                yield Kind.STEP, name, 0
                if len(shares) > 1:
                    yield Kind.REDUCE, name, 0

    def _wrong_with(self, device: int, action: Action) -> str | None:
        if action.block not in self.shares:
            return "the plan has no such block"
        if action.kind in _TRANSFER:
            return self._wrong_transfer(device, action)
        if action.kind in (Kind.PUSH, Kind.PULL):
            return "it belongs to a plan with waves"
        if action.value or action.gradient or action.peer != -1:
            return "it names a value or a peer, which only send and receive have"
        share = self.shares[action.block].get(device)
        if share is None:
            return f"device {device} has no share of the block"
        if action.kind in _COMPUTE:
            return self._wrong_compute(share, action)
        if action.minibatch or action.start or action.stop:
            return "it names a minibatch or samples; it is for the whole step"
        return self._wrong_agreement(action)

    def _wrong_compute(self, share: Share, action: Action) -> str | None:
        if not 0 <= action.minibatch < self.plan.num_minibatches:
            return f"the plan has minibatches 0 to {self.plan.num_minibatches - 1}"
        if (action.start, action.stop) != (share.start, share.stop):
            return f"the device's share is {share.start}:{share.stop}"
        return "it names a group, which only reduce has" if action.group else None

    def _wrong_agreement(self, action: Action) -> str | None:
        group = self.groups[action.block]
        if not self.flow.blocks[action.block].parameter_bytes:
            return "the block has no parameters of its own"
        if action.kind is Kind.REDUCE and len(group) < 2:
            return "the block is on one device only"
        if action.group != (group if action.kind is Kind.REDUCE else ()):
            return f"its group must be {','.join(map(str, group))}" if action.kind is Kind.REDUCE else "it has no group"
        return None

    def _wrong_transfer(self, device: int, action: Action) -> str | None:
        value = self.flow.values.get(action.value)
        if value is None or value.maker != action.block:
            return f"block {action.block!r} hands on no value {action.value!r}"
        if not value.has_samples:
            return "the value cannot be cut along samples, so it cannot travel"
        if action.gradient and not value.differentiable:
            return "the value has no gradient"
        if action.group:
            return "it names a group, which only reduce has"
        if not 0 <= action.minibatch < self.plan.num_minibatches:
            return f"the plan has minibatches 0 to {self.plan.num_minibatches - 1}"
        if not 0 <= action.peer < self.plan.num_devices or action.peer == device:
            return f"its peer must be another of devices 0 to {self.plan.num_devices - 1}"
        maker = device if (action.kind is Kind.SEND) != action.gradient else action.peer
        share = self.shares[action.block].get(maker)
        if share is None or not share.start <= action.start < action.stop <= share.stop:
            return f"device {maker} does not make these samples"
        return None


def _error(device: int, place: int, action: Action, why: str) -> ScheduleError:
    return ScheduleError(f"device {device}, action {place} ({format_action(action)}): {why}")
