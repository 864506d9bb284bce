"""SVG as text: elements, the palette of all pictures, and pictures that stand alone.

Colours are named in `chart.css` as `var(--forward)`. In a page, `palette_css` gives each name its light and its dark
value; in a picture that stands alone the names are replaced by the light values, as some viewers know no variables.
"""

import re
from functools import cache
from html import escape
from importlib.resources import files

PALETTE: dict[str, tuple[str, str]] = {
    "page": ("#f7f8fa", "#101418"),
    "card": ("#ffffff", "#181d23"),
    "border": ("#e1e5ea", "#2b323b"),
    "ink": ("#1c2733", "#e4e9ef"),
    "faint": ("#64717f", "#93a0ae"),
    "grid": ("#e6eaee", "#2a313a"),
    "track": ("#eef1f5", "#222931"),
    "forward": ("#86b6e8", "#6fa8e0"),
    "backward": ("#2f6db5", "#3b7cc9"),
    "step": ("#1d3d63", "#b8cde6"),
    "reduce": ("#e3a03f", "#d9983c"),
    "send": ("#4f9d69", "#4f9d69"),
    "receive": ("#9ccb86", "#93c47d"),
    "push": ("#c26a4a", "#cf7a5a"),
    "pull": ("#dfa58e", "#dba48e"),
    "background": ("#ab8fd0", "#a88bd0"),
    "other": ("#8a97a5", "#8a97a5"),
    "warn": ("#9a5b00", "#f0b95b"),
    "on-light": ("#12263b", "#0c1a29"),
    "on-dark": ("#ffffff", "#ffffff"),
}
"""Name → colour on light, colour on dark."""
KINDS = ("forward", "backward", "step", "reduce", "send", "receive", "push", "pull")
"""Kinds of events that have a colour of their own."""
_MARGIN = 18
"""Around a picture that stands alone."""
_UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""What XML cannot hold."""


def text_of(value: object) -> str:
    """Anything as text that is safe inside of an element or an attribute."""
    return escape(_UNFIT.sub("\ufffd", str(value)), quote=True)


def element(name: str, *children: str, **attributes: object) -> str:
    """`element("text", "a", class_="label", x=1.5)`; children are markup already, attributes are not."""
    written = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    return f"<{name}{written}>{''.join(children)}</{name}>"


def rect(x: float, y: float, width: float, height: float, *, title: str = "", **attributes: object) -> str:
    """A rectangle that says what it is when pointed at."""
    inside = (element("title", text_of(title)),) if title else ()
    return element("rect", *inside, x=x, y=y, width=width, height=height, **attributes)


def label(x: float, y: float, content: object, **attributes: object) -> str:
    """Some text."""
    return element("text", text_of(content), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    """A straight one."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def path(points: list[tuple[float, float]], **attributes: object) -> str:
    """A line through points."""
    return element("path", d="M" + "L".join(f"{_value(x)} {_value(y)}" for x, y in points), **attributes)


def picture(*children: str, width: float, height: float, title: str, **attributes: object) -> str:
    """An SVG that fills the width of its place; `title` is read aloud by screen readers."""
    size = {"viewBox": f"0 0 {_value(width)} {_value(height)}", "class_": "chart", "role": "img"}
    return element("svg", *children, **size, aria_label=title, **attributes)


def standalone(drawn: str, *, width: float, height: float) -> str:
    """A picture as a file of its own, on a light card with a margin."""
    box = f"-{_MARGIN} -{_MARGIN} {_value(width + 2 * _MARGIN)} {_value(height + 2 * _MARGIN)}"
    style = f"<style>{_resolved(stylesheet('chart.css'))}</style>"
    card = rect(0.5 - _MARGIN, 0.5 - _MARGIN, width + 2 * _MARGIN - 1, height + 2 * _MARGIN - 1, rx=8, class_="card")
    head = '<svg xmlns="http://www.w3.org/2000/svg"'
    opening, _, rest = drawn.removeprefix("<svg").partition(">")
    opening = re.sub(r'viewBox="[^"]*"', f'viewBox="{box}"', opening, count=1)
    return f"{head}{opening}>\n{style}\n{card}\n{rest}\n"


def palette_css() -> str:
    """The palette as CSS variables for both themes."""
    return ":root{" + "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in PALETTE.items()) + "}"


@cache
def stylesheet(name: str) -> str:
    """A file that lies beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _resolved(css: str) -> str:
    return re.sub(r"var\(--([\w-]+)\)", lambda found: PALETTE[found[1]][0], css)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text_of(value)
