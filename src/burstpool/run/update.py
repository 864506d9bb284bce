"""Update: from gradients to changed parameters, the same on every device that keeps a copy.

One optimizer and one learning-rate schedule a device, built by the job over the parameters it keeps. Where the
gradients must be judged as a whole, to clip their norm or to skip a step whose scaled gradients overflowed, all devices
agree first: each parameter counts once, by the first device that keeps it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from burstpool.errors import RunError
from burstpool.job import Job
from burstpool.run.waiting import naming_peers

_TINY = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


@dataclass(slots=True, kw_only=True)
class LossScale:
    """A factor on the loss that keeps fp16 gradients from vanishing; the rules of torch.amp.GradScaler."""

    factor: float = 65536.0
    good_steps: int = 0
    """Since the factor last changed."""
    growth_interval: int = 2000

    def after(self, *, overflowed: bool) -> None:
        """Halves the factor after an overflow, doubles it after many steps without one."""
        if overflowed:
            self.factor, self.good_steps = self.factor / 2, 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.factor, self.good_steps = self.factor * 2, 0


class Update:
    """Changes the parameters of one device."""

    def __init__(
        self,
        job: Job,
        parameters: Mapping[str, nn.Parameter],
        *,
        counted: Sequence[str],
        group: dist.ProcessGroup | None,
        clip_norm: float | None,
        scale: LossScale | None,
        on: torch.device,
    ) -> None:
        self.parameters = parameters
        """All that the device keeps, by key, in the model's order."""
        self.optimizer = job.optimizer(list(parameters.values())) if parameters else None
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler and self.optimizer is not None else None
        self.scale = scale
        self.trained = {key: parameter for key, parameter in parameters.items() if parameter.requires_grad}
        self._counted = [parameters[key] for key in counted]
        self._group, self._clip_norm, self._on = group, clip_norm, on
        self._rates: dict[int, tuple[float, torch.Tensor]] = {}
        """Parameter group → its learning rate, and where captured steps read it."""
        if self.optimizer is not None and type(self.optimizer) is torch.optim.LBFGS:
            raise RunError("LBFGS evaluates the loss several times a step, which a schedule cannot; choose another")

    def make_capturable(self) -> None:
        """Has the optimizer keep on the device what changes from step to step, as far as it can; on CUDA only."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
                self.optimizer._warned_capturable_if_run_uncaptured = True  # as the first steps are meant to
        self.keep_rates_on_device()

    def keep_rates_on_device(self) -> None:
        """Makes learning rates that change tensors, where the optimizer is captured: a graph reads them anew."""
        if self.optimizer is None or self.scheduler is None:
            return
        self._rates = {}
        for index, group in enumerate(self.optimizer.param_groups):
            if group.get("capturable", False):
                rate = float(group["lr"])
                group["lr"] = torch.tensor(rate, device=self._on)
                self._rates[index] = (rate, group["lr"])

    @property
    def can_be_captured(self) -> bool:
        """Whether a replayed step would do what a call does, with nothing left to the host."""
        if self._group is not None and self.judges_all:
            return False  # the norm goes over several devices
        if self.optimizer is None:
            return True
        if all(group.get("capturable", False) for group in self.optimizer.param_groups):
            return True
        # Plain numbers are fixed in a graph: right for SGD, as long as its learning rate stays.
        return type(self.optimizer) is torch.optim.SGD and self.scheduler is None

    @property
    def judges_all(self) -> bool:
        """Whether no parameter may change before all gradients are there."""
        return self._clip_norm is not None or self.scale is not None

    @property
    def always_judges(self) -> bool:
        """Whether this device takes part even if it has nothing to step: all must scale their losses alike."""
        return self.scale is not None

    def apply(self, keys: Sequence[str]) -> None:
        """Steps these parameters from their gradients, and forgets the gradients."""
        chosen = self.trained if len(keys) == len(self.trained) else {key: self.trained[key] for key in keys}
        if self.judges_all and not self._judge():
            self.forget(chosen)
            return
        if self.optimizer is not None:
            hidden = self._hide_others(chosen)
            self.optimizer.step()
            for parameter, gradient in hidden:
                parameter.grad = gradient
        self.forget(chosen)

    def end_step(self) -> None:
        """Moves the learning rate on."""
        if self.scheduler is None or self.optimizer is None:
            return
        # The schedule computes with plain numbers: with tensors on a GPU it would wait for the device every step.
        for index, rate in self._rates.items():
            self.optimizer.param_groups[index]["lr"] = rate[0]
        self.scheduler.step()
        for index, (_, tensor) in self._rates.items():
            group = self.optimizer.param_groups[index]
            self._rates[index] = (float(group["lr"]), tensor)
            group["lr"] = tensor.fill_(group["lr"])

    def forget(self, chosen: Mapping[str, nn.Parameter] | None = None) -> None:
        """Drops gradients."""
        for parameter in (self.trained if chosen is None else chosen).values():
            parameter.grad = None

    def _hide_others(self, chosen: Mapping[str, nn.Parameter]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        if len(chosen) == len(self.trained):
            return []
        others = [p for key, p in self.trained.items() if key not in chosen and p.grad is not None]
        hidden = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
        for parameter in others:
            parameter.grad = None
        return hidden

    def _judge(self) -> bool:
        """Scales the gradients as they must be; whether the step may be taken."""
        gradients = [p.grad for p in self.trained.values() if p.grad is not None]
        norm = self._norm() / (self.scale.factor if self.scale else 1.0)
        factor = 1.0 / (self.scale.factor if self.scale else 1.0)
        if self.scale is not None:
            overflowed = not bool(torch.isfinite(norm))  # the host must know before it can go on or skip
            self.scale.after(overflowed=overflowed)
            if overflowed:
                return False
        if self._clip_norm is not None and gradients:
            torch._foreach_mul_(gradients, factor * torch.clamp(self._clip_norm / (norm + _TINY), max=1.0))
        elif factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        return True

    def _norm(self) -> torch.Tensor:
        """Of all gradients of the model, each parameter counted once."""
        own = [p.grad for p in self._counted if p.grad is not None]
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in own) or not own else torch.float32
        square = torch.zeros((), dtype=torch.float64, device=self._on)
        if own:
            norms = torch.stack([n.to(dtype) for n in torch._foreach_norm(own)])
            square = torch.linalg.vector_norm(norms).double().square()
        if self._group is not None:
            with naming_peers("the norms of all devices' gradients"):
                dist.all_reduce(square, group=self._group)
        return square.sqrt()


_HOW = ("params", "capturable", "foreach", "fused", "differentiable")
"""Entries of a parameter group that say how it is computed, which is this device's own business."""


def hyper_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's hyper-parameters, learning rates that live on a device as plain numbers."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in _HOW
    }
