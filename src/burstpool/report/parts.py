"""Parts that pages of reports share: the file around them, tiles, sections, notes, details.

Whatever comes from outside is escaped in `element`'s attributes and in `text_of`.
"""

from collections.abc import Iterable, Mapping, Sequence

from burstpool.report.svg import element, palette_css, stylesheet, text_of

_SECURITY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Nothing is ever loaded, whatever a name may contain."""


def document(title: str, body: str) -> str:
    """The whole file: no network, no other files, light and dark."""
    head = (
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY}">',
        element("title", text_of(f"{title} · Burstpool")),
        element("style", palette_css(), stylesheet("page.css"), stylesheet("chart.css")),
    )
    script = element("div", id="tip") + element("script", stylesheet("page.js"))
    return f'<!doctype html>\n<html lang="en"><head>{"".join(head)}</head>\n<body>{body}\n{script}</body></html>\n'


def header(title: str, words: Iterable[str]) -> str:
    """The page's name, and a line below it."""
    lead = " · ".join(word for word in words if word)
    named = element("div", element("h1", text_of(title)), element("p", text_of(lead), class_="lead"))
    return element("header", named, element("button", "light / dark", id="theme", type="button"))


def tile(what: str, figure: str, more: str) -> str:
    """One figure."""
    lines = (("what", what), ("figure", figure), ("more", more))
    return element("div", *(element("div", text_of(text), class_=name) for name, text in lines), class_="tile")


def warnings(notes: Sequence[str]) -> str:
    """What a reader should be warned of."""
    if not notes:
        return ""
    items = (element("li", text_of(note)) for note in notes)
    return element("section", element("ul", *items), class_="warning")


def section(title: str, *inside: str, notes: Iterable[str] = (), beside: str = "", long: bool = False) -> str:
    """A part of the page under a heading."""
    head = element("div", element("h2", text_of(title)), beside, class_="head")
    below = (element("p", text_of(note), class_="note") for note in notes)
    return element("section", head, *inside, *below, class_="long" if long else None)


def details(found: Mapping[str, str]) -> str:
    """Names and texts."""
    if not found:
        return ""
    pairs = (element("dt", text_of(name)) + element("dd", text_of(text)) for name, text in found.items())
    return section("Details", element("dl", *pairs))
