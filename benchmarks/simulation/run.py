"""How far is the simulator from what really happens? Predicted over measured step time on CPU workers.

    python benchmarks/simulation/run.py                                all cases, about 10 minutes
    python benchmarks/simulation/run.py --devices 2 --only resnet      a part of them
    burstpool cluster --detect --device cpu --devices 2 -o two.toml    for several calls with one measured machine:
    python benchmarks/simulation/run.py --cluster two.toml --only vgg

Measures the cores and their link; then, in rounds, starts workers for each model, which a few times in turn profile it,
predict its step, train, and note the ratio. A prediction uses nothing of the run it predicts: only what was measured of
the machine at first, and the profile taken just before. The case's error is that of the median ratio over all turns, so
that a disturbance that hits a profile or a run spoils some turns only; a turn in which other programs used the cores is
taken again, whatever came out. Plans are data parallelism, and ones that regroup: the middle of the model on two
devices, its ends on one. At most as many workers as cores. Bar: median error at most 10%, worst 20%, over at least 12
cases. One JSON line at the end.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burstpool import load_job
from burstpool.cluster.detect import num_cores
from burstpool.cluster.spec import ClusterSpec
from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine
from burstpool.job import Job
from burstpool.model.graph import LayerGraph
from burstpool.plan import data
from burstpool.plan.cost import CostModel
from burstpool.plan.dataflow import dataflow
from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.profiling.measure import profile_job
from burstpool.profiling.profile import Profile
from burstpool.run.machine import this_machine
from burstpool.run.options import RunOptions
from burstpool.run.progress import RunLog
from burstpool.run.setup import trace_job
from burstpool.run.worker import Task, joined, train_at
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import predict

_RUN_S = 0.8
"""About how long a run lasts, by its prediction."""
_LEAST_STEPS, _MOST_STEPS = 24, 600
_TURNS = 5
"""Of profiling and training, in each round's processes."""
_OTHERS, _AGAIN = 0.05, 3
"""Cores that other programs may use in a turn; how often one is taken again at most."""
# Exchanges of batch norm and masks of the whole minibatch are not modelled: both local, as DDP has them.
_OPTIONS = RunOptions(batch_norm="local", dropout="local", checkpoint_every=0, timeout_s=120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch and a kind of plan."""

    model: str
    batch: int
    """Samples a step over all devices."""
    settings: dict[str, Any] = field(default_factory=dict)
    regroup: bool = False
    """Whether only the middle of the model runs on all devices."""

    def __str__(self) -> str:
        return f"{self.model}{' regrouped' if self.regroup else ''}"


_TINY = ("tiny_vgg", "tiny_resnet", "tiny_inception", "tiny_lstm", "tiny_transformer")
_GPT = {"width": 128, "layers": 4, "heads": 4, "vocabulary": 1000, "tokens": 64}
CASES = (
    *(Case(model=model, batch=batch) for model in _TINY for batch in (16, 64)),
    Case(model="vgg16", batch=8, settings={"image_size": 32, "num_classes": 10, "width": 16}),
    Case(model="gpt_small", batch=4, settings=_GPT),
)
REGROUPED = tuple(
    Case(model=model, batch=64, regroup=True) for model in ("tiny_vgg", "tiny_resnet", "tiny_transformer")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the workers are told."""

    case: Case
    cluster: ClusterSpec


Times = tuple[float, float]
"""The predicted and the measured step time, in seconds."""


def measure(place: Place, work: Work) -> list[Times]:
    """What every worker runs; all ranks agree."""
    torch.set_num_threads(1)
    job = dataclasses.replace(load_job(f"zoo:{work.case.model}", work.case.settings), batch=work.case.batch)
    graph = trace_job(job).graph
    with joined(place, _OPTIONS) as seat:
        return [_undisturbed(lambda: _turn(work, job, graph, place, seat)) for _ in range(_TURNS)]


def _undisturbed(turn: Callable[[], Times]) -> Times:
    """Takes the turn until other programs keep still; all ranks agree on when."""
    for _ in range(_AGAIN + 1):
        start, busy_s, own_s = time.perf_counter(), _busy_s(), time.process_time()
        times = turn()
        own = torch.tensor(time.process_time() - own_s, dtype=torch.float64)
        dist.all_reduce(own)
        others = torch.tensor((_busy_s() - busy_s - own.item()) / (time.perf_counter() - start))
        dist.broadcast(others, src=0)
        if others <= _OTHERS:
            break
    return times


def _busy_s() -> float:
    """Seconds in which cores did anything, or were taken away by a hypervisor; 0 where the system does not say."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _turn(work: Work, job: Job, graph: LayerGraph, place: Place, seat: Any) -> Times:
    case, cluster = work.case, work.cluster
    shares = {-(-case.batch // cluster.num_devices), *([case.batch] if case.regroup else [])}
    dist.barrier()
    profile = profile_job(job, batches=sorted(shares), use_cache=False)  # on all cores, as the run will be
    profiles: list[Any] = [None] * place.num_workers
    dist.all_gather_object(profiles, profile)
    # Workers that meet in every step go at the pace of the slower core.
    slowest = max(profiles, key=lambda found: found.step_time_s(max(shares)))
    plan = _plan(case, slowest, cluster, graph)
    assert plan.step_time_s is not None
    return plan.step_time_s, _trained_s(job, plan, graph, place, seat)


def _plan(case: Case, profile: Profile, cluster: ClusterSpec, graph: LayerGraph) -> Plan:
    if not case.regroup:
        return data.plan(profile, cluster, batch=case.batch, graph=graph)
    layers = [layer.name for layer in graph.layers]
    first, last = len(layers) // 3, 2 * len(layers) // 3
    parts = [(layers[:first], 1), (layers[first:last], cluster.num_devices), (layers[last:], 1)]
    plan = Plan(
        model=case.model,
        strategy="burst",
        num_devices=cluster.num_devices,
        batch=case.batch,
        blocks=tuple(
            PlannedBlock(name=part[0], layers=tuple(part), shares=even_shares(case.batch, tuple(range(width))))
            for part, width in parts
        ),
    )
    return predict(plan, CostModel(profile, cluster), dataflow(plan, graph))


def _trained_s(job: Job, plan: Plan, graph: LayerGraph, place: Place, seat: Any) -> float:
    """Median step time of a run, the first third left out."""
    assert plan.step_time_s is not None
    steps = max(_LEAST_STEPS, min(_MOST_STEPS, round(_RUN_S / plan.step_time_s)))
    reports: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders, src=0)
        task = Task(
            job=job, plan=plan, schedule=lower(plan, graph), options=_OPTIONS, steps=steps, checkpoints=folders[0]
        )
        train_at(seat, dataclasses.replace(place, report=reports.append, stop_asked=lambda: False), task)
        dist.barrier()
    gathered: list[Any] = [None] * place.num_workers
    dist.all_gather_object(gathered, reports)
    log = RunLog(plan, steps=steps, first_step=0)
    for rank, found in enumerate(gathered):
        for report in found:
            log.add(rank, report)
    return statistics.median(loss.step_time_s for loss in log.losses[steps // 3 :])


def run(cases: Sequence[Case], cluster: ClusterSpec, rounds: int) -> list[dict[str, Any]]:
    """All cases on one cluster, round after round."""
    found = [[_once(Work(case=case, cluster=cluster)) for case in cases] for _ in range(rounds)]
    return [_row(case, cluster, [x for each in found for x in each[i]]) for i, case in enumerate(cases)]


def _once(work: Work) -> list[Times]:
    """In processes of its own, as a run is."""
    workers = LocalEngine().start(measure, work, num_workers=work.cluster.num_devices, silence_s=300)
    try:
        while (results := workers.results()) is None:
            workers.poll(1.0)
    finally:
        workers.terminate()
    return results[0]  # type: ignore[no-any-return]


def _row(case: Case, cluster: ClusterSpec, found: Sequence[Times]) -> dict[str, Any]:
    ratios = [predicted_s / measured_s for predicted_s, measured_s in found]
    return {
        "case": str(case),
        "devices": cluster.num_devices,
        "batch": case.batch,
        "predicted_ms": round(statistics.median(predicted_s for predicted_s, _ in found) * 1e3, 3),
        "measured_ms": round(statistics.median(measured_s for _, measured_s in found) * 1e3, 3),
        "error": round(statistics.median(ratios) - 1, 3),
        "errors": [round(ratio - 1, 3) for ratio in ratios],
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--devices", type=int, action="append", help="only with so many workers")
    parser.add_argument("--cluster", action="append", help="instead of measuring, a file measured just before")
    parser.add_argument("--only", action="append", help="only cases whose name contains this")
    options = parser.parse_args()
    rows = []
    for cluster in _clusters(options):
        wanted = [*CASES, *(REGROUPED if cluster.num_devices > 1 else ())]
        cases = [case for case in wanted if not options.only or any(part in str(case) for part in options.only)]
        rows += run(cases, cluster, options.rounds)
    for row in rows:
        print(*(f"{row[key]!s:>{width}}" for key, width in _COLUMNS.items()), row["errors"])
    errors = sorted(abs(row["error"]) for row in rows)
    print(json.dumps({"cases": rows, "median_error": statistics.median(errors), "worst_error": errors[-1]}))


def _clusters(options: argparse.Namespace) -> Iterator[ClusterSpec]:
    if options.cluster:
        yield from map(ClusterSpec.load, options.cluster)
        return
    for devices in options.devices or range(1, min(num_cores(), 2) + 1):
        yield this_machine(device="cpu", num_devices=devices)


_COLUMNS = {"case": 28, "devices": 2, "batch": 4, "predicted_ms": 9, "measured_ms": 9, "error": 7}

if __name__ == "__main__":
    main()
