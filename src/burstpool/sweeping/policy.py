"""The policy: what a sweep does next. Pure: no clock, no I/O, no torch.

Takes what is known of trials and arrays, and a search. Returns one move. Arrays take turns: one fills its free places
with waiting trials of its group and with new ones from the search, and trains until a trial of it reports; then the one
that has not had a turn the longest is next, so that what one array's trials report counts for another's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from burstpool.sweeping.search.base import Assignment, Search
from burstpool.sweeping.trials import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """Make a trial, or promote one: it waits for a place from now on."""

    assignment: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Put a waiting trial into its group's array."""

    trial: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """This group's array is next."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Train this group's array for a while."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Nothing is left to do."""


Move = Assign | Place | Turn | Run | Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """All that the policy looks at."""

    trials: Sequence[Trial]
    """By number."""
    places: int
    """Members of an array."""
    current: int | None = None
    """The group whose turn it is."""
    last_turns: Mapping[int, int] = field(default_factory=dict)
    """Group → when it last had a turn, counted in turns."""
    capacities: Mapping[int, int] = field(default_factory=dict)
    """Group → its array's places, for those that ran out of memory with more."""

    def capacity(self, group: int) -> int:
        """How many members the group's array may have."""
        return min(self.places, self.capacities.get(group, self.places))

    def waiting(self, group: int | None = None) -> list[Trial]:
        """Trials that wait for a place, of all groups or of one."""
        return [t for t in self.trials if t.state == "waiting" and (group is None or t.group == group)]

    def running(self, group: int) -> list[Trial]:
        """Trials that are in the group's array."""
        return [t for t in self.trials if t.state == "running" and t.group == group]


def decide(view: View, search: Search) -> Move:
    """The next move."""
    group = view.current
    if group is None or not (view.running(group) or view.waiting(group)):
        return _next_turn(view, search)
    if len(view.running(group)) < view.capacity(group):
        if waiting := view.waiting(group):
            return Place(trial=waiting[0].number, group=group)
        # No further ahead than one array's worth: what a search is asked later, it answers knowing more.
        if len(view.waiting()) < view.places and (found := search.next(view.trials)):
            return Assign(assignment=found)
    return Run(group=group)


def _next_turn(view: View, search: Search) -> Move:
    busy = {trial.group for trial in view.trials if trial.state in ("waiting", "running")} - {None}
    groups = sorted(group for group in busy if group is not None)
    if groups:
        return Turn(group=min(groups, key=lambda group: (view.last_turns.get(group, -1), group)))
    found = search.next(view.trials)
    return Finish() if found is None else Assign(assignment=found)


def steps_to_run(trials: Sequence[Trial], *, clock: int, longest: int) -> int:
    """How far an array trains in one go: to its next report, at most to the next multiple of `longest` steps.

    Counted on the array's own clock, so that a sweep which was cut off in between comes to the same stops.
    """
    return min([longest - clock % longest, *(trial.until - trial.step for trial in trials)])
