"""Any torch optimizer, the slow way: one for each member, over slices of the stacked parameters."""

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion.copied import copied
from burstpool.fusion.gradients import forget_gradients
from burstpool.fusion.options import loaded_groups, stepping

if TYPE_CHECKING:
    from burstpool.fusion.optim import Settings


class SlicedOptimizer:
    """M torch optimizers; their parameters share the array's memory."""

    def __init__(
        self,
        settings: "Settings",
        parameters: Mapping[str, nn.Parameter],
        active: Tensor,
    ) -> None:
        self.settings, self.parameters, self.active = settings, parameters, active
        self.keeps_state = True
        self.proxies = [self._over_slices(member) for member in range(len(active))]

    def _over_slices(self, member: int) -> torch.optim.Optimizer:
        """A member's optimizer; its slices are parameters like those it would have alone."""
        slices = {
            key: nn.Parameter(parameter.data[member], requires_grad=parameter.requires_grad)
            for key, parameter in self.parameters.items()
        }
        return self.settings.optimizer(self.settings.given[member], slices)

    @property
    def lr(self) -> list[float]:
        """Each member's learning rate, of the first group."""
        return [float(proxy.param_groups[0]["lr"]) for proxy in self.proxies]

    def _slices(self, member: int) -> list[tuple[nn.Parameter, str]]:
        groups = zip(self.proxies[member].param_groups, self.settings.keys, strict=True)
        return [(p, key) for group, keys in groups for p, key in zip(group["params"], keys, strict=True)]

    def step(self, skip: Tensor | None = None) -> None:
        """Updates all active members, one after another."""
        mask = stepping(self.active, skip).tolist()
        for member, steps in enumerate(mask):
            if not steps:
                continue
            for slice_, key in self._slices(member):
                gradient = self.parameters[key].grad
                slice_.grad = None if gradient is None else gradient[member].resolve_conj()
            try:
                self.proxies[member].step()
            except RuntimeError as error:
                if type(error) is not RuntimeError:  # no memory, or the device's own
                    raise
                name = type(self.proxies[member]).__name__
                raise FusionError(f"{name} cannot step member {member}: {error}") from error

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or sets them to zero."""
        forget_gradients(self.parameters.values(), set_to_none=set_to_none)

    def pull(self) -> None:
        """The optimizers read their own numbers."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Refuses what the class itself refuses."""
        self.settings.proxy(self.settings.for_new(options))

    def _rebind(self) -> None:
        """Points every slice to its place in the array's present memory; the optimizers keep their state."""
        for member in range(len(self.proxies)):
            for slice_, key in self._slices(member):
                slice_.data = self.parameters[key].data[member]

    def keep(self, indices: Sequence[int], active: Tensor) -> None:
        """Only these members, in this order."""
        self.active, self.settings = active, self.settings.kept(indices)
        self.proxies = [self.proxies[index] for index in indices]
        self._rebind()

    def taken(
        self, indices: Sequence[int], parameters: Mapping[str, nn.Parameter], active: Tensor
    ) -> "SlicedOptimizer":
        """An optimizer of these members over their new parameters, state carried; they leave this one."""
        other = copy.copy(self)
        other.parameters = parameters
        other.keep(indices, active)
        return other

    def admit(self, options: Mapping[str, Any], active: Tensor) -> None:
        """One more member, with a fresh state."""
        given = self.settings.for_new(options)
        self.active, self.settings = active, self.settings.with_one_more(given)
        self.proxies.append(self._over_slices(len(self.proxies)))
        self._rebind()

    def member_state_dict(self, index: int) -> dict[str, Any]:
        """One member's state, torch's own."""
        return copied(self.proxies[index].state_dict())

    def load_member_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """One member's state and numbers, torch's own."""
        _load(self.proxies[index], state)

    def state_dict(self) -> dict[str, Any]:
        """All members' states."""
        return {"members": [copied(made.state_dict()) for made in self.proxies]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The same array's optimizer as it was."""
        if "members" not in state:
            raise FusionError("the optimizer was saved by an array whose members agree in all that is no number")
        if len(state["members"]) != len(self.proxies):
            raise FusionError(
                f"the optimizer was saved with {len(state['members'])} members; this one has {len(self.proxies)}"
            )
        for made, saved in zip(self.proxies, state["members"], strict=True):
            _load(made, saved)


def _load(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    saved = copied(dict(state))
    loaded_groups(optimizer, saved["param_groups"])
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        raise FusionError(f"{type(optimizer).__name__} refuses the state: {error}") from None
    places = [place for group in saved["param_groups"] for place in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        for name, value in saved["state"].get(place, {}).items():
            # torch casts a number of state, as NAdam's product of momenta, to the parameters' type: it would go on
            # with another number of digits than before.
            if isinstance(value, Tensor) and value.dim() == 0 and parameter.dim() > 0:
                slots = optimizer.state[parameter]
                slots[name] = value.to(slots[name].device)
