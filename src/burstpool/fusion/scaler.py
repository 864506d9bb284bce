"""Loss scaling for fp16: each member has its own scale, and an overflow skips its own step alone.

    scaler = array.loss_scaler(init_scale=2.0**16)
    scaler.scale(losses).sum().backward(); scaler.step(optimizer); scaler.update()

As torch.amp.GradScaler for one model; no wait for the device. Shapes: M = members.
"""
# ruff: noqa: N806 -- shape suffixes are capitals

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.errors import FusionError
from burstpool.fusion.optim import ArrayOptimizer
from burstpool.fusion.options import for_member

_DEFAULTS = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


class LossScaler:
    """One scale a member."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], active: Tensor, options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - _DEFAULTS.keys():
            raise FusionError(f"the loss scaler has no option {sorted(unknown)[0]!r}; it has {', '.join(_DEFAULTS)}")
        members = len(active)
        self.parameters, self.active = parameters, active
        self._given = [for_member({**_DEFAULTS, **options}, member, members) for member in range(members)]
        self._overflow_M = torch.zeros(members, dtype=torch.bool, device=active.device)
        self._unscaled = False
        self._spread(active.device)
        self.scale_M = self._numbers["init_scale"].clone()
        """Each member's scale."""
        self.growth_M = torch.zeros_like(self.scale_M)
        """Steps since the scale last changed."""

    def _spread(self, device: torch.device) -> None:
        try:
            self._numbers = {
                name: torch.tensor([float(given[name]) for given in self._given], device=device) for name in _DEFAULTS
            }
        except (TypeError, ValueError) as error:
            raise FusionError(f"the loss scaler takes numbers: {error}") from None

    def scale(self, losses: Tensor) -> Tensor:
        """[M]: the losses to go backward from."""
        return losses * self.scale_M.to(losses.dtype)

    @torch.no_grad()
    def unscale(self) -> None:
        """Divides the gradients by the scales, e.g. before clipping; `step` does it otherwise."""
        if self._unscaled:
            raise FusionError("the gradients are unscaled already; call update() after each step")
        members = len(self.scale_M)
        factor_M = self.scale_M.double().reciprocal()
        overflow_M = torch.zeros_like(self._overflow_M)
        for parameter in self.parameters.values():
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                raise FusionError("sparse gradients, as of nn.Embedding(sparse=True), cannot be unscaled; use bfloat16")
            parameter.grad.mul_(factor_M.view(-1, *[1] * (parameter.dim() - 1)).to(parameter.grad.dtype.to_real()))
            overflow_M |= ~torch.isfinite(parameter.grad.reshape(members, -1)).all(1)
        self._overflow_M.copy_(overflow_M)  # in place, as all state here: a recorded step finds it again
        self._unscaled = True

    def step(self, optimizer: ArrayOptimizer) -> None:
        """The optimizer's step, but for members whose gradients overflowed."""
        if not self._unscaled:
            self.unscale()
        optimizer.step(skip=self._overflow_M)

    @torch.no_grad()
    def update(self) -> None:
        """Smaller scales where there was an overflow, larger after many steps without; a stopped member's stays."""
        numbers, overflow_M = self._numbers, self._overflow_M
        none_M = torch.zeros_like(self.growth_M)
        growth_M = torch.where(overflow_M, none_M, self.growth_M + 1)
        grows_M = growth_M >= numbers["growth_interval"]
        ones_M = torch.ones_like(self.scale_M)
        smaller_M = self.scale_M * torch.where(overflow_M, numbers["backoff_factor"], ones_M)
        larger_M = smaller_M * numbers["growth_factor"]
        # An infinite scale would overflow for ever.
        scale_M = torch.where(grows_M & torch.isfinite(larger_M), larger_M, smaller_M)
        self.scale_M.copy_(torch.where(self.active, scale_M, self.scale_M))
        self.growth_M.copy_(torch.where(self.active, torch.where(grows_M, none_M, growth_M), self.growth_M))
        self._unscaled = False

    def overflowed(self) -> list[bool]:
        """Whose last step was skipped. Waits for the device."""
        return self._overflow_M.tolist()

    def keep(self, indices: Sequence[int], active: Tensor) -> None:
        """Only these members, in this order."""
        self.active, chosen = active, torch.tensor(indices, device=active.device)
        self._given = [self._given[index] for index in indices]
        self._spread(active.device)
        self._overflow_M, self.scale_M, self.growth_M = (
            t[chosen] for t in (self._overflow_M, self.scale_M, self.growth_M)
        )

    def taken(self, indices: Sequence[int], parameters: Mapping[str, nn.Parameter], active: Tensor) -> "LossScaler":
        """The scales of these members, over their new parameters."""
        other = copy.copy(self)
        other.parameters = parameters
        other.keep(indices, active)
        return other

    def admit(self, active: Tensor) -> None:
        """One more member, with the first one's options."""
        self.active = active
        self._given.append(dict(self._given[0]))
        self._spread(active.device)
        self._overflow_M = torch.cat([self._overflow_M, torch.zeros_like(self._overflow_M[:1])])
        self.scale_M = torch.cat([self.scale_M, self._numbers["init_scale"][-1:]])
        self.growth_M = torch.cat([self.growth_M, torch.zeros_like(self.growth_M[:1])])

    def state_dict(self) -> dict[str, Any]:
        """Scales and counts."""
        return {"scale": self.scale_M.clone(), "growth": self.growth_M.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Scales and counts as they were."""
        self.scale_M.copy_(state["scale"])  # in place: a recorded step finds them again
        self.growth_M.copy_(state["growth"])
        self._unscaled = False

    def member_state_dict(self, index: int) -> dict[str, Any]:
        """One member's scale and count."""
        return {"scale": self.scale_M[index].item(), "growth": self.growth_M[index].item()}

    def load_member_state_dict(self, index: int, state: Mapping[str, Any]) -> None:
        """One member's scale and count as they were."""
        self.scale_M[index], self.growth_M[index] = state["scale"], state["growth"]
