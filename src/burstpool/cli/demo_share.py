"""The demo's sharing step: the burst plan once more, with a fused sweep of small models in what it leaves.

Takes the plan that an earlier step trained with. Each worker has an array of its own beside it. Shows what sharing cost
the foreground and what all jobs together got done, against the foreground first and then the arrays, one on each core.
"""

from typing import TYPE_CHECKING, Any

from burstpool.cli.demo_story import Story
from burstpool.cli.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burstpool.share.base import BackgroundOutcome

SLOWDOWN = 1.20
"""Of the foreground: more than the usual 1.10, as four workers on few cores disturb each other by themselves."""
_TIMES_AS_LONG = 10
"""As the runs before: the controller first measures the foreground alone."""
SWEPT = "zoo:tiny_mlp lr=0.3,0.1,0.03,0.01 seed=0,1,2,3"


def share_gaps(story: Story) -> None:
    """The whole step."""
    from burstpool.cli.report import gather
    from burstpool.cli.share import background, known_gaps, spread
    from burstpool.plan.inputs import PlanInputs
    from burstpool.plan.plan import Plan
    from burstpool.report.html import page
    from burstpool.run.options import RunOptions
    from burstpool.share.base import ShareRequest, find
    from burstpool.share.budget import Budget

    earlier = story.folder / "burst" / "plan.json"
    plan, inputs = Plan.load(earlier), PlanInputs.load(PlanInputs.path(earlier))
    request = ShareRequest(
        foreground=story.source,
        settings=story.settings,
        plan=plan,
        steps=_TIMES_AS_LONG * story.steps,
        backgrounds=tuple(spread([background(SWEPT)], len(plan.devices))),
        budget=Budget(slowdown=SLOWDOWN),
        options=RunOptions(checkpoint_every=0),
        run_folder=story.folder / "shared",
        inputs=inputs,
        gaps=known_gaps(plan, inputs),
    )
    with progress_bar("sharing") as progress:
        outcome = find("cpu")(
            request,
            observer=lambda now: progress(now.step, now.steps, f"background {now.background_steps_per_s:.1f} steps/s"),
        )
    (outcome.folder / "report.html").write_text(page(gather(outcome.folder)), encoding="utf-8")
    story.figures["share"] = _told(story, outcome)


def _told(story: Story, outcome: Any) -> dict[str, Any]:
    from burstpool.cluster.detect import num_cores

    alone_s = outcome.alone_step_s or outcome.step_time_s
    shared_s = outcome.step_time_s * len(outcome.losses)
    after_s = alone_s * len(outcome.losses) + arrays_s(outcome.backgrounds, num_cores())
    members = sum(each.steps * len(each.losses[-1]) for each in outcome.backgrounds if each.losses)
    story.say(
        f"The foreground's steps took {outcome.slowdown:.2f} times as long as those that ran alone (promised: "
        f"{SLOWDOWN:.2f} at most). Beside it the arrays made {outcome.background_steps} steps, which is "
        f"{members} steps of single models."
    )
    story.say(
        f"All of it in {shared_s:.1f} s. Without sharing, the foreground first and then the arrays, one a core at a "
        f"time, would have taken {after_s:.1f} s by their measured steps alone: {after_s / shared_s:.2f}× the "
        "throughput.",
        style="bold",
    )
    story.say(f"Report: {outcome.folder / 'report.html'}")
    return {
        "slowdown": outcome.slowdown,
        "slowdown_p95": outcome.slowdown_p95,
        "background_steps": outcome.background_steps,
        "background_kept": outcome.background_kept,
        "shared_s": shared_s,
        "foreground_then_arrays_s": after_s,
        "throughput_over_foreground_then_arrays": after_s / shared_s,
    }


def arrays_s(backgrounds: "Sequence[BackgroundOutcome]", cores: int) -> float:
    """What the arrays' steps would take after the foreground, at their speed alone, on all cores at once."""
    work_s = sum(each.steps * (each.alone_step_s or 0.0) for each in backgrounds)
    return work_s / max(min(len(backgrounds), cores), 1)
