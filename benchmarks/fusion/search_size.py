"""How many members fit into a memory: a line through measured peaks, and which size to try next.

Takes sizes with what was seen of them. Returns the next size to try, or None where another try would tell little.
Pure: no clock, no device. Ignores that a larger array may fit where a smaller one does not, as the allocator's luck is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FIRST = 0.6
"""Share of the first prediction that is tried first: where single tensors have tens of GiB, the allocator needs much
room of its own, and a size that was seen to fit tells more than one that was not."""
_REFINED = 0.95
"""Share of a prediction from a large size that fitted."""
_UP = 0.04
"""Share to go up by at least where a size fitted: libraries take what memory there is, so that a line may err."""
_DOWN = 0.05
"""Share to go down by where the first try ran out of memory; doubled with each that does, too."""
_NEAR = 0.01
"""Sizes that are no farther apart than this share of them are as good as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A size and what came of it."""

    members: int
    fits: bool
    peak_bytes: int = 0
    """Of a step, where it fits."""
    error: str = ""
    """Why it does not fit."""
    by_memory: bool = True
    """Whether it is memory that was missing, where it does not fit."""
    late: bool = False
    """Whether it was not done in the time that there was, which says nothing of the size."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """Peak memory over members."""

    fixed_bytes: float
    member_bytes: float

    def largest(self, limit_bytes: int) -> int:
        """Members that fit; at least one."""
        return max(1, int((limit_bytes - self.fixed_bytes) // self.member_bytes))


def line_through(tried: Sequence[Tried]) -> Line | None:
    """Through the smallest and the largest size that fitted; None for fewer than two."""
    fitted = sorted((one for one in tried if one.fits), key=lambda one: one.members)
    if len(fitted) < 2 or fitted[0].members == fitted[-1].members:
        return None
    low, high = fitted[0], fitted[-1]
    slope = max(1.0, (high.peak_bytes - low.peak_bytes) / (high.members - low.members))
    return Line(low.peak_bytes - slope * low.members, slope)


def bounds(tried: Sequence[Tried]) -> tuple[int, int | None]:
    """The largest size that was seen to fit, 0 for none, and the smallest larger one that was seen not to."""
    fits = max((one.members for one in tried if one.fits), default=0)
    fails = [one.members for one in tried if not one.fits and one.members > fits]
    return fits, min(fails, default=None)


def next_size(measured: Sequence[Tried], tried: Sequence[Tried], *, limit_bytes: int) -> int | None:
    """The size to try after those: by the line at first, then up or down, then halfway between what fits and not.

    `measured` are the small sizes that the line goes through.
    """
    line = line_through([*measured, *tried])
    if line is None:
        return None
    fits, fails = bounds([*measured, *tried])
    if fails is not None and fails - fits <= max(1.0, _NEAR * fits):
        return None
    guess = _guess(tried, line.largest(limit_bytes), fits, fails)
    return max(fits + 1, guess if fails is None else min(guess, fails - 1))


def _guess(tried: Sequence[Tried], predicted: int, fits: int, fails: int | None) -> int:
    if not tried:
        return int(_FIRST * predicted)
    if fails is None:
        return max(int(_REFINED * predicted), int((1.0 + _UP) * fits))
    if any(one.fits for one in tried):
        return (fits + fails) // 2
    if not tried[-1].by_memory:
        return fails // 2  # some other limit, which no line tells
    failures = sum(one.by_memory for one in tried)
    return int(fails * max(0.5, 1.0 - _DOWN * 2 ** (failures - 1)))


def search(
    attempt: Callable[[int], Tried | None], measured: Sequence[Tried], *, limit_bytes: int, tries: int
) -> list[Tried]:
    """What was tried, in order; `attempt` gives None where there is no time for it."""
    tried: list[Tried] = []
    while len(tried) < tries and (members := next_size(measured, tried, limit_bytes=limit_bytes)) is not None:
        found = attempt(members)
        if found is None:
            break
        tried.append(found)
    return tried
