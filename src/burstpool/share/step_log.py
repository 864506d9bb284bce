"""What each step of a foreground was that shared its devices, and what sharing cost it, by these.

Whichever way they were shared: worker processes with gates and a GPU's loop write the same log, in the run folder.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from burstpool.artifact import json_line, write_whole

SHARING = "sharing.json"
"""What each step of the foreground was, in its run folder: a `StepLog`."""
_FEW = 5
"""Steps alone in between that are too few to tell by: the last so many of all count then."""


@dataclass(slots=True, kw_only=True)
class StepLog:
    """What each step of the foreground was."""

    times_s: list[float] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)
    """Whether no background ran in it."""
    overlapped_s: list[float] = field(default_factory=list)
    in_gaps_s: list[float] = field(default_factory=list)
    started_s: float = 0.0
    """When the first step began, by the machine's clock."""
    stopped_s: float = 0.0
    background_steps: dict[str, int] = field(default_factory=dict)
    """Gate's file → steps its background trained between the two."""
    paused_s: float = 0.0
    """For how long the foreground was stopped, in all, as backgrounds left a GPU's memory or came back."""

    def save(self, path: Path) -> None:
        """As JSON, whole or not at all."""
        write_whole(path, json_line({name: getattr(self, name) for name in self.__slots__}))

    @classmethod
    def load(cls, path: Path) -> "StepLog":
        """What `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def slowdowns(log: StepLog) -> dict[str, Any]:
    """Mean and p95 of all steps since the first shared one, over the mean step alone: that of those in between.

    Side by side, so that a machine that changes while it runs changes both. Each of those stands for the steps that it
    is nearest to: where steps take longer by themselves for a while, more of them run alone, to find out why. Where
    there were fewer than five in between, the last five before count too. Without any shared step there is no slowdown
    to speak of: 1.
    """
    first = next((step for step, is_alone in enumerate(log.alone) if not is_alone), None)
    places = [step for step, is_alone in enumerate(log.alone) if is_alone]
    if first is None or not places:
        return {"slowdown": 1.0, "slowdown_p95": None, "alone_p95": None, "alone_step_s": None}
    between = [step for step in places if step > first]
    chosen = between if len(between) >= _FEW else places[-_FEW:]
    weights = _nearest(chosen, first=min(first, chosen[0]), stop=len(log.alone))
    alone = [log.times_s[step] for step in chosen]
    base_s = math.fsum(weight * time_s for weight, time_s in zip(weights, alone, strict=True)) / math.fsum(weights)
    steps = log.times_s[first:]
    return {
        "slowdown": fmean(steps) / base_s,
        "slowdown_p95": p95(steps) / base_s,
        "alone_p95": p95(alone, weights) / base_s,
        "alone_step_s": base_s,
    }


def p95(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """The value that one in twenty passes."""
    if not values:
        return math.nan
    pairs = sorted(zip(values, weights or [1.0] * len(values), strict=True))
    most = 0.05 * math.fsum(weight for _, weight in pairs) + 1e-9
    above = 0.0
    for value, weight in reversed(pairs):
        above += weight
        if above > most:
            return value
    return pairs[0][0]


def _nearest(places: Sequence[int], *, first: int, stop: int) -> list[float]:
    """How many steps each place stands for; those in a row share what all of them do."""
    rows = [[places[0]]]
    for before, place in pairwise(places):
        if place == before + 1:
            rows[-1].append(place)
        else:
            rows.append([place])
    borders = [first, *((before[-1] + 1 + row[0]) / 2 for before, row in pairwise(rows)), stop]
    return [(end - begin) / len(row) for row, (begin, end) in zip(rows, pairwise(borders), strict=True) for _ in row]
