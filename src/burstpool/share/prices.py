"""What each piece of a background costs the foreground, beside an average second of background work.

A step of a background has pieces that want memory bandwidth and others that want arithmetic; the same ones beside the
same foreground cost the same every time. Known by themselves, they let the controller spend its budget evenly: without,
steps with three costly pieces and steps with three cheap ones would be as many, and the budget for p95 would hold back
all of them.

Takes, for each step of the foreground, the pieces that ran beside it and how much average work its delay amounts to.
Each piece's factor is estimated by a Kalman filter with variances only: pieces are taken to be independent. Pure.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_FIRST_VARIANCE = 0.25
"""Of a factor nothing is known of."""
_DRIFT = 1e-4
"""What a variance grows by at each step with the piece: neither job is the same for ever."""
_MISFIT = 0.05
"""Standard error of the model itself, relative to the work in a step."""
_LEAST, _MOST = 0.2, 5.0


@dataclass(slots=True)
class _Factor:
    length_s: float
    value: float = 1.0
    variance: float = _FIRST_VARIANCE


class Prices:
    """Factors by piece; 1 on average."""

    def __init__(self) -> None:
        self._factors: dict[Hashable, _Factor] = {}

    def of(self, piece: Hashable, length_s: float) -> float:
        """So many seconds of average work cost as much as this piece."""
        factor = self._factors.setdefault(piece, _Factor(length_s))
        factor.length_s = length_s
        return length_s * factor.value

    def learn(self, pieces: Sequence[Hashable], amounts_to_s: float, *, error_s: float) -> None:
        """From one step: the pieces in it, and the average work that its delay amounts to, give or take `error_s`."""
        factors = [self._factors[piece] for piece in pieces]
        work_s = sum(factor.length_s for factor in factors)
        if work_s <= 0:
            return
        variance = sum(factor.length_s**2 * factor.variance for factor in factors)
        variance += error_s**2 + (_MISFIT * work_s) ** 2
        missing_s = amounts_to_s - sum(factor.length_s * factor.value for factor in factors)
        for factor in factors:
            gain = factor.variance * factor.length_s / variance
            factor.value = min(max(factor.value + gain * missing_s, _LEAST), _MOST)
            factor.variance = (1 - gain * factor.length_s) * factor.variance + _DRIFT
        all_s = sum(factor.length_s for factor in self._factors.values())
        mean = sum(factor.length_s * factor.value for factor in self._factors.values()) / all_s
        for factor in self._factors.values():
            factor.value /= mean
