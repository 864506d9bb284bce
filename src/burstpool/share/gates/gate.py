"""The gate: shared memory between a foreground worker and one background process.

A file that both map. Each number has one writer, so that nothing is locked and writing costs well under a microsecond:
the foreground says what it is doing and what is allowed, the background what it has done and when. Also readable after
either was killed. A background that may not start a slice sleeps at a pipe beside the file until the foreground, having
something to allow, wakes it: looking again and again, even at the lowest priority, cost the foreground up to 13%.
Knows nothing of what is trained.
"""

import contextlib
import math
import mmap
import os
import select
import time
from pathlib import Path
from typing import NamedTuple

from burstpool.share.budget import Allowance, Moment

MOMENTS = tuple(Moment)
"""A moment is written as its place here."""
_KEPT_SLICES = 16384
_MOST_COUNTED_S = 1000.0
"""What a step without limit counts for in the sum of what all steps allowed: more than any slice is long."""
_FREE = Allowance(alone=False, overlapped_s=math.inf, gaps_s=(), waiting_s=math.inf, reducing_s=math.inf)

_MOMENT, _STEP, _OVERLAP, _WAITING, _REDUCING, _IDLE, _LEAVE, _ALONE_S, _RECENT_S = range(9)  # by the foreground's side
_FREE_BYTES, _TOTAL_BYTES, _AWAY, _ALL_OVERLAP, _ALL_WAITING, _ALL_REDUCING, _ALL_IDLE = range(9, 16)
_OVERLAPPED_S, _IN_GAPS_S, _OUTSIDE_S, _STEPS, _NUM_SLICES = range(16, 21)  # by the background
_BUSY_SINCE, _BUSY_MOMENT, _BUSY_CPU_S, _BUSY_PID, _WAITS, _BY_WALL = range(21, 27)
_FIRST_SLICE = 32
_NUMBERS = _FIRST_SLICE + 2 * _KEPT_SLICES
_ALLOWED: dict[Moment, tuple[int, int]] = {
    Moment.COMPUTING: (_OVERLAP, _ALL_OVERLAP),
    Moment.WAITING: (_WAITING, _ALL_WAITING),
    Moment.REDUCING: (_REDUCING, _ALL_REDUCING),
    Moment.IDLE: (_IDLE, _ALL_IDLE),
}
"""Where it says what a step allows at a moment, and what all steps together did."""


class Done(NamedTuple):
    """What a background process has done since it was first started; a tuple, as one is made at every step."""

    overlapped_s: float
    """Seconds of its own work beside the foreground's compute."""
    in_gaps_s: float
    """The same while the foreground waited."""
    outside_s: float
    """The same while the foreground was idle, or had ended."""
    steps: int


class Gate:
    """One end of a mapped file; made by `create`, opened by path in each process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * _NUMBERS)
        self._numbers = memoryview(self._map).cast("d")
        self._bell = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK)  # both ways: no end of it is ever missing
        self._allowance: Allowance | None = None
        self._share = 1.0
        self._counted: tuple[tuple[int, float], ...] = ()
        """What the last call of `allow` wrote, and what such a step adds to which sums."""

    @classmethod
    def create(cls, path: Path) -> "Gate":
        """A new file; all is allowed, since the foreground has not begun."""
        path.write_bytes(bytes(8 * _NUMBERS))
        os.mkfifo(path.with_name(path.name + ".bell"))
        gate = cls(path)
        gate.free()
        return gate

    def free(self) -> None:
        """The foreground has not begun: everything may start until it says otherwise."""
        self.announce(Moment.IDLE)
        self.allow(_FREE, step=-2)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._bell)

    @property
    def _pipe(self) -> Path:
        return self.path.with_name(self.path.name + ".bell")

    def wake(self) -> None:
        """Wakes a background that sleeps; costs a microsecond or two, next to nothing if it does not."""
        if self._numbers[_WAITS]:
            with contextlib.suppress(BlockingIOError):
                os.write(self._bell, b"!")

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until woken. To be called again while there is nothing to do."""
        if select.select([self._bell], [], [], timeout_s)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._bell, 4096)

    def say_waiting(self, waits: bool) -> None:
        """Whether the background wants to be woken."""
        self._numbers[_WAITS] = float(waits)

    def announce(self, moment: Moment) -> None:
        """The foreground goes on to something else."""
        self.announce_number(MOMENTS.index(moment))

    def announce_number(self, number: int) -> None:
        """The same, by a moment's place in `MOMENTS`: what is called at every action."""
        self._numbers[_MOMENT] = number
        if self._numbers[_WAITS] and self.allowed_s(MOMENTS[number]) > 0:
            self.wake()

    def allow(self, allowance: Allowance, *, step: int, share: float = 1.0) -> None:
        """What the next step allows; `share` is this gate's part of it."""
        numbers = self._numbers
        if allowance is not self._allowance or share != self._share:  # mostly it is what the last step allowed
            self._allowance, self._share = allowance, share
            numbers[_OVERLAP] = share * allowance.overlapped_s
            numbers[_WAITING] = share * allowance.waiting_s
            numbers[_REDUCING] = share * allowance.reducing_s
            numbers[_IDLE] = allowance.during(Moment.IDLE)
            self._counted = tuple((sums, min(numbers[this], _MOST_COUNTED_S)) for this, sums in _ALLOWED.values())
        for sums, allowed_s in self._counted:
            numbers[sums] += allowed_s
        numbers[_STEP] = step + 1  # last: whoever sees it sees the others
        if not allowance.alone:
            self.wake()

    def close(self) -> None:
        """Nothing at all may start."""
        self.allow(Allowance(alone=True, overlapped_s=0, gaps_s=(), waiting_s=0, reducing_s=0), step=-1)
        self.announce(Moment.COMPUTING)

    def open(self) -> None:
        """Everything may."""
        self.announce(Moment.ENDED)

    def let_leave(self, leave: bool = True) -> None:
        """The background is asked to stop: it goes on to the end of its step without asking."""
        self._numbers[_LEAVE] = float(leave)
        self.wake()

    def say_away(self, away: bool) -> None:
        """The background asks for nothing: it is being prepared, has left, failed or ended. Others get its part."""
        self._numbers[_AWAY] = float(away)

    @property
    def is_away(self) -> bool:
        """What `say_away` said; false before."""
        return bool(self._numbers[_AWAY])

    def tell(self, *, alone_s: float, recent_s: float) -> None:
        """How long the foreground's steps take, alone and lately: for whoever watches."""
        self._numbers[_ALONE_S], self._numbers[_RECENT_S] = alone_s, recent_s

    def told(self) -> tuple[float, float]:
        """What `tell` said; zeros before."""
        return self._numbers[_ALONE_S], self._numbers[_RECENT_S]

    def tell_memory(self, *, free_bytes: int, total_bytes: int) -> None:
        """How much of the device's memory is free: for whoever makes room."""
        self._numbers[_TOTAL_BYTES], self._numbers[_FREE_BYTES] = total_bytes, free_bytes

    def told_memory(self) -> tuple[int, int] | None:
        """(free, total) as `tell_memory` said; None before."""
        total = int(self._numbers[_TOTAL_BYTES])
        return (int(self._numbers[_FREE_BYTES]), total) if total else None

    @property
    def moment(self) -> Moment:
        """What the foreground is doing."""
        return MOMENTS[int(self._numbers[_MOMENT])]

    @property
    def step(self) -> float:
        """Changes with every step of the foreground."""
        return self._numbers[_STEP]

    def allowed_s(self, moment: Moment) -> float:
        """What the foreground's step allows at such moments."""
        if self._numbers[_LEAVE] or moment is Moment.ENDED:
            return math.inf
        return self._numbers[_ALLOWED[moment][0]]

    def allowed_so_far_s(self, moment: Moment) -> float:
        """What all steps of the foreground together allowed at such moments, this one included."""
        return self._numbers[_ALLOWED[moment][1]]

    def count_by_wall(self) -> None:
        """The background's work is counted by the clock on the wall: a GPU does it, and no CPU time says how much."""
        self._numbers[_BY_WALL] = 1.0

    def begin_slice(self, moment: Moment) -> None:
        """The background starts a slice."""
        numbers = self._numbers
        numbers[_BUSY_MOMENT], numbers[_BUSY_PID] = MOMENTS.index(moment), os.getpid()
        numbers[_BUSY_CPU_S], numbers[_BUSY_SINCE] = time.process_time(), time.time()

    def end_slice(self) -> float:
        """It has ended; returns how much work it was."""
        numbers, number = self._numbers, int(self._numbers[_NUM_SLICES])
        by_wall = bool(numbers[_BY_WALL])
        work_s = time.time() - numbers[_BUSY_SINCE] if by_wall else time.process_time() - numbers[_BUSY_CPU_S]
        moment = MOMENTS[int(numbers[_BUSY_MOMENT])]
        if moment is not Moment.ENDED:  # those are nobody's gaps, and would soon push all others out
            place = _FIRST_SLICE + 2 * (number % _KEPT_SLICES)
            numbers[place], numbers[place + 1] = numbers[_BUSY_SINCE], time.time()
            numbers[_NUM_SLICES] = number + 1
        numbers[_column(moment)] += work_s
        numbers[_BUSY_SINCE] = 0.0
        return work_s

    def end_background_step(self) -> None:
        """The background has trained one more step."""
        self._numbers[_STEPS] += 1

    def forget_slice(self) -> None:
        """Whoever ran a slice is gone."""
        self._numbers[_BUSY_SINCE] = 0.0

    def done(self) -> Done:
        """What the background has done; a slice under way counts as far as it has come."""
        numbers = self._numbers
        work = [numbers[_OVERLAPPED_S], numbers[_IN_GAPS_S], numbers[_OUTSIDE_S]]
        if since_s := numbers[_BUSY_SINCE]:
            by_wall = bool(numbers[_BY_WALL])
            so_far_s = time.time() - since_s if by_wall else _cpu_time_s(int(numbers[_BUSY_PID])) - numbers[_BUSY_CPU_S]
            work[_column(MOMENTS[int(numbers[_BUSY_MOMENT])]) - _OVERLAPPED_S] += max(so_far_s, 0.0)
        return Done(overlapped_s=work[0], in_gaps_s=work[1], outside_s=work[2], steps=int(numbers[_STEPS]))

    def slices(self) -> list[tuple[float, float]]:
        """(start, stop) of the last slices before the foreground ended, in seconds of the machine's clock."""
        count = int(self._numbers[_NUM_SLICES])
        places = (_FIRST_SLICE + 2 * (n % _KEPT_SLICES) for n in range(max(count - _KEPT_SLICES, 0), count))
        return [(self._numbers[place], self._numbers[place + 1]) for place in places]


def _cpu_time_s(pid: int) -> float:
    """What a process has computed so far, by its own clock; 0 where there is none such."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # how Linux numbers the clock of another process
    except OSError:
        return 0.0


def _column(moment: Moment) -> int:
    if moment is Moment.COMPUTING:
        return _OVERLAPPED_S
    return _OUTSIDE_S if moment in (Moment.IDLE, Moment.ENDED) else _IN_GAPS_S
