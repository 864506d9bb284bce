"""`burstpool share`: trains a foreground job at a promised speed, and background jobs in what it leaves.

Takes the foreground as `train` does: a job and a plan file, or a number of devices (one, if neither is given). Each
`--with` names a background job with its settings; several values of a setting make a fused array:

    burstpool share zoo:tiny_vgg --with 'zoo:tiny_mlp lr=0.1,0.03,0.01' --slowdown 1.10 --steps 500

Shows the foreground's speed, its slowdown and the background's throughput while it runs; writes a run folder. With
`--json`, one JSON object says what came of it.
"""

import itertools
import math
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from burstpool.artifact import json_line
from burstpool.cli.fallback import Fallback, checked_fallback
from burstpool.cli.json_alone import json_alone
from burstpool.cli.progress import progress_bar
from burstpool.errors import RunError, ShareError
from burstpool.limits import LARGEST_BATCH
from burstpool.share.base import background_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan
    from burstpool.share.base import Background, ShareOutcome, ShareProgress
    from burstpool.share.budget import Gap


def share(
    foreground: Annotated[str, typer.Argument(metavar="FOREGROUND", help="job.py, job.py:function or zoo:NAME.")],
    backgrounds: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="A background job and its settings: 'job.py lr=0.1'; lr=0.1,0.01 makes an array. "
            "'job.py --steps 500' ends there; else it trains as long as the foreground does.",
        ),
    ] = None,
    slowdown: Annotated[float, typer.Option(help="How much longer than alone the foreground's steps may take.")] = 1.10,
    plan: Annotated[Path | None, typer.Option(help="The foreground's plan; burstpool plan writes one.")] = None,
    devices: Annotated[int | None, typer.Option(help="Data parallelism on so many devices.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Steps of the foreground.", min=1)] = 500,
    batch: Annotated[
        int | None,
        typer.Option(help="The foreground's samples a step; the job's if left out.", min=1, max=LARGEST_BATCH),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A hyper-parameter of the foreground: name=value.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    autocast: Annotated[str | None, typer.Option(help="bf16: matrix products of all jobs in this format.")] = None,
    memory: Annotated[float | None, typer.Option(help="MiB that each background job may allocate.")] = None,
    lowest_priority: Annotated[
        bool, typer.Option(help="On CPU: background jobs run only where nothing else wants to.")
    ] = True,
    fallback: Fallback = None,
    interference: Annotated[
        Path | None,
        typer.Option(
            help="How kinds of layers slow each other down here: all-reduces are filled where it is harmless."
        ),
    ] = None,
    run_folder: Annotated[Path | None, typer.Option(help="Where to write; runs/NAME-TIME if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as one JSON object.")] = False,
) -> None:
    """Train background jobs in what a foreground job leaves, within a slowdown budget."""
    from burstpool.job import load_job, parse_settings
    from burstpool.run.folder import RunFolder, new_run_path
    from burstpool.run.options import RunOptions
    from burstpool.run.trainer import InterruptedRun
    from burstpool.share.base import ShareRequest, find
    from burstpool.share.budget import Budget
    from burstpool.share.interference.table import InterferenceTable

    if not backgrounds:
        raise ShareError("say what to train beside it: --with job.py, once or more")
    if autocast not in (None, "bf16"):
        raise ShareError(f"--autocast {autocast} cannot be shared with; pass bf16, or leave it out")
    how = checked_fallback(fallback)
    harmless = interference is not None and InterferenceTable.load(interference).harmless_in_reduce()
    budget, implementation = Budget(slowdown=slowdown, harmless_in_reduce=harmless), find(device)
    with json_alone(as_json):
        given = parse_settings(settings or [])
        job = load_job(foreground, given)
        found, inputs = _plan(job, plan, devices, batch, how)
        wanted = [replace(background(words, memory), lowest_priority=lowest_priority) for words in backgrounds]
        request = ShareRequest(
            foreground=foreground,
            settings=given,
            plan=found,
            steps=steps,
            backgrounds=tuple(spread(wanted, len(found.devices))),
            budget=budget,
            options=RunOptions(
                device="cuda" if device == "cuda" else "cpu", autocast="bf16" if autocast else None, fallback=how
            ),
            run_folder=run_folder or new_run_path(job.name, Path("runs")),
            inputs=inputs,
            gaps=known_gaps(found, inputs),
        )
        with _progress(job.name) as observer:
            try:
                outcome = implementation(request, observer=observer)
            except InterruptedRun as error:
                print(f"burstpool: {error}; what it has learnt is in {error.folder}", file=sys.stderr)
                raise
            except KeyboardInterrupt:
                has_run = RunFolder(request.run_folder).record.exists()
                what = f"what it has learnt is in {request.run_folder}" if has_run else "nothing was trained or written"
                print(f"burstpool: stopped; {what}", file=sys.stderr)
                raise
    if as_json:
        print(json_line(in_short(outcome)))
        return
    _show(outcome, slowdown, Console())


def background(words: str, memory_mib: float | None = None) -> "Background":
    """`"job.py lr=0.1,0.01 --steps 500"` as a background: every combination of values is a member of its array."""
    from burstpool.job import parse_settings
    from burstpool.setting_lists import parts
    from burstpool.share.base import Background

    # A fraction of a byte is no memory either.
    if memory_mib is not None and not 1 / (1 << 20) <= memory_mib < math.inf:
        raise ShareError(f"--memory {memory_mib:g} must be more than 0 MiB; e.g. --memory 512")
    try:
        source, *rest = shlex.split(words) or [""]
    except ValueError as error:
        raise ShareError(f"--with {words!r} cannot be read: {error}; e.g. --with 'job.py lr=0.1'") from None
    if not source or source.startswith("-"):
        raise ShareError(f"--with {words!r} names no job; e.g. --with 'job.py lr=0.1'")
    pairs, steps = _without_steps(rest, words)
    given = parse_settings(pairs, given_by=f"--with {words!r}:")
    values = {name: parts(text, where=f"--with {words!r}: {name}={text}") for name, text in given.items()}
    members = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    memory_bytes = None if memory_mib is None else int(memory_mib * (1 << 20))
    return Background(source=source, settings=tuple(members), steps=steps, memory_bytes=memory_bytes)


def _without_steps(words: list[str], given: str) -> tuple[list[str], int]:
    """The words but `--steps N`, or `--steps=N`, and that number."""
    from burstpool.share.base import ENDLESS

    pairs, steps, rest = list[str](), ENDLESS, iter(words)
    for word in rest:
        option, equals, text = word.partition("=")
        if not option.startswith("-"):
            pairs.append(word)
            continue
        if option != "--steps":
            raise ShareError(f"--with {given!r}: {option} is no option of a background; --steps 500 is the only one")
        text = text if equals else next(rest, "")
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
            raise ShareError(f"--with {given!r}: --steps {text or 'without a number'}; e.g. --steps 500")
        steps = int(text)
    return pairs, steps


def spread(backgrounds: "list[Background]", num_devices: int) -> "list[Background]":
    """With one array for several devices, each of them gets an array of its own with a part of the members."""
    if len(backgrounds) != 1 or num_devices == 1 or len(backgrounds[0].settings) < num_devices:
        return backgrounds
    members = backgrounds[0].settings
    return [replace(backgrounds[0], settings=members[device::num_devices]) for device in range(num_devices)]


def known_gaps(plan: "Plan", inputs: "PlanInputs | None") -> "tuple[Gap, ...]":
    """The gaps of the least busy device, simulated; one of unknown length where they wait but nothing was measured."""
    from burstpool.share.budget import Gap

    if len(plan.devices) == 1:
        return ()
    if inputs is None:
        return (Gap(length_s=0.0),)
    from burstpool.schedule.lower import lower
    from burstpool.schedule.simulate import simulate
    from burstpool.share.interference.predict import device_gaps

    flow = inputs.dataflow(plan)
    timeline = simulate(lower(plan, flow), inputs.cost(), flow)
    return max(
        (device_gaps(timeline, device) for device in plan.devices), key=lambda gaps: sum(g.length_s for g in gaps)
    )


def _plan(
    job: Any,
    plan_file: Path | None,
    num_devices: int | None,
    batch: int | None,
    fallback: Literal["modules"] | None,
) -> "tuple[Plan, Any]":
    from burstpool.cluster.detect import check_workers
    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan
    from burstpool.run.even import even_plan
    from burstpool.run.setup import trace_job

    if plan_file is not None and num_devices is not None:
        raise RunError("give either --plan or --devices, not both")
    if plan_file is None:
        check_workers(num_devices or 1)
        graph = trace_job(job, fallback=fallback).graph
        return even_plan(graph, num_devices=num_devices or 1, batch=batch or job.batch, name=job.name), None
    found = Plan.load(plan_file)
    if batch is not None and batch != found.batch:
        raise RunError(f"--batch {batch} is not the plan's {found.batch}; plan again with --batch {batch}")
    beside = PlanInputs.path(plan_file)
    return found, PlanInputs.load(beside) if beside.is_file() else None


def in_short(outcome: "ShareOutcome") -> dict[str, Any]:
    """What scripts want to know."""
    return {
        "run_folder": str(outcome.folder),
        "steps": len(outcome.losses),
        "step_time_s": outcome.step_time_s,
        "alone_step_time_s": outcome.alone_step_s,
        "slowdown": outcome.slowdown,
        "slowdown_p95": outcome.slowdown_p95,
        "alone_p95": outcome.alone_p95,
        "background_steps": outcome.background_steps,
        "background_kept": outcome.background_kept,
        "loss": outcome.losses[-1],
        "losses": list(outcome.losses),
        "backgrounds": [
            {
                "name": each.name,
                "folder": str(background_path(outcome.folder, number)),
                "device": each.device,
                "steps": each.steps,
                "kept": each.kept,
                "state": each.state,
                "reason": each.reason,
                "restarts": each.restarts,
                "evictions": each.evictions,
                "multiprocessors": each.multiprocessors,
                "losses": each.losses,
            }
            for number, each in enumerate(outcome.backgrounds)
        ],
    }


@contextmanager
def _progress(name: str) -> "Iterator[Callable[[ShareProgress], None]]":
    with progress_bar(f"sharing with {name}") as tell:

        def observe(progress: "ShareProgress") -> None:
            what = f"{progress.samples_per_s:,.0f} samples/s"
            if progress.slowdown is not None:
                what += f", slowdown {progress.slowdown:.2f}"
            tell(progress.step, progress.steps, f"{what}; background {progress.background_steps_per_s:.1f} steps/s")

        yield observe


def _learnt(losses: list[Any]) -> str:
    """The last losses of a background that are numbers."""
    last = losses[-1] if losses else []
    known = [loss for loss in (last if isinstance(last, list) else [last]) if math.isfinite(loss)]
    if not known:
        return ""
    return f"; loss {known[0]:.4g}" if len(known) == 1 else f"; losses {min(known):.4g} to {max(known):.4g}"


def _show(outcome: "ShareOutcome", budget: float, console: Console) -> None:
    line = f"Foreground: loss {outcome.losses[-1]:.4g}, slowdown {outcome.slowdown:.3f} of {budget:g}"
    if outcome.slowdown_p95 is not None and outcome.alone_p95 is not None:
        line += f", p95 {outcome.slowdown_p95:.3f} ({outcome.alone_p95:.3f} alone)"
    console.print(line, highlight=False)
    for number, each in enumerate(outcome.backgrounds):
        kept = f", {each.kept:.0%} of its speed alone" if each.kept is not None else ""
        why = f": {each.reason}" if each.reason else ""
        console.print(
            f"Background {each.name} on device {each.device}: {each.steps} steps{kept}; {each.state}{why}"
            f"{_learnt(each.losses)}; in {background_path(outcome.folder, number)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"Run folder: {outcome.folder}", markup=False, highlight=False)
