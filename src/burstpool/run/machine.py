"""This machine as a cluster, with what only the executor can tell: the host's own time in a step of CPU workers.

Detection (`cluster/detect.py`) measures cores and links. A step also takes the time in which the executor looks up what
comes next, hands values on, keeps its records and starts autograd, once a step and once a block. It is the same for
every model, so it is measured on one that computes next to nothing: profiled, predicted and then trained in one
process, as one block and as several. What training takes longer than predicted is the host's.

Takes what `detect` takes. Returns a ClusterSpec. On CUDA, where the device works while the host goes on, nothing is
added.
"""

import dataclasses
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from burstpool.cluster.detect import TIMEOUT_S, DeviceKind, detect, num_cores
from burstpool.cluster.measure import run_workers
from burstpool.cluster.spec import ClusterSpec
from burstpool.engine.base import Place
from burstpool.job import Job
from burstpool.model.graph import LayerGraph
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.profiling.measure import profile_job
from burstpool.run.options import RunOptions
from burstpool.run.progress import StepsReport
from burstpool.run.setup import Seat, trace_job
from burstpool.run.worker import Task, train_at
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import predict

_BATCH, _WIDTH, _LAYERS = 8, 16, 8
_STEPS = 120
_TURNS = 5
"""Other programs disturb one of them and not the median."""
_CORE = "cpu-core"


def this_machine(
    *,
    measure: bool = True,
    device: DeviceKind = "auto",
    num_devices: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> ClusterSpec:
    """What `detect` finds; where CPU workers are measured, with the host's time in a step."""
    found = detect(measure=measure, device=device, num_devices=num_devices, progress=progress)
    if not measure or {part.type for group in found.node_groups for part in group.devices} != {_CORE}:
        return found
    progress("measuring the host's part of a step")
    host = host_times(timeout_s=TIMEOUT_S)
    turns = max(1.0, found.num_devices / num_cores())  # workers beyond the cores take turns
    figures = tuple(
        dataclasses.replace(
            figures,
            host_step_s=float(f"{host.step_s * turns:.4g}"),
            host_block_s=float(f"{host.block_s * turns:.4g}"),
        )
        for figures in found.device_types
    )
    return dataclasses.replace(found, device_types=figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """The host's own seconds."""

    step_s: float
    """A step."""
    block_s: float
    """A block of it, forward and backward."""


def host_times(*, timeout_s: float, turns: int = _TURNS) -> HostTimes:
    """Measured in a process of its own, in a few seconds."""
    (found,) = run_workers(_measure, 1, timeout_s, turns, what="measurement of the host", timeout_s=timeout_s)
    return found  # type: ignore[no-any-return]


class _Noise(torch.utils.data.Dataset[Any]):
    """Some samples."""

    def __init__(self) -> None:
        self._samples = torch.randn(16 * _BATCH, _WIDTH)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index], index % _WIDTH


class _Nothing:
    """Says nothing to anybody."""

    def begin_step(self, step: int) -> None:
        """Ignored."""

    def say(self, phrase: bytes) -> None:
        """Ignored."""


def _small_job() -> Job:
    return Job(
        model=lambda: nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))),
        loss=nn.functional.cross_entropy,
        data=_Noise(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        batch=_BATCH,
    )


def _measure(_rank: int, timeout_s: float, turns: int) -> HostTimes:
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=timeout_s))
    try:
        job = _small_job()
        graph = trace_job(job).graph
        longer = [_longer_s(job, graph) for _ in range(turns)]
    finally:
        dist.destroy_process_group()
    one_s, all_s = (statistics.median(found) for found in zip(*longer, strict=True))
    block_s = max(0.0, (all_s - one_s) / (_LAYERS - 1))
    return HostTimes(step_s=max(0.0, one_s - block_s), block_s=block_s)


def _longer_s(job: Job, graph: LayerGraph) -> tuple[float, float]:
    """How much longer steps of one and of many blocks take than is predicted from a profile taken right before."""
    profile = profile_job(job, batches=[_BATCH], use_cache=False)
    cost = CostModel(profile, ClusterSpec.uniform(_CORE, devices_per_node=1))
    longer = []
    for num_blocks in (1, _LAYERS):
        plan = _plan(graph, num_blocks)
        predicted_s = predict(plan, cost, dataflow(plan, graph)).step_time_s
        assert predicted_s is not None
        longer.append(_trained_s(job, plan, graph) - predicted_s)
    return longer[0], longer[1]


def _plan(graph: LayerGraph, num_blocks: int) -> Plan:
    layers = [layer.name for layer in graph.layers]
    each = len(layers) // num_blocks
    return Plan(
        model=graph.model,
        strategy="data",
        num_devices=1,
        batch=_BATCH,
        blocks=tuple(
            PlannedBlock(
                name=layers[first], layers=tuple(layers[first : first + each]), shares=even_shares(_BATCH, (0,))
            )
            for first in range(0, len(layers), each)
        ),
    )


def _trained_s(job: Job, plan: Plan, graph: LayerGraph) -> float:
    """Median seconds of a step, the first third left out."""
    reports: list[StepsReport] = []
    doing, control = _Nothing(), dist.group.WORLD
    assert control is not None
    place = Place(
        rank=0,
        num_workers=1,
        host="localhost",
        port=0,
        local_rank=0,
        num_local=1,
        doing=doing,
        report=reports.append,
        stop_asked=lambda: False,
    )
    seat = Seat(device=0, on=torch.device("cpu"), backend="gloo", control=control, doing=doing)
    with tempfile.TemporaryDirectory(prefix="burstpool-") as folder:
        task = Task(
            job=job,
            plan=plan,
            schedule=lower(plan, graph),
            options=RunOptions(checkpoint_every=0, timeline_steps=0),
            steps=_STEPS,
            checkpoints=os.path.join(folder, "checkpoints"),
        )
        train_at(seat, place, task)
    times = [time_s for report in reports for time_s in report.times_s]
    return statistics.median(times[_STEPS // 3 :])
