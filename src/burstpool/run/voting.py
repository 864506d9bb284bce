"""Voting: all workers stop after the same step.

Now and then, at steps that all know beforehand, the workers exchange one small message: whether any of them was asked
to stop, and when to ask again. Costs one gloo message about every half second, whatever a step takes.
"""

import time

import torch
import torch.distributed as dist

from burstpool.run.waiting import naming_peers

_INTERVAL_S = 0.5
"""About how long a request to stop may go unnoticed, if steps are shorter."""
_MAX_STEPS = 10_000


class Vote:
    """One worker's voice. Every worker must call `stops` before every step."""

    def __init__(self, control: dist.ProcessGroup, *, first_step: int) -> None:
        self._control = control
        self._last_step, self._next_step = first_step, first_step + 1
        self._since = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether all vote before this step."""
        return step >= self._next_step

    def stops(self, step: int, *, asked: bool) -> bool:
        """Whether any worker was asked to stop; to be called when a vote is due."""
        # The slowest worker sets the pace: one without work would be through with all steps at once.
        message = torch.tensor([-int(asked), self._interval(step)])
        with naming_peers("the other workers' vote on stopping"):
            dist.all_reduce(message, op=dist.ReduceOp.MIN, group=self._control)
        stop, interval = message.tolist()
        self._last_step, self._next_step, self._since = step, step + interval, time.monotonic()
        return bool(stop < 0)

    def _interval(self, step: int) -> int:
        step_time_s = (time.monotonic() - self._since) / max(step - self._last_step, 1)
        return max(1, min(_MAX_STEPS, int(_INTERVAL_S / max(step_time_s, 1e-9))))
