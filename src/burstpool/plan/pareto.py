"""Pareto fronts: which of many labels could still be part of the best plan.

Takes columns of numbers, all of them better when smaller. Returns places. Decides nothing else.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from burstpool.plan.cost import Floats

Integers = npt.NDArray[np.intp]

_MOST_COMPARED = 3000
"""Labels of a group that are compared each with each."""
_ROUNDING = 2.0**-40
"""Of the largest cost: what sums of some hundred numbers may differ by in another order, and much more."""


def front(first: Floats, second: Floats) -> Integers:
    """Places of the points that no other beats in both, `second` rising: O(n log n)."""
    if not len(first):
        return np.zeros(0, dtype=np.intp)
    order = np.lexsort((first, second))
    least = np.minimum.accumulate(first[order])
    return np.asarray(order[np.append(True, least[1:] < least[:-1])])


def coarse(costs: Floats) -> Floats:
    """The costs in multiples of a trillionth of the largest: nearly all that differ by rounding only become equal.

    Sums of the same numbers in another order differ in the last digits; as labels none beats the other, and of layers
    that are alike there are thousands.
    """
    unit = float(np.max(costs, where=np.isfinite(costs), initial=0.0)) * _ROUNDING
    return np.rint(costs / unit) * unit if unit else costs


def undominated(group: Integers, first: Floats, *others: Floats) -> Integers:
    """Places of labels (some costs each) that are worth keeping, each among those of its own group: O(n log n).

    Sound for up to some thousand groups and finite costs (but for `first`): a label goes only if one that is no worse
    in anything stays. Complete where all columns but the first agree; else some labels stay that a full comparison
    would find useless, as each is compared with one rival a column only:
    of those no worse in the first column, the best in that one.
    """
    kept = np.arange(len(group), dtype=np.intp)
    for leading in range(len(others)):
        columns = [others[leading][kept], *(column[kept] for i, column in enumerate(others) if i != leading)]
        kept = kept[_beaten_by_none(group[kept], first[kept], columns)]
    return kept[_distinct(group[kept], first[kept], *(column[kept] for column in others))]


def _distinct(*columns: Floats | Integers) -> Integers:
    """Places of the first of equal labels each."""
    order = np.lexsort(columns)
    if not len(order):
        return np.zeros(0, dtype=np.intp)
    differs = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    return np.asarray(order[np.append(True, differs)])


def _beaten_by_none(group: Integers, first: Floats, columns: Sequence[Floats]) -> Integers:
    """Places of labels whose rival (no worse in `first`, the least in the first column) is worse in another."""
    order = np.lexsort((*reversed(columns), first, group))
    rival = order[_running_best(group[order], columns[0][order])]
    is_worse = np.any([column[rival] > column[order] for column in columns[1:]], axis=0)
    return np.asarray(order[(rival == order) | is_worse])


def _running_best(group: Integers, cost: Floats) -> Integers:
    """Sorted by group: for each place, where the least cost of its group so far stands; the first of equals."""
    if not len(cost):
        return np.zeros(0, dtype=np.intp)
    # Each group lies below all before it, so that one running minimum serves all of them.
    rank = np.cumsum(np.append(False, group[1:] != group[:-1]))
    span = 1.000001 * float(cost.max() - cost.min()) + 1e-9
    least = np.minimum.accumulate(cost - rank * span)
    is_new = np.append(True, least[1:] < least[:-1])
    return np.asarray(np.maximum.accumulate(np.where(is_new, np.arange(len(cost)), 0)))


def fully_undominated(group: Integers, *columns: Floats) -> Integers:
    """As `undominated`, but every label is compared with every other of its group: O(n²) for each.

    Groups of more than some thousand labels are left as they are.
    """
    kept = []
    for one in np.unique(group):
        places = np.flatnonzero(group == one)
        if len(places) <= _MOST_COMPARED:
            costs = np.stack([column[places] for column in columns])
            # A label in front of its equals stays; the others are beaten by it.
            places = places[np.lexsort(costs)]
            costs = np.stack([column[places] for column in columns])
            no_worse = np.all(costs[:, :, None] <= costs[:, None, :], axis=0)
            places = places[~np.any(np.triu(no_worse, 1) | np.tril(no_worse & ~no_worse.T, -1), axis=0)]
        kept.append(places)
    return np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)
