"""A model's row as parts: what the search goes through one after the other.

Takes BurstCost and ModelRow. Returns a sequence: one part a stage, with the branches before it where there are some.
Decides which forks are small enough to look at all their alternatives.
"""

from collections.abc import Sequence

import numpy as np

from burstpool.plan.branches import Fork, ModelRow, Stage
from burstpool.plan.burst_cost import BurstCost
from burstpool.plan.burst_forks import Part, fork_part, num_alternatives, num_groupings, stage_ops, stage_part
from burstpool.plan.cost import Floats
from burstpool.plan.pareto import coarse, fully_undominated, undominated

_SMALL_FORK = 70_000
"""A fork with no more alternatives × widths² is searched in full,"""
_FEW_WIDTHS = 8
"""where there are no more widths than these,"""
_FEW_GROUPINGS = 5_000
"""and fewer ways to run its branches at the same time."""
_KEPT_NUMBERS = 5_000_000
"""Stages × widths² up to which the search keeps what it has worked out of each."""


class Parts(Sequence[Part]):
    """What follows the first stage. Of many stages at many widths, parts are worked out again whenever asked for."""

    def __init__(self, cost: BurstCost, model: ModelRow, weights: Floats) -> None:
        self.cost, self.weights, self.complete = cost, weights, True
        self.made: list[Part | tuple[Stage, int]] = []
        keeps = len(model.row) * len(cost.widths.values) ** 2 <= _KEPT_NUMBERS
        bytes_in, fork = 0, None
        for part in model.row:
            if isinstance(part, Fork):
                fork = self._fork(part, bytes_in)
                continue
            if fork is not None:
                self.made.append(_behind(cost, fork, part))
            elif part is not model.row[0]:
                self.made.append(stage_part(cost, part, bytes_in) if keeps else (part, bytes_in))
            bytes_in, fork = part.bytes_per_sample, None
        self.sizes = [len(part.codes) if isinstance(part, Part) else 1 for part in self.made]

    def _fork(self, fork: Fork, port_bytes: int) -> Part:
        if self._is_small(fork):
            return _worth_keeping(fork_part(self.cost, fork, port_bytes, None))
        self.complete = False
        return fork_part(self.cost, fork, port_bytes, self.weights)

    def _is_small(self, fork: Fork) -> bool:
        num_widths = len(self.cost.widths.values)
        if num_widths > _FEW_WIDTHS or num_alternatives((fork,), num_widths) * num_widths**2 > _SMALL_FORK:
            return False
        return num_groupings(self.cost, fork, _FEW_GROUPINGS) < _FEW_GROUPINGS

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> Part:  # type: ignore[override]
        made = self.made[index]
        return made if isinstance(made, Part) else stage_part(self.cost, *made)


def _worth_keeping(part: Part) -> Part:
    """Without alternatives that another beats in everything, each between its own two widths."""
    num_ways, num_before, num_after = part.ops.compute_s.shape
    way, pair = (x.ravel() for x in np.indices((num_ways, num_before * num_after)))
    flat = [coarse(array.reshape(-1)) for array in part.ops]
    kept = undominated(pair, flat[3], flat[2], flat[1], flat[0])
    kept = kept[fully_undominated(pair[kept], *(column[kept] for column in flat))]
    kept = kept[np.argsort(pair[kept], kind="stable")]
    starts = np.searchsorted(pair[kept], np.arange(num_before * num_after))
    rank = np.arange(len(kept)) - starts[pair[kept]]
    chosen = np.full((int(rank.max()) + 1, num_before * num_after), -1)
    chosen[rank, pair[kept]] = way[kept]
    chosen = chosen.reshape(-1, num_before, num_after)
    _, before, after = np.ogrid[: len(chosen), :num_before, :num_after]
    ops = part.ops.at((chosen, before, after))
    ops = ops._replace(device_s=np.where(chosen < 0, np.inf, ops.device_s))
    return Part(ops, part.codes[chosen, before, after], part.layers)


def _behind(cost: BurstCost, fork: Part, stage: Stage) -> Part:
    """Branches and the stage in which they end."""
    own = np.arange(fork.codes.shape[2], dtype=np.int32)[:, None]
    own = np.broadcast_to(own, (*fork.codes.shape[:3], len(stage.layers)))
    ops = stage_ops(cost, stage).then(fork.ops)
    return Part(ops, np.concatenate([fork.codes, own], axis=3), (*fork.layers, *stage.layers))
