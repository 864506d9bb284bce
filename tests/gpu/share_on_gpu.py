"""What the tests of sharing a GPU have in common: jobs at work there, and alone."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from burstpool.data import digits
from burstpool.engine.base import Place
from burstpool.errors import CaptureError
from burstpool.job import Job, load_job
from burstpool.run.graphs import WARM_UP_STEPS
from burstpool.run.torchrun import Silent
from burstpool.run.worker import JobSource
from burstpool.share.budget import Budget
from burstpool.share.fused import FusedReport, FusedTask, fused_work
from burstpool.share.gpu.at_work import BackgroundWork, JobAtWork
from burstpool.share.gpu.feeding import Feeder
from burstpool.share.gpu.graph_steps import GraphStep
from burstpool.share.gpu.loop import SharedGpu, streams

STEPS = 120


def at_work(source: str, control: dist.ProcessGroup, stream: torch.cuda.Stream, job: Job | None = None) -> JobAtWork:
    """A zoo job, or `job` in its place."""
    own = job or load_job(source)
    steps = GraphStep(own, stream=stream, control=control, piece_s=1e-4)
    feeder = Feeder(job or JobSource(source=source, settings={}), own, hang_s=3.0, memory_bytes=1 << 30)
    return JobAtWork(source, steps, feeder)


def start_background(work: JobAtWork) -> BackgroundWork:
    work.start()
    return BackgroundWork(work)


def alone(
    source: str,
    control: dist.ProcessGroup,
    steps: int = STEPS + WARM_UP_STEPS,
    job: Job | None = None,
    *,
    captured: bool = True,
) -> list[list[float]]:
    """Losses of so many steps."""
    high, _ = streams(torch.device("cuda", 0))
    work = at_work(source, control, high, job)
    work.start() if captured else start_eagerly(work)
    work.read(all_of_them=True)
    SharedGpu(work, (), Budget()).run(steps - len(work.losses))
    work.feeder.close()
    return work.losses


def start_eagerly(work: JobAtWork) -> None:
    """As `share_on_cuda` starts a foreground that cannot be captured."""
    with pytest.raises(CaptureError):
        work.start()
    assert isinstance(work.steps, GraphStep)
    work.steps.run_uncaptured()
    work.read(all_of_them=True)


class Wide(torch.nn.Module):
    """Weights of 64 MiB a layer, so that they can be told from what libraries keep for themselves."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 4096)
        self.norm = torch.nn.BatchNorm1d(4096)
        self.hidden = torch.nn.ModuleList(torch.nn.Linear(4096, 4096) for _ in range(num_layers))
        self.drop = torch.nn.Dropout(0.1)
        self.last = torch.nn.Linear(4096, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(images.flatten(1))).relu()
        for layer in self.hidden:
            x = self.drop(layer(x).relu())
        found: torch.Tensor = self.last(x)
        return found


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


def synchronising_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Which no graph can hold."""
    loss = torch.nn.functional.cross_entropy(output, target)
    return loss * (2.0 if loss.item() < 0 else 1.0)


def wide_job(
    *, num_layers: int = 2, lr: float = 1e-3, adam: bool = False, uncapturable: bool = False, name: str = "wide"
) -> Job:
    return Job(
        name=name,
        model=partial(Wide, num_layers),
        loss=synchronising_loss if uncapturable else torch.nn.functional.cross_entropy,
        data=digits(),
        optimizer=partial(torch.optim.AdamW, lr=lr) if adam else partial(torch.optim.SGD, lr=lr, momentum=0.9),
        scheduler=halved if adam else None,
        batch=32,
    )


def say(what: object) -> None:
    """For whoever reads why a test failed."""
    sys.stdout.write(f"{what}\n")


ARRAY = ({"lr": "0.1"}, {"lr": "0.01"})


def array_alone(source: str, settings: tuple[dict[str, str], ...], steps: int, folder: Path) -> list[list[float]]:
    """The array by itself, in this process."""
    found: list[FusedReport] = []
    place = Place(
        rank=0, num_workers=1, host="", port=0, local_rank=0, num_local=1,
        doing=Silent(), report=found.append, stop_asked=lambda: False,
    )  # fmt: skip
    checkpoint = str(folder / "array.pt")
    task = FusedTask(
        source=source, settings=settings, steps=steps, checkpoint=checkpoint, checkpoint_every=1000, device="cuda"
    )
    fused_work(place, task)
    return [list(report.losses) for report in found]
