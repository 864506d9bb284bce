"""The controller: how much background work may run beside the next step of the foreground.

Takes, after each step, how long it took and how much background work ran in it: beside the foreground's compute
(*overlapped*), and while it had nothing to compute (*in gaps*), in seconds of the background's own time alone, or of
average work where pieces have prices (`prices.py`). Returns what the next step allows. Pure: no clock, no randomness,
no torch; the same object drives a GPU, a CPU process and a simulation.

    aim      = slowdown - what the base is not known by         the mean to hold, over all steps
    extra_s  = (aim - 1) · alone_s - debt_s / 20 or more        feed forward, and feedback on what was spent too much
    extra_s ≤ (tail limit - own p95) · alone_s                  so that a step rarely passes slowdown + tail
    in gaps  = min(known gaps, extra_s / gap cost)              the cheapest place first
    overlap  = (extra_s - in gaps · gap cost) / overlap cost

A cost is what a second of background work adds to the foreground, measured. The base is the mean of *alone* steps,
with no background at all: some at first, then one in about 25, at distances with which they meet all steps of a period
of the foreground. They cost nothing: the others may spend what an alone step leaves. Where nobody can, as the budget
holds no one back, they are four times as rare. When steps are not what the costs predict, three or more alone steps in
a row tell whether the foreground has changed or the interference has. Where nobody comes for long, only those steps
are looked at that were meant to be alone.

Ignores: what kind of work the background does at which moment; that is averaged over a step.
"""

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from burstpool.errors import ShareError
from burstpool.share.base_time import BaseTime

_FEEDBACK_STEPS = 20
"""Over how many steps a debt is paid back: few enough to hold a mean over a second, many enough not to follow noise."""
_MOST_FEEDBACK_STEPS = 400
"""The same for a foreground with steps of several kinds, of which some twenty say little."""
_PAUSE_PART = 0.5
"""Share of a step's budget that pauses are paid back with: the background goes on meanwhile, at half its speed."""
_MOST_DEBT = 30
"""Steps that may be owed: one that hangs for a minute by itself is not held against the background for ever."""
_CATCH_UP = 1.25
"""How much more than an even share a step may spend to catch up: spread evenly, never in bursts."""
_LEAST_PART = 0.05
"""Share of a step's budget that is allowed whatever is owed: without any work its cost stays unknown, and steps without
background pass for alone steps, though they follow long ones."""
_GROWTH = 1.5
"""How much more work than lately the next step may get: costs are known only for what was tried."""
_MEMORY = 0.95
"""What is kept of a step's work in what was tried lately, from one step to the next."""
_LEAST_COST, _MOST_COST = 0.02, 50.0
"""Costs beyond are taken for these: work is bounded even where it seems free, and never ruled out for good."""
_RARELY = 0.025
"""Share of the steps that may pass the tail limit; below the 5% that a p95 allows."""
_TAIL_STEP = 0.3
"""How far one step over the limit takes the work back."""
_RARELY_NOISY, _MOST_NOISY, _TAIL_STEP_NOISY = 0.04, 0.05, 0.08
"""The same for a foreground that passes the limit by itself now and then: one such step says little of the background.
As many as the second may pass it where the foreground alone comes near to that, and more only as far as it does."""
_SPACING = (29, 19, 25)
"""Steps from one alone step to the next. Their sum, 73, is a prime: each time around they fall on other steps of a
foreground's period, and in the end on all of them alike."""
_RARE_SPACING = (101, 83, 87)
"""The same, their sum a prime too, for a steady foreground with a background that does not use up the budget: there an
alone step, and the end of the background's queue before it, are lost to it."""
_SPARED = 0.9
"""Part of what it may do, or could do in the time, below or above which a background is not held back."""
_SURPRISES = 4
"""Steps in a row that are not what the costs predict until the base is looked at again."""
_SHIFT, _SHIFTED = 0.5, 6.0
"""Standard deviations that each step may be off, and what all together may be off beyond that until then."""
_LEAST_SHIFT = 0.008
"""A standard deviation is taken for this at least: nobody minds steps that are off by less."""
_MOST_FIRST = 20
"""Alone steps at the beginning, at most, where the first ones differ much."""
_KNOWN, _MODEST = 0.5, 0.10
"""Part of the budget that the base may be wrong by until then, and what a larger budget is taken for."""
_LEAP = 0.05
"""How far one alone step may take the base until costs are learnt anew."""
_CONFIRMING = 3
"""Alone steps in a row that decide whether the foreground has changed."""
_QUIET = 20
"""Steps in a row to which nobody came until only those are looked at that were meant to be alone: without a background,
sharing costs the foreground next to nothing."""


class Moment(enum.Enum):
    """What the foreground is doing on a device."""

    COMPUTING = "computing"
    WAITING = "waiting"
    """For a message, or with nothing to do until the next action."""
    REDUCING = "reducing"
    """Waiting for an all-reduce that nothing hides: whatever slows that down slows down the step."""
    IDLE = "idle"
    """Between steps: it loads data, writes a checkpoint, or has not begun."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the foreground is promised."""

    slowdown: float = 1.10
    """Mean step over the mean step alone, at most."""
    tail: float = 0.05
    """The p95 step may be this much over the slowdown, or over the foreground's own p95 where that is more."""
    alone_first: int = 8
    """Steps without background at the beginning."""
    harmless_in_reduce: bool = False
    """Whether background work is known not to slow down an exposed all-reduce."""

    def __post_init__(self) -> None:
        if not 1 < self.slowdown < math.inf:
            raise ShareError(f"slowdown={self.slowdown} must be more than 1, e.g. 1.10 for steps 10% longer than alone")
        if not 0 < self.tail < math.inf:
            raise ShareError(f"tail={self.tail} must be more than 0")
        if self.alone_first < 3:
            raise ShareError(f"alone_first={self.alone_first} must be at least 3, to know the step alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in every step in which the device has nothing to compute, known from the schedule."""

    length_s: float
    reduces: bool = False
    """Whether an exposed all-reduce is what it waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    """One step of the foreground, and the background work in it."""

    time_s: float
    overlapped_s: float = 0.0
    """Background work beside the foreground's compute, by the background's own time alone or by its price."""
    in_gaps_s: float = 0.0
    """Background work while the foreground waited or idled within the step."""
    meant_alone: bool | None = None
    """Whether it was to run alone; None where that is what the last allowance says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What the next step allows, in seconds of background work."""

    alone: bool
    """Nothing at all in this step: it measures the base."""
    overlapped_s: float
    """Beside compute."""
    gaps_s: tuple[float, ...]
    """In each known gap."""
    waiting_s: float
    """In all waiting of the step together, known gaps included; infinite while it costs nothing."""
    reducing_s: float
    """The same for exposed all-reduces."""

    def during(self, moment: Moment, *, used_s: float = 0.0) -> float:
        """Seconds that may still be started at such a moment; `used_s` were already, in this step, at such moments."""
        match moment:
            case Moment.COMPUTING:
                return max(self.overlapped_s - used_s, 0.0)
            case Moment.WAITING:
                return max(self.waiting_s - used_s, 0.0)
            case Moment.REDUCING:
                return max(self.reducing_s - used_s, 0.0)
            case Moment.IDLE:
                return 0.0 if self.alone else math.inf
            case Moment.ENDED:
                return math.inf


class Credit:
    """Seconds that were allowed and not yet used: what is less than a piece is kept for the next step."""

    def __init__(self, left_s: float = 0.0) -> None:
        self.left_s = left_s

    def take(self) -> float:
        """All of it, for another to spend."""
        left_s, self.left_s = self.left_s, 0.0
        return left_s

    def add(self, allowed_s: float, *, piece_s: float) -> None:
        """A step's allowance; no more than a piece's length is saved from earlier ones, lest work comes in bursts."""
        self.left_s = min(self.left_s, piece_s) + allowed_s

    def covers(self, piece_s: float) -> bool:
        """Whether there is enough for a piece."""
        return piece_s <= self.left_s

    def spend(self, piece_s: float) -> None:
        """Takes a piece's length off."""
        self.left_s -= piece_s


class Cost:
    """What a second of background work adds to the foreground: a ratio of sums that forgets."""

    def __init__(self, guess: float, work: float) -> None:
        self._added, self._work = 3 * guess * work, 3 * work  # a guess counts as three steps

    @property
    def value(self) -> float:
        """Seconds a second."""
        return max(self._added / self._work, _LEAST_COST)

    def learn(self, added: float, work: float, *, memory: float) -> None:
        """From one step; `memory` is what is kept of the steps before."""
        self._work = memory * self._work + work
        # Bounded, so that some noisy steps with hardly any work do not hide for long what work costs.
        self._added = min(max(memory * self._added + added, -0.5 * self._work), _MOST_COST * self._work)

    def doubt(self) -> None:
        """The next steps count for most."""
        self._added, self._work = 0.2 * self._added, 0.2 * self._work


class Controller:
    """Holds a budget, step after step. Not thread-safe; a call takes some tens of microseconds."""

    def __init__(self, budget: Budget, *, gaps: Sequence[Gap] = ()) -> None:
        self.budget, self.gaps = budget, tuple(gaps)
        self.base = BaseTime(enough=budget.alone_first)
        room = max(budget.slowdown - 1, 0.01)
        self.overlap_cost, self.gap_cost = Cost(1.0, room), Cost(0.05, room)
        self.scale = 1.0
        """Share of the work that the tail allows."""
        self.debt_s = 0.0
        """What all steps together took more than the budget."""
        self.pause_debt_s = 0.0
        """For how long the foreground was stopped for the background, and has not got back yet."""
        self._has_shared, self._last_shared = False, 0
        self._alone_left = budget.alone_first
        self._was_alone, self._spoilt = True, False
        """Whether the last step was to be alone; and whether work of the one before ran on into the last such step that
        came after a shared one."""
        self._gaps_only_left = _CONFIRMING if gaps else 0
        self._spacing, self._rare_spacing = cycle(_SPACING), cycle(_RARE_SPACING)
        self._step = 0
        self._until_alone = budget.alone_first + next(self._spacing)
        self._residuals: deque[float] = deque(maxlen=_SURPRISES)
        self._usual_residual = 0.02
        self._above = self._below = 0.0
        self._patience, self._calm = 10, 0
        self._free_steps = 0
        """Shared steps in a row in which the background was not held back."""
        self._tried_work = room
        self._unvisited = 0
        """Steps in a row that allowed work, and to which nobody came."""
        self.allowance = self._decide()

    @property
    def alone_s(self) -> float | None:
        """The step without background; None before the first."""
        return self.base.mean_s if self.base.num_samples else None

    def observe(self, step: StepTaken, *, alone_under_way: int = 0) -> Allowance:
        """Takes what a step was; returns what the next one allows that is not under way yet.

        `alone_under_way`: of those that are, how many are to be alone.
        """
        if not 0 < step.time_s < math.inf or not (step.overlapped_s >= 0 and step.in_gaps_s >= 0):
            raise ShareError(f"{step} is no step: its time must be more than 0, its work 0 or more")
        self._step += 1
        self._until_alone -= 1
        meant_alone = self.allowance.alone if step.meant_alone is None else step.meant_alone
        has_work = step.overlapped_s > 0 or step.in_gaps_s > 0
        if meant_alone and not self._was_alone:
            self._spoilt = has_work
        self._was_alone = meant_alone
        if self._is_quiet(has_work, meant_alone):
            if self._until_alone <= 0:
                self.allowance = self._decide(alone_under_way)
            return self.allowance
        if not has_work:
            self._take_alone(step.time_s, meant_alone)
        elif self.base.num_samples:
            self._take_shared(step)
        self.pause_debt_s = max(self.pause_debt_s - _PAUSE_PART * (self._whole_aim() - 1) * self.base.mean_s, 0.0)
        self.allowance = self._decide(alone_under_way)
        return self.allowance

    def charge_pause(self, time_s: float) -> None:
        """The foreground was stopped for so long, between two steps, for the background's sake: no step's time.

        It is paid back from the steps that follow, however long that takes.
        """
        self.pause_debt_s += time_s

    def _is_quiet(self, has_work: bool, meant_alone: bool) -> bool:
        """Whether a step need not be looked at: nobody has come for long, and it would change nothing for who does."""
        if has_work:
            self._unvisited = 0
        elif not meant_alone:
            self._unvisited += 1
        if self._unvisited <= _QUIET or meant_alone or self.allowance.alone:
            return False
        known = self.base.num_samples >= _MOST_FIRST and not self.base.questions and self.pause_debt_s <= 0
        could_come = not self._gaps_only_left  # such a step is looked at, so that it is the last that keeps them out
        return known and could_come and (not self._has_shared or self._has_saved())

    def _take_alone(self, time_s: float, meant_alone: bool) -> None:
        """A step without background is a sample of the base, and leaves its share of the budget to the others."""
        self._alone_left = max(self._alone_left - 1, 0)
        if not meant_alone:  # gaps were allowed and nobody came: they may be none, or too short for a slice
            self._gaps_only_left = max(self._gaps_only_left - 1, 0)
        before_s = self.base.mean_s
        if self._is_paying and self._step - self._last_shared < sum(_SPACING):
            pass  # a step after long ones, not one that was chosen evenly
        elif self.base.add(time_s, step=self._step, can_wait=not meant_alone):
            self._forget()
        elif self.base.questions:
            self._alone_left = max(self._alone_left, self.base.questions)
        elif self.base.is_odd(time_s) and self._alone_left == 0 and self._calm >= self._patience:
            self._look_again()
        if not self._has_shared and self._knows_too_little():
            self._alone_left = max(self._alone_left, 1)
        if before_s and abs(self.base.mean_s / before_s - 1) > _LEAP:
            self._start_anew()
        if self._has_shared:  # what the first steps leave is not saved up: the mean holds from where sharing begins
            self._owe((1 - self._aim()) * self.base.mean_s)

    def _take_shared(self, step: StepTaken) -> None:
        self._has_shared, self._last_shared = True, self._step
        alone_s = self.base.mean_s
        ratio = step.time_s / alone_s
        overlapped, in_gaps = step.overlapped_s / alone_s, step.in_gaps_s / alone_s
        self._owe(step.time_s - self._aim() * self.base.mean_s)
        self._follow_tail(ratio)
        allowed_s = self.allowance.overlapped_s
        free = step.overlapped_s < _SPARED * allowed_s or allowed_s > _SPARED * self._aim() * alone_s
        self._free_steps = self._free_steps + 1 if free else 0
        predicted = 1 + self.overlap_cost.value * overlapped + self.gap_cost.value * in_gaps
        self._watch(ratio - predicted)
        # One hiccup says little of the cost; the debt counts it in full. Long steps of the foreground's own count here
        # as they do for the base's mean: cut, they would make up for none of the short ones.
        added = min(ratio - 1, max(1.0, self.base.longest - 0.5))
        memory = 1 - 1 / self._lasting()
        if overlapped > 0:
            self.overlap_cost.learn(added - self.gap_cost.value * in_gaps, overlapped, memory=memory)
            # Not the last step's alone: with slices of some length, a step may well get none.
            self._tried_work = max(overlapped, _MEMORY * self._tried_work, 0.1 * (self.budget.slowdown - 1))
        else:
            self.gap_cost.learn(added, in_gaps, memory=memory)
            self._gaps_only_left = max(self._gaps_only_left - 1, 0)

    def _lasting(self) -> float:
        """Over how many steps costs are learnt and debts paid back: as many as tell the budget from the noise."""
        needed = (4 * self.base.deviation / (self.budget.slowdown - 1)) ** 2
        return min(max(needed, _FEEDBACK_STEPS), _MOST_FEEDBACK_STEPS)

    def _aim(self) -> float:
        """The mean that steps are to have: less than the whole while a pause is being paid back."""
        whole = self._whole_aim()
        return whole if self.pause_debt_s <= 0 else 1 + (1 - _PAUSE_PART) * (whole - 1)

    def _whole_aim(self) -> float:
        """The mean to hold: the budget, less what the base may be wrong by."""
        return max(self.budget.slowdown - 1.5 * self.base.error, 1 + 0.2 * (self.budget.slowdown - 1))

    def _owe(self, more_s: float) -> None:
        alone_s = self.base.mean_s
        self.debt_s += min(more_s, _MOST_DEBT * alone_s)
        self.debt_s = min(max(self.debt_s, -self._most_saved_s()), _MOST_DEBT * alone_s)

    def _most_saved_s(self) -> float:
        """As much as steps may have taken less than the budget, for later ones to spend."""
        return self._lasting() * (self.budget.slowdown - 1) * self.base.mean_s

    def _has_saved(self) -> bool:
        return -self.debt_s >= _SPARED * self._most_saved_s()

    def _is_unused(self) -> bool:
        """Whether the budget holds nobody back, beside a foreground that is known well and steady."""
        free = self._free_steps >= _FEEDBACK_STEPS
        return self._has_saved() and free and not self._knows_too_little() and not self.base.is_drifting

    def _tail_limit(self) -> float:
        """Over the mean alone; careful where the foreground's own p95, or the mean, is not known well."""
        own = self.base.own_p95 - self.base.p95_error
        return max(self.budget.slowdown - self.base.error, own) + self.budget.tail

    def _follow_tail(self, ratio: float) -> None:
        """Finds, by small steps, the share of work with which as few steps pass the limit as may."""
        limit = self._tail_limit()
        own, rarely, step = self.base.share_above(limit), _RARELY, _TAIL_STEP
        if own > 0:  # what it does alone is not the background's fault
            rarely, step = max(_RARELY_NOISY, min(1.5 * own, _MOST_NOISY), 1.1 * own), _TAIL_STEP_NOISY
        change = -step * (1 - rarely) if ratio > limit else step * rarely
        self.scale = min(max(self.scale * math.exp(change), 0.01), 1.0)

    def _watch(self, residual: float) -> None:
        """Notices steps that the costs do not explain, and has the base measured again."""
        self._residuals.append(residual)
        self._calm += 1
        usual = max(0.04, 2.5 * self.base.noise, 1.5 * self.base.deviation, 2 * self._usual_residual)
        # A shared step faster than alone needs no statistics: the base is out of date.
        strange = all(r > usual for r in self._residuals) or all(r < -usual for r in self._residuals)
        strange = strange and len(self._residuals) == _SURPRISES
        if (self._has_shifted(residual) or strange) and self._calm >= self._patience:
            self._look_again()
        self._usual_residual += 0.02 * (min(abs(residual), 1.0) - self._usual_residual)

    def _has_shifted(self, residual: float) -> bool:
        """Whether steps are off by a little, but for long, all to the same side (a cumulative sum; Page, 1954)."""
        if self._calm < _FEEDBACK_STEPS:  # costs are being learnt
            return False
        usual = max(self.base.deviation, 1.25 * self._usual_residual, _LEAST_SHIFT)
        errors = min(max(residual / usual, -3.0), 3.0)
        self._above = max(self._above + errors - _SHIFT, 0.0)
        self._below = max(self._below - errors - _SHIFT, 0.0)
        return max(self._above, self._below) > _SHIFTED

    def _look_again(self) -> None:
        """Alone steps next; what was thought of costs counts for little if the base turns out as it was."""
        self._alone_left = _CONFIRMING
        self.base.question()
        self._residuals.clear()
        self._above = self._below = 0.0
        self.overlap_cost.doubt()
        self._calm, self._patience = 0, min(2 * self._patience, 200)

    def _knows_too_little(self) -> bool:
        """Whether steps are so different that the first few do not tell the base, by half of the budget."""
        enough = _KNOWN * min(self.budget.slowdown - 1, _MODEST)
        return self.base.num_samples < _MOST_FIRST and self.base.error > enough

    def _start_anew(self) -> None:
        """Costs and debts were learnt against a base that was wrong: enough steps are known now to tell."""
        self.overlap_cost, self.debt_s = Cost(1.0, max(self.budget.slowdown - 1, 0.01)), min(self.debt_s, 0.0)

    def _forget(self) -> None:
        """The foreground has changed: what was owed and what the tail taught were of another one."""
        self.debt_s, self.scale = 0.0, max(self.scale, 0.5)
        self._residuals.clear()
        self._above = self._below = 0.0
        self._patience, self._calm = 10, 0
        self._alone_left = self.budget.alone_first - self.base.num_samples

    def _decide(self, alone_under_way: int = 0) -> Allowance:
        self._is_paying = False
        # Where work of the step before runs on into one that is to be alone, it takes two in a row.
        coming = 0 if self._spoilt and not self._was_alone else alone_under_way
        if self._alone_left > coming or not self.base.num_samples:
            return Allowance(alone=True, overlapped_s=0, gaps_s=(0.0,) * len(self.gaps), waiting_s=0, reducing_s=0)
        if self._until_alone <= 0:
            self._alone_left, self._gaps_only_left = 1, 1 if self.gaps else 0
            self._until_alone = next(self._rare_spacing if self._is_unused() else self._spacing)
            return self._decide()
        alone_s, aim = self.base.mean_s, self._aim()
        even_s = (aim - 1) * alone_s
        tail_room = max(self._tail_limit() - self.base.own_p95, self.budget.tail / 2)
        most_s = min(_CATCH_UP * even_s, tail_room * alone_s)
        left_s, least_s = even_s - self.debt_s / self._lasting(), _LEAST_PART * even_s
        self._is_paying = left_s < least_s
        extra_s = self.scale * min(max(left_s, least_s), most_s)
        gap_cost = self.gap_cost.value
        waiting_s = math.inf if gap_cost <= _LEAST_COST else extra_s / gap_cost
        gaps_s = self._share_among_gaps(waiting_s)
        left_s = max(extra_s - gap_cost * sum(gaps_s), 0.0)
        overlapped_s = min(left_s / self.overlap_cost.value, _GROWTH * self._tried_work * alone_s, aim * alone_s)
        return Allowance(
            alone=False,
            overlapped_s=0.0 if self._gaps_only_left else overlapped_s,
            gaps_s=gaps_s,
            waiting_s=waiting_s,
            reducing_s=waiting_s if self.budget.harmless_in_reduce else 0.0,
        )

    def _share_among_gaps(self, waiting_s: float) -> tuple[float, ...]:
        wanted = [gap.length_s if self.budget.harmless_in_reduce or not gap.reduces else 0.0 for gap in self.gaps]
        part = min(waiting_s / sum(wanted), 1.0) if sum(wanted) > 0 else 0.0
        return tuple(part * length_s for length_s in wanted)
