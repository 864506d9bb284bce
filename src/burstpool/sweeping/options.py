"""StepOptions: how the steps of trials are computed, apart from what is trained; the same for all trials of a sweep."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from burstpool.artifact import STRICT
from burstpool.errors import RunError
from burstpool.run.passes import AUTOCAST

Autocast = Literal["bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """As `burstpool train` has them under the same names."""

    __pydantic_config__ = STRICT

    autocast: Autocast | None = None
    """Number format of matrix products, in training and evaluation; with fp16 each trial has a loss scale of its own,
    and an overflow of its gradients skips its step alone."""
    clip_norm: float | None = None
    """Scales a trial's gradients down so that their norm over all of its parameters is at most this."""
    compiled: bool = False
    """Whether steps that torch.compile has taken over are tried as well, and the fastest way kept."""

    def __post_init__(self) -> None:
        if self.autocast not in (None, *get_args(Autocast)):
            raise RunError(f"--autocast {self.autocast} is unknown; give {' or '.join(get_args(Autocast))}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RunError(f"--clip-norm {self.clip_norm} must be more than 0; leave it out not to clip")
        if self.clip_norm is not None and math.isinf(self.clip_norm):
            raise RunError("--clip-norm inf clips nothing; leave it out")
        if self.compiled and self.autocast == "fp16":
            raise RunError("--compile does not go with fp16, whose losses are scaled; give --autocast bf16")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The format, None without autocast."""
        return None if self.autocast is None else AUTOCAST[self.autocast]

    def autocasting(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """What a forward pass and its loss run in."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=AUTOCAST[self.autocast])
