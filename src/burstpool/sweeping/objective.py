"""The objective: the number that trials are ranked by, lower is better.

Where the job has held-out data (`Job.evaluation`), the mean loss over it, in eval mode. Else the mean training loss of
the last tenth of a whole trial's steps, or of as many as there are.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from burstpool.errors import JobError
from burstpool.fusion.array import FusedArray
from burstpool.job import Job
from burstpool.run.loading import Samples
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
    training, streams = array.training, array.streams.states()
    array.eval()
    try:
        for data in {id(jobs[member].evaluation): jobs[member].evaluation for member in wanted}.values():
            values = _mean_losses(array, jobs[wanted[0]], data, batch)
            found |= {member: values[member] for member in wanted if jobs[member].evaluation is data}
    finally:
        array.train(training)
        if array.streams.draws_in_loss:  # training goes on as if nothing had been evaluated
            array.streams.restore(streams)
    return found


@torch.no_grad()
def _mean_losses(array: FusedArray, job: Job, data: Any, batch: int) -> list[float]:
    total = torch.zeros(len(array), dtype=torch.float64, device=array.device)
    samples, num_samples = held_out_samples(job, data)
    for start in range(0, num_samples, batch):
        stop = min(start + batch, num_samples)
        inputs, target = moved(samples.collated(range(start, stop), 0), array.device)
        total += array.losses(inputs, job.loss, target).double() * (stop - start)
    return [float(value) for value in (total / num_samples).tolist()]


def held_out_samples(job: Job, data: Any) -> tuple[Samples, int]:
    """The held-out samples, and how many; those that draw random numbers draw the same for every trial."""
    num_samples = number_of_samples(data, job, what="held-out data")
    if num_samples == 0:
        raise JobError(f"the held-out data of job {job.name!r} is empty; leave evaluation out, or give some")
    return Samples(replace(job, data=data, seed=0)), num_samples
