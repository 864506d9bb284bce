"""Random streams: each member draws its own numbers, the ones it would draw alone after `torch.manual_seed(seed)`.

On the CPU the numbers are those of training alone, bit for bit. On CUDA each member's stream is its own and does
not depend on the others, but a dropout mask is not the one that torch's fused dropout kernel would draw.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Streams:
    """One generator a member."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.generators = [self._generator(seed) for seed in seeds]
        self._resting: dict[int, torch.Tensor] = {}
        """Where the streams of stopped members go on: until then what is drawn for them is of no consequence."""
        self.draws_in_loss = False
        """Whether a loss has drawn from them: whoever records a step must know."""

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def rest(self, index: int) -> None:
        """A stopped member's stream stays where it is now."""
        self._resting.setdefault(index, self.generators[index].get_state())

    def wake(self, index: int) -> None:
        """Goes on where the stream was when the member stopped."""
        if index in self._resting:
            self.generators[index].set_state(self._resting.pop(index))

    def keep(self, indices: Sequence[int]) -> None:
        """Only the streams of these members, in this order."""
        self.generators = [self.generators[index] for index in indices]
        self._resting = {place: self._resting[i] for place, i in enumerate(indices) if i in self._resting}

    def taken(self, indices: Sequence[int]) -> "Streams":
        """The streams themselves, not copies: their members leave this array."""
        other = Streams([], self.device)
        other.generators, other._resting = self.generators, self._resting
        other.keep(indices)
        return other

    def admit(self, seed: int) -> None:
        """One more member."""
        self.generators.append(self._generator(seed))

    def states(self) -> list[torch.Tensor]:
        """Where each stream is."""
        return [self.state(index) for index in range(len(self.generators))]

    def state(self, index: int) -> torch.Tensor:
        """Where one stream is."""
        return self._resting[index].clone() if index in self._resting else self.generators[index].get_state()

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Puts each stream back to where it was."""
        for index, (generator, state) in enumerate(zip(self.generators, states, strict=True)):
            generator.set_state(state)
            if index in self._resting:
                self._resting[index] = state.clone()

    def clone(self) -> "Streams":
        """Streams that continue alike, apart from these."""
        copy = Streams([0] * len(self.generators), self.device)
        copy.restore(self.states())
        return copy

    def drawn(self, count: int) -> torch.Tensor:
        """[M, count] random integers, each row of its member's stream."""
        rows = torch.empty(len(self.generators), count, dtype=torch.int64, device=self.device)
        for row, generator in zip(rows.unbind(0), self.generators, strict=True):
            row.random_(generator=generator)
        return rows

    def drawing(self, member: int, function: Callable[[], Any]) -> Any:
        """The function's result with the member's stream in the place of torch's own."""
        default, mine = _default_generator(self.device), self.generators[member]
        if self.device.type == "cuda":  # the state itself, not what it says: so it can be recorded
            before = default.graphsafe_get_state()
            default.graphsafe_set_state(mine.graphsafe_get_state())
            try:
                return function()
            finally:
                default.graphsafe_set_state(before)
        before_state = default.get_state()
        default.set_state(mine.get_state())
        try:
            return function()
        finally:
            mine.set_state(default.get_state())
            default.set_state(before_state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
