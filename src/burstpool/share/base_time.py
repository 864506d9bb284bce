"""The base: how long a step of the foreground takes without background, from the steps that ran alone.

Takes one duration after another, and which step of the run it was. Knows the mean, the noise, and how wrong the mean
may be. Tells a foreground that has changed from one that is noisy: when the newest alone steps lie apart from those
before, these are forgotten. A foreground that gets slower or faster little by little is followed by a line.

Ignores what steps come in turns of: steps of several kinds are a wide distribution, nothing more.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

_KEPT = 80
"""Alone steps remembered."""
_RECENT = (5, 10, 20)
"""How many of the newest are held against the others: few see a large change soon, many a small one at all."""
_CONFIRMING, _MOST_CONFIRMING = 3, 9
"""The same where the base was questioned; more where these leave it open."""
_APART, _TOGETHER = 3.0, 1.5
"""Standard errors between the two before the foreground is said to have changed, and up to which it surely has not."""
_APART_AT_LAST = 2.0
"""The same after nine steps in a row that leave it open, of which ranks tell enough."""
_RANKS_APART = 3.0
"""Standard errors between their ranks, too: medians of steps of several kinds jump from one kind to another."""
_LEAST = 0.01
"""Changes below are followed by the mean, without forgetting."""
_FLOOR = 1e-4
"""Noise below, relative to the step, is taken for this much: a handful of equal samples proves no silence."""
_MANY = 20
"""Alone steps from which on long ones are taken for the foreground's own, and not for hiccups."""
_VAGUE = 0.08
"""Error of the mean, relative to it, from which on they are hiccups after all: a handful of very long steps does not
tell how frequent they are, and a base that is too long by chance would break the promise."""
_LINE = 8
"""Alone steps that a line is drawn through at least; that many of the newest bound it where it rises."""
_STRAIGHT = 0.8
"""A line leaves this part at most of what a jump leaves unexplained: samples after a jump lie on a line with those
before, as long as there are few, and it leads nowhere."""
_BATCH, _BATCHES, _EVENLY = 9, 4, 0.6
"""Alone steps in a batch, batches that tell an error, and the part of the error of as many steps drawn at random from
which on it is believed."""
_TOGETHER_AT_MOST = 4
"""Alone steps that nobody planned are taken in so many at a time: each time costs the next step 0.1 ms."""
_AHEAD = 12
"""Steps: half of the way to the next alone step, for which the base is to hold."""


class BaseTime:
    """The step alone."""

    def __init__(self, *, enough: int) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._enough = enough
        self._questions = 0
        """Alone steps asked for by a question and still to come."""
        self._answers = 0
        """Alone steps since the base was questioned."""
        self._slope_s = 0.0
        """Seconds a step by which steps get longer; 0 as long as that may be noise."""
        self._ordered: list[float] = []
        self._put_off = 0
        """Alone steps that are to be taken in together with the next."""
        self.mean_s = 0.0
        """Of the steps alone, hiccups cut, the less the more steps are known."""
        self.median_s = 0.0
        """Of the steps alone: what most of them are near to, where one of a rare kind would mislead."""
        self.noise = 0.02
        """Standard deviation of a step, relative to it; hiccups and rare kinds of steps do not count."""
        self.deviation = 0.02
        """The same with all that counts for the mean."""
        self.longest = 1.0
        """The longest step that is no hiccup, over the mean one."""
        self.error = 0.02
        """Standard error of the mean, relative to it; of a line's end it is twice that of its middle."""
        self.own_p95 = 1.0
        """The p95 step alone over the mean one."""
        self.p95_error = 0.0
        """Its standard error, by the noise, or by how far the samples below it lie apart where that is less."""

    @property
    def num_samples(self) -> int:
        """Alone steps since the foreground last changed."""
        return len(self._samples)

    @property
    def questions(self) -> int:
        """Alone steps that are wanted now, to decide whether the foreground has changed."""
        return self._questions

    @property
    def is_drifting(self) -> bool:
        """Whether steps get longer or shorter, little by little."""
        return self._slope_s != 0

    def add(self, time_s: float, *, step: int, can_wait: bool = False) -> bool:
        """Takes an alone step; returns whether the foreground has changed since those before."""
        self._samples.append((step, time_s))
        self._put_off += 1
        if can_wait and self._put_off < _TOGETHER_AT_MOST and self.num_samples > _MANY and not self._questions:
            return False
        self._put_off = 0
        if not self._questions:
            changed = any(self._has_changed(count) for count in _RECENT)
        else:
            self._questions -= 1
            self._answers += 1
            changed = not self._questions and self._answer()
        self._settle()
        return changed

    def is_odd(self, time_s: float) -> bool:
        """Whether one alone step lies so far from the others, and from all kinds of them, that it is worth a look."""
        far = time_s / self.mean_s - 1
        if self.num_samples <= 3 or abs(far) <= max(3.5 * self.noise, 0.015):
            return False
        alike = bisect_left(self._ordered, (1 + 0.7 * far) * self.mean_s)
        return (alike if far < 0 else len(self._ordered) - alike) <= (1 if self._put_off else 2)  # itself, and another

    def question(self) -> None:
        """The next three alone steps by themselves decide whether the foreground has changed."""
        self._questions, self._answers = _CONFIRMING, 0

    def share_above(self, limit: float) -> float:
        """Share of the alone steps that took more than `limit` means."""
        return 1 - bisect_right(self._ordered, limit * self.mean_s) / max(len(self._ordered), 1)

    def _answer(self) -> bool:
        """Whether the steps since the question differ from those before; asks for more if that is open."""
        if self._has_changed(self._answers):
            return True
        older, recent = self._parted(self._answers)
        open_still = len(older) >= 3 and self._apart(older, recent) > _TOGETHER and _distance(older, recent) > _LEAST
        if open_still:
            self._questions = _CONFIRMING if self._answers < _MOST_CONFIRMING else 0
        else:  # steps in a row, at a moment that was not chosen evenly: they count as one
            for _ in range(min(self._answers, len(self._samples)) - 1):
                self._samples.pop()
        return False

    def _has_changed(self, count: int) -> bool:
        """Whether the newest so many differ from those before, which are forgotten then."""
        older, recent = self._parted(count)
        if len(older) < max(3, count // 2) or len(recent) < count:
            return False
        change, errors = _distance(older, recent), self._apart(older, recent)
        enough = _APART if count != self._answers or count < _MOST_CONFIRMING else _APART_AT_LAST
        if change <= _LEAST or errors <= enough or not _ranks_apart(older, recent):
            return False
        middle = median(recent)  # a last one of before among them would pass for noise
        near, newest = max(0.5 * change, 4 * self.noise), list(self._samples)[-count:]
        kept = (sample for sample, x in zip(newest, recent, strict=True) if abs(x / middle - 1) < near)
        self._samples = deque(kept, maxlen=_KEPT)
        return True

    def _parted(self, count: int) -> tuple[list[float], list[float]]:
        """Times of the samples before the newest so many, and of these, as if all had been taken at the same step."""
        level = self._levelled([time_s for _, time_s in self._samples])
        return level[:-count], level[-count:]

    def _levelled(self, times: Sequence[float]) -> list[float]:
        """The samples' times as if all had been taken at the last one's step."""
        if not self._slope_s:
            return list(times)
        last, slope_s, least_s = self._samples[-1][0], self._slope_s, 0.5 * min(times)  # no line leads to nothing
        return [
            max(time_s + slope_s * (last - step), least_s)
            for (step, _), time_s in zip(self._samples, times, strict=True)
        ]

    def _apart(self, older: Sequence[float], recent: Sequence[float]) -> float:
        """Standard errors between their medians, by the noise of before if that is known, else by that of both."""
        known = (older,) if len(older) >= _LINE else (older, recent)
        noise = max(*(_spread(sorted(times)) / median(times) for times in known), _FLOOR)
        return _distance(older, recent) / (1.25 * noise * math.sqrt(1 / len(recent) + 1 / len(older)))

    def _settle(self) -> None:
        """Works out what is asked for at every step."""
        count = len(self._samples)
        if not count:
            return
        clipped = self._without_hiccups(kinds=count >= _MANY)
        if count >= _MANY and _error_of_mean(clipped) > _VAGUE:
            clipped = self._without_hiccups(kinds=False)
        self._slope_s = _slope([step for step, _ in self._samples], clipped)
        clipped = self._levelled(clipped)
        self._ordered = sorted(self._levelled([time_s for _, time_s in self._samples]))
        self.mean_s, self.median_s = self._mean(clipped), median(self._ordered)
        self.longest = max(clipped) / self.mean_s
        self.noise = max(_spread(self._ordered) / self.mean_s, _FLOOR) if count >= 3 else 0.02
        spread = (_deviation(clipped) if count > 1 else 0.0) / self.mean_s
        self.deviation = max(spread, _FLOOR if count >= _MANY else self.noise)
        drawn = self.deviation / math.sqrt(count if count >= self._enough else 1)
        in_batches = _error_by_batches(clipped) / self.mean_s
        self.error = (in_batches if in_batches < _EVENLY * drawn else drawn) * (2 if self._slope_s else 1)
        self._settle_p95()

    def _settle_p95(self) -> None:
        count, ordered = len(self._ordered), [time_s / self.mean_s for time_s in self._ordered]
        self.own_p95, self.p95_error = 1 + 1.645 * self.noise, 2.1 * self.noise / math.sqrt(count)
        if count < _MANY:
            return
        place = math.floor(0.95 * (count - 1))
        p95, below = ordered[place], ordered[max(place - round(1.5 * math.sqrt(0.0475 * count)), 0)]
        several_kinds = self.own_p95 > ordered[-1] + 0.3 * self.noise  # no step is as long as noise would have it
        self.own_p95 = p95 if several_kinds else min(max(self.own_p95, p95), ordered[-1])
        self.p95_error = min(self.p95_error, p95 - below)

    def _without_hiccups(self, *, kinds: bool) -> list[float]:
        """The samples in their order, long ones cut: single ones, or all where there are no `kinds` of steps."""
        times = [time_s for _, time_s in self._samples]
        ordered, count = sorted(times), len(times)
        middle_s = median(ordered)
        usual = 4 * (max(_spread(ordered) / middle_s, _FLOOR) if count >= 3 else 0.02)
        high = middle_s * (1 + usual)
        if kinds:
            high = max(high, 1.5 * middle_s, ordered[-3])
        return [min(x, high) for x in times]

    def _mean(self, level: Sequence[float]) -> float:
        """Of levelled times: now, and until the next alone step."""
        mean_s = fmean(level)
        if self._slope_s < 0:  # a base that is too long would break the promise, one that is too short would not
            return max(mean_s + self._slope_s * _AHEAD, 0.5 * mean_s)
        if self._slope_s > 0:
            return min(mean_s, fmean([time_s for _, time_s in list(self._samples)[-_LINE:]]))
        return mean_s


def _distance(older: Sequence[float], recent: Sequence[float]) -> float:
    return abs(median(recent) / median(older) - 1)


def _ranks_apart(older: Sequence[float], recent: Sequence[float]) -> bool:
    """Whether one lies above the other by their ranks, whatever their distribution (Mann and Whitney, 1947)."""
    ordered, pairs = sorted(older), len(older) * len(recent)
    above = sum(bisect_left(ordered, x) + bisect_right(ordered, x) for x in recent) / 2
    standard_error = math.sqrt(pairs * (len(older) + len(recent) + 1) / 12)
    most = 0.5 * pairs / standard_error  # of few samples even all ranks say no more
    return abs(above - 0.5 * pairs) / standard_error >= min(_RANKS_APART, 0.9 * most)


def _deviation(times: Sequence[float]) -> float:
    """Their standard deviation: that of `statistics` counts in fractions, and takes eight times as long."""
    mean_s = fmean(times)
    return math.sqrt(math.fsum((time_s - mean_s) ** 2 for time_s in times) / (len(times) - 1))


def _error_of_mean(times: Sequence[float]) -> float:
    """Relative to it, by the differences of the samples or of batches."""
    return min(_deviation(times) / math.sqrt(len(times)), _error_by_batches(times)) / fmean(times)


def _error_by_batches(times: Sequence[float]) -> float:
    """Standard error of the mean from the means of batches: small where alone steps met all kinds of steps in turns."""
    means = [fmean(times[end - _BATCH : end]) for end in range(len(times), _BATCH - 1, -_BATCH)]
    if len(means) < _BATCHES:
        return math.inf
    middle = fmean(means)
    return math.sqrt(sum((x - middle) ** 2 for x in means) / (len(means) - 1) / len(means))


def _slope(steps: Sequence[int], times: Sequence[float]) -> float:
    """By least squares, seconds a step; 0 where it may well be noise."""
    count = len(times)
    if count < _LINE:
        return 0.0
    middle, mean_s = fmean(steps), fmean(times)
    width = sum((step - middle) ** 2 for step in steps)
    slope_s = sum((step - middle) * time_s for step, time_s in zip(steps, times, strict=True)) / width
    left = sum((time_s - mean_s - slope_s * (step - middle)) ** 2 for step, time_s in zip(steps, times, strict=True))
    standard_error = max(math.sqrt(left / (count - 2)), _FLOOR * mean_s) / math.sqrt(width)
    is_noise = abs(slope_s) <= (3 + 10 / (count - 2)) * standard_error
    return 0.0 if is_noise or left > _STRAIGHT * _left_by_a_jump(times) else slope_s


def _left_by_a_jump(times: Sequence[float]) -> float:
    """The sum of squares that the best jump from one level to another leaves unexplained."""
    total, count = sum(times), len(times)
    before, most = 0.0, 0.0
    for place, time_s in enumerate(times[:-1], start=1):
        before += time_s
        most = max(most, (before - place * total / count) ** 2 * count / (place * (count - place)))
    return max(sum((time_s - total / count) ** 2 for time_s in times) - most, 0.0)


def _spread(ordered: list[float]) -> float:
    """Standard deviation by quantiles: the median deviation, or the distance of the deciles where some steps are of
    another kind (every fifth loads data)."""
    middle = median(ordered)
    tenth = round(0.1 * (len(ordered) - 1))
    return max(1.4826 * median(abs(x - middle) for x in ordered), (ordered[-1 - tenth] - ordered[tenth]) / 2.563)
