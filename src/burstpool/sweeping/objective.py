"""The objective: the number that trials are ranked by, lower is better.

Where the job has held-out data (`Job.evaluation`), the mean loss over it, in eval mode. Else the mean training loss of
the last tenth of a whole trial's steps, or of as many as there are.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from burstpool.fusion.array import FusedArray
from burstpool.job import Job
from burstpool.sweeping.feed import moved, number_of_samples

HELD_OUT = "mean loss over the held-out data"
TRAINING = "mean training loss of the last steps"


def last_losses(losses: Sequence[float], *, steps: int) -> float:
    """The mean of the last tenth of a trial's steps, or of as many as there are."""
    last = losses[-max(1, steps // 10) :]
    return math.fsum(last) / len(last)


def held_out(array: FusedArray, jobs: Sequence[Job], members: Iterable[int], *, batch: int) -> dict[int, float]:
    """Each of these members' mean loss over its job's held-out data; the members must have some."""
    wanted = list(members)
    found: dict[int, float] = {}
    training = array.training
    array.eval()
    try:
        for data in {id(jobs[member].evaluation): jobs[member].evaluation for member in wanted}.values():
            values = _mean_losses(array, jobs[wanted[0]], data, batch)
            found |= {member: values[member] for member in wanted if jobs[member].evaluation is data}
    finally:
        array.train(training)
    return found


@torch.no_grad()
def _mean_losses(array: FusedArray, job: Job, data: Any, batch: int) -> list[float]:
    total = torch.zeros(len(array), dtype=torch.float64, device=array.device)
    num_samples = number_of_samples(data, job)
    for start in range(0, num_samples, batch):
        stop = min(start + batch, num_samples)
        inputs, target = moved(default_collate([data[index] for index in range(start, stop)]), array.device)
        total += array.losses(inputs, job.loss, target).double() * (stop - start)
    return [float(value) for value in (total / num_samples).tolist()]
