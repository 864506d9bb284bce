"""Numbers as people read them: `1.24 ms`, `12,300`, `devices 0–3, 8`."""

from collections.abc import Sequence
from itertools import groupby

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def unit_of(value_s: float) -> tuple[str, float]:
    """The unit in which a time is best written, and its seconds."""
    return next((unit for unit in _UNITS if value_s >= unit[1]), ("ns", 1e-9))


def seconds(value_s: float | None) -> str:
    """`1.24 ms`; nothing for None."""
    if value_s is None:
        return ""
    unit, scale = unit_of(abs(value_s))
    return f"{value_s / scale:.3g} {unit}" if value_s else "0 s"


def number(value: float) -> str:
    """`0.25`, `12,300`: no more digits than it takes."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.3g}"
    return f"{value:,.6f}".rstrip("0").rstrip(".")


def percent(share: float | None) -> str:
    """`71%`; nothing for None."""
    return "" if share is None else f"{share:.0%}"


def signed_percent(share: float | None) -> str:
    """`+3.1%`; nothing for None."""
    return "" if share is None else f"{share:+.1%}".replace("-", "−")


def runs(numbers: Sequence[int], *, most: int = 4) -> str:
    """`0–3, 8`; the rest of many runs is left out."""
    found = []
    for _, run in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [value for _, value in run]
        found.append(str(members[0]) if len(members) == 1 else f"{members[0]}–{members[-1]}")
    return ", ".join(found[:most]) + (", …" if len(found) > most else "")
