"""Resharding: samples of a value, held in pieces, cut and joined to what a block needs.

A device makes some samples of a value, receives others, and runs a block on a range of them. `Pieces` holds what is
there by the samples' places in the minibatch, so that regrouping is arithmetic. Gradients are added where several
blocks contribute to the same samples.
"""

import itertools

import torch


class Pieces:
    """Samples of one value. Not thread-safe."""

    __slots__ = ("_dim", "_parts")

    def __init__(self, dim: int | None) -> None:
        self._dim = dim
        """Dimension of the samples; None for a value that cannot be cut: it is held whole, whatever the range."""
        self._parts: list[tuple[int, int, torch.Tensor]] = []
        """(start, stop, tensor), sorted, disjoint."""

    def put(self, start: int, stop: int, tensor: torch.Tensor) -> None:
        """Holds these samples, in place of what was held of them."""
        if self._parts:
            self.pop(start, stop)
        self._parts.append((start, stop, tensor))
        if len(self._parts) > 1:
            self._parts.sort(key=lambda part: part[0])

    def add(self, start: int, stop: int, tensor: torch.Tensor) -> None:
        """Adds to what is held of these samples; holds the rest."""
        if self._dim is None or not self._parts:
            total = tensor if not self._parts else self._parts[0][2] + tensor
            self._parts = [(start, stop, total)]
            return
        self._split(start)
        self._split(stop)
        edges = sorted({start, stop} | {edge for a, b, _ in self._parts for edge in (a, b) if start < edge < stop})
        held = {part[0]: part for part in self._parts}
        for low, high in itertools.pairwise(edges):
            own = tensor.narrow(self._dim, low - start, high - low)
            held[low] = (low, high, held[low][2] + own if low in held else own)
        self._parts = sorted(held.values(), key=lambda part: part[0])

    def take(self, start: int, stop: int) -> torch.Tensor | None:
        """These samples in one tensor; None where not all of them are held."""
        parts = self._parts
        if len(parts) == 1:
            first, last, tensor = parts[0]
            if (first == start and last == stop) or self._dim is None:
                return tensor
        if self._dim is None:
            return None
        found, reached = [], start
        for first, last, tensor in parts:
            if first <= reached < last and reached < stop:
                length = min(stop, last) - reached
                found.append(tensor.narrow(self._dim, reached - first, length))
                reached += length
        if reached < stop:
            return None
        return found[0] if len(found) == 1 else torch.cat(found, self._dim)

    def pop(self, start: int, stop: int) -> torch.Tensor | None:
        """The same, and no longer holds any of them."""
        found = self.take(start, stop)
        if self._dim is None:
            self._parts = []
            return found
        self._split(start)
        self._split(stop)
        self._parts = [part for part in self._parts if part[1] <= start or part[0] >= stop]
        return found

    def holds_any(self, start: int, stop: int) -> bool:
        """Whether at least one of these samples is there."""
        return any(first < stop and start < last for first, last, _ in self._parts)

    def _split(self, place: int) -> None:
        assert self._dim is not None
        for index, (start, stop, tensor) in enumerate(self._parts):
            if start < place < stop:
                left = tensor.narrow(self._dim, 0, place - start)
                right = tensor.narrow(self._dim, place - start, stop - place)
                self._parts[index : index + 1] = [(start, place, left), (place, stop, right)]
                return
