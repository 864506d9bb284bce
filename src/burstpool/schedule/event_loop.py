"""The simulator's event loop: runs a Program for some steps and notes when everything began and ended.

Takes a Program. Returns the times. Knows no schedule and no cluster, only operations, links by number and seconds.

A class of devices runs on until it must wait; what others could notice (a message that leaves, a reduction that all
members have started, one that ends) goes through one queue in the order of time, so that nothing is decided on a link
before all that came earlier.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from burstpool.errors import ScheduleError
from burstpool.schedule.program import COMPUTE, LOAD, RECEIVE, REDUCE, SEND, Program

_LEAVES, _READY, _ENDS = range(3)
"""What happens: a message leaves, a reduction has been started by all members, a reduction ends."""

Span = tuple[float, float]
"""Start and stop, in seconds."""


@dataclass(slots=True)
class Times:
    """When everything happened."""

    finishes: list[list[float]]
    """Step → class → when its last operation ended."""
    starts: list[list[float]]
    """Class → when each of its computing operations began, step after step."""
    transfers: dict[tuple[int, int], Span] = field(default_factory=dict)
    """(step, transfer) → from its first byte on the link until it has arrived."""
    reductions: dict[tuple[int, int], Span] = field(default_factory=dict)
    """(step, reduction) → from when all members are there until it ends."""


class EventLoop:
    """One run; use it once."""

    def __init__(self, program: Program, num_steps: int) -> None:
        self.program, self.num_steps = program, num_steps
        num_classes = len(program.classes)
        self.times = Times([[0.0] * num_classes for _ in range(num_steps)], [[] for _ in range(num_classes)])
        self.clocks, self.places, self.steps = [0.0] * num_classes, [0] * num_classes, [0] * num_classes
        self.queue: list[tuple[float, int, int, int, int]] = []
        """(time, order of arrival, what, step, index)."""
        self.order = count()
        self.waiting: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        """(code, step, index) → classes that wait for it."""
        self.free_s = [0.0] * program.num_links
        """Link direction → when its last message has left it."""
        self.missing: dict[tuple[int, int], int] = {}
        """(step, reduction) → members that have not started it."""
        self.started_s: dict[tuple[int, int], float] = defaultdict(float)
        """(step, reduction) → when the last member so far started it."""
        self.ready: list[tuple[int, int]] = []
        """Reductions that wait only for others."""
        self.active: dict[tuple[int, int], Span] = {}
        """Reductions under way, with their end if nothing else gets in their way."""
        self.holders: dict[int, tuple[int, int]] = {}
        """Link direction → the reduction that uses it."""
        self.pauses: dict[tuple[int, int], dict[int, float]] = {}
        """Reduction → link direction → seconds it paused for messages there."""

    def run(self) -> Times:
        """Until all classes are through."""
        for index in range(len(self.program.classes)):
            self._advance(index)
        happens = (self._leave, self._all_there, self._end)
        while self.queue:
            now_s, _, what, step, index = heappop(self.queue)
            happens[what](now_s, step, index)
        for index, step in enumerate(self.steps):
            if step < self.num_steps:
                stuck = self.program.classes[index]
                at = stuck.operations[self.places[index]]
                raise ScheduleError(
                    f"device {stuck.members[0]} waits forever at action {self.places[index]}, {at.kind} of block "
                    f"{at.block!r}, minibatch {at.minibatch}; validate the schedule"
                )
        return self.times

    def _push(self, time_s: float, what: int, step: int, index: int) -> None:
        heappush(self.queue, (time_s, next(self.order), what, step, index))

    def _advance(self, who: int) -> None:
        """Runs a class on until it must wait."""
        operations = self.program.classes[who].operations
        starts, length = self.times.starts[who], len(operations)
        clock_s, place, step = self.clocks[who], self.places[who], self.steps[who]
        while step < self.num_steps:
            if place == length:
                self.times.finishes[step][who] = clock_s
                step, place = step + 1, 0
                continue
            code, index, seconds, *_ = operations[place]
            if code == COMPUTE:
                starts.append(clock_s)
                clock_s += seconds
            elif code == SEND:
                self._push(clock_s, _LEAVES, step, index)
                clock_s += seconds
            elif code == LOAD:
                clock_s += seconds
            elif code == REDUCE:
                self._start(clock_s, step, index, len(self.program.classes[who].members))
            else:
                if index >= 0:
                    done = (self.times.transfers if code == RECEIVE else self.times.reductions).get((step, index))
                    if done is None:
                        self.waiting[code == RECEIVE, step, index].append(who)
                        break
                    clock_s = max(clock_s, done[1])
                if code != RECEIVE:
                    starts.append(clock_s)
                    clock_s += seconds
            place += 1
        self.clocks[who], self.places[who], self.steps[who] = clock_s, place, step

    def _wake(self, receive: bool, step: int, index: int) -> None:
        for who in self.waiting.pop((receive, step, index), ()):
            self._advance(who)

    def _leave(self, now_s: float, step: int, index: int) -> None:
        """A message takes its links as soon as earlier messages have left them, and goes before reductions."""
        (out, into), hold_s, latency_s = self.program.transfers[index]
        start_s = max(now_s, self.free_s[out], self.free_s[into])
        self.free_s[out] = self.free_s[into] = start_s + hold_s
        for link in (out, into):
            if link in self.holders:
                self._pause(self.holders[link], link, start_s, hold_s)
        self.times.transfers[step, index] = (start_s, start_s + hold_s + latency_s)
        self._wake(True, step, index)

    def _pause(self, key: tuple[int, int], link: int, start_s: float, hold_s: float) -> None:
        began_s, end_s = self.active[key]
        pauses = self.pauses[key]
        paused_s = max(pauses.values(), default=0.0)
        if start_s < end_s + paused_s and start_s + hold_s > began_s:
            pauses[link] = pauses.get(link, 0.0) + min(hold_s, start_s + hold_s - began_s)

    def _start(self, now_s: float, step: int, index: int, num_members: int) -> None:
        key = (step, index)
        left = self.missing.pop(key, None)
        left = (len(self.program.reductions[index].group) if left is None else left) - num_members
        self.started_s[key] = max(self.started_s[key], now_s)
        if left:
            self.missing[key] = left
        else:
            self._push(self.started_s.pop(key), _READY, step, index)

    def _all_there(self, now_s: float, step: int, index: int) -> None:
        self.ready.append((step, index))
        self._begin_ready(now_s)

    def _begin_ready(self, now_s: float) -> None:
        for key in tuple(self.ready):
            reduction = self.program.reductions[key[1]]
            after = any((key[0], other) not in self.times.reductions for other in reduction.after)
            if after or any(link in self.holders for link in reduction.holds):
                continue
            self.ready.remove(key)
            start_s = max([now_s, *(self.free_s[link] for link in reduction.holds)])
            self.active[key], self.pauses[key] = (start_s, start_s + reduction.seconds), {}
            self.holders.update(dict.fromkeys(reduction.holds, key))
            self._push(start_s + reduction.seconds, _ENDS, *key)

    def _end(self, now_s: float, step: int, index: int) -> None:
        key = (step, index)
        start_s, end_s = self.active[key]
        end_s += max(self.pauses[key].values(), default=0.0)
        if end_s > now_s:
            self._push(end_s, _ENDS, step, index)  # messages got in its way
            return
        del self.active[key], self.pauses[key]
        for link in self.program.reductions[index].holds:
            del self.holders[link]
        self.times.reductions[key] = (start_s, now_s)
        self._wake(False, step, index)
        self._begin_ready(now_s)
