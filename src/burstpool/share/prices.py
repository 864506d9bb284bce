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

PieceName = tuple[int, int]
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
_ODD, _DOUBT = 4.0, 1.5
"""Standard errors beyond which a step had something else in it; or what is known of its pieces is wrong, so that their
variances grow, and some such steps in a row are believed."""


@dataclass(slots=True)
class _Factor:
    length_s: float
    value: float = 1.0
    variance: float = _FIRST_VARIANCE


class Prices:
    """Factors by piece; 1 on average, by the pieces' lengths."""

    def __init__(self) -> None:
        self._factors: dict[PieceName, _Factor] = {}
        self._lengths_s = self._values_s = 0.0
        """Sums over all pieces: of lengths, and of lengths times values."""
        self._steps, self._added_s, self._work_s = 0, 0.0, 0.0

    def meet(self, piece: PieceName, length_s: float) -> float:
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

    def learn(self, pieces: Sequence[PieceName], added_s: float, *, error_s: float) -> None:
        """From one step: the pieces in it, and what it took longer than alone, give or take `error_s`."""
        if any(piece not in self._factors for piece in pieces):
            return  # one of a background that has ended
        amounts_s = {piece: count * self._factors[piece].length_s for piece, count in Counter(pieces).items()}
        work_s = sum(amount_s * self._factors[piece].value / self._mean for piece, amount_s in amounts_s.items())
        if work_s <= 0:
            return
        cost = self._cost
        if cost is None:
            self._average(added_s, work_s, least_s=-0.5 * work_s, most_s=self._most_s(work_s))
            return
        variance = (error_s / cost) ** 2 + (_MISFIT * sum(amounts_s.values())) ** 2
        variance += sum(amount_s**2 * self._factors[piece].variance for piece, amount_s in amounts_s.items())
        usual_s, far_s = cost * work_s, cost * _ODD * math.sqrt(variance)
        self._average(added_s, work_s, least_s=usual_s - far_s, most_s=usual_s + far_s)
        missing_s, mean = (added_s - usual_s) / cost, self._mean
        for piece, amount_s in amounts_s.items():
            factor = self._factors[piece]
            if abs(added_s - usual_s) <= far_s:
                gain = factor.variance * amount_s / variance
                factor.value = max(factor.value + gain * missing_s * mean, _LEAST * mean)
                factor.variance *= 1 - gain * amount_s
            else:
                factor.variance *= _DOUBT
            factor.variance = min(factor.variance + _DRIFT, _FIRST_VARIANCE)
        self._make_average_1()

    @property
    def _cost(self) -> float | None:
        """Of an average second; None where it is not known yet, or too little to tell pieces apart."""
        known = self._steps >= _STEPS_TO_AVERAGE and self._added_s > _LEAST_COST * self._work_s
        return self._added_s / self._work_s if known else None

    def _most_s(self, work_s: float) -> float:
        """What a step may add to the average before pieces can be told apart."""
        if self._steps < _STEPS_TO_AVERAGE:
            return math.inf
        return max(3 * self._added_s / self._work_s, 3 * _LEAST_COST) * work_s

    def _average(self, added_s: float, work_s: float, *, least_s: float, most_s: float) -> None:
        """Takes a step into the average cost; one that had something else in it only as far as is usual."""
        self._steps += 1
        self._added_s = _MEMORY * self._added_s + min(max(added_s, least_s), most_s)
        self._work_s = _MEMORY * self._work_s + work_s

    def _make_average_1(self) -> None:
        """Else values would all grow, or all shrink, for as long as anything is learnt."""
        self._add_up()
        mean = self._mean
        for factor in self._factors.values():
            factor.value /= mean
        self._add_up()

    @property
    def _mean(self) -> float:
        return self._values_s / self._lengths_s if self._lengths_s > 0 else 1.0

    def _forget(self, piece: PieceName) -> None:
        if self._factors.pop(piece, None) is not None:
            self._add_up()

    def _add_up(self) -> None:
        self._lengths_s = sum(factor.length_s for factor in self._factors.values())
        self._values_s = sum(factor.length_s * factor.value for factor in self._factors.values())
