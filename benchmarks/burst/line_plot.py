"""Line plots as SVG, with nothing but the standard library.

Takes series of points; returns the text of a picture. Both axes are logarithmic.
"""

import math
from collections.abc import Mapping, Sequence

COLOURS = ("#4063d8", "#8fa6ec", "#9b9b9b", "#cb3c33", "#e79a95", "#389826", "#9558b2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 70, 170, 40, 50

Points = Sequence[tuple[float, float]]


def line_plot(series: Mapping[str, Points], *, title: str, x_label: str, y_label: str) -> str:
    """One line a series, with its name at the right."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low, high = min(ys) / 1.15, max(ys) * 1.15

    def place(x: float, y: float) -> tuple[float, float]:
        across = _part(x, min(xs), max(xs)) * (WIDTH - LEFT - RIGHT)
        return LEFT + across, HEIGHT - BOTTOM - _part(y, low, high) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{_safe(title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{_safe(x_label)}</text>',
        f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle">'
        f"{_safe(y_label)}</text>",
    ]
    for x in sorted(set(xs)):
        across, _ = place(x, low)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:g}</text>')
    for y in _ticks(low, high):
        _, down = place(xs[0], y)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" stroke="#e5e5e5"/>'
            f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for place_of, (name, points) in enumerate(series.items()):
        parts.append(_line([place(*point) for point in points], name, place_of))
    return "\n".join([*parts, "</svg>", ""])


def _line(points: Points, name: str, index: int) -> str:
    colour, y = COLOURS[index % len(COLOURS)], TOP + 18 * index
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        f'<rect x="{WIDTH - RIGHT + 12}" y="{y - 8}" width="10" height="10" fill="{colour}"/>'
        f'<text x="{WIDTH - RIGHT + 28}" y="{y + 1}">{_safe(name)}</text>'
    )


def _part(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in decades for step in (1, 2, 5) if low <= step * 10.0**power <= high]


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
