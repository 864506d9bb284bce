"""Losses: read without stalling the device, and looked at before a checkpoint could keep what is wrong."""

import math

import torch

from burstpool.errors import RunError

StepLosses = list[tuple[int, float]]
"""(step, this device's part of its loss)."""


class LossReader:
    """Turns a device's part of each step's loss into a number.

    On CUDA the number comes a step late: waiting for it would let the device run dry between two steps.
    """

    def __init__(self, on: torch.device, *, allow_nan: bool) -> None:
        self._late, self._allow_nan = on.type == "cuda", allow_nan
        self._waiting: tuple[int, torch.Tensor, torch.cuda.Event] | None = None

    def read(self, step: int, loss: torch.Tensor | None) -> StepLosses:
        """Takes the loss of a step, None where the device computes none; returns what is known now."""
        if loss is None:
            return []
        if not self._late:
            return [(step, loss.item())]
        known = self.finish()
        host = torch.empty((), dtype=torch.float64, pin_memory=True)
        host.copy_(loss, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._waiting = (step, host, event)
        return known

    def finish(self) -> StepLosses:
        """Waits for what is still under way."""
        if self._waiting is None:
            return []
        (step, host, event), self._waiting = self._waiting, None
        event.synchronize()
        value = host.item()
        if not self._allow_nan and not math.isfinite(value):
            raise RunError(not_finite(value, step))
        return [(step, value)]


def not_finite(value: float, step: int) -> str:
    """What is said of a loss that is no number."""
    return f"the loss is {value} in step {step}; lower the learning rate, clip gradients, or pass allow_nan to go on"
