"""Burst planner: for each layer as many devices as pay for themselves.

Takes profiles, ClusterSpec, batch. Returns the Pareto front of step time and device-time, and a Plan picked from it:
the fastest within a burst limit (a budget of device-time for the whole step, as a multiple of what one device would
need), or the best for a weight of device-time against step time. The cost it minimises is defined in `burst_cost.py`,
the widths in `widths.py`; what a branch may do in `burst_forks.py`; the search itself is in `burst_chain.py`.

- Exact on chains, and on branching models whose forks are small; else the best that was found, with a bound.
- Where a model has branches, at most `MOST_BRANCH_WIDTHS` widths are considered, powers of two among them.
- The plan's own `step_time_s` and `device_seconds` come from lowering and simulating it. Where the simulator has it
  slower than its cost, plans whose cost is more certain are simulated too (branches one after the other; one width for
  all layers), and the fastest is the plan. Where data parallelism keeps to the budget and is faster, its blocks are.
- Memory: see `burst_memory.py`.

Ignores host-side data loading, and what CostModel leaves out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise

import numpy as np

from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan import data
from burstpool.plan.branches import ModelRow, Stage, model_row
from burstpool.plan.burst_chain import Problem, Sweep, Way, best, whole_front
from burstpool.plan.burst_cost import BurstCost, BurstOptions, Ops, burst_cost
from burstpool.plan.burst_forks import stage_ops
from burstpool.plan.burst_parts import Parts
from burstpool.plan.cost import CostModel, Profiles
from burstpool.plan.dataflow import dataflow
from burstpool.plan.pareto import front
from burstpool.plan.plan import Plan, PlannedBlock
from burstpool.plan.widths import Widths, find_widths
from burstpool.profiling.profile import Profile
from burstpool.schedule.simulate import predict

MOST_BRANCH_WIDTHS = 16
"""Widths considered where a model has branches."""
_WEIGHTS = np.concatenate([[0.0], np.geomspace(1e-5, 10.0, 13), [1e6]])
"""Seconds of step time that a device-second is worth, from nothing to everything."""
_TRUST = 0.03
"""Where the simulator has a plan slower than its cost by more, relative to the cost, others are simulated too."""
_MOST_WIDTHS_TRIED = 3
"""Of one width for all layers."""
_BUDGETS_TRIED = 6
"""Between a plan's device-time and one device's."""
_LABEL_WORK = 2_000_000
"""Labels × alternatives × widths of one search, over all parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstPoint:
    """One plan of the search space, by its layers."""

    step_time_s: float
    """By the cost of `burst_cost.py`."""
    device_seconds: float
    widths: tuple[int, ...]
    """Layer → number of devices."""
    offsets: tuple[int, ...]
    """Layer → rank of its first device; more than 0 where branches run beside each other."""
    proven: bool
    """Whether no plan of the search space is better by what was asked for."""
    bound_s: float
    """No plan within the budget has a shorter step, as far as alternatives of forks were looked at; 0 if unknown."""


class BurstSearch:
    """The search space of one model on one cluster at one batch; answers as many questions as one likes.

    Pure and deterministic; remembers what it has worked out.
    """

    def __init__(self, cost: BurstCost, model: ModelRow) -> None:
        self.cost, self.model = cost, model
        self._parts = Parts(cost, model, _WEIGHTS)
        first = model.row[0]
        assert isinstance(first, Stage)
        self._first = first
        self._problem = Problem(stage_ops(cost, first), self._parts, cost.updates_s)
        work = sum(self._parts.sizes) * len(cost.widths.values)
        self._max_labels = int(np.clip(_LABEL_WORK / max(work, 1), 32, 20_000))

    @property
    def one_device_seconds(self) -> float:
        """What one device would need: the unit of the burst limit."""
        return self.cost.one_device_seconds

    @cached_property
    def _sweep(self) -> Sweep:
        return Sweep(self._problem, _WEIGHTS)

    @cached_property
    def _ways(self) -> list[Way]:
        return self._sweep.ways()

    def front(self) -> tuple[BurstPoint, ...]:
        """Plans that no other beats in both, the fastest last; all of them, or where they are too many some."""
        ways = whole_front(self._problem, self._sweep, max_labels=self._max_labels)
        proven = ways is not None
        if ways is None:
            ways = [*self._ways, *self._refined(_WEIGHTS[1], _WEIGHTS[-2])[1]]
        steps, device_s = (np.array(x) for x in zip(*((w.step_time_s, w.device_seconds) for w in ways), strict=True))
        return tuple(self._point(ways[place], proven=proven) for place in front(steps, device_s))

    def within(self, device_seconds: float) -> BurstPoint:
        """The fastest plan that needs no more device-time."""
        fitting = [way for way in self._ways if way.device_seconds <= device_seconds]
        known = min(fitting, key=lambda way: way.step_time_s, default=None)
        if known is self._fastest:
            low, high = 0.0, _WEIGHTS[1]
        else:
            low, high = self._bracket(device_seconds)
        sweep, ways = self._refined(low, high)
        fitting = [way for way in (*self._ways, *ways) if way.device_seconds <= device_seconds]
        known = min(fitting, key=lambda way: (way.step_time_s, way.device_seconds), default=None)
        found = best(self._problem, sweep, budget=device_seconds, known=known, max_labels=self._max_labels)
        if found.way is None:
            raise self._too_little(device_seconds)
        return self._point(found.way, proven=found.proven, bound_s=sweep.lower_bound_s(device_seconds))

    def weighted(self, weight: float) -> BurstPoint:
        """The plan with the least step time + weight × device-time."""
        if not weight >= 0:
            raise PlanError(f"device_time_weight={weight} must be 0 or more")
        sweep = Sweep(self._problem, np.array([weight]))
        known = min((*self._ways, *sweep.ways()), key=lambda way: way.step_time_s + weight * way.device_seconds)
        found = best(self._problem, sweep, weight=weight, known=known, max_labels=self._max_labels)
        assert found.way is not None
        return self._point(found.way, proven=found.proven)

    def of_one_width(self, place: int) -> BurstPoint:
        """All layers at one width: data parallelism on some of the devices."""
        layers = self.cost.layers
        whole = reduce(Ops.then, (layers.at((layer, place)) for layer in reversed(range(len(layers.device_s)))))
        return BurstPoint(
            step_time_s=max(float(whole.both_s), float(whole.compute_s) + self.cost.updates_s),
            device_seconds=float(whole.device_s),
            widths=(self.cost.widths.values[place],) * len(layers.device_s),
            offsets=(0,) * len(layers.device_s),
            proven=False,
            bound_s=0.0,
        )

    @cached_property
    def _fastest(self) -> Way:
        return min(self._ways, key=lambda way: way.step_time_s)

    def _bracket(self, device_seconds: float) -> tuple[float, float]:
        """Neighbouring weights whose plans need more and less than so much."""
        places = [i for i, way in enumerate(self._ways) if way.device_seconds > device_seconds]
        low = min(max(places, default=0), len(_WEIGHTS) - 2)
        return float(_WEIGHTS[low]), float(_WEIGHTS[low + 1])

    def _refined(self, low: float, high: float) -> tuple[Sweep, list[Way]]:
        between = np.linspace(low, high, 8) if low == 0 else np.geomspace(low, high, 8)
        sweep = Sweep(self._problem, np.unique(np.concatenate([[0.0], between])))
        return sweep, sweep.ways()

    def _too_little(self, device_seconds: float) -> PlanError:
        least = float(self._sweep.device[-1].min())
        return PlanError(
            f"no plan needs as little as {device_seconds:.4g} device-seconds a step; the least is {least:.4g}, a "
            f"burst limit of {least / self.one_device_seconds:.3f}"
        )

    def _point(self, way: Way, *, proven: bool, bound_s: float = 0.0) -> BurstPoint:
        num_widths = len(self.cost.widths.values)
        codes = dict.fromkeys(self._first.layers, way.places[0])
        choices = zip(way.alternatives, pairwise(way.places), strict=True)
        for index, (alternative, (before, place)) in enumerate(choices):
            part = self._parts[index]
            codes.update(zip(part.layers, part.codes[alternative, before, place].tolist(), strict=True))
        pairs = [divmod(codes[layer], num_widths) for layer in range(len(codes))]
        return BurstPoint(
            step_time_s=way.step_time_s,
            device_seconds=way.device_seconds,
            widths=tuple(self.cost.widths.values[place] for _, place in pairs),
            offsets=tuple(offset for offset, _ in pairs),
            proven=proven and self._parts.complete,
            bound_s=bound_s,
        )


def search(
    profiles: Profiles,
    cluster: ClusterSpec,
    *,
    batch: int,
    graph: LayerGraph | None = None,
    extrapolate: bool = False,
    options: BurstOptions | None = None,
) -> BurstSearch:
    """Everything up to the choice of a plan."""
    cost = CostModel(profiles, cluster, extrapolate=extrapolate)
    return _search(cost, batch, graph, options or BurstOptions())


def _search(cost: CostModel, batch: int, graph: LayerGraph | None, options: BurstOptions) -> BurstSearch:
    if graph is not None and tuple(layer.name for layer in graph.layers) != cost.layers:
        raise PlanError(
            f"the graph of {graph.model} has other layers than the profile; profile and plan the same model"
        )
    model = model_row(graph or cost.profile(cost.device_type(0)))
    widths = find_widths(cost, batch)
    if model.has_branches and len(widths.values) > MOST_BRANCH_WIDTHS:
        widths = find_widths(cost, batch, values=_some_widths(widths))
    parameter_bytes = np.array(model.parameter_bytes, dtype=np.float64)
    return BurstSearch(burst_cost(cost, widths, parameter_bytes, options), model)


def _some_widths(widths: Widths) -> list[int]:
    """Powers of two and the widest, then what fills the largest gaps."""
    values = np.array(widths.values)
    chosen = {int(value) for value in values if value & (value - 1) == 0} | {int(values[-1]), int(values[0])}
    while len(chosen) < MOST_BRANCH_WIDTHS:
        distance = np.abs(np.log(values)[:, None] - np.log(sorted(chosen))[None]).min(axis=1)
        chosen.add(int(values[distance.argmax()]))
    return sorted(chosen)


def plan(
    profiles: Profiles,
    cluster: ClusterSpec,
    *,
    batch: int,
    graph: LayerGraph | None = None,
    extrapolate: bool = False,
    burst_limit: float | None = None,
    device_time_weight: float | None = None,
) -> Plan:
    """The fastest plan within `burst_limit` × what one device would need, of any device-time where there is none.

    With `device_time_weight` instead, the plan with the least step time + weight × device-time.
    """
    if burst_limit is not None and device_time_weight is not None:
        raise PlanError("burst_limit and device_time_weight exclude each other; give one")
    if burst_limit is not None and not burst_limit > 0:
        raise PlanError(f"burst_limit={burst_limit} must be more than 0; 1 is what one device would need")
    cost = CostModel(profiles, cluster, extrapolate=extrapolate)
    found = _search(cost, batch, graph, BurstOptions())
    budget = np.inf if burst_limit is None else burst_limit * found.one_device_seconds
    point = found.weighted(device_time_weight) if device_time_weight is not None else found.within(budget)
    weight = device_time_weight or 0.0
    made = predicted_plan(cost, found, point, graph)
    assert made.step_time_s is not None
    if made.step_time_s > (1 + _TRUST) * point.step_time_s:
        for other in _more_certain(found, point, budget, weight):
            if other.step_time_s + weight * other.device_seconds < _price(made, weight):
                made = min(made, predicted_plan(cost, found, other, graph), key=lambda some: _price(some, weight))
    whole = _data_parallel(cost, batch, graph, extrapolate)
    if whole is not None and _price(whole, weight) <= _price(made, weight) and _needs(whole) <= budget * (1 + 1e-9):
        return replace(whole, strategy="burst")
    return made


def _more_certain(found: BurstSearch, point: BurstPoint, budget: float, weight: float) -> Iterator[BurstPoint]:
    """Plans within the budget whose cost may say more: without branches beside each other, of one width, and those
    that spend less, down to one device's time."""
    if any(point.offsets):
        options = replace(found.cost.options, branches_beside=False)
        search = BurstSearch(replace(found.cost, options=options), found.model)
        yield from [search.weighted(weight)] if weight else _within(search, budget)
    layers = found.cost.layers
    within = np.flatnonzero(layers.device_s.sum(axis=0) <= budget)
    compute_s = layers.compute_s.sum(axis=0)
    for place in sorted(within.tolist(), key=lambda place: compute_s[place])[:_MOST_WIDTHS_TRIED]:
        yield found.of_one_width(place)
    if not weight:
        most, least = min(budget, point.device_seconds), min(found.one_device_seconds, point.device_seconds)
        for part in np.linspace(1.0, 0.0, _BUDGETS_TRIED + 1)[1:]:
            yield from _within(found, least + part * (most - least) * (1 - 1e-9))


def _within(search: BurstSearch, device_seconds: float) -> list[BurstPoint]:
    """The fastest plan that needs no more device-time; none where none is found."""
    try:
        return [search.within(device_seconds)]
    except PlanError:
        return []


def _price(some: Plan, weight: float) -> float:
    assert some.step_time_s is not None
    return some.step_time_s + weight * _needs(some)


def _needs(some: Plan) -> float:
    assert some.device_seconds is not None
    return some.device_seconds


def _data_parallel(cost: CostModel, batch: int, graph: LayerGraph | None, extrapolate: bool) -> Plan | None:
    try:
        return data.plan(cost.profiles, cost.cluster, batch=batch, graph=graph, extrapolate=extrapolate)
    except PlanError:
        return None  # no split over all devices is among the measured batches


def predicted_plan(cost: CostModel, found: BurstSearch, point: BurstPoint, graph: LayerGraph | None = None) -> Plan:
    """The plan behind a point, with step time and device-time as the simulator has them."""
    model = graph or cost.profile(cost.device_type(0))
    made = planned(found, point, model)
    return predict(made, cost, dataflow(made, model))


def planned(found: BurstSearch, point: BurstPoint, model: Profile | LayerGraph) -> Plan:
    """The plan behind a point, not yet predicted; `model` has the layers that were searched."""
    return Plan(
        model=model.model,
        strategy="burst",
        num_devices=len(found.cost.widths.devices),
        batch=found.cost.widths.batch,
        blocks=tuple(_blocks(found, point, [layer.name for layer in model.layers])),
    )


def _blocks(found: BurstSearch, point: BurstPoint, names: Sequence[str]) -> Iterator[PlannedBlock]:
    """Consecutive layers with the same devices together, cut where gradients fill a bucket."""
    widths = found.cost.widths
    keys = list(zip(point.widths, point.offsets, strict=True))
    starts = [place for place in range(len(keys)) if place == 0 or keys[place] != keys[place - 1]]
    for start, stop in pairwise([*starts, len(keys)]):
        place = widths.values.index(point.widths[start])
        bucket = found.cost.bucket_bytes[place]
        sizes = found.model.parameter_bytes[start:stop]
        cuts = data.bucket_cuts(sizes, int(max(bucket, 1))) if np.isfinite(bucket) else [0, stop - start]
        shares = widths.shares(place, point.offsets[start])
        for a, b in pairwise(cuts):
            yield PlannedBlock(name=names[start + a], layers=tuple(names[start + a : start + b]), shares=shares)
