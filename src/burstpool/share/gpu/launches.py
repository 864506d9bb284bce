"""Background pieces on a GPU: which are started for a step of the foreground, which are under way, what each costs.

Takes what a step allows, from the controller, and the events at which its stretches of compute and its gaps begin;
starts pieces behind these, of the job in turn that has got least. Says, after a step, what ran in it. What is started
is bound by three things:

    credit   what the step allows, beside compute by each piece's own price (`share/prices.py`), in gaps by its length
    room     the length of the stretch or gap: more would run on into what follows, and be late for all that comes then
    queue    what a stream's queue holds, and samples that are there; the rest is started as pieces end and samples
             come, or never if its window, the stretch or the gap, is over by then

A step's work beside compute is spread over its stretches. All of it at the beginning would stand in the streams before
that of the gaps, and last beyond the first ones: pieces that were meant for a gap would run beside compute.

Time passes between any two lines here, and pieces end meanwhile: what must agree is asked once.

Ignores what the foreground does: `loop.py` runs it, and tells the controller.
"""

import collections
import enum
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from burstpool.share.budget import Allowance, Controller, Credit, StepTaken
from burstpool.share.gpu.at_work import Filler, Marker, PieceSpan
from burstpool.share.prices import PieceName, Prices

_IN_FLIGHT = 2
"""Pieces on the way while the foreground idles: one runs, one waits, so that its next step begins within a piece."""
_LOOKED_AT = 16
"""The newest pieces, among which those on the way are."""
_MOST_QUEUED = 128
"""Pieces on a stream that were started and have not ended. A queue holds some 1,000 entries, of which a piece takes
four; a thread that finds it full waits, and the foreground's next step with it."""
_AT_ONCE = 16
"""Pieces that are started before the thread looks after the foreground again: short ones may end as fast as they are
started, and fill no queue."""
_LEAST_BUSY = 0.05
"""Share of a step in which the foreground computes, at least: its gaps may be shorter than the schedule says."""
_OVERRUN = 0.5
"""Part of a piece that may run on after its gap or stretch. After a gap it costs the foreground less than all of it
beside compute would; after a stretch it takes little of the gap."""
_BESIDE, _BESIDE_MEMORY = (5e-4, 1e-3), 0.98
"""Background work beside compute, by its time alone, and the time that it takes, before any was seen; and what is kept
of both with each piece that is."""
_HUNG_STEPS, _HUNG_LENGTHS = 16, 20
"""A piece under way for more steps, and for more times its length, may never end: others do not wait for it."""


class Window(NamedTuple):
    """A time on the device in which background work may run: a stretch of the foreground's compute, or a gap."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    share: float = 1.0
    """Of the step's compute; a gap has none."""
    in_gap: bool = False


class _Tried(enum.Enum):
    """What came of trying to start a piece."""

    STARTED = enum.auto()
    LATER = enum.auto()
    """One could be started when another has ended, its samples have come or the window has begun."""
    NOTHING = enum.auto()
    """No job has work that there is credit and room for."""


@dataclass(slots=True, eq=False)
class Launched:
    """A background piece that was started and may not have ended."""

    end: Marker
    which: PieceName
    """The same in every step of the background."""
    length_s: float
    """By its time alone."""
    factor: float
    """What it costs the foreground, over what average work of its length does; 1 in gaps."""
    in_gap: bool
    step: int
    """The foreground's step with which it was started."""
    counted_s: float = 0.0
    """What of it was counted in steps that it did not end in."""


@dataclass(frozen=True, slots=True)
class _Allowed:
    """Background work that may be started for a step, of which some may have been."""

    step: int
    window: Window
    credit: Credit
    """By prices; in gaps by lengths."""
    room: Credit
    """By lengths: as much as there is time for."""
    most_room_s: float
    """What the longest of the step's windows of its kind has."""
    saved: Credit
    """Where what is left of the credit goes."""

    @property
    def in_gap(self) -> bool:
        """Whether the foreground waits in the window."""
        return self.window.in_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What ran in a step of the foreground."""

    length_s: float
    """All of it, by its time alone."""
    overlapped_s: float
    """Beside compute, by prices."""
    in_gaps_s: float
    pieces: tuple[PieceName, ...]
    """Those beside compute, where all of the step's work ran in it and nothing else did; else none."""


class Launches:
    """Of all background jobs of a GPU."""

    def __init__(
        self, backgrounds: Sequence[Filler], controller: Controller, note: Callable[[int, PieceSpan], None]
    ) -> None:
        """`note` is called with each piece that is started, and its step."""
        self._backgrounds, self._controller, self._note = backgrounds, controller, note
        self._overlapped, self._in_gaps = Credit(), Credit()
        self._beside = _BESIDE
        """Sums over pieces beside compute that forget: their time alone, and their time on the device."""
        self._to_start: collections.deque[_Allowed] = collections.deque()
        self.under_way: list[Launched] = []
        """Pieces that had not ended when `ended` was last asked."""
        self._ended_in_wait_s: dict[int, float] = {}
        """Step → work of pieces that are not kept, as they ended in a long wait of the foreground before it."""
        self._queued: dict[Hashable, collections.deque[PieceSpan]] = {}
        """Stream → what is on it, in order."""
        self._stuck: set[int] = set()
        """Backgrounds with a piece that may never end."""
        self.prices = Prices()
        self._gone: set[int] = set()
        """Backgrounds that were away when they were last looked at."""
        self._missed_s: dict[int, float] = {}
        """What others have got while a background was away; it does not catch up."""

    @property
    def is_waiting(self) -> bool:
        """Whether there is work that could not be started at once."""
        return bool(self._to_start)

    def allow(self, step: int, windows: Sequence[Window], allowance: Allowance) -> None:
        """Starts what a step allows, less what earlier ones started and the GPU has not got round to.

        `windows` are its stretches and gaps, in the order of time.
        """
        # Asked now: many that were under way when the last step was looked at may have ended in a wait for samples.
        late = [piece for piece in self.under_way if piece.step < step - 1 and not piece.end.query()]
        hung = {piece for piece in late if self._is_hung(piece, step)}
        self._stuck = {owner for owner, _ in (piece.which for piece in hung)}
        behind_s = sum(piece.length_s * piece.factor for piece in late if piece not in hung)
        busy_s, gaps_s = self._beside_s(), [gap.length_s for gap in self._controller.gaps]
        gaps = list(zip(gaps_s, allowance.gaps_s, strict=True))
        longest_s = max((gap_s for gap_s, allowed_s in gaps if allowed_s > 0), default=0.0)
        most_s = {True: longest_s, False: busy_s * max(window.share for window in windows)}
        coming = iter(gaps)
        for window in windows:
            room_s, allowed_s = window.share * busy_s, window.share * allowance.overlapped_s
            if window.in_gap:
                room_s, allowed_s = next(coming)
            less_s = min(behind_s, allowed_s)
            behind_s -= less_s
            saved = self._in_gaps if window.in_gap else self._overlapped
            credit, room = Credit(allowed_s - less_s), Credit(room_s)
            self._allow(_Allowed(step, window, credit, room, most_s[window.in_gap], saved))
        self.start_more()

    def _allow(self, allowed: _Allowed) -> None:
        waiting = self._in_turn()
        if allowed.credit.left_s <= 0 or not waiting:
            return
        allowed.saved.add(allowed.credit.take(), piece_s=self._longest_s(allowed))
        allowed.credit.left_s = allowed.saved.take()
        allowed.room.left_s = max(allowed.room.left_s, self._least_room_s(allowed, waiting))
        self._to_start.append(allowed)

    def _least_room_s(self, allowed: _Allowed, waiting: Sequence[Filler]) -> float:
        """Enough for the next pieces where no window of the step has room for them, lest these never run."""
        return max((x.next_s for x in waiting if not _fits(x.next_s, allowed.most_room_s)), default=0.0)

    def _longest_s(self, allowed: _Allowed) -> float:
        """What the longest piece costs: the first in turn may have no samples, and what it leaves must add up to it."""
        return max((self._factor(x, allowed) * x.next_s for x in self._in_turn()), default=0.0)

    def start_more(self) -> bool:
        """Starts what may be started now, in order, some pieces at most; whether there may be more."""
        started = 0
        while self._to_start and started < _AT_ONCE:
            allowed = self._to_start[0]
            over = bool(allowed.window.end.query())  # type: ignore[no-untyped-call]
            tried = _Tried.NOTHING if over else self._start_next(allowed.step, allowed)
            if tried is _Tried.STARTED:
                started += 1
            elif tried is _Tried.LATER and not self._has_next_begun():
                return False
            else:
                self._give_up_first()
        return bool(self._to_start)

    def _has_next_begun(self) -> bool:
        """Whether the window after the first has: its work does not wait for that of the first."""
        return len(self._to_start) > 1 and bool(self._to_start[1].window.begin.query())  # type: ignore[no-untyped-call]

    def _give_up_first(self) -> None:
        """What is left of its credit is the next step's, which may have been allowed its own by now."""
        allowed = self._to_start.popleft()
        heirs = (other for other in self._to_start if other.saved is allowed.saved)
        if (heir := next(heirs, None)) is None:
            allowed.saved.left_s += allowed.credit.take()
        else:
            heir.credit.left_s += min(allowed.credit.take(), self._longest_s(heir))

    def start_idle(self, step: int) -> bool:
        """Starts a piece while the foreground idles before a step, unless enough are on the way; whether it did."""
        if len(self.under_way) > _MOST_QUEUED:  # a long wait: what has ended is added up instead of kept
            gone = {piece for piece in self.under_way if piece.step == step and piece.end.query()}
            gone_s = sum(piece.length_s for piece in gone)
            self._ended_in_wait_s[step] = self._ended_in_wait_s.get(step, 0.0) + gone_s
            self.under_way = [piece for piece in self.under_way if piece not in gone]
        last = (piece for piece in self.under_way[-_LOOKED_AT:] if piece.which[0] not in self._stuck)
        on_the_way = sum(not piece.end.query() for piece in last)
        return on_the_way < _IN_FLIGHT and self._start_next(step, None) is _Tried.STARTED

    def _start_next(self, step: int, allowed: _Allowed | None) -> _Tried:
        """Starts a piece of the first background job in turn that has one ready.

        `allowed` is None while the foreground idles. Credit that is too small for a piece is saved for it: spent on
        others with shorter pieces, it would never suffice.
        """
        otherwise = _Tried.NOTHING
        for background in self._in_turn():
            covered = allowed is None or self._covers(allowed, background)
            if self._is_full(background):  # asked once: in a moment it is not
                otherwise = _Tried.LATER if covered else otherwise
                continue
            if not covered:
                return otherwise
            if allowed and background.queue is None and not allowed.window.begin.query():  # type: ignore[no-untyped-call]
                if not self._is_under_way(background):
                    return _Tried.LATER  # the others have got more, and would take what it is to have
                otherwise = _Tried.LATER
                continue
            which, length_s, factor = _which(background), background.next_s, self._factor(background, allowed)
            end = background.launch(allowed.window.begin if allowed else None)
            if end is None:
                otherwise = otherwise if background.ended else _Tried.LATER
                continue
            if allowed:
                allowed.credit.spend(factor * length_s)
                allowed.room.spend(length_s)
            in_gap = allowed is None or allowed.in_gap
            self.under_way.append(Launched(end, which, length_s, factor, in_gap, step))
            if isinstance(end, PieceSpan):
                self._queued[background.queue].append(end)
                self._note(step, end)
            return _Tried.STARTED
        return otherwise

    def _in_turn(self) -> list[Filler]:
        """The background jobs that are here, neither over nor stuck, those that have got least first."""
        here = [x for x in self._backgrounds if not x.ended and x.where in ("here", "leaving")]
        gone = {id(x) for x in self._backgrounds if x.where not in ("here", "leaving")}
        for background in here:
            if id(background) in self._gone:
                others = [self._got_s(x) for x in here if id(x) not in self._gone]
                missed_s = min(others, default=0.0) - background.done_s
                self._missed_s[id(background)] = max(missed_s, self._missed_s.get(id(background), 0.0))
        self._gone = gone
        return sorted((x for x in here if id(x) not in self._stuck), key=self._got_s)

    def _got_s(self, background: Filler) -> float:
        """Its work so far, with what it has missed."""
        return background.done_s + self._missed_s.get(id(background), 0.0)

    def _factor(self, background: Filler, allowed: _Allowed | None) -> float:
        """What its next piece costs the foreground, over what average work does; in gaps nobody asks."""
        if allowed is None or allowed.in_gap:
            return 1.0
        return self.prices.meet(_which(background), background.next_s)

    def _covers(self, allowed: _Allowed, background: Filler) -> bool:
        """Whether there is credit and room for its next piece."""
        length_s = background.next_s
        covered = allowed.credit.covers(self._factor(background, allowed) * length_s)
        return covered and _fits(length_s, allowed.room.left_s)

    def _is_full(self, background: Filler) -> bool:
        queued = self._queued.setdefault(background.queue, collections.deque())
        while queued and queued[0].query():
            queued.popleft()
        return len(queued) >= _MOST_QUEUED

    def _is_under_way(self, background: Filler) -> bool:
        return any(piece.which[0] == id(background) and not piece.end.query() for piece in self.under_way)

    def _is_hung(self, piece: Launched, step: int) -> bool:
        age = step - piece.step
        return age > _HUNG_STEPS and age * (self._controller.alone_s or 0.0) > _HUNG_LENGTHS * piece.length_s

    def _beside_s(self) -> float:
        """Background work that there is time for beside a step's compute."""
        alone_s, gaps_s = self._controller.alone_s, sum(gap.length_s for gap in self._controller.gaps)
        if alone_s is None or not gaps_s:
            return math.inf
        work_s, time_s = self._beside
        busy_s = self._controller.budget.slowdown * max(alone_s - gaps_s, _LEAST_BUSY * alone_s)
        return min(work_s / time_s, 1.0) * busy_s

    def _saw_beside(self, piece: Launched) -> None:
        """Learns how fast background work is beside compute, where that matters."""
        if self._controller.gaps and not piece.in_gap and isinstance(piece.end, PieceSpan):
            took_s = float(piece.end.begin.elapsed_time(piece.end.end)) / 1e3
            work_s, time_s = self._beside
            self._beside = _BESIDE_MEMORY * work_s + piece.length_s, _BESIDE_MEMORY * time_s + took_s

    def ended(self, step: int, end: torch.cuda.Event) -> list[Launched]:
        """Pieces that ended by a step's end, which has passed, and were not among those of an earlier one."""
        done: list[Launched] = []
        under_way: list[Launched] = []
        for piece in self.under_way:
            over = piece.step <= step and piece.end.query() and not _is_after(piece.end, end)
            (done if over else under_way).append(piece)  # asked once: it may end at any moment
        self.under_way = under_way
        for piece in done:
            self._saw_beside(piece)
        return done

    def work_in(self, step: int, time_s: float, done: Sequence[Launched]) -> Work:
        """What ran in a step of such a length, by what ended in it.

        A step in which nothing ended may still have had a part of a long piece in it: then it was not alone.
        """
        idle_s = self._ended_in_wait_s.pop(step, 0.0)
        parts = [(piece, piece.length_s - piece.counted_s) for piece in done]
        there = [piece for piece in self.under_way if piece.step <= step and not self._is_hung(piece, step)]
        if there and idle_s + sum(part_s for _, part_s in parts) == 0:
            part_s = min(there[0].length_s - there[0].counted_s, time_s) / 2
            there[0].counted_s += part_s
            parts = [(there[0], part_s)]
        whole = not there and not idle_s and all(piece.step == step for piece in done)
        return Work(
            length_s=idle_s + sum(part_s for _, part_s in parts),
            overlapped_s=sum(part_s * piece.factor for piece, part_s in parts if not piece.in_gap),
            in_gaps_s=idle_s + sum(part_s for piece, part_s in parts if piece.in_gap),
            pieces=tuple(piece.which for piece in done if not piece.in_gap) if whole else (),
        )

    def learn(self, taken: StepTaken, pieces: Sequence[PieceName]) -> None:
        """Which of these pieces cost more than others, from a step that had them whole and no part of another."""
        base = self._controller.base
        if pieces and base.num_samples:
            added_s = taken.time_s - base.median_s - self._controller.gap_cost.value * taken.in_gaps_s
            self.prices.learn(pieces, added_s, error_s=base.noise * base.median_s)


def _fits(length_s: float, room_s: float) -> bool:
    """Whether enough of a piece does."""
    return (1 - _OVERRUN) * length_s <= room_s


def _which(background: Filler) -> PieceName:
    """Its next piece."""
    return id(background), background.next_place


def _is_after(piece: Marker, moment: torch.cuda.Event) -> bool:
    """Whether a piece ended later, by the device's clock; the host may look late. Unknown of other processes' ones."""
    return isinstance(piece, PieceSpan) and float(piece.end.elapsed_time(moment)) < 0
