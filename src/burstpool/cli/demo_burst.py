"""The demo's burst step: a model planned and trained twice, under a burst plan and data parallel, side by side.

Takes the traced and measured job of the story. Shows the skyline, the gaps, and a table of predicted and measured step
times; writes a report page for each of the two runs. Workers stand for devices: where they are more than the cores,
they share them, and the table says what that makes of the prediction.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from burstpool.cli.demo_story import Story
from burstpool.cli.progress import progress_bar
from burstpool.cli.show import seconds

if TYPE_CHECKING:
    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan
    from burstpool.run.outcome import Result

BURST_LIMITS = (1.5, 1.3, 1.2, 1.1, 1.05, 1.02)
"""Device-time over one device's: the first whose plan has layers of different widths is shown, as that is what a burst
plan is about; where none has, the first."""
_COMPARED = 10
"""Steps whose losses are compared."""
_WARM_UP = 1 / 3
"""Part of the steps that is not timed: processes are still settling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One of the two ways, planned and run."""

    plan: "Plan"
    losses: tuple[float, ...]
    step_time_s: float
    """Measured: the median of the steps after the first third."""
    utilisation: float | None
    """Measured: busy part of the plan's devices."""
    report: Path


def plan_and_train(story: Story) -> None:
    """The whole step."""
    from burstpool.cluster.detect import num_cores
    from burstpool.plan import burst, data

    inputs = _inputs(story)
    options: dict[str, Any] = {"batch": story.job.batch, "graph": inputs.graph}
    tried = {limit: burst.plan(inputs.profiles, inputs.cluster, burst_limit=limit, **options) for limit in BURST_LIMITS}
    limit = next((x for x, plan in tried.items() if len({len(b.shares) for b in plan.blocks}) > 1), BURST_LIMITS[0])
    plans = {"data parallel": data.plan(inputs.profiles, inputs.cluster, **options), "burst": tried[limit]}
    _show_plan(story, inputs, plans, limit)
    trained = {name: _train(story, name, plan, inputs) for name, plan in plans.items()}
    cores = num_cores()
    story.console.print(_table(trained, cores))
    _explain(story, trained, cores)
    story.figures["burst"] = {name: _figures(ways, cores) for name, ways in trained.items()}


def _inputs(story: Story) -> "PlanInputs":
    from burstpool.plan.inputs import PlanInputs
    from burstpool.run.machine import this_machine

    assert story.traced is not None
    assert story.profile is not None
    with progress_bar("measuring the link") as progress:
        cluster = this_machine(device="cpu", num_devices=story.num_devices, progress=lambda what: progress(0, 1, what))
    return PlanInputs(cluster=cluster, profiles=(story.profile,), graph=story.traced.graph)


def _show_plan(story: Story, inputs: "PlanInputs", plans: "dict[str, Plan]", limit: float) -> None:
    from burstpool.plan import burst
    from burstpool.plan.skyline import describe_burst
    from burstpool.schedule.lower import lower
    from burstpool.schedule.simulate import simulate

    plan = plans["burst"]
    flow = inputs.dataflow(plan)
    timeline = simulate(lower(plan, flow), inputs.cost(), flow)
    alone_s = burst.search(inputs.profiles, inputs.cluster, batch=plan.batch, graph=inputs.graph).one_device_seconds
    text = describe_burst(plan, timeline, data_parallel=plans["data parallel"], one_device_seconds=alone_s)
    story.say(f"Batch {plan.batch}, burst limit {limit:g}. Predicted for a core a worker:\n\n{text}\n")


def _train(story: Story, name: str, plan: "Plan", inputs: "PlanInputs") -> Trained:
    from burstpool.artifact import write_whole
    from burstpool.cli.report import gather
    from burstpool.report.html import page
    from burstpool.run.options import RunOptions
    from burstpool.run.trainer import train

    with progress_bar(f"training, {name}") as progress:
        result = train(
            story.source,
            plan,
            steps=story.steps,
            run_folder=story.folder / name.replace(" ", "-"),
            settings=story.settings,
            options=RunOptions(checkpoint_every=0),
            inputs=inputs,
            observer=lambda now: progress(now.step, now.steps, f"loss {now.loss:.4g}"),
        )
    timed = result.losses[int(_WARM_UP * len(result.losses)) :]
    return Trained(
        plan=plan,
        losses=tuple(loss.loss for loss in result.losses),
        step_time_s=statistics.median(loss.step_time_s for loss in timed),
        utilisation=_utilisation(result, plan),
        report=write_whole(result.folder / "report.html", page(gather(result.folder))),
    )


def _utilisation(result: "Result", plan: "Plan") -> float | None:
    timeline = result.timeline
    span_s = timeline.stop_s - timeline.start_s if timeline is not None else 0.0
    return sum(timeline.all_busy_s()) / (span_s * len(plan.devices)) if timeline is not None and span_s else None


def least_here_s(plan: "Plan", num_cores: int) -> float:
    """No step can be shorter on so few cores: all that devices compute has to be computed by them."""
    assert plan.step_time_s is not None
    assert plan.device_seconds is not None
    return max(plan.step_time_s, plan.device_seconds / num_cores)


def _table(trained: dict[str, Trained], num_cores: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    shared = any(num_cores < len(ways.plan.devices) for ways in trained.values())
    titles = ["predicted", *([f"at best on {num_cores} cores"] if shared else []), "measured", "device-time", "busy"]
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for name, ways in trained.items():
        cells = [seconds(ways.plan.step_time_s or 0.0)]
        cells += [seconds(least_here_s(ways.plan, num_cores))] if shared else []
        cells += [seconds(ways.step_time_s), seconds(ways.plan.device_seconds or 0.0)]
        table.add_row(name, *cells, f"{ways.utilisation:.0%}" if ways.utilisation is not None else "")
    return table


def _explain(story: Story, trained: dict[str, Trained], num_cores: int) -> None:
    data, burst = trained["data parallel"], trained["burst"]
    ratio = data.step_time_s / burst.step_time_s
    faster = f"{ratio:.2f}× as fast as" if ratio >= 1 else f"{1 / ratio:.2f}× slower than"
    story.say(f"\nMeasured, the burst plan is {faster} data parallelism on the same workers.", style="bold")
    first = list(zip(data.losses, burst.losses, strict=True))[:_COMPARED]
    furthest = max(abs(a - b) for a, b in first)
    story.say(
        f"Both train the same model: in the first {len(first)} steps their losses differ by {furthest:.1e} at most. "
        "That is rounding, which grows from step to step (in 64 bits, 1e-9 after 50 steps: docs/run.md)."
    )
    crowded = {name: len(ways.plan.devices) for name, ways in trained.items() if len(ways.plan.devices) > num_cores}
    if crowded:
        whose = " and ".join(f"{count} workers under {name}" for name, count in crowded.items())
        story.say(
            f"Note: {whose} share {num_cores} cores here, and cannot reach the step predicted for a core each; waking "
            "each other up comes on top. Such a machine shows that plans run as planned and what their device-time "
            "costs, not how they scale.",
            style="yellow",
        )
    for name, ways in trained.items():
        story.say(f"Report, {name}: {ways.report}")


def _figures(ways: Trained, num_cores: int) -> dict[str, Any]:
    return {
        "predicted_step_time_s": ways.plan.step_time_s,
        "least_step_time_on_these_cores_s": least_here_s(ways.plan, num_cores),
        "measured_step_time_s": ways.step_time_s,
        "device_seconds": ways.plan.device_seconds,
        "utilisation": ways.utilisation,
        "num_cores": num_cores,
        "widths": [len(block.shares) for block in ways.plan.blocks for _ in block.layers],
        "last_loss": ways.losses[-1],
        "report": str(ways.report),
    }
