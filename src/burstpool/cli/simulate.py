"""`burstpool simulate`: how long would a step of this plan take, and where would devices wait?

Takes a plan file. Profile and cluster come from `plan.inputs.json`, which `burstpool plan -o plan.json` writes beside
it, or from `--profile` and `--cluster`. Prints the timeline as a picture or, with `--json`, step time, utilisation and
gaps; `-o` writes the timeline.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from burstpool.cli.plan import load_profiles
from burstpool.cli.show import seconds
from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan
from burstpool.report.timeline import Timeline
from burstpool.schedule.draw import draw
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate as simulate_schedule
from burstpool.schedule.validate import validate


def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file: burstpool plan … -o plan.json.")],
    profiles: Annotated[
        list[Path] | None, typer.Option("--profile", help="Other profiles than it was made from; one a device type.")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="Another cluster than it was made for.")] = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Guess beyond the measured batches.")] = False,
    steps: Annotated[int, typer.Option(help="Steps in the timeline.", min=1)] = 1,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the timeline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Simulate a plan: step time, utilisation and gaps of each device."""
    plan = Plan.load(plan_file)
    inputs = _inputs(plan_file, profiles, cluster, extrapolate)
    flow = inputs.dataflow(plan)
    schedule = lower(plan, flow)
    validate(schedule, plan, flow)
    timeline = simulate_schedule(schedule, inputs.cost(), flow, steps=steps)
    if output is not None:
        timeline.save(output)
    if as_json:
        print(json.dumps({"model": plan.model, "strategy": plan.strategy, "batch": plan.batch} | in_short(timeline)))
        return
    console = Console()
    console.print(Text(f"{plan.model}, batch {plan.batch}, strategy {plan.strategy}", style="bold"))
    show_timeline(timeline, console)
    if output is not None:
        console.print(f"Written to {output}", markup=False, highlight=False)


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
