"""Lowering: a Plan becomes a Schedule.

Takes the plan and the model's dataflow. Returns, for each device, its actions in order. Four passes, each of which can
be read and tested alone:

    deliveries   which samples of which value must travel from where to where: those a block needs on a device that
                 neither made nor got them for an earlier block; its mirror image is the way of the gradient
    orders       the forwards and backwards of each device, in order
    travels      receives before the block that needs them first, sends right after the block that makes them, and
                 the same backwards for gradients
    agreements   the reduce right after a block's last backward, the steps at the end in the order of the reduces

Several minibatches: a device runs the blocks of one minibatch in the plan's order and their backwards in the reverse
order; only how minibatches interleave is decided. Where all blocks have the same devices they come one after the
other (gradient accumulation). Else backwards go first and a block may be ahead of its own backward by as many
minibatches as there are changes of devices after it (one forward, one backward: PipeDream's order, flushed every step).
Every device's order is a part of one order of the whole that could run on one device, so nothing can deadlock.

Ignores times: an order is decided by counting actions, not seconds. Plans with waves are not lowered here yet.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from burstpool.errors import PlanError
from burstpool.plan.dataflow import Dataflow, FlowValue, Source, dataflow
from burstpool.plan.plan import Plan, PlannedBlock, Share
from burstpool.schedule.actions import Action, Kind, Schedule
from burstpool.schedule.samples import missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Samples of a value that must travel, in every minibatch."""

    value: str
    maker: str
    """The block that makes it."""
    first_taker: str
    """The first block, in the plan's order, that needs these samples at the destination."""
    source: int
    """Device that makes them."""
    destination: int
    """Device that needs them."""
    start: int
    """First sample."""
    stop: int
    """One past the last."""
    differentiable: bool
    """Whether the gradient travels back."""


class Turn(NamedTuple):
    """One forward or backward in a device's order."""

    backward: bool
    block: int
    """Its place in the plan."""
    minibatch: int


def lower(plan: Plan, source: Source) -> Schedule:
    """The schedule of one step. Pure and deterministic; linear in actions where no pipeline must be interleaved."""
    if plan.agreement != "reduce":
        raise PlanError(f"agreement={plan.agreement!r} cannot be lowered yet; plan with agreement='reduce'")
    flow = dataflow(plan, source)
    moves = deliveries(plan, flow)
    turns = orders(plan, flow)
    return Schedule(devices=agreements(plan, flow, travels(plan, turns, moves)))


def deliveries(plan: Plan, flow: Dataflow) -> tuple[Delivery, ...]:
    """All that must travel forward, in the order in which it is made and then first needed."""
    blocks = {block.name: block for block in plan.blocks}
    return tuple(move for value in flow.values.values() for move in _deliveries_of(value, blocks))


def orders(plan: Plan, flow: Dataflow) -> tuple[tuple[Turn, ...], ...]:
    """Device → its forwards and backwards in order."""
    mine: list[list[int]] = [[] for _ in range(plan.num_devices)]
    for index, block in enumerate(plan.blocks):
        for device in block.devices:
            mine[device].append(index)
    ahead = _allowed_ahead(plan, flow)
    if plan.num_minibatches == 1 or max(ahead) == 1:
        known: dict[tuple[int, ...], tuple[Turn, ...]] = {}
        for blocks in map(tuple, mine):
            if blocks not in known:
                known[blocks] = _one_after_the_other(blocks, plan.num_minibatches)
        return tuple(known[tuple(blocks)] for blocks in mine)
    return _Interleaving(plan, flow, mine, ahead).run(plan.num_devices)


def travels(plan: Plan, turns: Sequence[Sequence[Turn]], moves: Sequence[Delivery]) -> tuple[list[Action], ...]:
    """Device → its forwards, backwards, sends and receives in order."""
    arriving, leaving = defaultdict(list), defaultdict(list)
    for move in moves:
        arriving[move.destination, move.first_taker].append(move)
        leaving[move.source, move.maker].append(move)
    shares = [{share.device: share for share in block.shares} for block in plan.blocks]
    return tuple(
        _device_actions(device, plan.blocks, shares, order, arriving, leaving) for device, order in enumerate(turns)
    )


def agreements(plan: Plan, flow: Dataflow, actions: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Adds reduces and steps of all blocks that have parameters."""
    reduces, steps = {}, {}
    for block in plan.blocks:
        if flow.blocks[block.name].parameter_bytes:
            steps[block.name] = Action(kind=Kind.STEP, block=block.name)
            if len(block.shares) > 1:
                # One object for all members: a group of a thousand devices would weigh much in each of them.
                group = tuple(sorted(block.devices))
                reduces[block.name] = Action(kind=Kind.REDUCE, block=block.name, group=group)
    return tuple(_with_agreement(order, reduces, steps) for order in actions)


def _with_agreement(
    order: Sequence[Action], reduces: Mapping[str, Action], steps: Mapping[str, Action]
) -> tuple[Action, ...]:
    last = {action.block: place for place, action in enumerate(order) if action.kind is Kind.BACKWARD}
    found: list[Action] = []
    stepping: list[Action] = []
    waiting: Action | None = None
    for place, action in enumerate(order):
        # Gradients that others wait for leave before the reduction, for which nobody waits until the step.
        if waiting is not None and not (action.kind is Kind.SEND and action.gradient):
            found.append(waiting)
            waiting = None
        found.append(action)
        if action.block in steps and last.get(action.block) == place:
            waiting = reduces.get(action.block)
            stepping.append(steps[action.block])
    if waiting is not None:
        found.append(waiting)
    return (*found, *stepping)


def _deliveries_of(value: FlowValue, blocks: Mapping[str, PlannedBlock]) -> Iterable[Delivery]:
    if not value.has_samples:
        return
    maker = blocks[value.maker]
    held = {share.device: [(share.start, share.stop)] for share in maker.shares}
    for taker in value.takers:
        if blocks[taker].shares == maker.shares:
            continue
        for share in blocks[taker].shares:
            has = held.setdefault(share.device, [])
            for start, stop in missing((share.start, share.stop), has):
                for source in _overlapping(maker.shares, start, stop):
                    yield Delivery(
                        value=value.name,
                        maker=maker.name,
                        first_taker=taker,
                        source=source.device,
                        destination=share.device,
                        start=max(start, source.start),
                        stop=min(stop, source.stop),
                        differentiable=value.differentiable,
                    )
            has.append((share.start, share.stop))


def _overlapping(shares: Sequence[Share], start: int, stop: int) -> Iterable[Share]:
    """Of shares in the order of their samples, those that hold any of these."""
    place = bisect_right(shares, start, key=lambda share: share.start) - 1
    while place < len(shares) and shares[place].start < stop:
        yield shares[place]
        place += 1


def _allowed_ahead(plan: Plan, flow: Dataflow) -> list[int]:
    """Block → how many of its minibatches may wait for their backward: one more than the changes of devices that
    follow it."""
    devices = {block.name: frozenset(block.devices) for block in plan.blocks}
    found: dict[str, int] = {}
    for block in reversed(plan.blocks):
        takers = {taker for name in flow.blocks[block.name].makes for taker in flow.values[name].takers}
        found[block.name] = max((found[taker] + (devices[taker] != devices[block.name]) for taker in takers), default=1)
    return [found[block.name] for block in plan.blocks]


def _one_after_the_other(blocks: tuple[int, ...], num_minibatches: int) -> tuple[Turn, ...]:
    return tuple(
        turn
        for minibatch in range(num_minibatches)
        for turn in (
            *(Turn(False, block, minibatch) for block in blocks),
            *(Turn(True, block, minibatch) for block in reversed(blocks)),
        )
    )


class _Interleaving:
    """Lets blocks take turns, each as soon as it can and all devices of a block together, and writes down the order.

    Together, because batch norm over a block's samples makes its devices meet: where they share blocks, they must run
    them in the same order.
    """

    def __init__(self, plan: Plan, flow: Dataflow, mine: Sequence[Sequence[int]], ahead: Sequence[int]) -> None:
        self.devices = [block.devices for block in plan.blocks]
        self.ahead, self.num_minibatches = ahead, plan.num_minibatches
        self.done = {(backward, block): 0 for backward in (True, False) for block in range(len(plan.blocks))}
        """(backward, block) → minibatches that are through."""
        self.needs: dict[tuple[bool, int], set[tuple[bool, int]]] = {key: set() for key in self.done}
        """(backward, block) → what must be done before in the same minibatch."""
        index = {block.name: place for place, block in enumerate(plan.blocks)}
        for value in flow.values.values():
            for taker in value.takers:
                self._order((False, index[value.maker]), (False, index[taker]))
                self._order((True, index[taker]), (True, index[value.maker]))
        for blocks in mine:
            passes = [(turn.backward, turn.block) for turn in _one_after_the_other(tuple(blocks), 1)]
            for before, after in pairwise(passes):
                self._order(before, after)

    def _order(self, before: tuple[bool, int], after: tuple[bool, int]) -> None:
        self.needs[after].add(before)

    def run(self, num_devices: int) -> tuple[tuple[Turn, ...], ...]:
        """At most one turn a device at a time, until all have had all of theirs."""
        orders: list[list[Turn]] = [[] for _ in range(num_devices)]
        left = len(self.done) * self.num_minibatches
        while left:
            turns = self._choose()
            for turn in turns:
                self.done[turn.backward, turn.block] += 1
                for device in self.devices[turn.block]:
                    orders[device].append(turn)
            left -= len(turns)
        return tuple(map(tuple, orders))

    def _choose(self) -> list[Turn]:
        """Backwards before forwards, older minibatches before younger ones, on devices that are still free."""
        waiting = [Turn(*key, done) for key, done in self.done.items() if done < self.num_minibatches]
        busy: set[int] = set()
        chosen = []
        for turn in sorted(waiting, key=lambda turn: (not turn.backward, turn.minibatch, turn.block)):
            if self._can_run(turn) and busy.isdisjoint(self.devices[turn.block]):
                busy.update(self.devices[turn.block])
                chosen.append(turn)
        return chosen

    def _can_run(self, turn: Turn) -> bool:
        if not turn.backward and turn.minibatch - self.done[True, turn.block] >= self.ahead[turn.block]:
            return False
        return all(self.done[need] > turn.minibatch for need in self.needs[turn.backward, turn.block])


def _device_actions(
    device: int,
    blocks: Sequence[PlannedBlock],
    shares: Sequence[Mapping[int, Share]],
    order: Sequence[Turn],
    arriving: Mapping[tuple[int, str], Sequence[Delivery]],
    leaving: Mapping[tuple[int, str], Sequence[Delivery]],
) -> list[Action]:
    found: list[Action] = []
    for backward, place, minibatch in order:
        name, share = blocks[place].name, shares[place][device]
        before, after = arriving.get((device, name), ()), leaving.get((device, name), ())
        if backward:
            before, after = ([move for move in moves if move.differentiable] for moves in (after, before))
        found += [_receive(move, minibatch, gradient=backward) for move in before]
        kind = Kind.BACKWARD if backward else Kind.FORWARD
        found.append(Action(kind=kind, block=name, minibatch=minibatch, start=share.start, stop=share.stop))
        found += [_send(move, minibatch, gradient=backward) for move in after]
    return found


def _send(move: Delivery, minibatch: int, *, gradient: bool) -> Action:
    return _transfer(Kind.SEND, move, minibatch, gradient, peer=move.source if gradient else move.destination)


def _receive(move: Delivery, minibatch: int, *, gradient: bool) -> Action:
    return _transfer(Kind.RECEIVE, move, minibatch, gradient, peer=move.destination if gradient else move.source)


def _transfer(kind: Kind, move: Delivery, minibatch: int, gradient: bool, *, peer: int) -> Action:
    return Action(
        kind=kind,
        block=move.maker,
        minibatch=minibatch,
        start=move.start,
        stop=move.stop,
        value=move.value,
        gradient=gradient,
        peer=peer,
    )
