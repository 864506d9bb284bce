"""What sweeps are compared with: one trial after another, with torch alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import default_collate

from burstpool.job import Job, model_arguments
from burstpool.run.order import DataOrder
from burstpool.sweeping.folder import SweepFolder
from burstpool.sweeping.outcome import SweepResult


def alone(
    job: Job, steps: int, *, autocast: torch.dtype | None = None, clip_norm: float | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the state after so many steps: what a user's own loop does."""
    model = job.build_model()
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    order = DataOrder(len(job.data), samples_per_step=job.batch, seed=job.seed)  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu", enabled=autocast is torch.float16)
    losses = []
    with torch.random.fork_rng():
        torch.manual_seed(job.seed)
        for _ in range(steps):
            inputs, target = default_collate([job.data[index] for index in order.take().tolist()])
            args, kwargs = model_arguments(inputs)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                loss = job.loss(model(*args, **kwargs), target)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if clip_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss.detach()))
    return losses, model.state_dict()


def assert_as_alone(result: SweepResult, jobs: Sequence[Job]) -> None:
    """Every step's loss of every trial, and every weight of those that came to the end, in double precision."""
    folder = SweepFolder(Path(result.folder))
    done = 0
    for trial, losses in folder.read_losses(result.trials):
        assert trial.step == len(losses) > 0, trial
        expected, state = alone(jobs[trial.number], trial.step)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=0)
        if trial.state == "done":
            done += 1
            weights = load_file(folder.all_weights / f"trial-{trial.number:05d}.safetensors")
            assert weights.keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)  # zeros have no relative error
    assert done, "no trial came to its end"
