"""The jobs of the GPU benchmark: what they are called, how they are captured, how two of them are compared.

Learning rates are next to nothing and one batch is used again and again: what is compared is the GPU, not the loading.
"""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ARRAY_MEMBERS = 16
"""Small models in the fused array."""


@dataclass(frozen=True, slots=True)
class Which:
    """`"vgg16:4"`."""

    name: str
    batch: int

    @classmethod
    def parse(cls, text: str) -> "Which":
        name, batch = text.split(":")
        return cls(name, int(batch))

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}"


class FixedFeeder:
    """One batch again and again: what is compared is the GPU, not the loading."""

    position = None
    """Nowhere in particular: what is trained here is not kept."""

    def __init__(self, job: Any) -> None:
        from torch.utils import _pytree as pytree

        from burstpool.run.loading import Batch, Batches

        batch = Batches(job, ((0, job.batch),), batch=job.batch).load()[0][0]
        inputs, target = pytree.tree_map_only(torch.Tensor, lambda x: x.pin_memory(), (batch.inputs, batch.target))
        self._batch = [[Batch(0, job.batch, inputs, target)]]

    def take(self) -> Any:
        return self._batch

    def used(self, stream: Any) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to end."""


def at_work(which: Which, control: Any, stream: Any, piece_s: float) -> Any:
    """The job, captured."""
    import dataclasses

    from burstpool.job import load_job
    from burstpool.run.options import RunOptions
    from burstpool.share.gpu.array_steps import ArrayStep
    from burstpool.share.gpu.at_work import JobAtWork
    from burstpool.share.gpu.graph_steps import GraphStep

    if which.name == "array":
        settings = {"image_size": 32, "num_classes": 10}
        one = dataclasses.replace(at_rest(load_job("zoo:resnet18", settings)), batch=which.batch)
        work = JobAtWork(
            str(which),
            ArrayStep([one] * ARRAY_MEMBERS, stream=stream, piece_s=piece_s, autocast="bf16"),
            FixedFeeder(one),
        )
    else:
        job = dataclasses.replace(at_rest(load_job(f"zoo:{which.name}")), batch=which.batch)
        options = RunOptions(device="cuda", autocast="bf16")
        steps = GraphStep(job, stream=stream, control=control, piece_s=piece_s, options=options)
        work = JobAtWork(str(which), steps, FixedFeeder(job))
    work.start()
    gc.collect()
    torch.cuda.empty_cache()  # what the eager steps had taken: many processes share the GPU's memory here
    return work


def at_rest(job: Any) -> Any:
    """The job with a learning rate of next to nothing: on one batch again and again it would end in NaN."""
    import dataclasses

    def optimizer(parameters: Any) -> Any:
        made = job.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] = 1e-9
        return made

    return dataclasses.replace(job, optimizer=optimizer, scheduler=None)


def prepare() -> None:
    """What every process sets."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def compared(times: Sequence[float], alone_s: float, kept: float) -> dict[str, float]:
    """The figures of one case."""
    from burstpool.share.step_log import p95

    slowdown = statistics.mean(times) / alone_s
    return {
        "slowdown": slowdown,
        "slowdown_p95": p95(times) / alone_s,
        "kept": kept,
        "sum_of_shares": 1 / slowdown + kept,
        "alone_s": alone_s,
    }
