"""`burstpool train`: trains a job on the devices of this machine.

Takes a job and a plan file, or a number of devices; these are then measured, together with the job's layers, so that
the data-parallel planner can decide (`--no-measure` splits evenly at once). Shows loss, samples/s and utilisation while
it runs, and writes a run folder. With `--resume` a run goes on as it was: its job, settings, plan, options and steps
hold unless others are given. With `--json`, one JSON object says what came of it.
"""

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from burstpool.artifact import json_line
from burstpool.cli.fallback import Fallback, checked_fallback
from burstpool.cli.given import given_options
from burstpool.cli.json_alone import json_alone
from burstpool.cli.progress import progress_bar
from burstpool.cli.show import seconds
from burstpool.errors import RunError
from burstpool.limits import LARGEST_BATCH

if TYPE_CHECKING:
    from burstpool.job import Job
    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan
    from burstpool.run.options import RunOptions
    from burstpool.run.outcome import Result
    from burstpool.run.progress import Observer, Progress

_FIELDS = {"keep": "keep_checkpoints", "timeout": "timeout_s"}
"""Option → the field of RunOptions, where it is called otherwise."""


def train(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]", help="job.py, job.py:function or zoo:NAME; with --resume the run's.", show_default=False
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file; burstpool plan writes one.")] = None,
    devices: Annotated[int | None, typer.Option(help="Data parallelism on so many devices.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="The step at which training ends.", min=1)] = 100,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples a step over all devices; the job's if left out.", min=1, max=LARGEST_BATCH),
    ] = None,
    minibatches: Annotated[int, typer.Option(help="With --devices: minibatches a step; gradients add up.", min=1)] = 1,
    resume: Annotated[
        Path | None, typer.Option(help="A run folder to go on with, as it was but for what is given.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A hyper-parameter: name=value.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Clip gradients to this norm over the whole model.")] = None,
    batch_norm: Annotated[str, typer.Option(help="exact, as on one device; or local, faster.")] = "exact",
    dropout: Annotated[str, typer.Option(help="exact, whatever the plan; or local, faster.")] = "exact",
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Go on when the loss is not finite.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.", min=0)] = 200,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.", min=1)] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds a worker may be silent.")] = 300.0,
    fallback: Fallback = None,
    cuda_graphs: Annotated[bool, typer.Option(help="On CUDA: replay steps as graphs.")] = True,
    measure: Annotated[bool, typer.Option(help="With --devices: measure layers and links to plan and predict.")] = True,
    run_folder: Annotated[Path | None, typer.Option(help="Where to write; runs/NAME-TIME if left out.")] = None,
    prepare: Annotated[bool, typer.Option("--prepare", help="Only write the run folder, for torchrun.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as one JSON object.")] = False,
) -> None:
    """Train a job by a plan, or on a number of devices."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from burstpool.job import load_job, parse_settings
    from burstpool.run import trainer

    wanted = {
        "device": device,
        "autocast": autocast,
        "clip_norm": clip_norm,
        "batch_norm": batch_norm,
        "dropout": dropout,
        "allow_nan": allow_nan,
        "checkpoint_every": checkpoint_every,
        "keep_checkpoints": keep,
        "timeout_s": timeout,
        "fallback": checked_fallback(fallback),
        "cuda_graphs": cuda_graphs,
    }
    given = parse_settings(settings or [])
    if resume is None:
        options = _options(**wanted)
    else:
        on_command_line = {_FIELDS.get(name, name) for name in given_options(context)}
        with json_alone(as_json):
            earlier = _earlier(resume, source)
        source, given = earlier.source, {**earlier.settings, **given}
        options = _options(**{**earlier.options, **{n: value for n, value in wanted.items() if n in on_command_line}})
        steps = steps if "steps" in on_command_line else earlier.steps
    if source is None:
        raise RunError("say which job to train: burstpool train job.py --devices 2")
    with json_alone(as_json):
        job = load_job(source, given)
        found, inputs = _plan(job, plan, devices, resume, batch, options, measure=measure)
    if minibatches > 1 and plan is not None:
        raise RunError("--minibatches goes with --devices; a plan file says how many minibatches a step has")
    if minibatches > 1:
        found = replace(found, num_minibatches=minibatches, step_time_s=None, device_seconds=None)
    common: dict[str, Any] = {
        "steps": steps,
        "run_folder": run_folder,
        "resume": resume,
        "settings": given,
        "options": options,
        "inputs": inputs,
    }
    if prepare:
        with json_alone(as_json):
            _, start = trainer.prepare(source, found, **common)
        path = str(start.folder.path)
        command = f"torchrun --nproc-per-node {found.num_devices} -m burstpool.run.worker {shlex.quote(path)}"
        print(json_line({"run_folder": path, "command": command}) if as_json else command)
        return
    with json_alone(as_json), _progress(job.name) as observer:
        try:
            result = trainer.train(source, found, observer=observer, **common)
        except trainer.InterruptedRun as error:
            again = f"burstpool train --resume {shlex.quote(str(error.folder))}"
            print(f"burstpool: {error}; go on with: {again}", file=sys.stderr)
            raise
    if as_json:
        print(json_line(in_short(result, found)))
        return
    _show(result, found, Console())


def in_short(result: "Result", plan: "Plan") -> dict[str, Any]:
    """What scripts want to know of a run."""
    timeline = result.timeline
    span_s = timeline.stop_s - timeline.start_s if timeline is not None else 0.0
    step_time_s = result.step_time_s
    return {
        "run_folder": str(result.folder),
        "steps": result.losses[-1].step + 1,
        "loss": result.losses[-1].loss,
        "step_time_s": step_time_s,
        "predicted_step_time_s": plan.step_time_s,
        "samples_per_s": plan.batch * plan.num_minibatches / step_time_s,
        "num_devices": plan.num_devices,
        "strategy": plan.strategy,
        "utilisation": sum(timeline.all_busy_s()) / (span_s * len(plan.devices)) if timeline and span_s else None,
        "checkpoint": str(result.checkpoint),
        "weights": str(result.weights),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Earlier:
    """What a run was that is gone on with."""

    source: str
    settings: dict[str, Any]
    steps: int
    options: dict[str, Any]


def _earlier(folder: Path, source: str | None) -> _Earlier:
    """Settings are those of the run's own job; another one that is named has its own."""
    from burstpool.job import from_anywhere, from_record
    from burstpool.run.folder import RunFolder, RunRecord
    from burstpool.run.options import RunOptions

    found = RunFolder.open(folder)
    record, options = RunRecord.load(found.record), RunOptions.load(found.options)
    if source is None and not record.source:
        raise RunError(f"{folder} holds a job that was made in a program; go on with it there: train(job, resume=…)")
    same = source is None or from_anywhere(source) == record.source
    return _Earlier(
        source=source or record.source,
        settings=from_record(record.source, record.settings) if same else {},
        steps=record.steps,
        options={field.name: getattr(options, field.name) for field in fields(options)},
    )


def _options(**fields: Any) -> "RunOptions":
    import pydantic

    from burstpool.artifact import first_line
    from burstpool.run.options import RunOptions

    try:
        return pydantic.TypeAdapter(RunOptions).validate_python(fields)
    except pydantic.ValidationError as error:
        field, colon, what = first_line(error).partition(":")
        option = next((option for option, name in _FIELDS.items() if name == field), field.replace("_", "-"))
        raise RunError(f"--{option}{colon}{what}") from None


def _plan(
    job: "Job",
    plan_file: Path | None,
    num_devices: int | None,
    resume: Path | None,
    batch: int | None,
    options: "RunOptions",
    *,
    measure: bool,
) -> "tuple[Plan, PlanInputs | None]":
    """The plan that is asked for, and what it was made from."""
    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan

    if plan_file is not None and num_devices is not None:
        raise RunError("give either --plan or --devices, not both")
    if plan_file is None and num_devices is None:
        if resume is None:
            raise RunError("say on which devices: --devices N, or --plan plan.json")
        plan_file = resume / "plan.json"
    if plan_file is None:
        assert num_devices is not None
        return _data_parallel(job, num_devices, batch or job.batch, options, measure=measure)
    found = Plan.load(plan_file)
    if batch is not None and batch != found.batch:
        raise RunError(f"--batch {batch} is not the plan's {found.batch}; plan again with --batch {batch}")
    beside = PlanInputs.path(plan_file)
    return found, PlanInputs.load(beside) if beside.is_file() else None


def _data_parallel(
    job: "Job", num_devices: int, batch: int, options: "RunOptions", *, measure: bool
) -> "tuple[Plan, PlanInputs | None]":
    from burstpool.cluster.detect import check_workers
    from burstpool.run.even import even_plan
    from burstpool.run.setup import trace_job

    check_workers(num_devices)
    traced = trace_job(job, fallback=options.fallback)
    if not measure or options.device != "cpu":
        return even_plan(traced.graph, num_devices=num_devices, batch=batch, name=job.name), None
    from burstpool.plan.data import plan as plan_data
    from burstpool.plan.inputs import PlanInputs
    from burstpool.profiling.measure import profile
    from burstpool.run.machine import this_machine
    from burstpool.run.order import check_enough

    check_enough(len(job.data), samples_per_step=batch)  # type: ignore[arg-type]
    _, target = job.samples(2)
    share = -(-batch // num_devices)
    with progress_bar(f"measuring {job.name}") as progress:
        cluster = this_machine(device="cpu", num_devices=num_devices, progress=lambda what: progress(0, 1, what))
        measured = profile(
            traced,
            loss=job.loss,
            target=target,
            name=job.name,
            job=job,
            batches=sorted({max(1, batch // num_devices), share}),
            threads=1,
            autocast=options.autocast,
            progress=progress,
        )
    inputs = PlanInputs(cluster=cluster, profiles=(measured,), graph=traced.graph)
    return plan_data(inputs.profiles, cluster, batch=batch, graph=traced.graph), inputs


@contextmanager
def _progress(name: str) -> "Iterator[Observer]":
    with progress_bar(f"training {name}") as tell:

        def observe(progress: "Progress") -> None:
            what = f"loss {progress.loss:.4g}, {progress.samples_per_s:,.0f} samples/s"
            if progress.utilisation is not None:
                what += f", devices {progress.utilisation:.0%} busy"
            tell(progress.step, progress.steps, what)

        yield observe


def _show(result: "Result", plan: "Plan", console: Console) -> None:
    short = in_short(result, plan)
    line = f"Step {short['steps']}: loss {short['loss']:.4g}; {seconds(short['step_time_s'])} a step"
    if plan.step_time_s:
        line += f" ({seconds(plan.step_time_s)} predicted)"
    line += f", {short['samples_per_s']:,.0f} samples/s"
    if short["utilisation"] is not None:
        line += f", devices {short['utilisation']:.0%} busy"
    console.print(line, highlight=False)
    console.print(f"Run folder: {result.folder}", markup=False, highlight=False)
