"""`burstpool simulate`: how long would a step of this plan take, and where would devices wait?

Takes a plan file. Profile and cluster come from `plan.inputs.json`, which `burstpool plan -o plan.json` writes beside
it, or from `--profile` and `--cluster`. Prints the timeline as a picture or, with `--json`, step time, utilisation and
gaps; `-o` writes the timeline.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from burstpool.artifact import json_line
from burstpool.cli.json_alone import json_alone
from burstpool.cli.plan import load_profiles
from burstpool.cli.progress import progress_bar
from burstpool.cli.show import seconds
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError, ShareError
from burstpool.job import is_job
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import Profile
from burstpool.report.timeline import Timeline
from burstpool.schedule.draw import draw
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate as simulate_schedule
from burstpool.schedule.validate import validate
from burstpool.share.budget import Budget
from burstpool.share.interference.predict import SharingPrediction, predict_sharing
from burstpool.share.interference.table import InterferenceTable, mix_of

_MOST_SPANS = 2_000_000
"""Of a timeline: about a GiB."""


def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file: burstpool plan … -o plan.json.")],
    profiles: Annotated[
        list[Path] | None, typer.Option("--profile", help="Other profiles than it was made from; one a device type.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="Another cluster than it was made for.")] = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Guess beyond the measured batches.")] = False,
    steps: Annotated[int, typer.Option(help="Steps in the timeline.", min=1)] = 1,
    background: Annotated[
        str | None, typer.Option(help="A job, or its profile, to train in what the plan leaves on every device.")
    ] = None,
    interference: Annotated[
        Path | None, typer.Option(help="How kinds of layers slow each other down; burstpool interference writes it.")
    ] = None,
    slowdown: Annotated[float, typer.Option(help="With --background: how much longer steps may take.")] = 1.10,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the timeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Simulate a plan: step time, utilisation and gaps of each device."""
    plan = Plan.load(plan_file)
    inputs = _inputs(plan_file, profiles, cluster, extrapolate)
    flow = inputs.dataflow(plan)
    schedule = lower(plan, flow)
    validate(schedule, plan, flow)
    _check_steps(steps, sum(map(len, schedule.devices)))
    timeline = simulate_schedule(schedule, inputs.cost(), flow, steps=steps)
    if output is not None:
        timeline.save(output)
    sharing = None
    if background is not None:
        one_step = timeline if steps == 1 else simulate_schedule(schedule, inputs.cost(), flow)
        with json_alone(as_json):
            sharing = _shared(one_step, plan, inputs.profiles[0], background, interference, slowdown)
    if as_json:
        found = {"model": plan.model, "strategy": plan.strategy, "batch": plan.batch} | in_short(timeline)
        print(json_line(found | (sharing_in_short(sharing) if sharing is not None else {})))
        return
    console = Console()
    console.print(Text(f"{plan.model}, batch {plan.batch}, strategy {plan.strategy}", style="bold"))
    show_timeline(timeline, console)
    if sharing is not None:
        console.print(
            f"With a background job on every device: slowdown {sharing.slowdown:.3f}, {sharing.background_kept:.0%} of "
            f"its speed alone kept; sum of shares {sharing.sum_of_shares:.2f}",
            highlight=False,
        )
    if output is not None:
        console.print(f"Written to {output}", markup=False, highlight=False)


def _check_steps(steps: int, num_actions: int) -> None:
    """Refuses a timeline that memory does not hold."""
    most = max(1, _MOST_SPANS // max(1, num_actions))
    if steps > most:
        raise PlanError(f"--steps {steps} of {num_actions} actions each are too many; give --steps {most} or fewer")


def sharing_in_short(sharing: SharingPrediction) -> dict[str, Any]:
    """What scripts want to know of a background under a plan."""
    return {
        "slowdown": sharing.slowdown,
        "background_kept": sharing.background_kept,
        "sum_of_shares": sharing.sum_of_shares,
        "background_s": [device.gap_s + device.overlapped_s for device in sharing.devices],
    }


def _shared(
    timeline: Timeline, plan: Plan, foreground: Profile, background: str, interference: Path | None, slowdown: float
) -> SharingPrediction:
    if interference is None:
        raise ShareError("--background needs --interference table.json; burstpool interference -o table.json makes one")
    table = InterferenceTable.load(interference)
    beside = load_profiles([Path(background)])[0] if not is_job(background) else _profiled(background)
    batch = max(share.num_samples for block in plan.blocks for share in block.shares)
    batch = min(max(batch, foreground.batches[0]), foreground.batches[-1])
    return predict_sharing(
        timeline,
        mix_of(foreground, batch),
        mix_of(beside, beside.batches[-1]),
        table,
        Budget(slowdown=slowdown),
        devices=plan.devices,
    )


def _profiled(source: str) -> Profile:
    """A job's layers at its own batch, measured on this machine's CPU: of them only the parts of the kinds count."""
    from burstpool.job import load_job
    from burstpool.profiling.measure import profile
    from burstpool.run.setup import trace_job

    job = load_job(source)
    _, target = job.samples(2)
    with progress_bar(f"measuring {job.name}") as progress:
        return profile(
            trace_job(job), loss=job.loss, target=target, name=job.name, batches=[job.batch], progress=progress
        )


def in_short(timeline: Timeline) -> dict[str, Any]:
    """What scripts want to know of a timeline."""
    busy_s = [total_s / max(1, timeline.num_steps) for total_s in timeline.all_busy_s()]
    return {
        "num_devices": timeline.num_devices,
        "num_steps": timeline.num_steps,
        "step_time_s": timeline.step_time_s,
        "device_seconds": sum(busy_s),
        "utilisation": list(timeline.utilisation()),
        "gaps_s": [max(0.0, timeline.step_time_s - each_s) for each_s in busy_s],
        "gaps": [[list(span) for span in spans] for spans in timeline.gaps()],
    }


def show_timeline(timeline: Timeline, console: Console) -> None:
    """The picture, and a line of what matters."""
    console.print(Text(draw(timeline, width=console.width)), no_wrap=True, crop=True)
    used = [share for share in timeline.utilisation() if share] or [0.0]
    idle = timeline.num_devices - len([share for share in used if share])
    busy = f"busy {min(used):.0%} to {max(used):.0%} of it, {sum(used) / len(used):.0%} on average"
    console.print(
        f"A step takes {seconds(timeline.step_time_s)} in steady state; devices are {busy}"
        + (f"; {idle} have nothing to do" if idle else ""),
        highlight=False,
    )


def _inputs(plan_file: Path, profiles: list[Path] | None, cluster: Path | None, extrapolate: bool) -> PlanInputs:
    """What the plan was made from, with what is given in its place."""
    beside = PlanInputs.path(plan_file)
    known = PlanInputs.load(beside) if beside.is_file() else None
    if known is None and (profiles is None or cluster is None):
        raise PlanError(f"there is no {beside} to say what the plan was made from; give --profile and --cluster")
    given = ClusterSpec.load(cluster) if cluster is not None else None
    measured = load_profiles(profiles) if profiles else None
    if known is None:
        assert given is not None
        assert measured is not None
        return PlanInputs(cluster=given, profiles=measured, extrapolate=extrapolate)
    return PlanInputs(
        cluster=given or known.cluster,
        profiles=measured or known.profiles,
        graph=known.graph,
        extrapolate=extrapolate or known.extrapolate,
    )
