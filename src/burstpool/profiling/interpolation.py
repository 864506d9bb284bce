"""Values between and beyond measured batches.

Takes tables `batch → value`; returns the value at any batch. Between two measured batches it lies on the
straight line between them. Outside it is refused, unless the caller asks for a guess:

- above: the slope up to the last batch goes on, and the value never falls below the last one. The slope is
  taken from the largest batch of at most half the last (32 to 64, also where 63 was measured: over one sample
  it would be noise). Where only one batch was measured, the value grows in proportion to the batch;
- below: the value of the smallest batch holds, because small batches are bound by launching kernels and by
  reading the weights, which take as long for fewer samples.

Ignores the steps real kernels have (a batch of 33 may cost as much as one of 64): measure where it matters.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from burstpool.errors import ProfileError


class Place(NamedTuple):
    """Where a batch lies among the measured ones: its value is `weight_low·v[low] + weight_high·v[high]`."""

    low: int
    high: int
    weight_low: float
    weight_high: float
    beyond: bool
    """Above the largest measured batch: the value must not fall below the last one."""


def place(batches: Sequence[int], batch: int, *, extrapolate: bool) -> Place:
    """Locates `batch` in the sorted `batches`; O(log n)."""
    if batch < 1:
        raise ProfileError(f"batch {batch} must be at least 1")
    index = bisect_left(batches, batch)
    if index < len(batches) and batches[index] == batch:
        return Place(index, index, 1.0, 0.0, False)
    if 0 < index < len(batches):
        weight = (batch - batches[index - 1]) / (batches[index] - batches[index - 1])
        return Place(index - 1, index, 1.0 - weight, weight, False)
    if not extrapolate:
        raise ProfileError(
            f"no measurement for batch {batch}: measured are {', '.join(map(str, batches))}; "
            "measure it too, or pass --extrapolate to have it guessed"
        )
    if index == 0:
        return Place(0, 0, 1.0, 0.0, False)
    last = len(batches) - 1
    if last == 0:
        return Place(0, 0, batch / batches[0], 0.0, True)
    anchor = max(0, bisect_right(batches, batches[-1] / 2) - 1)
    weight = (batch - batches[anchor]) / (batches[-1] - batches[anchor])
    return Place(anchor, last, 1.0 - weight, weight, True)


def value_at(table: Mapping[int, float], batches: Sequence[int], batch: int, *, extrapolate: bool) -> float:
    """The table's value at any batch; `batches` are its keys, sorted."""
    measured = table.get(batch)
    if measured is not None:
        return measured
    where = place(batches, batch, extrapolate=extrapolate)
    low, high = table[batches[where.low]], table[batches[where.high]]
    value = where.weight_low * low + where.weight_high * high
    return max(value, high) if where.beyond else value


def values_at(
    values: npt.NDArray[np.float64], batches: Sequence[int], wanted: Sequence[int], *, extrapolate: bool
) -> npt.NDArray[np.float64]:
    """The same for many layers at once: takes layers × measured batches, returns layers × wanted batches."""
    places = [place(batches, batch, extrapolate=extrapolate) for batch in wanted]
    low = values[:, [where.low for where in places]]
    high = values[:, [where.high for where in places]]
    found: npt.NDArray[np.float64] = low * np.array([where.weight_low for where in places])
    found += high * np.array([where.weight_high for where in places])
    beyond = np.array([where.beyond for where in places], dtype=bool)
    np.maximum(found, high, out=found, where=beyond)
    return found
