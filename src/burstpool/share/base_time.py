"""The base: how long a step of the foreground takes without background, from the steps that ran alone.

Takes one duration after another. Knows the median, the noise, and how wrong it may be. Tells a foreground that has
changed from one that is noisy: when the newest alone steps lie apart from those before, these are forgotten.
"""

import math
from bisect import bisect_right
from collections import deque
from statistics import median

_KEPT = 80
"""Alone steps remembered."""
_RECENT = 5
"""How many of the newest are held against the others."""
_CONFIRMING = 3
"""The same where the base was questioned."""
_APART = 3.0
"""Standard errors between the two before the foreground is said to have changed."""
_LEAST = 0.01
"""Changes below are followed by the median, without forgetting."""
_FLOOR = 1e-4
"""Noise below, relative to the step, is taken for this much: a handful of equal samples proves no silence."""


class BaseTime:
    """The step alone."""

    def __init__(self, *, enough: int) -> None:
        self._samples: deque[float] = deque(maxlen=_KEPT)
        self._enough = enough
        self._questioned = 0
        self._change = 0.0
        self._settle()

    @property
    def num_samples(self) -> int:
        """Alone steps since the foreground last changed."""
        return len(self._samples)

    def add(self, time_s: float) -> bool:
        """Takes an alone step; returns whether the foreground has changed since those before."""
        self._samples.append(time_s)
        changed = self._has_changed()
        if changed:
            recent = list(self._samples)[-self._num_recent() :]
            middle = median(recent)  # a last one of before among them would pass for noise
            self._samples = deque((x for x in recent if abs(x / middle - 1) < 0.5 * self._change), maxlen=_KEPT)
        self._questioned = max(self._questioned - 1, 0)
        self._settle()
        return changed

    def is_odd(self, time_s: float) -> bool:
        """Whether one alone step lies so far from the others that it is worth a second look."""
        return self.num_samples > 3 and abs(time_s / self.median_s - 1) > max(3.5 * self.noise, 0.015)

    def question(self) -> None:
        """The next three alone steps by themselves decide whether the foreground has changed."""
        self._questioned = _CONFIRMING

    def share_above(self, limit: float) -> float:
        """Share of the alone steps that took more than `limit` medians."""
        return 1 - bisect_right(self._ordered, limit * self.median_s) / max(self.num_samples, 1)

    def _num_recent(self) -> int:
        return _CONFIRMING if self._questioned else _RECENT

    def _has_changed(self) -> bool:
        count, samples = self._num_recent(), list(self._samples)
        older, recent = samples[:-count], samples[-count:]
        if len(older) < 3 or self._questioned > 1:
            return False
        standard_error = 1.25 * self.noise * math.sqrt(1 / count + 1 / len(older))
        self._change = abs(median(recent) / median(older) - 1)
        return self._change > max(_APART * standard_error, _LEAST)

    def _settle(self) -> None:
        """Works out what is asked for at every step."""
        count = len(self._samples)
        self._ordered = ordered = sorted(self._samples)
        self.median_s = median(ordered) if ordered else 0.0
        """Of the steps alone."""
        self.noise = max(_spread(ordered) / self.median_s, _FLOOR) if count >= 3 else 0.02
        """Standard deviation of a step, relative to it; hiccups do not count."""
        usual = 4 * self.noise
        low, high = self.median_s * (1 - usual), self.median_s * (1 + (max(usual, 0.5) if count >= 20 else usual))
        self.mean_s = sum(min(max(x, low), high) for x in ordered) / count if count else 0.0
        """Mean with hiccups cut, the less the more steps are known: a skewed foreground has a mean above its median."""
        self.error = 1.25 * self.noise / math.sqrt(count) if count >= self._enough else 1.25 * self.noise
        """Standard error of the median, relative to it."""
        place = 0.95 * (count - 1)
        p95 = ordered[math.floor(place)] / self.median_s if count >= 20 else 0.0
        self.own_p95 = max(p95, 1 + 1.645 * self.noise)
        """The p95 step alone over the median one."""
        self.p95_error = 2.1 * self.noise / math.sqrt(max(count, 1))
        """Its standard error, for noise of the usual shape."""


def _spread(ordered: list[float]) -> float:
    """Standard deviation by quantiles: the median deviation, or the distance of the deciles where some steps are of
    another kind (every fifth loads data)."""
    middle = median(ordered)
    tenth = round(0.1 * (len(ordered) - 1))
    return max(1.4826 * median(abs(x - middle) for x in ordered), (ordered[-1 - tenth] - ordered[tenth]) / 2.563)
