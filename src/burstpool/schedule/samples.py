"""Ranges of samples: pairs of the first and one past the last."""

from collections.abc import Iterable

Span = tuple[int, int]


def missing(wanted: Span, held: Iterable[Span]) -> list[Span]:
    """What of one range of samples no other covers."""
    left = [wanted]
    for low, high in held:
        left = [
            piece
            for start, stop in left
            for piece in ((start, min(stop, low)), (max(start, high), stop))
            if piece[0] < piece[1]
        ]
    return left


def overlap(a: Span, b: Span) -> bool:
    """Whether two ranges have a sample in common."""
    return a[0] < b[1] and b[0] < a[1]
