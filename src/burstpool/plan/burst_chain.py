"""The search for widths along a model: exact where it ends, bounded where it must stop early.

Takes a row of parts (`burst_forks.py`: what a stage, or branches and the stage behind them, do to the clocks for each
width before and after). Returns ways: which alternative and width each part gets, with step time and device-time.

Two passes over the model:

- `Sweep`, from the first part to the last, for several weights of device-time at once: the least that the parts up to
  here can add to either clock, device-time times weight included. Following the choices back gives a real plan for each
  weight, the lower hull of the front; the least values bound every other plan from below (Lagrange).
- `best`, from the last part to the first: labels (compute clock, lane clock, device-time) for each width. A label goes
  if another of the same width is no worse in all three, if it breaks the budget whatever follows, or if a bound says
  that it cannot beat the best plan found so far. What is left at the end is the optimum.

Where more labels are left than `max_labels`, those with the best bounds stay and `proven` is False: the plan is then
the best of what was looked at, and `Sweep.lower_bound_s` says how much better any plan could be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burstpool.plan.burst_cost import Ops
from burstpool.plan.burst_forks import Part
from burstpool.plan.cost import Floats
from burstpool.plan.pareto import Integers, coarse, front, fully_undominated, undominated

_SLACK = 1e-12
"""Relative; sums of the same numbers in another order differ by less."""
_NARROW = 8
"""How many times fewer labels the first search keeps."""
_MANY_LABELS = 500
"""Where so many are allowed, a full comparison is worth its time before some are given up."""
_FEW_LABELS = 32
"""Fewer are not worth a search."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What is searched."""

    first: Ops
    """The first stage, by width."""
    parts: Sequence[Part]
    """All behind it."""
    updates_s: float
    """Seconds that come after the last backward."""

    def step_time_s(self, compute_s: Floats, lane_s: Floats) -> Floats:
        """From the two clocks at the end."""
        return np.asarray(np.maximum(lane_s, compute_s + self.updates_s))


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """A choice for every part."""

    step_time_s: float
    device_seconds: float
    places: tuple[int, ...]
    """Width of each stage, from the first."""
    alternatives: tuple[int, ...]
    """Of each part behind the first stage."""


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The outcome of a search."""

    way: Way | None
    """None where no plan keeps to the budget."""
    proven: bool
    """Whether no other plan of the search space is better."""


class Sweep:
    """Bounds and plans for some weights. O(parts × weights × alternatives × widths²)."""

    def __init__(self, problem: Problem, weights: Floats) -> None:
        self.problem, self.weights = problem, weights
        first, w = problem.first, weights[:, None]
        device_s = w * _finite(first.device_s)
        self.lane = [np.where(np.isinf(first.device_s), np.inf, first.lane_s + device_s)]
        """Part → weights × widths: the least from here to the front for what the lane has."""
        ends = np.maximum(first.both_s, first.compute_s + problem.updates_s)
        self.compute = [np.where(np.isinf(first.device_s), np.inf, ends + device_s)]
        """The same for what the compute clock has."""
        self.device = [first.device_s]
        """Part → widths: the least device-time from here to the front."""
        self.choices: list[Integers] = []
        for part in problem.parts:
            self._add(part.ops)

    def _add(self, ops: Ops) -> None:
        num_ways, _, num_after = ops.compute_s.shape
        compute_s, lane_s, both_s, device_s = (array.reshape(-1, num_after) for array in ops)
        priced = self.weights[:, None, None] * _finite(device_s)
        priced[:, np.isinf(device_s)] = np.inf
        lane, compute = (np.tile(last[-1], num_ways)[:, :, None] for last in (self.lane, self.compute))
        sums = lane + lane_s
        sums += priced
        self.lane.append(sums.min(axis=1))
        totals = np.add(compute, compute_s, out=sums)
        np.maximum(totals, lane + both_s, out=totals)
        totals += priced
        choice = totals.argmin(axis=1)
        self.choices.append(choice)
        self.compute.append(np.take_along_axis(totals, choice[:, None], axis=1)[:, 0])
        self.device.append((np.tile(self.device[-1], num_ways)[:, None] + device_s).min(axis=0))

    def ways(self) -> list[Way]:
        """For each weight the plan its choices lead to."""
        last = np.maximum(self.lane[-1], self.compute[-1])
        place = last.argmin(axis=1)
        num_widths = last.shape[1]
        clocks = np.zeros((3, len(place)))
        places, alternatives = [place], []
        for part, choice in zip(reversed(self.problem.parts), reversed(self.choices), strict=True):
            alternative, before = np.divmod(choice[np.arange(len(place)), place], num_widths)
            clocks = _advance(clocks, part.ops.at((alternative, before, place)))
            places.append(before)
            alternatives.append(alternative)
            place = before
        compute_s, lane_s, device_s = _advance(clocks, self.problem.first.at(place))
        steps = self.problem.step_time_s(compute_s, lane_s)
        return [
            Way(
                float(steps[i]),
                float(device_s[i]),
                tuple(int(column[i]) for column in reversed(places)),
                tuple(int(column[i]) for column in reversed(alternatives)),
            )
            for i in range(len(steps))
            if np.isfinite(device_s[i])
        ]

    def lower_bound_s(self, budget: float, weight: float = 0.0) -> float:
        """No plan within the budget has a lower step time + weight × device-time."""
        least = np.maximum(self.lane[-1], self.compute[-1]).min(axis=1)
        useful = self.weights >= weight
        paid = 0.0 if np.isinf(budget) else (self.weights[useful] - weight) * budget
        usable = least[useful] - paid if np.isfinite(budget) else least[useful][self.weights[useful] == weight]
        return float(usable.max()) if usable.size else 0.0


def best(
    problem: Problem,
    sweep: Sweep,
    *,
    budget: float = np.inf,
    weight: float = 0.0,
    known: Way | None = None,
    max_labels: int = 1000,
) -> Best:
    """The plan within the budget with the least step time + weight × device-time, or `known` where none is better.

    Where many labels are allowed, a narrow search comes first: what it finds lets the full one drop most of them.
    """
    found = Best(known, False)
    for limit in (max_labels // _NARROW, max_labels):
        if limit < min(_FEW_LABELS, max_labels):
            continue
        found = _best(problem, sweep, budget=budget, weight=weight, known=found.way, max_labels=limit)
        if found.proven:
            break
    return found


def _best(problem: Problem, sweep: Sweep, *, budget: float, weight: float, known: Way | None, max_labels: int) -> Best:
    most = np.inf if known is None else _price(known, weight)
    search = _Labels(problem, sweep, budget=budget * (1 + _SLACK), weight=weight, most=most, max_labels=max_labels)
    steps, device_s = search.run()
    if not len(steps):
        return Best(known, search.proven)
    place = int(np.lexsort((device_s, steps + weight * device_s))[0])
    found = search.way(place, float(steps[place]), float(device_s[place]))
    if known is not None and _price(known, weight) < _price(found, weight):
        found = known
    return Best(found, search.proven)


def _price(way: Way, weight: float) -> float:
    return way.step_time_s + weight * way.device_seconds


def whole_front(problem: Problem, sweep: Sweep, *, max_labels: int) -> list[Way] | None:
    """Every plan that no other beats in both step time and device-time; None where there are too many labels."""
    search = _Labels(problem, sweep, budget=np.inf, weight=0.0, most=np.inf, max_labels=max_labels)
    steps, device_s = search.run()
    if not search.proven:
        return None
    return [search.way(int(i), float(steps[i]), float(device_s[i])) for i in front(steps, device_s)]


class _Labels:
    """The second pass."""

    def __init__(
        self, problem: Problem, sweep: Sweep, *, budget: float, weight: float, most: float, max_labels: int
    ) -> None:
        self.problem, self.sweep, self.budget, self.weight = problem, sweep, budget, weight
        self.most, self.max_labels, self.proven = most, max_labels, True
        self.rows = self._useful_weights()
        self.history: list[tuple[Integers, Integers, Integers]] = []
        """For each part, from the last: label → its parent, its alternative, its width."""

    def run(self) -> tuple[Floats, Floats]:
        """Step time and device-time of what is left at the front of the model."""
        num_widths = len(self.problem.first.device_s)
        place = np.arange(num_widths)
        self.start = place
        clocks = np.zeros((3, num_widths))
        for level in reversed(range(len(self.problem.parts))):
            place, clocks = self._extend(level, place, clocks)
        compute_s, lane_s, device_s = _advance(clocks, self.problem.first.at(place))
        steps = self.problem.step_time_s(compute_s, lane_s)
        self.final = np.flatnonzero((device_s <= self.budget) & np.isfinite(device_s))
        return steps[self.final], device_s[self.final]

    def way(self, index: int, step_time_s: float, device_seconds: float) -> Way:
        """The choices behind a label."""
        label = int(self.final[index])
        places, alternatives = [], []
        for parent, alternative, place in reversed(self.history):
            places.append(int(place[label]))
            alternatives.append(int(alternative[label]))
            label = int(parent[label])
        places.append(int(self.start[label]))
        return Way(step_time_s, device_seconds, tuple(places), tuple(alternatives))

    def _extend(self, level: int, place: Integers, clocks: Floats) -> tuple[Integers, Floats]:
        ops = self.problem.parts[level].ops
        num_ways, num_before, _ = ops.compute_s.shape
        columns = Ops(*(array.reshape(num_ways * num_before, -1)[:, place] for array in ops))
        compute_s, lane_s, device_s = _advance(clocks[:, None, :], columns)
        before = np.tile(np.arange(num_before), num_ways)
        bound = self._bound(level, before, compute_s, lane_s, device_s)
        is_open = device_s + self.sweep.device[level][before][:, None] <= self.budget
        choice, parent = np.nonzero(is_open & (bound <= self.most * (1 + _SLACK)) & np.isfinite(bound))
        clocks = np.stack([array[choice, parent] for array in (compute_s, lane_s, device_s)])
        rough = np.stack([coarse(clock) for clock in clocks])
        kept = undominated(before[choice], rough[2], rough[1], rough[0])
        if len(kept) > self.max_labels >= _MANY_LABELS:
            kept = kept[fully_undominated(before[choice[kept]], *rough[:, kept])]
        if len(kept) > self.max_labels:
            self.proven = False
            kept = kept[np.argsort(bound[choice[kept], parent[kept]], kind="stable")[: self.max_labels]]
        choice, parent, clocks = choice[kept], parent[kept], clocks[:, kept]
        self.history.append((parent, choice // num_before, before[choice]))
        return before[choice], clocks

    def _bound(self, level: int, before: Integers, compute_s: Floats, lane_s: Floats, device_s: Floats) -> Floats:
        """The least that can become of each label: alternative and width × label."""
        found = np.zeros(compute_s.shape)
        for row in self.rows:
            lane, compute = (values[level][row][before][:, None] for values in (self.sweep.lane, self.sweep.compute))
            extra = float(self.sweep.weights[row]) - self.weight
            paid = 0.0 if extra == 0 else extra * (device_s - self.budget)
            total = np.maximum(lane_s + lane, compute_s + compute) + paid
            total += self.weight * device_s if self.weight else 0.0
            np.maximum(found, total, out=found)
        return found

    def _useful_weights(self) -> list[int]:
        """Rows of the sweep that bound tightest: the weight itself, and around the best multiplier of the budget."""
        weights = self.sweep.weights
        exact = [int(i) for i in np.flatnonzero(weights == self.weight)[:1]]
        if np.isinf(self.budget):
            return exact
        least = np.maximum(self.sweep.lane[-1], self.sweep.compute[-1]).min(axis=1)
        bounds = np.where(weights >= self.weight, least - (weights - self.weight) * self.budget, -np.inf)
        return [*exact, *(int(i) for i in np.argsort(-bounds)[:3] if np.isfinite(bounds[i]))]


def _advance(clocks: Floats, ops: Ops) -> Floats:
    """The clocks (compute, lane, device-time) after one more part."""
    compute_s, lane_s, device_s = clocks
    return np.stack(
        [
            compute_s + ops.compute_s,
            np.maximum(lane_s + ops.lane_s, compute_s + ops.both_s),
            device_s + ops.device_s,
        ]
    )


def _finite(array: Floats) -> Floats:
    """With 0 for what is infinite, so that a weight of 0 times it is no error."""
    return np.asarray(np.where(np.isinf(array), 0.0, array))
