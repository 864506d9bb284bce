"""From jobs to an array: each job's optimizer and schedule, read off and given to its member."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from burstpool.errors import FusionError
from burstpool.fusion.options import stand_ins

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray
    from burstpool.job import Job

_SETTINGS = {"params", "initial_lr", "param_names"}
"""What a group holds besides its options."""


def attach(array: "FusedArray", jobs: "Sequence[Job]") -> None:
    """Gives the array its jobs' optimizers and schedules."""
    names, parameters = _stand_ins(array)
    made = [job.optimizer(list(parameters)) for job in jobs]
    for index, optimizer in enumerate(made):
        if type(optimizer) is not type(made[0]):
            raise FusionError(
                f"member {index} trains with {type(optimizer).__name__}, member 0 with {type(made[0]).__name__}; "
                "fuse them apart"
            )
    array.jobs = list(jobs)
    array.optimizer(type(made[0]), **_all_options(array, names, made))
    schedules = [job.scheduler for job in jobs]
    if any(schedule is None for schedule in schedules):
        if any(schedule is not None for schedule in schedules):
            raise FusionError("some members have a schedule and some have none; fuse them apart")
        return
    array.scheduler(_apply, schedule=schedules)


def _stand_ins(array: "FusedArray") -> tuple[dict[int, str], list[nn.Parameter]]:
    """Stand-ins for one member's parameters, and their keys.

    With them a job's groups of parameters (no decay for biases) come out as the user made them.
    """
    made = stand_ins(array.state.parameters)
    return {id(parameter): key for key, parameter in made.items()}, list(made.values())


def _all_options(array: "FusedArray", names: Mapping[int, str], made: Sequence[Any]) -> dict[str, Any]:
    """The optimizers' options as `array.optimizer` takes them: numbers that differ as lists, groups by keys."""
    trained = {key for key, parameter in array.named_parameters() if parameter.requires_grad}
    keys = [[[names[id(p)] for p in group["params"]] for group in optimizer.param_groups] for optimizer in made]
    for index, other in enumerate(keys):
        if other != keys[0]:
            raise FusionError(f"the optimizer of member {index} groups parameters unlike that of member 0")
    if left_out := trained - {key for group in keys[0] for key in group}:
        raise FusionError(f"the optimizer leaves out {sorted(left_out)[0]!r}; freeze it by requires_grad=False instead")
    if len(keys[0]) == 1:
        # Named where they are not all, in the model's order: state goes in and out as the job's own optimizer has it.
        named = {} if keys[0] == [list(array.state.parameters)] else {"groups": [{"keys": keys[0][0]}]}
        return {**together([options(optimizer) for optimizer in made]), **named}
    groups = [
        {"keys": mine, **together([options(optimizer, group=place) for optimizer in made])}
        for place, mine in enumerate(keys[0])
    ]
    # What a class cannot do without; every group has its own value of it.
    return {"groups": groups, **options(made[0])}


def _apply(optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
    return schedule(optimizer)


def options(optimizer: torch.optim.Optimizer, *, group: int = 0) -> dict[str, Any]:
    """The options one of an optimizer's groups was made with."""
    made = optimizer.param_groups[group]
    known = optimizer.defaults.keys() - _SETTINGS - _derived(optimizer)
    return {name: made[name] for name in made if name in known}


def _derived(optimizer: torch.optim.Optimizer) -> set[str]:
    """Defaults that the class sets itself and does not take."""
    import inspect

    return optimizer.defaults.keys() - inspect.signature(type(optimizer).__init__).parameters.keys()


def together(members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One value where all agree, a list where not."""
    names = members[0].keys()
    columns = {name: [member[name] for member in members] for name in names}
    return {name: column[0] if all(v == column[0] for v in column) else column for name, column in columns.items()}
