"""`burstpool plan`: which devices should run which layers, with which samples?

Takes a job, which is traced and, without `--profile`, measured on this machine; or a profile file of any known format.
Prints the predicted step as a picture and the blocks as a table or, with `--json`, the plan in short. `-o plan.json`
writes the plan and, beside it, `plan.inputs.json` with what it was made from, for `burstpool simulate plan.json`.
"""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from burstpool.artifact import json_line
from burstpool.cli.fallback import Fallback, checked_fallback
from burstpool.cli.json_alone import json_alone
from burstpool.cli.progress import progress_bar
from burstpool.cli.show import seconds, size
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError, ProfileError
from burstpool.job import is_job
from burstpool.limits import LARGEST_BATCH
from burstpool.model.graph import LayerGraph
from burstpool.plan import burst, data
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan, PlannedBlock
from burstpool.plan.skyline import describe_burst
from burstpool.plan.strategies import planner
from burstpool.profiling.profile import Profile
from burstpool.report.timeline import Timeline
from burstpool.schedule.draw import draw
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate

if TYPE_CHECKING:
    from burstpool.job import Job

_CPU = re.compile(r"cpu-(?:core|(\d+)-cores)")
"""Device types that this machine's CPU stands for."""
_EXAMPLE_BATCH = 5
"""Samples of a job's data that its model is traced with."""


def plan(
    source: Annotated[str, typer.Argument(metavar="JOB", help="job.py, zoo:NAME, or a profile file.")],
    cluster: Annotated[Path, typer.Option(help="The cluster file; burstpool cluster --detect writes one.")],
    batch: Annotated[
        int | None,
        typer.Option(help="Samples a step over all devices; the job's if left out.", min=1, max=LARGEST_BATCH),
    ] = None,
    strategy: Annotated[str, typer.Option(help="How to use the devices: data or burst.")] = "data",
    burst_limit: Annotated[
        float | None, typer.Option(help="With burst: device-time a step may take over one device's, e.g. 2.0.")
    ] = None,
    profiles: Annotated[
        list[Path] | None, typer.Option("--profile", help="A profile of the job; one a device type.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A hyper-parameter: name=value.")] = None,
    fallback: Fallback = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Guess beyond the measured batches.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan in short as one JSON object.")] = False,
) -> None:
    """Plan which devices run which layers, and predict the step."""
    choose = planner(strategy)  # a wrong name should not cost a minute of measuring
    if burst_limit is not None and strategy != "burst":
        raise PlanError("--burst-limit goes with --strategy burst")
    options: dict[str, Any] = {} if burst_limit is None else {"burst_limit": burst_limit}
    spec = ClusterSpec.load(cluster)
    how = checked_fallback(fallback)
    with json_alone(as_json):
        if is_job(source):
            measured, graph, batch = _from_job(source, settings, profiles, batch, spec, fallback=how)
        else:
            measured, graph, batch = _from_file(source, settings, profiles, batch)
    inputs = PlanInputs(cluster=spec, profiles=measured, graph=graph, extrapolate=extrapolate)
    begin = time.perf_counter()
    found = choose(inputs.profiles, spec, batch=batch, graph=inputs.graph, extrapolate=extrapolate, **options)
    planning_time_s = time.perf_counter() - begin
    if output is not None:
        inputs.save(PlanInputs.path(output))
        found.save(output)
    if as_json:
        print(json_line(in_short(found) | {"planning_time_s": planning_time_s}))
        return
    console = Console()
    show_plan(found, inputs, console)
    if output is not None:
        console.print(f"Written to {output}", markup=False, highlight=False)


def in_short(found: Plan) -> dict[str, Any]:
    """What scripts want to know of a plan."""
    return {
        "model": found.model,
        "strategy": found.strategy,
        "batch": found.batch,
        "num_devices": found.num_devices,
        "num_minibatches": found.num_minibatches,
        "step_time_s": found.step_time_s,
        "device_seconds": found.device_seconds,
        "blocks": [
            {
                "name": block.name,
                "layers": list(block.layers),
                "devices": list(block.devices),
                "samples": [share.num_samples for share in block.shares],
            }
            for block in found.blocks
        ],
    }


def show_plan(found: Plan, inputs: PlanInputs, console: Console) -> None:
    """The predicted step as a picture, the blocks as a table."""
    cost, flow = inputs.cost(), inputs.dataflow(found)
    timeline = simulate(lower(found, flow), cost, flow)
    used = f"{len(found.devices)} of {found.num_devices} devices"
    console.print(Text(f"{found.model}, batch {found.batch}, strategy {found.strategy}: {used}", style="bold"))
    console.print(Text(draw(timeline, width=console.width)), no_wrap=True, crop=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("block", no_wrap=True, overflow="ellipsis")
    for title in ("layers", "devices", "samples a device", "parameters", "forward", "backward"):
        table.add_column(title, justify="right", no_wrap=True)
    for block in found.blocks:
        slowest = max(block.shares, key=lambda share: cost.forward_s(block.layers, share.device, share.num_samples))
        table.add_row(
            Text(block.name),
            str(len(block.layers)),
            str(len(block.shares)),
            _samples(block),
            size(flow.blocks[block.name].parameter_bytes),
            seconds(cost.forward_s(block.layers, slowest.device, slowest.num_samples)),
            seconds(cost.backward_s(block.layers, slowest.device, slowest.num_samples)),
        )
    console.print(table)
    assert found.step_time_s is not None
    assert found.device_seconds is not None
    line = f"A step takes {seconds(found.step_time_s)} and {seconds(found.device_seconds)} of device time (predicted)"
    if found.step_time_s:
        busy = found.device_seconds / (found.step_time_s * len(found.devices))
        line += f": {found.batch / found.step_time_s:,.0f} samples/s, devices {busy:.0%} busy"
    console.print(line, highlight=False)
    if found.strategy == "burst":
        console.print(Text(_beside_data_parallelism(found, inputs, timeline)), highlight=False)


def _beside_data_parallelism(found: Plan, inputs: PlanInputs, timeline: Timeline) -> str:
    """The skyline and the gaps, and what data parallelism and one device would take."""
    options: dict[str, Any] = {"batch": found.batch, "graph": inputs.graph, "extrapolate": inputs.extrapolate}
    alone_s = burst.search(inputs.profiles, inputs.cluster, **options).one_device_seconds
    others = data.plan(inputs.profiles, inputs.cluster, **options)
    return describe_burst(found, timeline, data_parallel=others, one_device_seconds=alone_s)


def _samples(block: PlannedBlock) -> str:
    numbers = {share.num_samples for share in block.shares}
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)}–{max(numbers)}"


Source = tuple[tuple[Profile, ...], LayerGraph | None, int]
"""Profiles, the traced model if there is one, and the batch."""


def _from_file(source: str, settings: list[str] | None, profiles: list[Path] | None, batch: int | None) -> Source:
    if settings:
        raise PlanError("--set goes with a job; a profile's model is what it is")
    if batch is None:
        raise PlanError("give --batch: a profile does not say how many samples a step has")
    return load_profiles([Path(source), *(profiles or [])]), None, batch


def _from_job(
    source: str,
    settings: list[str] | None,
    profiles: list[Path] | None,
    batch: int | None,
    cluster: ClusterSpec,
    *,
    fallback: Literal["modules"] | None,
) -> Source:
    from burstpool.job import load_job, parse_settings
    from burstpool.model.trace import trace  # imports torch, which takes seconds

    job = load_job(source, parse_settings(settings or []))
    batch = batch or job.batch
    example, target = job.samples(_EXAMPLE_BATCH)
    traced = trace(job.build_model().train(), example, fallback=fallback)
    found = load_profiles(profiles) if profiles else (_measure(job, traced, target, cluster, batch),)
    return found, traced.graph, batch


def load_profiles(paths: list[Path]) -> tuple[Profile, ...]:
    """Profiles of any known format."""
    from burstpool.profiling.importers import import_profile

    return tuple(import_profile(path) for path in paths)


def _measure(job: "Job", traced: Any, target: Any, cluster: ClusterSpec, batch: int) -> Profile:
    from burstpool.profiling.measure import profile

    types = sorted({device.type for device in cluster.devices})
    match = _CPU.fullmatch(types[0])
    if len(types) > 1 or match is None:
        raise ProfileError(
            f"only a cluster of CPU workers can be measured here, this one has {', '.join(types)}; measure there "
            "(burstpool profile JOB --device cuda -o profile.json), then give --profile profile.json"
        )
    batches = _batches(batch, cluster.num_devices)
    with progress_bar(f"profiling {job.name}") as progress:
        return profile(
            traced,
            loss=job.loss,
            target=target,
            name=job.name,
            job=job,
            batches=batches,
            threads=int(match[1] or 1),
            progress=progress,
        )


def _batches(batch: int, num_devices: int) -> list[int]:
    """What a device may get: an even share, and powers of two around it."""
    even = {max(1, batch // num_devices), -(-batch // num_devices), batch}
    return sorted(even | {2**power for power in range(batch.bit_length()) if 2**power <= batch})
