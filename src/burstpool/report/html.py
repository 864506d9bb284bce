"""The report as one HTML file: no network, no other files, light and dark, prints.

Takes Contents. Computes nothing of its own: figures, overlay and charts do. Whatever comes from outside (names of
models, blocks and layers, settings) is escaped in `element`'s attributes and in `text_of`.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from burstpool.report.charts import layer_bars, loss_curve, skyline, step_time_curve
from burstpool.report.contents import BackgroundJob, Contents, PlannedWork
from burstpool.report.draw_charts import curve_picture, layers_picture, skyline_picture, swatch
from burstpool.report.draw_timeline import kinds_legend, shown_note, timeline_picture
from burstpool.report.figures import Figures, block_seconds, figures
from burstpool.report.overlay import overlay
from burstpool.report.parts import details, document, header
from burstpool.report.parts import section as _section
from burstpool.report.parts import tile as _tile
from burstpool.report.parts import warnings as _notes
from burstpool.report.svg import element, text_of
from burstpool.report.sweep_contents import TrialCurve
from burstpool.report.sweep_curves import curves_picture, trial_curves
from burstpool.report.words import number, percent, runs, seconds, signed_percent

_MOST_BLOCKS = 300
_MOST_MEMBERS = 100
"""Of a background array, whose curves are drawn."""


def page(contents: Contents) -> str:
    """The whole file."""
    found = figures(contents)
    sections = (
        _timeline(contents),
        _skyline(contents),
        _training(contents, found),
        _backgrounds(contents),
        _layers(contents),
        _blocks(contents),
        details(contents.details),
    )
    body = element(
        "main",
        _header(contents),
        element("div", *_tiles(found), class_="tiles"),
        _notes(contents.notes),
        *sections,
        element("footer", text_of(f"Made by {contents.made_by}.")),
    )
    return document(contents.model, body)


def _header(contents: Contents) -> str:
    words = [f"{contents.strategy} plan" if contents.strategy else ""]
    words.append(" and ".join(timeline.source for timeline in contents.timelines))
    words += [contents.details[name] for name in ("source", "started") if name in contents.details]
    return header(contents.model, words)


def _tiles(found: Figures) -> Iterator[str]:
    """One a figure that somebody knows; the measured one is large where both are there."""
    if found.measured_samples_per_s or found.predicted_samples_per_s:
        yield _tile("samples/s", *_both(found.measured_samples_per_s, found.predicted_samples_per_s, _rate))
    if found.measured_step_s is not None or found.predicted_step_s is not None:
        yield _tile("step time", *_both(found.measured_step_s, found.predicted_step_s, seconds))
    if found.step_error is not None:
        side = "too fast" if found.step_error < 0 else "too slow"
        yield _tile("prediction", signed_percent(found.step_error), side)
    if found.measured_utilisation is not None or found.predicted_utilisation is not None:
        yield _tile("utilisation", *_both(found.measured_utilisation, found.predicted_utilisation, percent))
    if found.num_devices:
        all_used = found.num_used_devices == found.num_devices
        yield _tile("devices", f"{found.num_used_devices:,}", "all in use" if all_used else f"of {found.num_devices:,}")
    if found.samples_per_step is not None:
        yield _tile("batch", f"{found.samples_per_step:,}", "samples a step")
    if found.num_steps is not None:
        yield _tile("steps", f"{found.num_steps:,}", "trained")
    if found.first_loss is not None:
        last = f"{found.last_loss:.4g}" if found.last_loss is not None else "not finite"
        yield _tile("loss", last, f"from {found.first_loss:.4g}")


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _both(measured: float | None, predicted: float | None, write: Callable[[float | None], str]) -> tuple[str, str]:
    if measured is None:
        return write(predicted), "predicted"
    return write(measured), f"{write(predicted)} predicted" if predicted is not None else "measured"


def _timeline(contents: Contents) -> str:
    shown = overlay(contents.timelines)
    if shown is None:
        return ""
    names = {"predicted": ("outlined", "predicted"), "measured": ("solid", "measured")}
    looks = [names[source] for source in shown.sources] if len(shown.sources) > 1 else []
    legend = [element("span", element("i", class_=look), text_of(name)) for look, name in looks]
    legend += [element("span", swatch(kind), text_of(name)) for kind, name in [*kinds_legend(shown), ("track", "gap")]]
    buttons = (("left", "←"), ("right", "→"), ("out", "−"), ("in", "+"), ("all", "all"))
    controls = (element("button", text_of(sign), type="button", data_zoom=move) for move, sign in buttons)
    beside = element("div", *legend, class_="legend") + element("div", *controls, class_="controls")
    drawn, _ = timeline_picture(shown)
    drawn = drawn.replace('class="chart"', 'class="chart plot"', 1)
    notes = [*shown_note(shown), "Drag to zoom in, double-click to see all; point at anything to read what it is."]
    return _section(_timeline_title(shown.sources), element("div", drawn, class_="wide"), notes=notes, beside=beside)


def _timeline_title(sources: Sequence[str]) -> str:
    return "A step, predicted and measured" if len(sources) > 1 else f"A step, {sources[0]}"


def _skyline(contents: Contents) -> str:
    shown = skyline(contents)
    if shown is None:
        return ""
    note = {
        "layers": "No time is known: a layer counts 1.",
        "predicted": "As wide as a block's forward and backward take, predicted; its area is device time.",
        "measured": "As wide as a block's forward and backward took, measured; its area is device time.",
    }[shown.source]
    drawn, _ = skyline_picture(shown)
    return _section("The plan: devices a block", element("div", drawn, class_="wide"), notes=[note])


def _training(contents: Contents, found: Figures) -> str:
    loss, times = loss_curve(contents), step_time_curve(contents, found.predicted_step_s)
    parts, notes = [], []
    if loss is not None:
        parts.append(element("div", "<h3>Loss</h3>", curve_picture(loss, title="loss over steps")))
        notes += [f"Losses that are no finite number, left out: {loss.num_left_out}."] if loss.num_left_out else []
    if times is not None:
        drawn = curve_picture(times, title="time a step", line_name=f"predicted {seconds(times.line)}")
        parts.append(element("div", "<h3>Step time</h3>", drawn))
        notes += [f"Steps of more than three medians, left out: {times.num_left_out}."] if times.num_left_out else []
    return _section("Training", element("div", *parts, class_="pair"), notes=notes) if parts else ""


def _backgrounds(contents: Contents) -> str:
    if not contents.backgrounds:
        return ""
    notes, parts = [], []
    for job in contents.backgrounds:
        members = job.members[:_MOST_MEMBERS]
        curves = trial_curves(members, _best(members))
        if curves is not None:
            drawn, _ = curves_picture(curves)
            where = f"{job.name}, beside device {job.device}"
            parts.append(element("div", element("h3", text_of(where)), drawn))
    if parts:
        notes.append("Training losses, smoothed; the member with the lowest in its last tenth is drawn strong.")
    if any(len(job.members) > _MOST_MEMBERS for job in contents.backgrounds):
        notes.append(f"Of arrays with more members than {_MOST_MEMBERS} the first {_MOST_MEMBERS} are drawn.")
    heads = ("job", "beside device", "steps", "of its speed alone", "state", "last loss")
    rows = (element("tr", *(element("td", text_of(cell)) for cell in _job_cells(job))) for job in contents.backgrounds)
    head = element("thead", element("tr", *(element("th", text_of(name)) for name in heads)))
    table = element("div", element("table", head, element("tbody", *rows)), class_="wide")
    return _section("Background jobs", element("div", *parts, class_="pair"), table, notes=notes)


def _best(members: Sequence[TrialCurve]) -> int | None:
    """By the mean of the last tenth; a single job is not drawn strong."""
    ends = {m.number: m.losses[-max(len(m.losses) // 10, 1) :] for m in members if m.losses}
    known = {n: sum(end) / len(end) for n, end in ends.items() if all(map(math.isfinite, end))}
    return min(known, key=lambda n: known[n]) if len(members) > 1 and known else None


def _job_cells(job: BackgroundJob) -> tuple[str, ...]:
    last = [member.losses[-1] for member in job.members if member.losses and math.isfinite(member.losses[-1])]
    loss = number(min(last)) if last else ""
    if len(last) > 1:
        loss += f" to {number(max(last))}"
    state = f"{job.state}: {job.reason}" if job.reason else job.state
    return job.name, str(job.device), f"{job.steps:,}", percent(job.kept), state, loss


def _layers(contents: Contents) -> str:
    bars = layer_bars(contents)
    if bars is None:
        return ""
    legend = (element("span", swatch(kind), kind) for kind in ("forward", "backward"))
    notes = []
    if bars.num_others:
        notes.append(f"And {bars.num_others} cheaper layers, {percent(bars.others_share)} of the time.")
    beside = element("div", *legend, text_of(contents.layers_title), class_="legend")
    drawn = element("div", layers_picture(bars), class_="wide")
    return _section("The profile: time a layer", drawn, notes=notes, beside=beside, long=True)


def _blocks(contents: Contents) -> str:
    if not contents.blocks:
        return ""
    spent = [block_seconds(timeline) for timeline in contents.timelines]
    kinds = [kind for kind in ("forward", "backward", "reduce") if any(k == kind for of in spent for _, k in of)]
    rows = []
    for block in contents.blocks[:_MOST_BLOCKS]:
        cells = [*_block_cells(block), *(seconds(of.get((block.name, kind))) for kind in kinds for of in spent)]
        rows.append(element("tr", *(element("td", text_of(cell)) for cell in cells)))
    head = _blocks_head(kinds, [timeline.source for timeline in contents.timelines])
    table = element("table", element("thead", head), element("tbody", *rows))
    notes = ["Seconds a step, on the block's slowest device."] if kinds else []
    if len(contents.blocks) > _MOST_BLOCKS:
        notes.append(f"The first {_MOST_BLOCKS} of {len(contents.blocks):,} blocks.")
    return _section("Blocks", element("div", table, class_="wide"), notes=notes, long=True)


def _blocks_head(kinds: Sequence[str], sources: Sequence[str]) -> str:
    """One line, or two where each kind has a predicted and a measured column."""
    names = ("block", "layers", "devices", "which", "samples a device")
    if len(sources) < 2 or not kinds:
        return element("tr", *(element("th", name) for name in (*names, *kinds)))
    groups = (element("th", kind, colspan=len(sources), class_="group") for kind in kinds)
    below = (element("th", source) for _ in kinds for source in sources)
    return element("tr", *(element("th", name, rowspan=2) for name in names), *groups) + element("tr", *below)


def _block_cells(block: PlannedWork) -> tuple[str, ...]:
    least, most = min(block.samples, default=0), max(block.samples, default=0)
    samples = number(most) if least == most else f"{least}–{most}"
    return block.name, str(block.num_layers), str(len(block.devices)), runs(block.devices), samples
