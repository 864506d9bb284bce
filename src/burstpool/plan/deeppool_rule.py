"""DeepPool's published rule, as a baseline to compare the burst planner with (Park et al., MLSys'22).

Takes a BurstSearch's cost and model; returns the widths the rule chooses, timed by the same cost. The rule:

- widths are powers of two;
- layer by layer, each width keeps one best predecessor: the one with the least time so far, where a predecessor is
  admissible while its amplification stays under the limit, or is the lowest accepted so far. Amplification: its
  seconds (the regrouping into it and its reduction included) × its devices, over the seconds of one device. Layers that
  take one device 300 µs or less always count as 1. The last layer's width is never checked;
- regrouping into an activation or a flattening is forbidden: it counts a thousand times;
- for every width before a fork each branch is searched on its own, its first layer unchecked; the join begins when the
  slowest has arrived, as if all ran at the same time.

Its recurrence adds reductions up, also where the cost overlaps them. What it plans is then timed with the branches
arranged as the burst planner would arrange them at these widths, on the devices there are: DeepPool packs them after
its search, and may need more. Its byte counts are not its own (those of convolutions are wrong) but the cost's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from burstpool.cluster.spec import ClusterSpec
from burstpool.errors import PlanError
from burstpool.model.graph import LayerGraph
from burstpool.plan.branches import Fork, ModelRow, Row, Stage, model_row
from burstpool.plan.burst import BurstPoint, BurstSearch
from burstpool.plan.burst_cost import BurstCost, BurstOptions, burst_cost
from burstpool.plan.cost import CostModel, Floats, Profiles
from burstpool.plan.widths import find_widths

NEGLIGIBLE_S = 300e-6
"""Layers that take one device no longer are never limited."""

FOLLOWERS = ("relu", "flatten", "batch_norm")
"""Kinds of layers that stay with the one before."""

_FORBIDDING = 1000.0
"""How many times a regrouping into one of those counts."""

Chosen = dict[int, int]
"""Layer → place of its width."""


def plan_by_rule(
    profiles: Profiles,
    cluster: ClusterSpec,
    *,
    batch: int,
    limit: float,
    graph: LayerGraph | None = None,
    extrapolate: bool = False,
    options: BurstOptions | None = None,
) -> BurstPoint:
    """What the rule plans under an amplification limit, and what it takes by the burst planner's cost."""
    if not limit > 0:
        raise PlanError(f"limit={limit} must be more than 0; DeepPool's were 1.5 to 5")
    cost = CostModel(profiles, cluster, extrapolate=extrapolate)
    model = model_row(graph or cost.profile(cost.device_type(0)))
    most = min(cluster.num_devices, batch)
    widths = find_widths(cost, batch, values=[2**power for power in range(most.bit_length())])
    parameter_bytes = np.array(model.parameter_bytes, dtype=np.float64)
    tables = burst_cost(cost, widths, parameter_bytes, options or BurstOptions())
    kinds = [layer.kind for layer in (graph or cost.profile(cost.device_type(0))).layers]
    followers = frozenset(place for place, kind in enumerate(kinds) if kind in FOLLOWERS)
    chosen = _Rule(tables, limit, followers).choose(model)
    return _timed(tables, model, chosen)


def _timed(cost: BurstCost, model: ModelRow, chosen: Chosen) -> BurstPoint:
    """The widths as the only ones allowed: the search can then only arrange branches."""
    allowed = np.full(cost.layers.device_s.shape, np.inf)
    for layer, place in chosen.items():
        allowed[layer, place] = 0.0
    layers = cost.layers._replace(device_s=cost.layers.device_s + allowed)
    return BurstSearch(replace(cost, layers=layers), model).within(np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The search up to some stage."""

    seconds: Floats
    """Width → the least time so far."""
    chosen: tuple[Chosen, ...]
    """Width → the widths of all layers on that way."""
    amplification: Floats
    """Width → device-time of the stage on that way over one device's."""


class _Rule:
    """The recurrence over a model's row."""

    def __init__(self, cost: BurstCost, limit: float, followers: frozenset[int]) -> None:
        self.cost, self.limit, self.followers = cost, limit, followers
        self.num_devices = np.array(cost.widths.values)
        self.unlimited = np.ones(len(self.num_devices))
        is_added = cost.options.reduction == "added"
        self.compute_s = cost.layers.compute_s - (cost.reduce_s if is_added else 0.0)

    def choose(self, model: ModelRow) -> Chosen:
        """The widths of the fastest way to the end."""
        end = self._row(model.row, None, 0)
        return end.chosen[int(end.seconds.argmin())]

    def _row(self, row: Row, state: _State | None, bytes_in: int) -> _State:
        fork: Fork | None = None
        for part in row:
            if isinstance(part, Fork):
                fork = part
                continue
            if fork is not None:
                assert state is not None
                state, fork = self._join(part, fork, state, bytes_in), None
            elif part.layers:
                state = self._stage(part, state, bytes_in)
            bytes_in = part.bytes_per_sample
        assert state is not None
        return state if fork is None else self._join(Stage(), fork, state, bytes_in)

    def _stage(self, stage: Stage, before: _State | None, bytes_in: int) -> _State:
        places = range(len(self.num_devices))
        if before is None:
            nothing = np.zeros(len(places))
            return self._at(stage, nothing, nothing, tuple({} for _ in places))
        moving = self.cost.regrouping(bytes_in).compute_s
        moving = moving * (_FORBIDDING if self.followers.issuperset(stage.layers) else 1.0)
        arrival, source = self._arrivals(before, moving)
        return self._at(stage, arrival, moving[source, places], tuple(before.chosen[other] for other in source))

    def _at(self, stage: Stage, arrival: Floats, moving: Floats, chosen: Sequence[Chosen]) -> _State:
        """Runs a stage: when its input is there, how long that had to move, what was chosen before."""
        layers = list(stage.layers)
        own = (self.compute_s[layers] + self.cost.reduce_s[layers]).sum(axis=0)
        one_device_s = float(own[0])
        amplification = self.unlimited
        if one_device_s > NEGLIGIBLE_S:
            amplification = (moving + own) * self.num_devices / one_device_s
        widths = (earlier | dict.fromkeys(layers, place) for place, earlier in enumerate(chosen))
        return _State(arrival + own, tuple(widths), amplification)

    def _arrivals(self, before: _State, moving: Floats) -> tuple[Floats, list[int]]:
        """Width → when its input can be there, and from which width: the rule itself."""
        seconds, sources = [], []
        for place in range(len(self.num_devices)):
            best, source, lowest = np.inf, 0, np.inf
            for other, factor in enumerate(before.amplification):
                total = before.seconds[other] + moving[other, place]
                if total < best and (factor < self.limit or factor < lowest):
                    best, source, lowest = total, other, factor
            seconds.append(best)
            sources.append(source)
        return np.array(seconds), sources

    def _branches(self, fork: Fork, bytes_in: int) -> Iterator[tuple[Floats, Floats, list[Chosen]]]:
        """For each width before the fork, by width after it: when the last branch is there, what moved, the layers."""
        places = np.arange(len(self.num_devices))
        for start in places:
            state = _State(np.where(places == start, 0.0, np.inf), tuple({} for _ in places), self.unlimited)
            arrival, moved = np.zeros(len(places)), np.zeros(len(places))
            chosen: list[Chosen] = [{} for _ in places]
            for row in fork.branches:
                end = self._row(row, state, bytes_in) if row else state
                moving = self.cost.regrouping(_end_bytes(row, fork)).compute_s
                seconds, source = self._arrivals(end, moving)
                arrival = np.maximum(arrival, seconds)
                moved += moving[source, places]
                chosen = [widths | end.chosen[other] for widths, other in zip(chosen, source, strict=True)]
            yield arrival, moved, chosen

    def _join(self, stage: Stage, fork: Fork, before: _State, bytes_in: int) -> _State:
        arrivals, moved, chosen = zip(*self._branches(fork, bytes_in), strict=True)
        totals = before.seconds[:, None] + np.array(arrivals)
        source = totals.argmin(axis=0)
        widths = [before.chosen[other] | chosen[other][place] for place, other in enumerate(source)]
        moving = np.array([moved[other][place] for place, other in enumerate(source)])
        return self._at(stage, totals.min(axis=0), moving, widths)


def _end_bytes(row: Row, fork: Fork) -> int:
    """What a branch hands on; a fork at its end has handed it on already."""
    if not row:
        return fork.shortcut_bytes
    return row[-1].bytes_per_sample if isinstance(row[-1], Stage) else 0
