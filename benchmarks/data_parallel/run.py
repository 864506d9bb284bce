"""Step time of Burstpool's data parallelism over PyTorch DDP's: same model, same processes, one run.

    python benchmarks/data_parallel/run.py                    2 gloo processes on the CPU
    python benchmarks/data_parallel/run.py --device cuda      1 NCCL process: CUDA graphs against eager DDP

Both train the same job on the same samples, loaded beforehand, in turns of some steps each, so that whatever else the
machine does hits both alike. Prints one JSON line: for each model the median step times and their ratio (median over
the turns of ours divided by DDP's next to it), and the worst ratio.
"""

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data import default_collate

from burstpool.cluster.cores import claim_core
from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine
from burstpool.job import Job, load_job, model_arguments
from burstpool.run.even import even_plan
from burstpool.run.loading import needed_ranges
from burstpool.run.options import RunOptions
from burstpool.run.order import DataOrder
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.schedule.lower import lower

_TIMEOUT_S = 120.0
_BATCHES = 4
"""Different batches that steps take in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained."""

    source: str
    settings: dict[str, Any]
    batch: int
    """Samples a step over all processes."""
    steps: int
    """A turn."""


CPU_MODELS = (
    Model(source="zoo:tiny_vgg", settings={}, batch=64, steps=20),
    Model(source="zoo:vgg16", settings={"image_size": 32, "num_classes": 10, "width": 16}, batch=16, steps=4),
    Model(source="zoo:gpt_small", settings={"width": 128, "layers": 4, "heads": 4, "vocabulary": 1000, "tokens": 64},
          batch=8, steps=4),
)  # fmt: skip
CUDA_MODELS = (
    Model(source="zoo:tiny_vgg", settings={}, batch=64, steps=50),
    Model(source="zoo:resnet50", settings={}, batch=32, steps=10),
    Model(source="zoo:gpt_small", settings={"tokens": 256}, batch=8, steps=10),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the workers are told."""

    models: Sequence[Model]
    turns: int
    device: str
    cuda_graphs: bool


def compare(place: Place, task: Task) -> list[dict[str, Any]]:
    """What every worker runs; rank 0's answer counts."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if task.device == "cpu":
        claim_core(num_workers=place.num_workers)  # as the worker does; DDP gets the same core
    timeout = timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore(place.host, place.port, is_master=False, timeout=timeout)
    if task.device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if task.device == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.num_workers,
        timeout=timeout,
    )
    try:
        return [_compare_model(place, task, model) for model in task.models]
    finally:
        dist.destroy_process_group()


def _compare_model(place: Place, task: Task, model: Model) -> dict[str, Any]:
    job = dataclasses.replace(load_job(model.source, model.settings), batch=model.batch)
    on = torch.device("cuda", 0) if task.device == "cuda" else torch.device("cpu")
    ours = _burstpool(place, task, job, on)
    theirs = _ddp(place, job, on)
    for step in (ours, theirs):
        _turn(step, max(model.steps // 2, 5), on)
    times: dict[str, list[float]] = {"burstpool": [], "ddp": []}
    for turn in range(task.turns):
        order = [("burstpool", ours), ("ddp", theirs)]
        for name, step in order if turn % 2 == 0 else reversed(order):
            times[name].append(_turn(step, model.steps, on))
    ratios = [a / b for a, b in zip(times["burstpool"], times["ddp"], strict=True)]
    return {
        "model": model.source,
        "settings": model.settings,
        "batch": model.batch,
        "burstpool_step_s": statistics.median(times["burstpool"]),
        "ddp_step_s": statistics.median(times["ddp"]),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def _turn(step: Callable[[], None], steps: int, on: torch.device) -> float:
    """Mean seconds of a step, all processes starting together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    if on.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def _burstpool(place: Place, task: Task, job: Job, on: torch.device) -> Callable[[], None]:
    graph = trace_job(job).graph
    plan = even_plan(graph, num_devices=place.num_workers, batch=job.batch, name=job.name)
    control = dist.group.WORLD
    assert control is not None
    backend = "nccl" if on.type == "cuda" else "gloo"
    seat = Seat(device=place.rank, on=on, backend=backend, control=control, doing=place.doing)
    options = RunOptions(
        device=task.device, batch_norm="local", dropout="local", timeout_s=_TIMEOUT_S, cuda_graphs=task.cuda_graphs
    )
    executor, loader = set_up(job, plan, lower(plan, graph), options, seat)
    batches = [loader.load() for _ in range(_BATCHES)]
    steps = itertools.count()

    def step() -> None:
        number = next(steps)
        executor.run(number, batches[number % _BATCHES])

    return step


def _ddp(place: Place, job: Job, on: torch.device) -> Callable[[], None]:
    model = DistributedDataParallel(job.build_model().train().to(on))
    optimizer = job.optimizer(model.parameters())
    order = DataOrder(len(job.data), samples_per_step=job.batch, seed=job.seed)
    graph = trace_job(job).graph
    plan = even_plan(graph, num_devices=place.num_workers, batch=job.batch, name=job.name)
    ((first, last),) = needed_ranges(plan, graph, place.rank)

    batches = [
        pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: tensor.to(on),
            default_collate([job.data[i] for i in order.take()[first:last].tolist()]),
        )
        for _ in range(_BATCHES)
    ]
    steps = itertools.count()

    def step() -> None:
        inputs, target = batches[next(steps) % _BATCHES]
        args, kwargs = model_arguments(inputs)
        loss = job.loss(model(*args, **kwargs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--model", action="append", help="only models whose name contains this")
    parser.add_argument("--no-graphs", action="store_true", help="on CUDA: eager against eager")
    options = parser.parse_args()
    models = CUDA_MODELS if options.device == "cuda" else CPU_MODELS
    chosen = [m for m in models if not options.model or any(part in m.source for part in options.model)]
    task = Task(models=chosen, turns=options.turns, device=options.device, cuda_graphs=not options.no_graphs)
    num_workers = 1 if options.device == "cuda" else 2
    workers = LocalEngine().start(compare, task, num_workers=num_workers, silence_s=900)
    try:
        while (results := workers.results()) is None:
            workers.poll(1.0)
    finally:
        workers.terminate()
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} CPU cores"
    report = {
        "benchmark": "data_parallel",
        "ratio": max(entry["ratio"] for entry in results[0]),
        "models": results[0],
        "num_processes": num_workers,
        "device": device,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
