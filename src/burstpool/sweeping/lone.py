"""A trial that is alone in its array, on the CPU: trained as its user would, by the plain module and torch's optimizer.

An array's step has work of its own (members' numbers, losses and updates), which pays from two members on; for one tiny
model it costs as much again as the model. Takes the array of one and the batches; leaves the array as if it had trained
its member itself. Ignores loss scales and recorded steps: those trials stay with the array.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from burstpool.fusion.array import FusedArray
from burstpool.job import Job, model_arguments
from burstpool.sweeping.feed import Batch, Feed
from burstpool.sweeping.options import StepOptions


def can_run_alone(array: FusedArray, options: StepOptions) -> bool:
    """Whether the array's only member can be trained without it, and faster."""
    return len(array) == 1 and array.device.type == "cpu" and not array.scalers and not options.compiled


def run_alone(
    array: FusedArray, job: Job, feed: Feed, options: StepOptions, *, num_steps: int, stop: Callable[[], bool]
) -> Tensor:
    """Trains for so many steps, or until `stop`, which is asked after each; returns the losses [steps, 1]."""
    saved = array.member(0).checkpoint()
    model = array.member(0).module().train()
    optimizer = job.optimizer(model.parameters())
    schedulers = [job.scheduler(optimizer)] if job.scheduler else []
    optimizer.load_state_dict(saved["optimizers"][0])
    for scheduler, state in zip(schedulers, saved["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    losses: list[Tensor] = []

    def step(batch: Batch) -> None:
        losses.append(_step(model, optimizer, job, batch, options))

    for _ in range(num_steps):
        batch = feed.take()
        # Also where the model draws nothing: its loss may.
        array.streams.drawing(0, lambda batch=batch: step(batch))  # type: ignore[misc]
        for scheduler in schedulers:
            scheduler.step()
        if stop():
            break
    buffers = dict(model.named_buffers())
    array.resume_member(
        0,
        {
            **saved,
            "state": model.state_dict(),
            "hidden": {key: buffers[key] for key in saved["hidden"]},
            "optimizers": [optimizer.state_dict()],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "stream": array.streams.generators[0].get_state(),
        },
    )
    return torch.stack(losses).unsqueeze(1)


def _step(model: nn.Module, optimizer: Any, job: Job, batch: Batch, options: StepOptions) -> Tensor:
    args, kwargs = model_arguments(batch.inputs)
    optimizer.zero_grad()
    with options.autocasting(torch.device("cpu")):
        loss = job.loss(model(*args, **kwargs), batch.target)
    loss.backward()  # type: ignore[no-untyped-call]
    if options.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
    optimizer.step()
    return loss.detach()
