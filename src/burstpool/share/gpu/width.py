"""On how many multiprocessors a background runs beside a foreground: the choice that keeps most within the budget.

A background may use the whole GPU for short times, or a part of it for longer. Which disturbs the foreground less
depends on both jobs' kernels, so both ways are tried, for some steps with nothing held back and nothing trained. A part
is taken only where it keeps clearly more, and only where a step on it gives the same numbers, bit for bit, as on the
whole GPU: libraries may choose other kernels for fewer multiprocessors. A job whose steps differ from time to time on
the whole GPU, as some of cuDNN's kernels add up in any order, has no bits to be kept and is not asked.

Takes captured jobs; leaves the background captured on the stream it is to run on. Ignores: times in which the
foreground waits, when a part of the GPU is less than there is; and other backgrounds, which run at the same time if
they are on other parts, and after one another if not.
"""

import collections
import functools
import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from burstpool.errors import CaptureError, in_a_line
from burstpool.share.gpu.at_work import Steps, move, recorded
from burstpool.share.gpu.capabilities import capabilities
from burstpool.share.gpu.partition import confined_stream
from burstpool.share.gpu.pieces import Piece

_LOG = logging.getLogger(__name__)
PARTS = (0.75, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Shares of the multiprocessors that are tried."""
_TRY_S = 0.15
_LEAST_STEPS, _MOST_STEPS = 6, 100
"""Of a foreground in a try: enough to tell, and not so many that one batch again and again ends in overflows."""
_CLEARLY = 1.05
"""How much more a part must keep to be taken."""
_WEIGHTS = 1 << 20
"""Elements that are compared in one go: few beside any job's state."""
_IN_FLIGHT = 12
"""Background pieces on the way, so that its queue never runs dry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Two jobs at once, nothing held back."""

    step_s: tuple[float, ...]
    """The foreground's steps."""
    alone_s: float
    """One of them alone."""
    kept: float
    """The background's speed over its speed alone."""

    @property
    def slowdown(self) -> float:
        """Of the foreground."""
        return statistics.mean(self.step_s) / self.alone_s

    def kept_within(self, budget: float) -> float:
        """What the background keeps when it is held back so far that the foreground's slowdown is the budget. Pure.

        A second of its work costs the foreground the same whether it is held back or not.
        """
        if self.slowdown <= budget or self.kept == 0:
            return self.kept
        cost = (self.slowdown - 1) / (self.slowdown * self.kept)
        return min((budget - 1) / (budget * cost), self.kept)


class Widths:
    """A background beside a foreground, on the whole GPU and on parts of it."""

    def __init__(self, foreground: Steps, background: Steps) -> None:
        """Tries them; the background is captured on one of them afterwards, whichever was the last, as it was cut."""
        self._background, self._roughly = background, False
        whole = background.stream
        self._streams = {1.0: whole}
        self.tried = {1.0: together(foreground, background, seconds=_TRY_S)}
        """Share of the multiprocessors → what came out; those of `left_out` are missing."""
        self.left_out: dict[float, str] = {}
        """Parts that are not, and why."""
        if no_parts := capabilities(whole.device.index).no_parts:
            self.left_out = dict.fromkeys(PARTS, no_parts)
            return
        wanted = _fingerprint(background)
        reproducible = _fingerprint(background) == wanted
        for share in PARTS:
            try:
                stream = confined_stream(whole.device.index, share, whole.priority)
                self._roughly = True
                move(background, stream, as_cut=True)
                if reproducible and _fingerprint(background) != wanted:
                    raise CaptureError("a step's numbers differ there")
                self.tried[share] = together(foreground, background, seconds=_TRY_S)
                self._streams[share] = stream
            # A GPU without such a part, a step that cannot run on one, or no memory to try it.
            except (CaptureError, RuntimeError) as error:
                self.left_out[share] = in_a_line(error)
                _LOG.info("no background on %.0f%% of the GPU: %s", 100 * share, self.left_out[share])

    def take(self, *, slowdown: float) -> float:
        """Has the background captured where it keeps most within a budget; returns that share."""
        best = best_width({share: tried.kept_within(slowdown) for share, tried in self.tried.items()})
        if self._roughly or self._background.stream != self._streams[best] or not self._background.pieces:
            move(self._background, self._streams[best])
            self._roughly = False
        return best


def best_width(kept: Mapping[float, float]) -> float:
    """The share of the multiprocessors with which most is kept; the whole, unless a part keeps clearly more. Pure."""
    part = max((share for share in kept if share < 1), key=kept.__getitem__, default=1.0)
    return part if kept[part] > _CLEARLY * kept[1.0] else 1.0


def together(
    foreground: Steps,
    background: Steps,
    *,
    seconds: float,
    stream: torch.cuda.Stream | None = None,
    pieces: Sequence[Piece] | None = None,
) -> Together:
    """Both at once for about so long, and the foreground alone before; nothing is trained.

    `stream` and `pieces` replace the foreground's own.
    """
    stream, pieces = stream or foreground.stream, pieces or foreground.pieces
    with foreground.rehearsed() as begin, background.rehearsed() as begin_other:
        torch.cuda.synchronize()
        beside = _Endless(background, begin_other)
        count = min(max(int(seconds / foreground.alone_s), _LEAST_STEPS), _MOST_STEPS)
        alone = _steps(pieces, stream, begin, max(count // 4, _LEAST_STEPS), lambda: None)
        first = recorded(stream, timing=True)
        times = _steps(pieces, stream, begin, count, beside.keep_busy)
        torch.cuda.synchronize()
        done = beside.done_within(first, sum(times))
    kept = done / sum(background.piece_times_s) * background.alone_s / sum(times)
    return Together(step_s=tuple(times), alone_s=statistics.mean(alone[1:]), kept=kept)


class _Endless:
    """A background whose queue never runs dry."""

    def __init__(self, steps: Steps, begin: Callable[[], None]) -> None:
        self._steps, self._begin = steps, begin
        self._places = itertools.cycle(range(len(steps.pieces)))
        self._under_way: collections.deque[torch.cuda.Event] = collections.deque()
        self._started: list[tuple[torch.cuda.Event, float]] = []

    def keep_busy(self) -> None:
        """Starts pieces, as many as are missing."""
        while self._under_way and self._under_way[0].query():  # type: ignore[no-untyped-call]
            self._under_way.popleft()
        while len(self._under_way) < _IN_FLIGHT:
            place = next(self._places)
            with torch.cuda.stream(self._steps.stream):
                if place == 0:
                    self._begin()
                self._steps.pieces[place]()
            end = recorded(self._steps.stream, timing=True)
            self._under_way.append(end)
            self._started.append((end, self._steps.piece_times_s[place]))

    def done_within(self, first: torch.cuda.Event, time_s: float) -> float:
        """Seconds of its work, by its time alone, that had ended so long after an event."""
        ended = (length_s for end, length_s in self._started if first.elapsed_time(end) / 1e3 <= time_s)
        return sum(ended)


def _steps(
    pieces: Sequence[Piece],
    stream: torch.cuda.Stream,
    begin: Callable[[], None],
    count: int,
    meanwhile: Callable[[], None],
) -> list[float]:
    """Seconds of so many steps, two under way at a time, with something else to do for the host."""
    torch.cuda.synchronize()
    meanwhile()  # else the first steps, of which there may be six in all, would have nothing beside them
    marks = [recorded(stream, timing=True)]
    for index in range(count):
        with torch.cuda.stream(stream):
            begin()
            for piece in pieces:
                piece()
        marks.append(recorded(stream, timing=True))
        while not marks[max(index - 1, 0)].query():  # type: ignore[no-untyped-call]
            meanwhile()
    while not marks[-1].query():  # type: ignore[no-untyped-call]
        meanwhile()
    return [float(a.elapsed_time(b)) / 1e3 for a, b in itertools.pairwise(marks)]


def _fingerprint(steps: Steps) -> list[int]:
    """Of all that a step changes, after one step that is not kept: equal where every bit is, and hardly otherwise."""
    with steps.rehearsed() as begin, torch.cuda.stream(steps.stream):
        begin()
        for piece in steps.pieces:
            piece()
        return [number for tensor in steps.state() for number in digest(tensor)]


def digest(tensor: torch.Tensor) -> list[int]:
    """Sums of a tensor's bits, taken as integers, each place with a weight of its own. Waits for the device.

    Plain sums would miss differences that cancel out, as roundings up and down do.
    """
    weights = _weights(tensor.device)
    bits = _as_integers(tensor).reshape(-1)
    parts = torch.split(bits, weights.numel())
    return [int(x) for x in torch.stack([(part.long() * weights[: part.numel()]).sum() for part in parts]).tolist()]


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers at random, the same each time: what is odd times a difference is never nothing."""
    drawn = torch.randint(2**62, (_WEIGHTS,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn + 1).to(device)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])
