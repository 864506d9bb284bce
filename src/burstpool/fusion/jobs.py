"""From jobs to an array: each job's optimizer and schedule, read off and given to its member."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from burstpool.errors import FusionError

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray
    from burstpool.job import Job

_SETTINGS = {"params", "initial_lr", "param_names"}
"""What a group holds besides its options."""


def attach(array: "FusedArray", jobs: "Sequence[Job]") -> None:
    """Gives the array its jobs' optimizers and schedules."""
    made = [job.optimizer([nn.Parameter(torch.zeros(1))]) for job in jobs]
    for index, optimizer in enumerate(made):
        if type(optimizer) is not type(made[0]):
            raise FusionError(
                f"member {index} trains with {type(optimizer).__name__}, member 0 with {type(made[0]).__name__}; "
                "fuse them apart"
            )
    array.jobs = list(jobs)
    array.optimizer(type(made[0]), **together([options(optimizer) for optimizer in made]))
    schedules = [job.scheduler for job in jobs]
    if any(schedule is None for schedule in schedules):
        if any(schedule is not None for schedule in schedules):
            raise FusionError("some members have a schedule and some have none; fuse them apart")
        return
    array.scheduler(_apply, schedule=schedules)


def _apply(optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
    return schedule(optimizer)


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options an optimizer was made with."""
    group = optimizer.param_groups[0]
    known = optimizer.defaults.keys() - _SETTINGS - _derived(optimizer)
    return {name: group[name] for name in group if name in known}


def _derived(optimizer: torch.optim.Optimizer) -> set[str]:
    """Defaults that the class sets itself and does not take."""
    import inspect

    return optimizer.defaults.keys() - inspect.signature(type(optimizer).__init__).parameters.keys()


def together(members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One value where all agree, a list where not."""
    names = members[0].keys()
    columns = {name: [member[name] for member in members] for name in names}
    return {name: column[0] if all(v == column[0] for v in column) else column for name, column in columns.items()}
