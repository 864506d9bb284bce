"""Rest of a step: what training does besides its layers, loading samples and changing parameters.

Takes a job, the model that is measured and a batch. Runs both between measured steps, as training would: they cost time
of their own, and push what the layers use out of the caches. Parameters are put back afterwards. Ignores learning-rate
schedules, and whatever the host does that is not the job's.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import default_collate

from burstpool.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRest:
    """Medians of repeats."""

    load_s: float
    """To load a batch of samples."""
    update_bytes_per_s: float | None
    """Bytes of parameters changed in a second; None where no parameter has a gradient."""


class RestOfStep:
    """Runs the rest of a step again and again, and keeps its times."""

    def __init__(self, job: Job, model: nn.Module, batch: int) -> None:
        self._job, self._batch = job, batch
        self._parameters = list(model.parameters())
        self._optimizer = job.optimizer(self._parameters) if self._parameters else None
        self._next = itertools.cycle(range(len(job.data)))  # type: ignore[arg-type]
        self._load_s: list[float] = []
        self._update_s: list[float] = []
        self._changed_bytes = 0

    def run(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Loads the next samples, and steps the optimizer from these gradients."""
        start = time.perf_counter()
        default_collate([self._job.data[index] for index in itertools.islice(self._next, self._batch)])
        self._load_s.append(time.perf_counter() - start)
        if not gradients or self._optimizer is None:
            return
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        start = time.perf_counter()
        self._optimizer.step()
        for parameter in gradients:
            parameter.grad = None
        self._update_s.append(time.perf_counter() - start)
        self._changed_bytes = sum(parameter.nbytes for parameter in gradients)

    @contextlib.contextmanager
    def parameters_left_as_they_were(self) -> Iterator[None]:
        """Puts parameters back at the end."""
        saved = [parameter.detach().clone() for parameter in self._parameters]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self._parameters, saved, strict=True):
                    parameter.copy_(before)

    def measured(self) -> MeasuredRest:
        """The first of each warms up."""
        update_s = statistics.median(self._update_s[1:]) if len(self._update_s) > 1 else 0.0
        return MeasuredRest(
            load_s=statistics.median(self._load_s[1:]),
            update_bytes_per_s=self._changed_bytes / update_s if update_s and self._changed_bytes else None,
        )
