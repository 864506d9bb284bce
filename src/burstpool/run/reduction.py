"""Reduction: gradients added up among the devices that keep copies of parameters.

A `Bucket` lays the gradients of some parameters out in one flat tensor, starts to add it up, and hands the sums back.
Gradients come in already weighted by samples, so that their sum is the gradient of the mean over the minibatch.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from burstpool.run.waiting import wait_for


class Bucket:
    """Parameters whose gradients are reduced together. `start`, then `finish`, once a step."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, *, timeout_s: float, what: str):
        self._parameters, self._group = list(parameters), group
        self._timeout, self._what = timedelta(seconds=timeout_s), what
        self._flat: list[torch.Tensor] = []
        """One a dtype."""
        self._with_gradient: list[nn.Parameter] = []
        self._views: list[torch.Tensor] = []
        self.works: list[dist.Work] = []
        """Under way."""

    def start(self) -> None:
        """Copies the gradients together and starts to add them up."""
        self.gather()
        self.launch()

    def gather(self) -> None:
        """Copies the gradients together."""
        if not self._views:
            self._lay_out()
        gradients = [_gradient(parameter) for parameter in self._with_gradient]
        if self._is_in_place():
            self._flat = [gradients[0].view(-1)]
            self._views = gradients
        else:
            torch._foreach_copy_(self._views, gradients)

    def launch(self) -> None:
        """Starts to add up what was copied together."""
        self.works = [_made(dist.all_reduce(flat, group=self._group, async_op=True)) for flat in self._flat]

    def finish(self) -> None:
        """Waits for the sums and makes them the parameters' gradients."""
        self.wait()
        self.adopt()

    def wait(self) -> None:
        """Waits for the sums."""
        for work in self.works:
            wait_for(work, self._timeout, self._what)
        self.works = []

    def adopt(self) -> None:
        """Makes the sums the parameters' gradients."""
        for parameter, view in zip(self._with_gradient, self._views, strict=True):
            parameter.grad = view

    def _lay_out(self) -> None:
        # Which parameters have a gradient follows from the traced code: it is the same on all devices.
        self._with_gradient = [parameter for parameter in self._parameters if parameter.grad is not None]
        if self._is_in_place():
            self._views = [_gradient(self._with_gradient[0])]
            return
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._with_gradient:
            by_dtype.setdefault(_gradient(parameter).dtype, []).append(parameter)
        self._with_gradient = [parameter for parameters in by_dtype.values() for parameter in parameters]
        for dtype, parameters in by_dtype.items():
            flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
            self._flat.append(flat)
            pieces = flat.split([p.numel() for p in parameters])  # type: ignore[no-untyped-call]
            self._views += [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]

    def _is_in_place(self) -> bool:
        """A single dense gradient needs no copy."""
        return len(self._with_gradient) == 1 and _gradient(self._with_gradient[0]).is_contiguous()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _made(work: dist.Work | None) -> dist.Work:
    assert work is not None  # None only for a rank outside the group
    return work
