"""One array of trials: who is in it, how they come and go, and how they train.

Wraps a FusedArray, which cannot be empty: when the last trial leaves, its place stays taken by what it left behind
until the next one comes, so that the captured model is kept. A trial comes with its whole state (weights, optimizer,
schedule, random stream), whether it is new or was here before, and leaves with it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from burstpool.fusion.array import Execution, FusedArray
from burstpool.fusion.checkpoint import SCHEMA_VERSION
from burstpool.fusion.jobs import attach
from burstpool.fusion.step import RecordedStep
from burstpool.job import Job
from burstpool.sweeping.feed import Batch, Feed, moved
from burstpool.sweeping.lone import can_run_alone, run_alone
from burstpool.sweeping.options import StepOptions


class TrialArray:
    """Trials that train as one."""

    def __init__(
        self,
        *,
        device: torch.device,
        mode: Execution,
        batch: int | None,
        options: StepOptions | None = None,
        choices_file: Path | None = None,
    ) -> None:
        """`choices_file` is where measured choices are kept: an array that goes on computes as it did before."""
        self.device, self.mode, self.batch = device, mode, batch
        self.options, self.choices_file = options or StepOptions(), choices_file
        self.numbers: list[int] = []
        """Trials, in the order of members."""
        self.jobs: list[Job] = []
        self.clock = 0
        """Steps the array has run."""
        self.array: FusedArray | None = None
        self._step: RecordedStep | None = None

    def place(self, number: int, job: Job, model: nn.Module, saved: Mapping[str, Any] | None) -> None:
        """Takes a trial in, as it was saved or new."""
        model = model.to(self.device)
        state = fresh_state(job, model) if saved is None else dict(saved)
        if self.array is None:
            example = moved(job.samples(self.batch or job.batch)[0], self.device)
            array = FusedArray([model], example, seeds=[job.seed], mode=self.mode)
            array.choices_file = self.choices_file
            attach(array, [job])
            if self.options.autocast == "fp16":
                array.loss_scaler()
            self.array, index = array, 0
        else:
            schedule = {"schedule": job.scheduler} if job.scheduler else None
            self.array.optimizers[0].zero_grad()  # those of the last step, which would be carried on
            index = self.array.admit(model, seed=job.seed, scheduler=schedule, job=job)
            if not self.numbers:
                self.array.drop(0)
                index = 0
        try:
            if saved is None:
                state["scalers"] = [scaler.member_state_dict(index) for scaler in self.array.scalers]
            self.array.resume_member(index, state)
        except Exception:
            if self.numbers:
                self.array.drop(index)
            else:
                self.array = None
            raise
        self.numbers.append(number)
        self.jobs.append(job)
        self._step = None

    def saved(self, number: int) -> dict[str, Any]:
        """All that a trial needs to go on, in the memory of the host."""
        saved: dict[str, Any] = in_host_memory(self._array.member(self.numbers.index(number)).checkpoint())
        return saved

    def remove(self, numbers: Sequence[int]) -> None:
        """Lets trials go."""
        gone = [self.numbers.index(number) for number in numbers]
        if gone and len(gone) == len(self.numbers):
            gone = gone[1:]  # the first stays as a place holder
        if gone:
            self._array.optimizers[0].zero_grad()
            self._array.drop(gone)
        kept = [place for place, number in enumerate(self.numbers) if number not in numbers]
        self.numbers, self.jobs = [self.numbers[p] for p in kept], [self.jobs[p] for p in kept]
        self._step = None

    def run(self, num_steps: int, steps: Sequence[int], stop: Callable[[], bool]) -> Tensor:
        """Trains, from each member's own step on; returns the losses [steps, M]. `stop` is asked after each step."""
        array = self._array
        feed = Feed(self.jobs, steps, batch=self.batch, device=self.device)
        if self.mode == "fastest" and can_run_alone(array, self.options):
            found = run_alone(array, self.jobs[0], feed, self.options, num_steps=num_steps, stop=stop)
            self.clock += len(found)
            return found
        losses: list[Tensor] = []
        for _ in range(num_steps):
            batch = feed.take()
            if self._step is None:
                self._step = self._recorded(batch)
            # Kept on the device: reading them here would wait for every step. The next step overwrites its own.
            losses.append(self._step(batch.inputs, batch.target).clone())
            for schedule in array.schedulers:
                schedule.step()
            if stop():
                break
        self.clock += len(losses)
        return torch.stack(losses).cpu()

    def _recorded(self, batch: Batch) -> RecordedStep:
        array = self._array
        return RecordedStep(
            array,
            array.optimizers[0],
            self.jobs[0].loss,
            batch.inputs,
            batch.target,
            per_member=batch.per_member,
            autocast=self.options.autocast_dtype,
            max_norm=self.options.clip_norm,
            scaler=array.scalers[0] if array.scalers else None,
            compiled=self.options.compiled,
            must_record=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """The whole array, in the memory of the host."""
        state: dict[str, Any] = in_host_memory(self._array.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Everything as it was; the same trials must be in their places."""
        self._array.load_state_dict(state)
        self._array.optimizers[0].zero_grad()
        self._step = None

    @property
    def _array(self) -> FusedArray:
        assert self.array is not None, "no trial was ever placed"
        return self.array


def fresh_state(job: Job, model: nn.Module) -> dict[str, Any]:
    """A member's checkpoint before its first step, from torch's own optimizer and schedule."""
    optimizer = job.optimizer(model.parameters())
    schedulers = [job.scheduler(optimizer)] if job.scheduler else []
    device = next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))
    return {
        "schema_version": SCHEMA_VERSION,
        "state": {key: tensor.detach().clone() for key, tensor in model.state_dict().items()},
        # After the schedule was made: it may have changed the rate for the first step.
        "optimizers": [optimizer.state_dict()],
        "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "stream": torch.Generator(device).manual_seed(job.seed).get_state(),
    }


def in_host_memory(tree: Any) -> Any:
    """The same structure with all tensors on the CPU."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), tree)
