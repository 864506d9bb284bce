"""Pictures of timelines and schedules: as text for the terminal, as SVG for pages, and as the data to draw others from.

Takes a Timeline or a Schedule; returns strings, or rectangles in seconds. Devices that did the same share a row.
Draws what it is given; decides nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from burstpool.report.timeline import Event, Lane, Timeline
from burstpool.schedule.actions import Kind, Schedule

GLYPHS = {"forward": "▒", "backward": "█", "step": "▓", "reduce": "═", "send": "─", "receive": "─", "gap": "·"}
"""How a kind looks in text; what has none looks like a step."""
COLOURS = {
    "forward": "#8fb8de",
    "backward": "#3f72af",
    "step": "#1b3a5c",
    "reduce": "#e0a458",
    "send": "#6a994e",
    "receive": "#a7c957",
    "gap": "#f2f2f2",
}
_ROW_HEIGHT, _LANE_HEIGHT, _LABEL_WIDTH, _CHARACTER_WIDTH = 36, 16, 90, 7
"""Pixels of the SVG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """One event as a rectangle: seconds across, devices and lanes down."""

    device: int
    lane: Lane
    kind: str
    """The event's kind, or `gap`."""
    block: str
    block_index: int
    """Blocks in the order in which they first ran: for colours; -1 for gaps."""
    start_s: float
    stop_s: float
    minibatch: int = 0
    step: int = 0


def rects(timeline: Timeline, *, gaps: bool = False) -> tuple[Rect, ...]:
    """Everything to draw, in order of start; gaps of the compute lane at the end if asked for."""
    blocks = {name: index for index, name in enumerate(dict.fromkeys(event.block for event in timeline.events))}
    found = [
        Rect(
            device=event.device,
            lane=event.lane,
            kind=event.kind,
            block=event.block,
            block_index=blocks[event.block],
            start_s=event.start_s,
            stop_s=event.stop_s,
            minibatch=event.minibatch,
            step=event.step,
        )
        for event in timeline.events
    ]
    if gaps:
        found += [
            Rect(device=device, lane="compute", kind="gap", block="", block_index=-1, start_s=start_s, stop_s=stop_s)
            for device, spans in enumerate(timeline.gaps())
            for start_s, stop_s in spans
        ]
    return tuple(found)


def draw(timeline: Timeline, *, width: int = 100, most_rows: int = 16) -> str:
    """The timeline as text: a line of compute a row, and one of communication below it where there is any."""
    if not timeline.events:
        return "nothing happens\n"
    rows = _rows(timeline)
    labels = [_label(row.devices) for row in rows[:most_rows]]
    margin = max(map(len, labels)) + 1
    columns = max(10, width - margin)
    window = (timeline.start_s, timeline.stop_s)
    lines = [" " * margin + _axis(window, columns)]
    for label, row in zip(labels, rows, strict=False):
        lines.append(f"{label:<{margin}}{_line(row.compute, window, columns, GLYPHS['gap'])}")
        if row.communication:
            lines.append(" " * margin + _line(row.communication, window, columns, " ").rstrip())
    if len(rows) > most_rows:
        lines.append(f"… and {sum(len(row.devices) for row in rows[most_rows:])} more devices")
    shown = dict.fromkeys(GLYPHS[event.kind] for event in timeline.events if event.kind in GLYPHS)
    names = {glyph: "/".join(kind for kind, other in GLYPHS.items() if other == glyph) for glyph in shown}
    names[GLYPHS["gap"]] = "gap"
    lines.append(" " * margin + "  ".join(f"{glyph} {name}" for glyph, name in names.items()))
    return "\n".join(lines) + "\n"


def outline(schedule: Schedule) -> str:
    """Each device's forwards and backwards in a line: `a▸0 b▸0 ◂b0 ◂a0`, with the minibatch behind."""
    marks = {Kind.FORWARD: "{}▸{}", Kind.BACKWARD: "◂{}{}"}
    rows: dict[str, list[int]] = {}
    for device, actions in enumerate(schedule.devices):
        cells = [
            marks[action.kind].format(action.block, action.minibatch) for action in actions if action.kind in marks
        ]
        rows.setdefault(" ".join(cells) or "nothing to do", []).append(device)
    margin = max(len(_label(devices)) for devices in rows.values()) + 2
    return "".join(f"{_label(devices):<{margin}}{cells}\n" for cells, devices in rows.items())


def svg(timeline: Timeline, *, width: int = 900) -> str:
    """The timeline as a picture of its own; every rectangle says what it is when pointed at."""
    rows = _rows(timeline)
    start_s, length_s = timeline.start_s, timeline.stop_s - timeline.start_s or 1.0
    scale = (width - _LABEL_WIDTH) / length_s
    height = _ROW_HEIGHT * len(rows) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for index, row in enumerate(rows):
        top = index * _ROW_HEIGHT + 4
        parts.append(f'<text x="4" y="{top + 12}">{_label(row.devices)}</text>')
        parts.append(_svg_rect(_LABEL_WIDTH, top, width - _LABEL_WIDTH, COLOURS["gap"], "gap"))
        for offset, events in enumerate((row.compute, row.communication)):
            for event in events:
                x = _LABEL_WIDTH + (event.start_s - start_s) * scale
                parts.append(_svg_event(event, x, top + offset * _LANE_HEIGHT, (event.stop_s - event.start_s) * scale))
    last = height - 8
    parts.append(f'<text x="{_LABEL_WIDTH}" y="{last}">0</text>')
    parts.append(f'<text x="{width}" y="{last}" text-anchor="end">{_seconds(length_s)}</text></svg>')
    return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Devices that did the same at the same times."""

    devices: Sequence[int]
    compute: Sequence[Event]
    communication: Sequence[Event]


def _rows(timeline: Timeline) -> list[_Row]:
    events: Mapping[int, list[Event]] = {device: [] for device in range(timeline.num_devices)}
    for event in timeline.events:
        events[event.device].append(event)
    alike: dict[tuple[object, ...], list[int]] = {}
    for device, mine in events.items():
        alike.setdefault(tuple((e.lane, e.kind, e.block, e.start_s, e.stop_s) for e in mine), []).append(device)
    return [
        _Row(
            devices=devices,
            compute=[event for event in events[devices[0]] if event.lane == "compute"],
            communication=[event for event in events[devices[0]] if event.lane == "communication"],
        )
        for devices in alike.values()
    ]


def _line(events: Iterable[Event], window: tuple[float, float], columns: int, empty: str) -> str:
    """Each column shows the kind that fills most of it."""
    start_s, stop_s = window
    column_s = (stop_s - start_s) / columns or 1.0
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    for event in events:
        first = min(columns - 1, int((event.start_s - start_s) / column_s))
        last = min(columns - 1, int((event.stop_s - start_s) / column_s))
        glyph = GLYPHS.get(event.kind, GLYPHS["step"])
        for column in range(first, last + 1):
            left_s = start_s + column * column_s
            inside_s = min(event.stop_s, left_s + column_s) - max(event.start_s, left_s)
            filled[column][glyph] = filled[column].get(glyph, 0.0) + inside_s
    return "".join(_fullest(column, column_s, empty) for column in filled)


def _fullest(filled: Mapping[str, float], column_s: float, empty: str) -> str:
    idle_s = column_s - sum(filled.values())
    glyph = max(filled, key=filled.__getitem__, default=empty)
    return glyph if filled and filled[glyph] >= idle_s else empty


def _axis(window: tuple[float, float], columns: int) -> str:
    right = _seconds(window[1] - window[0])
    return "0" + right.rjust(columns - 1)


def _label(devices: Sequence[int]) -> str:
    runs = list(_runs(devices))
    shown = ",".join(runs[:3]) + (f",… ({len(devices)})" if len(runs) > 3 else "")
    return f"device{'s' if len(devices) > 1 else ''} {shown}"


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}"


def _seconds(value_s: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value_s >= scale:
            return f"{value_s / scale:.3g} {unit}"
    return f"{value_s:.3g} s"


def _svg_event(event: Event, x: float, y: float, width: float) -> str:
    minibatch = f", minibatch {event.minibatch}" if event.kind in ("forward", "backward", "send", "receive") else ""
    title = f"{event.kind} {event.block}{minibatch}: {_seconds(event.stop_s - event.start_s)}"
    rect = _svg_rect(x, y, width, COLOURS.get(event.kind, COLOURS["step"]), title)
    if len(event.block) * _CHARACTER_WIDTH > width:
        return rect
    colour = "white" if event.kind in ("backward", "step") else "black"
    return rect + f'<text x="{x + 3:.1f}" y="{y + 12:.1f}" fill="{colour}">{escape(event.block)}</text>'


def _svg_rect(x: float, y: float, width: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_LANE_HEIGHT - 1}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )
