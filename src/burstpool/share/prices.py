"""What each piece of a background costs the foreground, beside an average second of background work.

A step of a background has pieces that want memory bandwidth and others that want arithmetic; the same ones beside the
same foreground cost the same every time. Known by themselves, they let the controller spend its budget evenly: without,
steps with three costly pieces and steps with three cheap ones would be as many, and the budget for p95 would hold back
all of them.

Takes, for each step of the foreground, the pieces that ran beside it and what it took longer than alone. Only what sets
pieces apart is learnt: a price is relative to the average of all pieces that were met, and what an average second costs
is known apart. Each piece's factor is estimated by a Kalman filter with variances only: pieces are taken to be
independent. Pure.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Piece = tuple[int, int]
"""Whose, and which of its pieces."""

_FIRST_VARIANCE = 0.25
"""Of a factor nothing is known of."""
_DRIFT = 1e-4
"""What a variance grows by at each step with the piece: neither job is the same for ever."""
_MISFIT = 0.05
"""Standard error of the model itself, relative to the work in a step."""
_LEAST, _MOST = 0.2, 5.0
"""Factors beyond are taken for these."""
_MEMORY = 0.97
"""What is kept of the average cost a step later."""
_STEPS_TO_AVERAGE = 20
"""Steps until the average cost is known."""
_LEAST_COST = 0.02
"""Seconds a second; where an average second costs no more, there is nothing to tell apart."""
_ODD = 4.0
"""Standard errors beyond which a step had something else in it."""


@dataclass(slots=True)
class _Factor:
    length_s: float
    value: float = 1.0
    variance: float = _FIRST_VARIANCE


class Prices:
    """Factors by piece; 1 on average, by the pieces' lengths."""

    def __init__(self) -> None:
        self._factors: dict[Piece, _Factor] = {}
        self._lengths_s = self._values_s = 0.0
        """Sums over all pieces: of lengths, and of lengths times values."""
        self._steps, self._added_s, self._work_s = 0, 0.0, 0.0

    def meet(self, piece: Piece, length_s: float) -> float:
        """The piece's factor: so many times what average work of its length costs."""
        known = self._factors.get(piece)
        if known is None or known.length_s != length_s:
            self._forget(piece)
            known = self._factors[piece] = _Factor(length_s, value=self._mean)
            self._lengths_s += length_s
            self._values_s += length_s * known.value
        return min(max(known.value / self._mean, _LEAST), _MOST)

    def forget(self, owner: int) -> None:
        """All pieces of one background."""
        for piece in [piece for piece in self._factors if piece[0] == owner]:
            self._forget(piece)

    def learn(self, pieces: Sequence[Piece], added_s: float, *, error_s: float) -> None:
        """From one step: the pieces in it, and what it took longer than alone, give or take `error_s`."""
        if any(piece not in self._factors for piece in pieces):
            return  # one of a background that has ended
        amounts_s = {piece: count * self._factors[piece].length_s for piece, count in Counter(pieces).items()}
        prices_s = {piece: amount_s * self._factors[piece].value / self._mean for piece, amount_s in amounts_s.items()}
        work_s = sum(prices_s.values())
        if work_s <= 0:
            return
        cost = self._average_cost(added_s, work_s)
        if cost is None:
            return
        variance = (error_s / cost) ** 2 + (_MISFIT * sum(amounts_s.values())) ** 2
        variance += sum(amount_s**2 * self._factors[piece].variance for piece, amount_s in amounts_s.items())
        missing_s = added_s / cost - work_s
        odd, mean = abs(missing_s) > _ODD * math.sqrt(variance), self._mean
        for piece, amount_s in amounts_s.items():
            factor = self._factors[piece]
            if not odd:
                gain = factor.variance * amount_s / variance
                self._values_s -= factor.length_s * factor.value
                factor.value = max(factor.value + gain * missing_s * mean, _LEAST * mean)
                self._values_s += factor.length_s * factor.value
                factor.variance *= 1 - gain * amount_s
            factor.variance = min(factor.variance + _DRIFT, _FIRST_VARIANCE)

    def _average_cost(self, added_s: float, work_s: float) -> float | None:
        """Seconds a second, with this step; None where it is not known yet, or too little to tell pieces apart."""
        usual_s = self._added_s / self._work_s * work_s if self._steps >= _STEPS_TO_AVERAGE else math.inf
        self._steps += 1
        self._added_s = _MEMORY * self._added_s + min(added_s, 3 * max(usual_s, _LEAST_COST * work_s))
        self._work_s = _MEMORY * self._work_s + work_s
        cost = self._added_s / self._work_s
        return cost if self._steps >= _STEPS_TO_AVERAGE and cost > _LEAST_COST else None

    @property
    def _mean(self) -> float:
        return self._values_s / self._lengths_s if self._lengths_s > 0 else 1.0

    def _forget(self, piece: Piece) -> None:
        if (known := self._factors.pop(piece, None)) is not None:
            self._lengths_s -= known.length_s
            self._values_s -= known.length_s * known.value
        if not self._factors:
            self._lengths_s = self._values_s = 0.0  # but for what was lost in rounding
