"""The picture of one step on all devices: predicted above, measured below, in each lane of each device.

Takes an Overlay, returns SVG. Only places and formats: what is shown is decided in `overlay.py`. The page's script
zooms by moving what lies in the group `zoomable`, and reads the geometry from the picture's `data-` attributes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from burstpool.report.charts import time_axis
from burstpool.report.overlay import MOST_DEVICES, Bar, Overlay, Row, Strip
from burstpool.report.svg import KINDS, element, label, line, picture, rect
from burstpool.report.timeline import WHOLE_STEP
from burstpool.report.words import percent, runs, seconds

WIDTH = 1120.0
_LEFT = 164.0
_RIGHT = 4.0
_TOP = 34.0
_BOTTOM = 26.0
_CHARACTER_WIDTH = 5.9
_MARK_WIDTH = 130.0
"""A mark's label; it stands to the right of a mark that has no room for it on the left."""
_SHORTEST = 0.6
"""A bar is at least this wide, so that what is short is seen."""
_THIN = 3.0
"""A bar narrower than this has no outline: there would be nothing else of it."""
_SIZES = ((8, (15, 9, 4, 16)), (24, (10, 7, 3, 10)), (MOST_DEVICES, (7, 5, 2, 7)))
"""Up to so many devices → the fields of _Sizes for two strips a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Heights in pixels."""

    compute: float
    """Of one strip."""
    communication: float
    between: float
    """Lanes of a device."""
    after: float
    """A device."""

    def strip(self, lane: str) -> float:
        """Height of a strip of this lane."""
        return self.compute if lane == "compute" else self.communication

    @classmethod
    def of(cls, overlay: Overlay) -> "_Sizes":
        """Lower ones for more devices; higher ones where there is one strip a lane instead of two."""
        taller = 1.4 if len(overlay.sources) == 1 else 1.0
        compute, communication, between, after = next(sizes for most, sizes in _SIZES if len(overlay.rows) <= most)
        return cls(compute=compute * taller, communication=communication * taller, between=between, after=after)


def timeline_picture(overlay: Overlay, *, caption: str = "", legend: bool = False) -> tuple[str, float]:
    """The SVG and its height; with a caption and a legend of its own where it stands alone."""
    sizes = _Sizes.of(overlay)
    top = _TOP + (22 if caption else 0)
    plot = WIDTH - _LEFT - _RIGHT
    scale = plot / overlay.length_s if overlay.length_s else 0.0
    rows, bottom = _rows(overlay, sizes, top, scale)
    height = bottom + _BOTTOM + (26 if legend else 0)
    clip = element("clipPath", rect(_LEFT, 0, plot + _RIGHT, height), id="plot")
    parts = [
        element("defs", clip),
        label(0, 14, caption, class_="strong") if caption else "",
        element("g", *_grid(overlay, scale, top, bottom), class_="axis"),
        *rows,
        element("g", *_marks(overlay, scale, top, bottom), class_="marks", clip_path="url(#plot)"),
        element("g", *_legend(overlay, height - 4), class_="legend") if legend else "",
    ]
    data = {"data_left": _LEFT, "data_plot": plot, "data_top": top, "data_bottom": bottom}
    title = f"timeline of a step on {overlay.num_devices} devices, {' and '.join(overlay.sources)}"
    drawn = picture(*parts, width=WIDTH, height=height, title=title, data_length=repr(overlay.length_s), **data)
    return drawn, height


def kinds_legend(overlay: Overlay) -> list[tuple[str, str]]:
    """(class, name) of each colour that is used, in one order always."""
    found = [(kind, kind) for kind in KINDS if kind in overlay.kinds]
    if WHOLE_STEP in overlay.kinds:
        found.append(("other", WHOLE_STEP))
    if any(strip.lane == "background" for strip in overlay.rows[0].strips):
        found.append(("background", "background job"))
    return found


def _rows(overlay: Overlay, sizes: _Sizes, top: float, scale: float) -> tuple[list[str], float]:
    drawn, y = [], top + 8
    for row in overlay.rows:
        inside, below = _row(row, overlay, sizes, y, scale)
        drawn.append(element("g", *inside, class_="row"))
        y = below + sizes.after
    return drawn, y - sizes.after + 8


def _row(row: Row, overlay: Overlay, sizes: _Sizes, y: float, scale: float) -> tuple[list[str], float]:
    parts = [label(0, y + 11, f"device {row.device}", class_="strong")]
    roomy = len(overlay.rows) <= _SIZES[0][0]
    busy = " / ".join(percent(share) for share in row.utilisation.values())
    parts.append(label(0, y + 26, f"{busy} busy", class_="faint") if roomy else "")
    parts.append("" if roomy else label(_LEFT - 8, y + 11, busy, class_="faint end"))
    lane = ""
    for strip in row.strips:
        height = sizes.strip(strip.lane)
        if lane and strip.lane != lane:
            y += sizes.between
        if strip.lane != lane and roomy:
            both = (height + 1) * sum(other.lane == strip.lane for other in row.strips) - 1
            parts.append(label(_LEFT - 8, y + both / 2 + 4, strip.lane, class_="faint end"))
        lane = strip.lane
        parts.append(_strip(strip, overlay, y, height, scale))
        y += height + 1
    return parts, y


def _strip(strip: Strip, overlay: Overlay, y: float, height: float, scale: float) -> str:
    track = height / strip.num_tracks
    # One timeline alone needs no outline to be told from the other.
    look = "predicted" if strip.source == "predicted" and len(overlay.sources) > 1 else "filled"
    bars = [drawn for bar in strip.bars for drawn in _bar(bar, strip, y + bar.track * track, track, scale)]
    return rect(_LEFT, y, WIDTH - _LEFT - _RIGHT, height, class_="track") + element(
        "g", *bars, class_=f"zoomable {look}", clip_path="url(#plot)"
    )


def _bar(bar: Bar, strip: Strip, y: float, height: float, scale: float) -> Iterator[str]:
    x, width = _LEFT + bar.start_s * scale, max(_SHORTEST, (bar.stop_s - bar.start_s) * scale)
    kind = _class(bar, strip)
    thin = " thin" if width < _THIN else ""
    # An outline of 1 px lies half inside: without this, neighbours would draw over each other's edges.
    inset = 0.5 if height > 3 else 0.0
    yield rect(x, y + inset, width, height - 2 * inset, title=_told(bar, strip), class_=f"bar {kind}{thin}")
    if bar.count == 1 and height >= 10 and len(bar.block) * _CHARACTER_WIDTH + 6 <= width:
        yield label(x + 4, y + height / 2 + 3.5, bar.block, class_=f"name {kind}")


def _class(bar: Bar, strip: Strip) -> str:
    if strip.lane == "background":
        return "background"
    return bar.kind if bar.kind in KINDS else "other"


def _told(bar: Bar, strip: Strip) -> str:
    """First line: kind and block, which the script takes the block's name from."""
    more = f" and {bar.count - 1} more" if bar.count > 1 else ""
    minibatch = f", minibatch {bar.minibatch}" if bar.minibatch else ""
    span = f"{seconds(bar.start_s)} to {seconds(bar.stop_s)}"
    return f"{bar.kind} {bar.block}{more}\n{strip.source}{minibatch}\n{seconds(bar.stop_s - bar.start_s)}: {span}"


def _grid(overlay: Overlay, scale: float, top: float, bottom: float) -> Iterator[str]:
    for value_s, written in time_axis(overlay.length_s).ticks if overlay.length_s else ():
        x = _LEFT + value_s * scale
        yield line(x, top, x, bottom, class_="grid")
        yield label(x, bottom + 15, written, class_="faint middle")


def _marks(overlay: Overlay, scale: float, top: float, bottom: float) -> Iterator[str]:
    """Where a step ends, predicted and measured; the later one's label stands above the other's."""
    ends = sorted((step_s, source) for source, step_s in overlay.step_times_s.items() if step_s)
    for place, (step_s, source) in enumerate(ends):
        x, y = _LEFT + step_s * scale, top - 6 - 14 * place
        yield line(x, y - 8, x, bottom, class_=f"mark {source}")
        left = x < _LEFT + _MARK_WIDTH
        written = f"{source} {seconds(step_s)}"
        yield label(x + 5 if left else x - 5, y, written, class_="faint" if left else "faint end")


def _legend(overlay: Overlay, y: float) -> Iterator[str]:
    x = _LEFT
    for kind, name in [*kinds_legend(overlay), ("track", "gap")]:
        yield rect(x, y - 10, 14, 11, class_=kind, rx=2)
        yield label(x + 20, y, name, class_="faint")
        x += 20 + len(name) * 6.2 + 22


def shown_note(overlay: Overlay) -> Sequence[str]:
    """What a reader must know of what is and is not drawn."""
    notes = [f"{source}: step {step}" for source, step in overlay.steps.items()]
    found = [f"Shown is the step whose length is nearest to the median ({', '.join(notes)}), each from its own start."]
    if len(overlay.sources) > 1:
        found.append("Busy: the part of the time in which a device computes, predicted / measured.")
    if len(overlay.rows) < overlay.num_devices:
        shown = runs([row.device for row in overlay.rows], most=100)
        found.append(
            f"{len(overlay.rows)} of {overlay.num_devices} devices are shown ({shown}): of those with the same work "
            "the least and the most busy ones, and some in between."
        )
    if overlay.num_merged:
        found.append(f"{overlay.num_merged:,} short events are drawn together with their neighbours.")
    return found
