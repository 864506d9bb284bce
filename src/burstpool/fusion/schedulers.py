"""Schedules: M of torch's own schedulers, each acting on its member's numbers, which the optimizer then takes up.

Everything a scheduler changes in its optimizer's groups counts: the rate, and momentum or betas where it cycles them.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from burstpool.errors import FusionError
from burstpool.fusion.copied import copied
from burstpool.fusion.optim import ArrayOptimizer
from burstpool.fusion.options import for_member


class ArrayScheduler:
    """One schedule a member."""

    def __init__(self, factory: Callable[..., Any], optimizer: ArrayOptimizer, options: Mapping[str, Any]) -> None:
        self.factory, self.optimizer = factory, optimizer
        self._resting: frozenset[int] = frozenset()
        """Members that were stopped: their schedules stay where they are."""
        members = len(optimizer.proxies)
        self._given = [for_member(options, member, members) for member in range(members)]
        self.schedulers = [self._made(given, member) for member, given in enumerate(self._given)]
        optimizer.pull()

    def _made(self, given: Mapping[str, Any], member: int) -> Any:
        # torch wraps `step` to warn of a schedule that steps before its optimizer; a proxy never steps.
        proxy = self.optimizer.proxies[member]
        try:
            made = self.factory(proxy, **given)
        except (TypeError, ValueError) as error:
            name = getattr(self.factory, "__name__", "the scheduler")
            raise FusionError(f"{name} refuses {dict(given)} of member {member}: {error}") from None
        proxy._opt_called = True  # type: ignore[attr-defined]
        return made

    def step(self, metrics: Tensor | Sequence[float] | None = None) -> None:
        """One step for all but those that were stopped.

        `metrics`, one a member, is for schedules that watch one, as ReduceLROnPlateau does.
        """
        values = self._checked_metrics(metrics)
        for member, scheduler in enumerate(self.schedulers):
            if member in self._resting:
                continue
            try:
                scheduler.step(*(() if values is None else (values[member],)))
            except ValueError as error:  # as of OneCycleLR, at its end
                raise FusionError(f"the schedule of member {member}: {error}; stop the member at its end") from None
        self.optimizer.pull()

    def _checked_metrics(self, metrics: Tensor | Sequence[float] | None) -> Sequence[float] | None:
        if metrics is None:
            if isinstance(self.schedulers[0], ReduceLROnPlateau):
                raise FusionError("ReduceLROnPlateau watches a metric; pass step a list of one number a member")
            return None
        values = metrics.tolist() if isinstance(metrics, Tensor) else metrics
        if not hasattr(values, "__len__") or len(values) != len(self.schedulers):
            count = len(values) if hasattr(values, "__len__") else 1
            raise FusionError(f"{count} metrics for {len(self.schedulers)} members; pass one each")
        if any(isinstance(value, list) for value in values):
            raise FusionError("a metric is one number a member; the ones given have more dimensions")
        return values

    def rest(self, index: int) -> None:
        """A stopped member's schedule stays where it is."""
        self._resting |= {index}

    def wake(self, index: int) -> None:
        """It goes on."""
        self._resting -= {index}

    def get_last_lr(self) -> list[float]:
        """Each member's learning rate, of the first group."""
        return self.optimizer.lr

    def taken(self, indices: Sequence[int], optimizer: ArrayOptimizer) -> "ArrayScheduler":
        """The schedules of these members, which go with the given optimizer; they leave this one."""
        other = copy.copy(self)
        other.optimizer = optimizer
        other.keep(indices)
        return other

    def keep(self, indices: Sequence[int]) -> None:
        """Only these members, in this order."""
        self._given = [self._given[index] for index in indices]
        self._resting = frozenset(place for place, index in enumerate(indices) if index in self._resting)
        self.schedulers = [self.schedulers[index] for index in indices]

    def admit(self, options: Mapping[str, Any]) -> None:
        """A schedule for the optimizer's newest member; what is left out is what the first member was given."""
        self._given.append({**self._given[0], **options})
        self.schedulers.append(self._made(self._given[-1], len(self.schedulers)))
        self.optimizer.pull()

    def state_dict(self) -> dict[str, Any]:
        """Where each schedule is."""
        return {"members": [self.member_state_dict(member) for member in range(len(self.schedulers))]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts each schedule back to where it was."""
        if len(state["members"]) != len(self.schedulers):
            raise FusionError(
                f"the schedule was saved with {len(state['members'])} members; this one has {len(self.schedulers)}"
            )
        for member, saved in enumerate(state["members"]):
            self.load_member_state_dict(member, saved)

    def member_state_dict(self, index: int) -> dict[str, Any]:
        """Where one member's schedule is, in torch's own format."""
        found: dict[str, Any] = copied(self.schedulers[index].state_dict())
        return found

    def load_member_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """Puts one member's schedule back to where it was."""
        self.schedulers[index].load_state_dict(copied(dict(state)))
