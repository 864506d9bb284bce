"""A sweep's report as one HTML file: the curves of all trials, and a table with the best first.

Takes SweepContents. Computes nothing of its own. Whatever comes from outside is escaped in `text_of`.
"""

import math
from collections.abc import Iterator

from burstpool.report.parts import details, document, header, section, tile, warnings
from burstpool.report.svg import element, rect, text_of
from burstpool.report.sweep_contents import SweepContents, TrialCurve
from burstpool.report.sweep_curves import curves_picture, trial_curves
from burstpool.report.words import number, runs, seconds

_LONG_CELL = 40
"""Characters above which a cell of the table is broken into lines."""
_LOOKS = (("best", "best"), ("trial", "trained to the end"), ("short", "stopped early"), ("failed", "failed"))


def sweep_page(contents: SweepContents) -> str:
    """The whole file."""
    words = (f"{contents.search} search", contents.details.get("source", ""), contents.details.get("started", ""))
    body = element(
        "main",
        header(contents.job, words),
        element("div", *_tiles(contents), class_="tiles"),
        warnings(contents.notes),
        _curves(contents),
        _table(contents),
        details(contents.details),
        element("footer", text_of(f"Made by {contents.made_by}.")),
    )
    return document(contents.job, body)


def _tiles(contents: SweepContents) -> Iterator[str]:
    best = next((trial for trial in contents.trials if trial.number == contents.best), None)
    if best is not None:
        yield tile("best objective", f"{best.reports[-1][1]:.4g}", f"trial {best.number}")
    counts = [f"{sum(t.state == state for t in contents.trials)} {state}" for state in ("done", "stopped", "failed")]
    yield tile("trials", f"{len(contents.trials):,}", ", ".join(c for c in counts if not c.startswith("0 ")))
    if contents.samples_per_s is not None:
        over = contents.samples_per_s / contents.serial_samples_per_s
        yield tile("samples/s", f"{contents.samples_per_s:,.0f}", f"{over:.1f}× one by one (estimate)")
    yield tile("arrays", str(contents.num_arrays), "of trials that can be fused")
    yield tile("time", seconds(contents.wall_time_s), "in all")


def _curves(contents: SweepContents) -> str:
    curves = trial_curves(contents.trials, contents.best)
    if curves is None:
        return ""
    legend = (
        element("span", _swatch(look), text_of(name))
        for look, name in _LOOKS
        if any(line.look == ("done" if look == "trial" else look) for line in curves.lines)
    )
    notes = ["Smoothed; point at a curve to read its settings."]
    if curves.num_cut:
        notes.append(f"Curves that leave the picture at its top: {curves.num_cut}.")
    drawn = element("div", curves_picture(curves)[0], class_="wide")
    return section("Training loss", drawn, notes=notes, beside=element("div", *legend, class_="legend"))


def _swatch(look: str) -> str:
    inside = rect(0, 0, 12, 12, class_=f"spot {look}", rx=2)
    return element("svg", inside, viewBox="0 0 12 12", width=12, height=12, class_="chart swatch", aria_hidden="true")


def _table(contents: SweepContents) -> str:
    names = list(dict.fromkeys(name for trial in contents.trials for name in trial.settings))
    heads = ("trial", *names, "state", "steps", "objective", "training loss")
    rows = [
        element("tr", *(_cell(text) for text in _cells(trial, names))) for trial in sorted(contents.trials, key=_rank)
    ]
    table = element("table", element("thead", element("tr", *(element("th", text_of(h)) for h in heads))), *rows)
    notes = [f"Objective: {contents.objective}, lower is better; the best first among those trained the longest."]
    notes += [f"In an array of their own: trials {runs(trials)}, because {why}." for trials, why in contents.apart[:20]]
    return section("Trials", element("div", table, class_="wide"), notes=notes, long=True)


def _cell(text: str) -> str:
    """One that is long goes over several lines, so that the others stay in sight."""
    return element("td", text_of(text), class_="long" if len(text) > _LONG_CELL else None)


def _rank(trial: TrialCurve) -> tuple[float, float, int]:
    step, value = trial.reports[-1] if trial.reports else (-1, math.inf)
    return (math.inf if trial.state == "failed" else -step, value, trial.number)


def _cells(trial: TrialCurve, names: list[str]) -> list[str]:
    state = f"{trial.state}: {trial.reason}" if trial.reason else trial.state
    value = number(trial.reports[-1][1]) if trial.reports else ""
    loss = number(trial.losses[-1]) if trial.losses and math.isfinite(trial.losses[-1]) else ""
    settings = [trial.settings.get(name, "") for name in names]
    return [str(trial.number), *settings, state, str(len(trial.losses)), value, loss]
