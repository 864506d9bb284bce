"""The space: which values each hyper-parameter may take.

    lr=0.1,0.03,0.01        one of these; one value alone is fixed
    lr=float:0.01..0.1      anything in between, evenly
    lr=log:1e-4..1e-1       anything in between, evenly in the logarithm
    width=int:16..64        whole numbers, both ends included
    width=logint:16..1024   whole numbers, evenly in the logarithm
    widths=[8,8],[16]       one of these lists

Takes such texts, or a dict of lists, `Range`s and texts. Returns a `Space`. Every value is checked against the job
function's annotations before anything is trained. A value holds commas in brackets only; a list or a tuple is kept as
the text `[8,8]`, which a trial's record can hold and its job reads.
"""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from burstpool.artifact import STRICT
from burstpool.errors import JobError
from burstpool.job import as_recorded, check_settings, parse_settings
from burstpool.run.folder import Setting
from burstpool.setting_lists import parts

_LARGEST_ORDER = 1_000_000
"""Settings whose random order is written down."""
_FEISTEL_TURNS = 6
Kind = Literal["float", "log", "int", "logint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """One of several values."""

    __pydantic_config__ = STRICT

    values: tuple[Setting, ...]

    def at(self, place: float) -> Setting:
        """The value at a place from 0 to 1, 1 excluded."""
        return self.values[int(place * len(self.values))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Anything from `low` to `high`."""

    __pydantic_config__ = STRICT

    low: float
    high: float
    kind: Kind = "float"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise JobError(f"a range has no kind {self.kind!r}; pass one of {', '.join(get_args(Kind))}")
        if not self.low < self.high or not math.isfinite(self.high - self.low):
            raise JobError(f"the range {self} is empty; its first end must be below its second")
        if self.kind.startswith("log") and self.low <= 0:
            raise JobError(f"the range {self} must begin above 0 to be even in the logarithm")
        if self.whole and (self.low != int(self.low) or self.high != int(self.high)):
            raise JobError(f"the range {self} must have whole ends")

    @property
    def whole(self) -> bool:
        """Whether only whole numbers count."""
        return self.kind in ("int", "logint")

    def at(self, place: float) -> Setting:
        """The value at a place from 0 to 1, 1 excluded."""
        low, high = (self.low, self.high + 1) if self.whole else (self.low, self.high)
        if self.kind.startswith("log"):
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        value = min(max(value, self.low), self.high)  # rounding must not leave the range
        return int(value) if self.whole else float(value)

    def __str__(self) -> str:
        ends = (self.low, self.high)
        low, high = (int(end) if self.whole and math.isfinite(end) and end == int(end) else end for end in ends)
        return f"{self.kind}:{low}..{high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All hyper-parameters that are searched, and those that are fixed."""

    __pydantic_config__ = STRICT

    axes: Mapping[str, Values | Range]

    @property
    def size(self) -> int | None:
        """How many different settings there are; None for a space with ranges."""
        if any(isinstance(axis, Range) for axis in self.axes.values()):
            return None
        return math.prod(len(axis.values) for axis in self.axes.values() if isinstance(axis, Values))

    def grid(self, number: int) -> dict[str, Setting]:
        """The settings with this number in the grid; the last name varies fastest."""
        found: dict[str, Setting] = {}
        for name, axis in reversed(list(self.axes.items())):
            if not isinstance(axis, Values):
                raise JobError(f"{name}={axis} is a range, and a grid needs values; use --search random")
            number, place = divmod(number, len(axis.values))
            found[name] = axis.values[place]
        return {name: found[name] for name in self.axes}

    def draw(self, number: int, *, seed: int) -> dict[str, Setting]:
        """The settings with this number in a random order; where there are no ranges, none comes twice."""
        if self.size is not None:
            return self.grid(_shuffled(number % self.size, size=self.size, seed=seed))
        places = np.random.default_rng((seed, 1, number)).random(len(self.axes))
        return {name: axis.at(float(place)) for (name, axis), place in zip(self.axes.items(), places, strict=True)}


def _shuffled(number: int, *, size: int, seed: int) -> int:
    """Where a number goes in a random order of 0 … size - 1."""
    if size <= _LARGEST_ORDER:
        return int(_order(size, seed)[number])
    # Too many to write down: a Feistel network is a one-to-one map of all numbers of so many bits, and a number that
    # falls outside goes through again until it comes back inside.
    half = ((size - 1).bit_length() + 1) // 2
    while True:
        left, right = divmod(number, 1 << half)
        for turn in range(_FEISTEL_TURNS):
            digest = hashlib.blake2b(f"{seed} {turn} {right}".encode()).digest()
            left, right = right, left ^ int.from_bytes(digest) % (1 << half)
        number = (left << half) | right
        if number < size:
            return number


@functools.lru_cache(maxsize=4)
def _order(size: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng((seed, 0)).permutation(size)


def parse_space(words: Iterable[str]) -> dict[str, Values | Range]:
    """What `--set` gives: `["lr=0.1,0.03", "width=int:16..64"]`."""
    return {name: _axis(name, text) for name, text in parse_settings(words).items()}


def checked_space(
    axes: Mapping[str, Values | Range | str | Sequence[Any]], function: Callable[..., Any], *, source: str
) -> Space:
    """The space with values of the types that the job's function takes; refuses names and values it does not take."""
    read = {name: _axis(name, axis) for name, axis in axes.items()}
    first = {name: _ends(axis)[0] for name, axis in read.items()}
    check_settings(function, first, source=source)
    typed = {name: _typed(name, axis, first, function, source) for name, axis in read.items()}
    for name, axis in typed.items():  # now that 0.1 and 0.10 are the same
        if isinstance(axis, Values) and len(set(map(repr, axis.values))) < len(axis.values):
            raise JobError(f"{name} has a value twice; give each once")
    return Space(axes=typed)


def _typed(
    name: str, axis: Values | Range, first: Mapping[str, Any], function: Callable[..., Any], source: str
) -> Values | Range:
    accepted = [check_settings(function, {**first, name: value}, source=source)[name] for value in _ends(axis)]
    for value in accepted:  # a sweep's files are JSON, which has no others
        if isinstance(value, float) and not math.isfinite(value):
            raise JobError(f"{name}={value} cannot be a trial's; give a finite number, or a word that the job reads")
    if isinstance(axis, Range):
        if inspect.signature(function).parameters[name].annotation in (int, "int") and not axis.whole:
            raise JobError(f"{name} of {source} takes whole numbers; give {name}=int:{axis.low:g}..{axis.high:g}")
        return axis
    recorded = [_as_trials_have_it(name, value, first, function, source) for value in accepted]
    if all(isinstance(value, Setting) for value in recorded):
        return Values(values=tuple(recorded))
    for value in axis.values:
        if not isinstance(value, Setting):
            raise JobError(f"{name}={value!r} cannot be a trial's; give numbers, or words that the job reads")
    return axis


def _as_trials_have_it(
    name: str, value: Any, first: Mapping[str, Any], function: Callable[..., Any], source: str
) -> Any:
    """A list or a tuple as the text that the job reads, if it reads the same; anything else as it is."""
    if not isinstance(value, list | tuple):
        return value
    text = as_recorded(value)
    try:
        again = check_settings(function, {**first, name: text}, source=source)[name]
    except JobError:
        return value
    return text if again == value else value


def _ends(axis: Values | Range) -> tuple[Any, ...]:
    if isinstance(axis, Values):
        return axis.values
    return (int(axis.low), int(axis.high)) if axis.whole else (axis.low, axis.high)


def _axis(name: str, axis: Any) -> Values | Range:
    if isinstance(axis, Values | Range):
        return axis
    if isinstance(axis, str):
        kind, colon, ends = axis.partition(":")
        if colon and kind in get_args(Kind):
            return _range(name, axis, kind, ends)
        values: tuple[Any, ...] = tuple(parts(axis, where=f"{name}={axis}"))
    elif isinstance(axis, Iterable):
        values = tuple(axis)
    else:
        values = (axis,)
    if not values or "" in values:
        raise JobError(f"{name} has an empty value; give {name}=a,b,c or {name}=log:1e-4..1e-1")
    return Values(values=values)


def _range(name: str, text: str, kind: Any, ends: str) -> Range:
    low, dots, high = ends.partition("..")
    try:
        if not dots:
            raise ValueError
        return Range(low=float(low), high=float(high), kind=kind)
    except ValueError:
        raise JobError(f"{name}={text} is not a range; write {name}={kind}:LOW..HIGH with two numbers") from None
