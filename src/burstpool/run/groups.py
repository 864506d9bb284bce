"""Process groups: who talks to whom, set up once before the first step.

Takes a plan and its schedule. Returns all groups that its devices need, made in the same order on every rank. Each
purpose has groups of its own, so that a small message that somebody waits for never queues behind a large one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from burstpool.errors import RunError
from burstpool.schedule.actions import Action, Kind, Schedule

Members = tuple[int, ...]
"""Ranks, in ascending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that one rank belongs to."""

    control: dist.ProcessGroup
    """All ranks, over gloo: stopping, checkpoints, shapes."""
    reduce: Mapping[Members, dist.ProcessGroup]
    """For sums of gradients of a block."""
    shared: Mapping[Members, dist.ProcessGroup]
    """For sums of gradients of parameters that several blocks on different devices share."""
    statistics: Mapping[Members, dist.ProcessGroup]
    """For batch norm."""
    norm: dist.ProcessGroup | None
    """All ranks that hold parameters, for the gradients' norm; None where nobody asks for it."""
    pairs: Mapping[tuple[int, int], dist.ProcessGroup]
    """(source, destination) → the group their messages travel in."""

    def close(self) -> None:
        """Takes the groups down; the rank can then set up others."""
        several = (self.reduce, self.shared, self.statistics, self.pairs)
        found = {id(group): group for groups in several for group in groups.values()}
        if self.norm is not None:
            found[id(self.norm)] = self.norm
        for group in found.values():
            dist.destroy_process_group(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNeeds:
    """Which groups a run takes, the same on every rank."""

    schedule: Schedule
    statistics: Sequence[Members]
    """Of the blocks with batch norm over several devices."""
    shared: Sequence[Members]
    """Of the parameters that blocks on different devices share."""
    norm: Members | None
    """Ranks that hold parameters, if the gradients' norm is asked for."""


def make_groups(needs: GroupNeeds, *, rank: int, control: dist.ProcessGroup, backend: str, timeout_s: float) -> Groups:
    """Makes every group on every rank, in the same order, as torch.distributed demands."""
    timeout = timedelta(seconds=timeout_s)

    def make(members: Members) -> dist.ProcessGroup | None:
        made = dist.new_group(list(members), timeout=timeout, backend=backend)
        return made if rank in members else None

    def make_all(wanted: Iterable[Members]) -> dict[Members, dist.ProcessGroup]:
        made = {members: make(members) for members in dict.fromkeys(wanted) if len(members) > 1}
        return {members: group for members, group in made.items() if group is not None}

    actions = [action for device in needs.schedule.devices for action in device]
    return Groups(
        control=control,
        reduce=make_all(action.group for action in actions if action.kind is Kind.REDUCE),
        shared=make_all(needs.shared),
        statistics=make_all(needs.statistics),
        norm=make_all([needs.norm]).get(needs.norm) if needs.norm is not None else None,
        pairs=_pairs(needs.schedule, make, num_ranks=dist.get_world_size(control), backend=backend),
    )


def check_orders(schedule: Schedule, talking: Mapping[str, Members]) -> None:
    """Refuses a schedule in which members of a group would take part in its collectives in different orders.

    `talking` are the blocks whose forward and backward communicate inside, with their devices.
    """
    orders: dict[tuple[str, Members], dict[int, list[Action]]] = {}
    for device, actions in enumerate(schedule.devices):
        for action in actions:
            if action.kind is Kind.REDUCE:
                key = ("reduce", tuple(sorted(action.group)))
            elif action.kind in (Kind.FORWARD, Kind.BACKWARD) and action.block in talking:
                key = ("statistics", talking[action.block])
            else:
                continue
            orders.setdefault(key, {}).setdefault(device, []).append(action)
    for (purpose, members), by_device in orders.items():
        first = [(x.kind, x.block, x.minibatch) for x in by_device[members[0]]]
        for device in members[1:]:
            if [(x.kind, x.block, x.minibatch) for x in by_device.get(device, [])] != first:
                advice = '; pass batch_norm="local"' if purpose == "statistics" else ""
                raise RunError(
                    f"devices {members[0]} and {device} run blocks that they {_DO[purpose]} together in different "
                    f"orders{advice}"
                )


_DO = {"reduce": "reduce", "statistics": "normalise"}


def _pairs(
    schedule: Schedule, make: Callable[[Members], dist.ProcessGroup | None], *, num_ranks: int, backend: str
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """gloo tells messages apart by tags: one group for all. NCCL goes by order alone and runs the messages of a
    group one after the other, so that each direction of each pair needs a group of its own."""
    ways = sorted(
        {
            (source, action.peer)
            for source, actions in enumerate(schedule.devices)
            for action in actions
            if action.kind is Kind.SEND
        }
    )
    if not ways:
        return {}
    if backend == "gloo":
        common = make(tuple(range(num_ranks)))
        assert common is not None
        return dict.fromkeys(ways, common)
    made = {way: make(tuple(sorted(way))) for way in ways}
    return {way: group for way, group in made.items() if group is not None}
