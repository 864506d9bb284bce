"""Draws the pictures of the README and the documentation: `python scripts/pictures.py`.

flow.svg      from a job to a report, by hand
timeline.svg  a predicted step of a burst plan on four devices, by the planner and the simulator
skyline.svg   the same plan: devices a block
sweep.svg     training losses of 64 trials of `examples/digits_mlp.py` by ASHA, trained when the picture is drawn
sharing.svg   the same step, its gaps filled with slices of a background job

The plan is of VGG-16, batch 16, on four H200 that NVLink joins, from the profile in `benchmarks/burst/profiles`.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import burstpool
from burstpool.artifact import write_whole
from burstpool.cli.report import planned_work
from burstpool.cluster.catalogue import Link
from burstpool.cluster.spec import ClusterSpec, DeviceCount, NodeGroup
from burstpool.plan import burst
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import Profile
from burstpool.report.charts import skyline
from burstpool.report.contents import Contents
from burstpool.report.draw_charts import skyline_picture
from burstpool.report.draw_timeline import WIDTH, timeline_picture
from burstpool.report.overlay import overlay
from burstpool.report.svg import element, label, path, picture, rect, standalone
from burstpool.report.sweep_curves import curves_picture, trial_curves
from burstpool.report.timeline import Event, Timeline
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate
from burstpool.share.interference.predict import device_gaps
from burstpool.sweeping.folder import SweepFolder
from burstpool.sweeping.outcome import sweep_contents

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
_NVLINK = Link(bytes_per_s=450e9, latency_s=5e-6)
_BOX_WIDTH, _BOX_HEIGHT, _PITCH = 118.0, 48.0, 172.0
_TIMELINES, _REPORT = 5 * _PITCH + 22, 6 * _PITCH + 36
"""Where the last two columns begin: the verbs before timelines need more room."""


def burst_example() -> tuple[Plan, Timeline]:
    """VGG-16 where the last layers do not pay for four devices."""
    profile = Profile.load(ROOT / "benchmarks" / "burst" / "profiles" / "vgg16.h200.json")
    node = NodeGroup(name="node", count=1, devices=(DeviceCount(type="H200", count=4),), link=_NVLINK)
    cluster = ClusterSpec(name="four", node_groups=(node,))
    inputs = PlanInputs(cluster=cluster, profiles=(profile,))
    plan = burst.plan(profile, cluster, batch=16, burst_limit=1.3)
    flow = inputs.dataflow(plan)
    return plan, simulate(lower(plan, flow), inputs.cost(), flow)


def timeline_svg(plan: Plan, timeline: Timeline) -> str:
    """One step, predicted."""
    shown = overlay([timeline])
    assert shown is not None
    caption = f"{plan.model}, batch {plan.batch}, on {plan.num_devices} devices: a predicted step of a burst plan"
    drawn, height = timeline_picture(shown, caption=caption, legend=True)
    return standalone(drawn, width=WIDTH, height=height)


def sharing_svg(plan: Plan, timeline: Timeline) -> str:
    """The same step with a background job in the gaps that may be used, in slices of a fortieth of the step."""
    slice_s = timeline.step_time_s / 40
    slices = [
        Event(
            device=device,
            lane="background",
            kind="background",
            block="background",
            start_s=start_s + count * slice_s,
            stop_s=start_s + (count + 0.9) * slice_s,
        )
        for device, spans in enumerate(timeline.gaps())
        for (start_s, stop_s), gap in zip(spans, device_gaps(timeline, device), strict=True)
        for count in range(0 if gap.reduces else int((stop_s - start_s) / slice_s))
    ]
    events = tuple(sorted((*timeline.events, *slices), key=lambda event: event.start_s))
    shown = overlay([replace(timeline, events=events)])
    assert shown is not None
    caption = f"{plan.model} in the foreground, slices of a background job in the gaps it leaves"
    drawn, height = timeline_picture(shown, caption=caption, legend=True)
    return standalone(drawn, width=WIDTH, height=height)


def skyline_svg(plan: Plan, timeline: Timeline) -> str:
    """The plan's widths over time."""
    contents = Contents(model=plan.model, num_devices=plan.num_devices, predicted=timeline, blocks=planned_work(plan))
    shown = skyline(contents)
    assert shown is not None
    caption = f"{plan.model}, batch {plan.batch}: as many devices for each block as pay for themselves"
    drawn, height = skyline_picture(shown, caption=caption)
    return standalone(drawn, width=WIDTH, height=height)


def sweep_svg() -> str:
    """Many trials, most of which stop early."""
    space = {"lr": "log:1e-3..1", "momentum": [0.0, 0.5, 0.9], "dropout": [0.0, 0.2]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        job = ROOT / "examples" / "digits_mlp.py"
        burstpool.sweep(job, space, search="asha", trials=64, steps=600, array_size=16, mode="rules", run_folder=path)
        contents = sweep_contents(SweepFolder.open(path))
    curves = trial_curves(contents.trials, contents.best)
    assert curves is not None
    done = sum(trial.state == "done" for trial in contents.trials)
    caption = f"Training loss of 64 trials by ASHA: {done} are trained to the end, the best of them drawn strong"
    drawn, height = curves_picture(curves, caption=caption)
    return standalone(drawn, width=WIDTH, height=height)


def flow_svg() -> str:
    """From a job to a report."""
    middle, above, below = 66.0, 0.0, 132.0
    row = [("job.py", "your model, as it is"), ("LayerGraph", "runnable layers"), ("Profile", "seconds a layer")]
    row += [("Plan", "devices a block"), ("Schedule", "actions a device")]
    parts = [
        _box(place * _PITCH, middle, name, told, strong=name == "Schedule") for place, (name, told) in enumerate(row)
    ]
    for place, verb in enumerate(("trace", "measure", "plan", "lower")):
        parts.append(_arrow([_right(place * _PITCH, middle), _left((place + 1) * _PITCH, middle)], verb))
    parts += [
        _box(3 * _PITCH, below, "cluster.toml", "devices and links"),
        _arrow([(3 * _PITCH + _BOX_WIDTH / 2, below), (3 * _PITCH + _BOX_WIDTH / 2, middle + _BOX_HEIGHT)], ""),
    ]
    for y, told, verb in ((above, "predicted", "simulate"), (below, "measured", "execute")):
        start, stop = _right(4 * _PITCH, middle), _left(_TIMELINES, y)
        turn = start[0] + 12
        parts.append(_box(_TIMELINES, y, "Timeline", told))
        parts.append(_arrow([start, (turn, start[1]), (turn, stop[1]), stop], ""))
        parts.append(label(turn + 5, stop[1] - 7, verb, class_="faint"))
        start, stop = _right(_TIMELINES, y), _left(_REPORT, middle)
        parts.append(_arrow([start, (stop[0] - 22, start[1]), (stop[0] - 22, stop[1]), stop], ""))
    parts.append(_box(_REPORT, middle, "Report", "both, and the error"))
    height = below + _BOX_HEIGHT
    width = _REPORT + _BOX_WIDTH
    drawn = picture(*parts, width=width, height=height, title="from a job to a report")
    return standalone(drawn, width=width, height=height)


def _box(x: float, y: float, name: str, told: str, *, strong: bool = False) -> str:
    look = " main" if strong else ""
    return (
        rect(x, y, _BOX_WIDTH, _BOX_HEIGHT, rx=7, class_=f"box{look}")
        + label(x + _BOX_WIDTH / 2, y + 20, name, class_=f"strong middle{look}")
        + label(x + _BOX_WIDTH / 2, y + 37, told, class_="main middle small" if strong else "faint middle")
    )


def _arrow(points: Sequence[tuple[float, float]], verb: str) -> str:
    """Through points, to the right or upwards at its end."""
    x, y = points[-1]
    to_the_right = points[-2][1] == y
    tip = [(x - 6, y - 3.5), (x, y), (x - 6, y + 3.5)] if to_the_right else [(x - 3.5, y + 6), (x, y), (x + 3.5, y + 6)]
    text = label((points[0][0] + x) / 2, y - 7, verb, class_="faint middle") if verb else ""
    return element("g", path(list(points), class_="arrow"), path(tip, class_="tip"), text)


def _right(x: float, y: float) -> tuple[float, float]:
    """The middle of a box's right side."""
    return x + _BOX_WIDTH, y + _BOX_HEIGHT / 2


def _left(x: float, y: float) -> tuple[float, float]:
    """The middle of a box's left side."""
    return x, y + _BOX_HEIGHT / 2


def main(folder: Path = PICTURES) -> None:
    """Writes all of them."""
    plan, timeline = burst_example()
    drawn = {"flow": flow_svg()}
    drawn |= {"timeline": timeline_svg(plan, timeline), "skyline": skyline_svg(plan, timeline)}
    drawn |= {"sharing": sharing_svg(plan, timeline)}
    drawn["sweep"] = sweep_svg()
    for name, text in drawn.items():
        print(write_whole(folder / f"{name}.svg", text))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
