"""Cases of training that tests run in worker processes, and the plain PyTorch loop that they are compared with."""

import copy
import dataclasses
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_graphs import emulate
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from burstpool.engine.base import Place
from burstpool.job import Job, load_job, model_arguments
from burstpool.model.graph import LayerGraph
from burstpool.model.traced import TracedModel
from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.run.batch_norm import exact_batch_norm
from burstpool.run.holdings import state_tensors
from burstpool.run.options import RunOptions
from burstpool.run.order import DataOrder
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.schedule.actions import Schedule


class Doubled(Dataset[Any]):
    """The same samples with 64-bit floats, so that only the order of sums separates two ways to train."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, self.data[index]
        )


def double_model(build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return build().double()


def double_job(source: str, **settings: Any) -> Job:
    return in_double(load_job(source, settings))


def in_double(job: Job) -> Job:
    return dataclasses.replace(job, model=partial(double_model, job.model), data=Doubled(job.data))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the executor."""

    name: str
    job: Job
    plan: Plan
    schedule: Schedule
    options: RunOptions = field(default_factory=partial(RunOptions, timeout_s=60))
    steps: int = 50
    captured: bool = False
    """Whether steps are captured and replayed, in an emulation of CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one worker was left with."""

    state: dict[str, torch.Tensor]
    losses: list[float | None]
    is_captured: bool


@dataclass(frozen=True, kw_only=True)
class BatchNormCheck:
    """Batch norm over devices that hold so many samples each, against torch's over all of them."""

    num_samples: tuple[int, ...]
    shape: tuple[int, ...]
    affine: bool = True
    tracked: bool = True

    def run(self, place: Place) -> float:
        """The largest difference in outputs, gradients and running statistics, relative to their size."""
        group = dist.new_group(list(range(len(self.num_samples))))
        if place.rank >= len(self.num_samples):
            return 0.0
        torch.manual_seed(0)
        start = sum(self.num_samples[: place.rank])
        own = slice(start, start + self.num_samples[place.rank])
        x = 1e3 + torch.randn(sum(self.num_samples), *self.shape, dtype=torch.float64)
        gradient = torch.randn_like(x)
        whole = self._results(torch.ops.aten.batch_norm.default, x, gradient)
        parts = self._results(exact_batch_norm(group, self.num_samples), x[own], gradient[own])
        for weight_or_bias in (2, 3):  # the executor adds these up with all other gradients
            if parts[weight_or_bias] is not None:
                dist.all_reduce(parts[weight_or_bias], group=group)
        expected = [whole[0][own], whole[1][own], *whole[2:]]
        pairs = [(a, b) for a, b in zip(parts, expected, strict=True) if a is not None]
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)

    def _results(self, operator: Any, x: torch.Tensor, gradient: torch.Tensor) -> list[Any]:
        channels = self.shape[0]
        x = x.clone().requires_grad_()
        weight = torch.linspace(1, 2, channels).double().requires_grad_() if self.affine else None
        bias = torch.linspace(-1, 1, channels).double().requires_grad_() if self.affine else None
        mean = torch.full((channels,), 900.0, dtype=torch.float64) if self.tracked else None
        var = torch.full((channels,), 2.0, dtype=torch.float64) if self.tracked else None
        y = operator(x, weight, bias, mean, var, True, 0.1, 1e-5, False)
        y.backward(gradient)
        gradients = [None if p is None else p.grad for p in (weight, bias)]
        return [y.detach(), x.grad, *gradients, mean, var]


def run_cases(place: Place, file: str) -> list[Any]:
    """Runs all pickled cases one after the other in the same processes: starting these takes longer than training."""
    cases: Sequence[Case | BatchNormCheck] = pickle.loads(Path(file).read_bytes())
    torch.set_num_threads(1)
    store = dist.TCPStore(place.host, place.port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=place.rank, world_size=place.num_workers, timeout=timedelta(seconds=60)
    )
    try:
        traces: dict[str, TracedModel] = {}
        return [_run_case(place, case, traces) if isinstance(case, Case) else case.run(place) for case in cases]
    finally:
        dist.destroy_process_group()


def _run_case(place: Place, case: Case, traces: dict[str, TracedModel]) -> Outcome:
    family = case.name.partition("/")[0]
    if family not in traces:
        traces[family] = trace_job(case.job, fallback=case.options.fallback)
    traced = copy.copy(traces[family])
    traced.model = case.job.build_model().train()
    seat = Seat(device=place.rank, on=torch.device("cpu"), backend="gloo", control=dist.group.WORLD, doing=place.doing)
    executor, loader = set_up(case.job, case.plan, case.schedule, case.options, seat, traced=traced)
    if case.captured:
        emulate(executor)
    losses = []
    for step in range(case.steps):
        loss = executor.run(step, loader.load())
        losses.append(None if loss is None else loss.item())
    executor.links.flush()
    model, keys = executor.part.traced.model, executor.part.holdings.of(place.rank)
    state = {key: tensor.detach().clone() for key, tensor in state_tensors(model, keys).items()}
    executor.part.groups.close()
    return Outcome(state=state, losses=losses, is_captured=executor.is_captured)


def train_alone(
    job: Job, *, batch: int, steps: int, num_minibatches: int = 1, clip_norm: float | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What anyone would write in PyTorch: the state dict and the losses after so many steps."""
    torch.set_num_threads(1)
    model = job.build_model().train()
    optimizer = job.optimizer(model.parameters())
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    order = DataOrder(len(job.data), samples_per_step=batch * num_minibatches, seed=job.seed)
    losses = []
    for _ in range(steps):
        indices = order.take()
        total = 0.0
        optimizer.zero_grad()
        for first in range(0, len(indices), batch):
            inputs, target = default_collate([job.data[i] for i in indices[first : first + batch].tolist()])
            args, kwargs = model_arguments(inputs)
            loss = job.loss(model(*args, **kwargs), target) / num_minibatches
            loss.backward()
            total += loss.item()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}, losses


def make_plan(
    graph: LayerGraph,
    groups: Sequence[tuple[int, Sequence[int]]],
    *,
    num_devices: int,
    batch: int,
    num_minibatches: int = 1,
) -> Plan:
    """Blocks that start at these layers and run, evenly split, on these devices."""
    names = [layer.name for layer in graph.layers]
    edges = [start for start, _ in groups] + [len(names)]
    blocks = tuple(
        PlannedBlock(name=names[start], layers=tuple(names[start:stop]), shares=even_shares(batch, tuple(devices)))
        for (start, devices), stop in zip(groups, edges[1:], strict=True)
    )
    return Plan(
        model=graph.model,
        strategy="test",
        num_devices=num_devices,
        batch=batch,
        blocks=blocks,
        num_minibatches=num_minibatches,
    )


def cut_evenly(graph: LayerGraph, num_blocks: int) -> list[int]:
    count = len(graph.layers)
    return sorted({index * count // num_blocks for index in range(min(num_blocks, count))})
