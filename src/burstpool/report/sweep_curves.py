"""Curves of all trials of a sweep, or of all members of an array, in one picture: the numbers, and the drawing.

Takes their losses. Returns `Curves`, smoothed and thinned out, with axes that a diverging trial does not stretch; and
SVG of it. Pure.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from burstpool.report.charts import Axis, axis, thinned
from burstpool.report.draw_charts import WIDTH
from burstpool.report.svg import element, label, line, picture, text_of
from burstpool.report.sweep_contents import TrialCurve
from burstpool.report.words import number

_MOST_POINTS = 200
"""Of a curve."""
_SMOOTHING = 0.04
"""Part of a whole trial's steps that a point is the mean of."""
_HEADROOM = 0.15
"""Over the middle of the first losses, as a part of their height: what lies higher is cut off."""

_FAR = 1e6
"""Times the middle of the first losses: what is larger is as good as that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLine:
    """One trial's curve."""

    stretches: tuple[tuple[tuple[float, float], ...], ...]
    """(step, smoothed loss), none outside of the axes; a curve that leaves the picture comes back as a new stretch."""
    look: str
    """`best`, `done`, `short` (stopped early) or `failed`."""
    title: str
    """What it says when pointed at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """All trials; the best is the last, over the others."""

    lines: tuple[TrialLine, ...]
    steps: Axis
    values: Axis
    num_cut: int
    """Curves that leave the picture."""


def trial_curves(trials: Sequence[TrialCurve], best: int | None) -> Curves | None:
    """None where no trial has come to its second step. `best` is the number of one."""
    longest = max((len(trial.losses) for trial in trials), default=1)
    first_losses = [abs(trial.losses[0]) for trial in trials if trial.losses and math.isfinite(trial.losses[0])]
    limit = _FAR * (statistics.median(first_losses) if first_losses else 1.0)
    widest = round(longest * _SMOOTHING / 2)
    smooth = {trial.number: _smoothed(trial.losses, widest, limit) for trial in trials}
    drawn = [trial for trial in trials if len(smooth[trial.number]) > 1]
    if not drawn:
        return None
    lowest = min(0.0, min(value for trial in drawn for _, value in smooth[trial.number]))
    first = statistics.median(smooth[trial.number][0][1] for trial in drawn)
    highest = first + (first - lowest) * _HEADROOM
    inside = {n: [(step, value) for step, value in points if value <= highest] for n, points in smooth.items()}
    ordered = sorted(drawn, key=lambda trial: (trial.number == best, trial.state == "done", trial.number))
    lines = tuple(
        TrialLine(
            stretches=_stretches(smooth[trial.number], highest),
            look=_look(trial, best),
            title=_title(trial),
        )
        for trial in ordered
        if len(inside[trial.number]) > 1
    )
    return Curves(
        lines=lines,
        steps=axis(0.0, float(max(1, longest - 1))),
        values=axis(lowest, highest, most=6),
        num_cut=sum(len(inside[trial.number]) < len(smooth[trial.number]) for trial in drawn),
    )


def curves_picture(curves: Curves, *, caption: str = "") -> tuple[str, float]:
    """The picture, and its height."""
    top = 40.0 if caption else 14.0
    left, right, bottom = 60.0, WIDTH - 16, top + 320.0

    def place(point: tuple[float, float]) -> str:
        x = left + curves.steps.place(point[0]) * (right - left)
        y = bottom - curves.values.place(point[1]) * (bottom - top)
        return f"{x:.1f} {y:.1f}"

    parts = [label(0, 14, caption, class_="strong") if caption else ""]
    for value, written in curves.values.ticks:
        y = bottom - curves.values.place(value) * (bottom - top)
        parts += [line(left, y, right, y, class_="grid"), label(left - 8, y + 4, written, class_="faint end")]
    for value, written in curves.steps.ticks:
        x = left + curves.steps.place(value) * (right - left)
        parts.append(label(x, bottom + 16, written, class_="faint middle"))
    for drawn in curves.lines:
        way = "".join("M" + "L".join(place(point) for point in stretch) for stretch in drawn.stretches)
        title = element("title", text_of(drawn.title))
        parts.append(element("path", title, d=way, class_=f"curve trial {drawn.look}"))
    parts.append(label((left + right) / 2, bottom + 34, "step", class_="faint middle"))
    height = bottom + 40
    return picture(*parts, width=WIDTH, height=height, title="training loss of all trials over steps"), height


def _stretches(points: list[tuple[float, float]], highest: float) -> tuple[tuple[tuple[float, float], ...], ...]:
    """The points inside, thinned out, apart where others between them are outside."""
    left = list(accumulate(value > highest for _, value in points))
    times_left = {step: count for (step, _), count in zip(points, left, strict=True)}
    inside = [point for point in points if point[1] <= highest]
    groups = groupby(thinned(inside, _MOST_POINTS), key=lambda point: times_left[point[0]])
    return tuple(tuple(group) for _, group in groups)


def _look(trial: TrialCurve, best: int | None) -> str:
    if trial.number == best:
        return "best"
    return {"done": "done", "failed": "failed"}.get(trial.state, "short")


def _title(trial: TrialCurve) -> str:
    last = f"\nobjective {number(trial.reports[-1][1])} at step {trial.reports[-1][0]}" if trial.reports else ""
    return f"{trial.name}\n{trial.state}{last}"


def _smoothed(losses: tuple[float, ...], widest: int, limit: float) -> list[tuple[float, float]]:
    """The mean of as many points on either side; ends at the first loss that is no number.

    Losses beyond the limit count as the limit, which is far outside of the picture: in the sums they would wipe out
    all that come after.
    """
    finite = losses[: next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))]
    sums = list(accumulate((min(max(loss, -limit), limit) for loss in finite), initial=0.0))
    found = []
    for place in range(len(finite)):
        reach = min(widest, place, len(finite) - 1 - place)
        found.append((float(place), (sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1)))
    return found
