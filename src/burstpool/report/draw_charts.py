"""The other pictures of a report: the plan's skyline, curves over steps, time a layer.

Takes what `charts.py` computed, returns SVG. Only places and formats.
"""

from collections.abc import Iterator

from burstpool.report.charts import Axis, Curve, LayerBars, Skyline
from burstpool.report.svg import element, label, line, path, picture, rect
from burstpool.report.words import percent, seconds

WIDTH = 1120.0
_CURVE_WIDTH = 540.0
_CHARACTER_WIDTH = 6.6
_MOST_LETTERS = 42
"""Of a layer's name."""


def skyline_picture(skyline: Skyline, *, caption: str = "") -> tuple[str, float]:
    """Towers as high as their devices and as wide as their time; and the height of the picture."""
    top = 48.0 if caption else 24.0
    left, right, bottom = 48.0, WIDTH - 16, top + min(170.0, 50 + 20 * skyline.devices.high)
    parts = [
        label(0, 14, caption, class_="strong") if caption else "",
        *_grid_left(skyline.devices, left, right, top, bottom),
        *_ticks_below(skyline.time, left, right, bottom),
        label(0, top - 12, "devices", class_="faint"),
    ]
    for tower in skyline.towers:
        x1, x2 = (left + skyline.time.place(value) * (right - left) for value in (tower.start_s, tower.stop_s))
        y = bottom - skyline.devices.place(tower.num_devices) * (bottom - top)
        layers = f"{tower.num_layers} layer{'s' if tower.num_layers > 1 else ''}"
        took = "" if skyline.source == "layers" else f"\n{seconds(tower.stop_s - tower.start_s)} {skyline.source}"
        devices = f"{tower.num_devices} device{'s' if tower.num_devices > 1 else ''}"
        title = f"{tower.name}\n{layers} on {devices}{took}"
        parts.append(rect(x1, y, x2 - x1, bottom - y, title=title, class_="tower", fill_opacity=0.85))
        if len(tower.name) * _CHARACTER_WIDTH + 8 <= x2 - x1:
            inside = bottom - y >= 20
            look = "tower middle" if inside else "faint middle"
            parts.append(label((x1 + x2) / 2, y + 15 if inside else y - 5, tower.name, class_=look))
    parts.append(line(left, bottom, right, bottom, class_="rule"))
    return picture(*parts, width=WIDTH, height=bottom + 26, title="devices a block over time"), bottom + 26


def curve_picture(curve: Curve, *, title: str, line_name: str = "") -> str:
    """A curve, its smoothed self over it, and a line across where there is one."""
    left, right, top, bottom = 60.0, _CURVE_WIDTH - 14, 14.0, 204.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x, y = curve.steps.place(point[0]), curve.values.place(point[1])
        return left + x * (right - left), bottom - y * (bottom - top)

    parts = [
        *_grid_left(curve.values, left, right, top, bottom),
        *_ticks_below(curve.steps, left, right, bottom),
        path([place(point) for point in curve.points], class_="curve raw" if curve.smooth else "curve"),
    ]
    if curve.smooth:
        parts.append(path([place(point) for point in curve.smooth], class_="curve"))
    if curve.line is not None:
        y = place((0.0, curve.line))[1]
        parts.append(line(left, y, right, y, class_="mark predicted"))
        parts.append(label(right, y - 5, line_name, class_="faint end"))
    parts.append(label((left + right) / 2, bottom + 32, "step", class_="faint middle"))
    return picture(*parts, width=_CURVE_WIDTH, height=bottom + 38, title=title)


def layers_picture(bars: LayerBars) -> str:
    """A bar a layer: forward, then backward."""
    longest = max(len(shortened(layer.name, _MOST_LETTERS)) for layer in bars.layers)
    left, right, top, pitch = 24 + longest * _CHARACTER_WIDTH, WIDTH - 120, 8.0, 20.0
    bottom = top + pitch * len(bars.layers)
    parts = [
        *(line(x, top, x, bottom, class_="grid") for x in _places(bars.time, left, right)),
        *_ticks_below(bars.time, left, right, bottom),
    ]
    for place, layer in enumerate(bars.layers):
        y = top + place * pitch
        x1, x2 = (left + bars.time.place(value) * (right - left) for value in (layer.forward_s, layer.seconds))
        share = layer.seconds / bars.total_s if bars.total_s else 0.0
        title = f"{layer.name}\n{layer.kind}\nforward {seconds(layer.forward_s)}, backward {seconds(layer.backward_s)}"
        parts += [
            label(left - 10, y + 14, shortened(layer.name, _MOST_LETTERS), class_="end"),
            rect(left, y + 4, x1 - left, pitch - 8, title=title, class_="forward"),
            rect(x1, y + 4, x2 - x1, pitch - 8, title=title, class_="backward"),
            label(x2 + 8, y + 14, f"{seconds(layer.seconds)} · {percent(share)}", class_="faint"),
        ]
    parts.append(line(left, top, left, bottom, class_="rule"))
    return picture(*parts, width=WIDTH, height=bottom + 26, title="time a layer")


def shortened(name: str, most: int) -> str:
    """A long name without its middle: both ends tell layers apart."""
    if len(name) <= most:
        return name
    half = (most - 1) // 2
    return f"{name[: most - 1 - half]}…{name[-half:]}"


def swatch(kind: str) -> str:
    """A small square of a kind's colour."""
    inside = rect(0, 0, 12, 12, class_=kind, rx=2)
    return element("svg", inside, viewBox="0 0 12 12", width=12, height=12, class_="chart swatch", aria_hidden="true")


def _grid_left(axis: Axis, left: float, right: float, top: float, bottom: float) -> Iterator[str]:
    for value, written in axis.ticks:
        y = bottom - axis.place(value) * (bottom - top)
        yield line(left, y, right, y, class_="grid")
        yield label(left - 8, y + 4, written, class_="faint end")


def _ticks_below(axis: Axis, left: float, right: float, bottom: float) -> Iterator[str]:
    for x, (_, written) in zip(_places(axis, left, right), axis.ticks, strict=True):
        yield label(x, bottom + 16, written, class_="faint middle")


def _places(axis: Axis, left: float, right: float) -> list[float]:
    return [left + axis.place(value) * (right - left) for value, _ in axis.ticks]
