"""The floor: every trial and array of a sweep in memory, as the run folder says, and written down there.

Knows who is where; decides nothing and trains nothing. `commit` writes everything; a new Floor on the same folder takes
it up again, to the bit.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from burstpool.fusion.array import Execution
from burstpool.fusion.group import Groups
from burstpool.job import Job, make_job
from burstpool.run.known_data import KnownData
from burstpool.sweeping.folder import ArrayRecord, SweepFolder, SweepRecord, SweepState
from burstpool.sweeping.policy import View
from burstpool.sweeping.trial_array import TrialArray
from burstpool.sweeping.trials import Trial, best_trial


class Builder:
    """Makes the jobs of trials: the user's function is imported once, and alike data is kept once."""

    def __init__(self, function: Callable[..., Any], *, source: str, name: str) -> None:
        self.function, self.source, self.name = function, source, name
        self._data = KnownData()

    def job(self, settings: Any) -> Job:
        """The job with these settings."""
        return self._data.shared(make_job(self.function, settings, source=self.source, name=self.name))


class Floor:
    """Who is where."""

    def __init__(self, folder: SweepFolder, record: SweepRecord, builder: Builder) -> None:
        self.folder, self.record, self.builder = folder, record, builder
        self.device = torch.device(record.device)
        self.state = folder.load_state()
        """As it was last written down."""
        self.trials = list(self.state.trials)
        """By number."""
        self.losses = folder.cut_losses(self.trials)
        """Every step's, by trial."""
        self.groups = Groups()
        self.arrays: dict[int, TrialArray] = {}
        """By group."""
        self.current, self.turns = self.state.current, self.state.turns
        self.last_turns: dict[int, int] = {}
        self.capacities: dict[int, int] = {}
        self.closed: set[int] = set()
        """Groups that no other trial may join."""
        self.begin_s = time.perf_counter() - self.state.wall_time_s
        """When the sweep would have begun, had it not been interrupted; whoever measured before may set it back."""
        self.train_s, self.num_samples = self.state.train_time_s, self.state.num_samples
        self._restore()

    def view(self) -> View:
        """What the policy looks at."""
        return View(
            trials=self.trials,
            places=self.record.sizing.places,
            current=self.current,
            last_turns=self.last_turns,
            capacities=self.capacities,
        )

    def update(self, number: int, **changes: Any) -> None:
        """Changes what is known of a trial."""
        self.trials[number] = replace(self.trials[number], **changes)

    def build(self, trial: Trial) -> tuple[Job, nn.Module]:
        """A trial's job and its model, new."""
        job = self.builder.job(trial.settings)
        return job, job.build_model()

    def array_of(self, group: int) -> TrialArray:
        """The group's array, made where there is none."""
        if group in self.arrays:
            return self.arrays[group]
        mode: Execution = self.record.mode  # type: ignore[assignment]
        self.arrays[group] = TrialArray(
            device=self.device,
            mode=mode,
            batch=self.record.batch,
            options=self.record.step_options,
            choices_file=self.folder.choices,
        )
        return self.arrays[group]

    def closed_group(self, reason: str) -> int:
        """A new group that no other trial joins."""
        group = self.groups.open(reason=reason)
        self.closed.add(group)
        return group

    def commit(self, *, finished: bool = False) -> SweepState:
        """Writes a checkpoint of everything."""
        state = replace(
            self.state,
            trials=tuple(self.trials),
            arrays=tuple(self._array_record(group) for group in sorted({*self.arrays, *self.closed})),
            current=self.current,
            turns=self.turns,
            num_arrays=len({t.group for t in self.trials if t.group is not None and t.step}),
            wall_time_s=time.perf_counter() - self.begin_s,
            train_time_s=self.train_s,
            num_samples=self.num_samples,
            finished=finished,
            notes={str(group): reason for group, reason in self.groups.reasons.items()},
        )
        arrays = {group: array.state_dict() for group, array in self.arrays.items() if array.numbers}
        best = best_trial(self.trials)
        kept = [t for t in self.trials if t.state in ("waiting", "paused") or t is best]
        if self.record.keep_all:
            kept += [t for t in self.trials if t.state == "done"]
        self.state = self.folder.commit(state, arrays, keep=kept)
        return self.state

    def _array_record(self, group: int) -> ArrayRecord:
        trial_array = self.arrays.get(group)
        return ArrayRecord(
            group=group,
            trials=tuple(trial_array.numbers) if trial_array else (),
            clock=trial_array.clock if trial_array else 0,
            last_turn=self.last_turns.get(group, -1),
            capacity=self.capacities.get(group, self.record.sizing.places),
            closed=group in self.closed,
        )

    def _restore(self) -> None:
        """Arrays, groups and turns as `trials.json` says."""
        states = self.folder.load_arrays(self.state)
        for record in self.state.arrays:
            self.last_turns[record.group] = record.last_turn
            self.capacities[record.group] = record.capacity
            if record.closed:
                self.closed.add(record.group)
                self.groups.open(number=record.group)
            if not record.trials and not record.clock:
                continue
            trial_array = self.array_of(record.group)
            for number in record.trials:
                trial_array.place(number, *self.build(self.trials[number]), None)
            if record.trials:
                trial_array.load_state_dict(states[record.group])
            trial_array.clock = record.clock
        self.groups.reasons |= {int(group): reason for group, reason in self.state.notes.items()}
        firsts: dict[int, Trial] = {}
        for trial in self.trials:
            if trial.group is not None and trial.group not in self.closed:
                firsts.setdefault(trial.group, trial)
        for group in sorted(firsts):
            self.groups.reopen(group, *self.build(firsts[group]), batch=self.record.batch)
