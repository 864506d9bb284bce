"""The runner: acts on the policy's moves, and writes down what came of them.

Everything it decides by follows from trials, losses and the sizing that was written down at the start; clocks only say
when to write a checkpoint. So a sweep that was interrupted or killed makes the same moves again and ends with the same
numbers. A trial that fails, by its settings or by its loss, fails alone; an array that runs out of memory goes on with
half of its places from where it was.
"""

import gc
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from burstpool.errors import BurstpoolError
from burstpool.fusion.array import Execution
from burstpool.fusion.group import Groups
from burstpool.job import Job, in_words, make_job
from burstpool.run.trainer import counted_interrupts
from burstpool.sweeping.feed import KnownData
from burstpool.sweeping.folder import ArrayRecord, SweepFolder, SweepRecord, SweepState
from burstpool.sweeping.objective import held_out, last_losses
from burstpool.sweeping.policy import Assign, Finish, Place, Run, Turn, View, decide, steps_to_run
from burstpool.sweeping.search import Assignment, Search
from burstpool.sweeping.trial_array import TrialArray
from burstpool.sweeping.trials import Report, Trial, best_trial

_LOG = logging.getLogger(__name__)
_LONGEST_RUN = 50
"""Steps between two looks at the losses."""
_OBSERVE_S = 0.25


class InterruptedSweep(KeyboardInterrupt):
    """Ctrl-C, or SIGTERM, ended a sweep; it can be gone on with."""

    def __init__(self, folder: Path) -> None:
        super().__init__("stopped; a checkpoint was written")
        self.folder = folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """What there is to show while a sweep runs."""

    trials: tuple[Trial, ...]
    """By number; steps of running ones are up to date, their losses those of the last look."""
    num_trials: int
    """That the search may ask for."""
    steps: int
    samples_per_s: float
    """Over all trials, of the time spent in steps."""
    serial_samples_per_s: float
    """What one after another would reach, estimated."""
    num_arrays: int
    wall_time_s: float


Observer = Callable[[SweepProgress], None]


class Builder:
    """Makes the jobs of trials: the user's function is imported once, and alike data is kept once."""

    def __init__(self, function: Callable[..., Any], *, source: str, name: str) -> None:
        self.function, self.source, self.name = function, source, name
        self._data = KnownData()

    def job(self, settings: Any) -> Job:
        """The job with these settings."""
        return self._data.shared(make_job(self.function, settings, source=self.source, name=self.name))


class Runner:
    """One sweep, from where its folder says it is."""

    def __init__(
        self,
        folder: SweepFolder,
        record: SweepRecord,
        *,
        builder: Builder,
        search: Search,
        checkpoint_every_s: float,
        observer: Observer | None = None,
    ) -> None:
        self.folder, self.record, self.builder, self.search = folder, record, builder, search
        self.observer, self.checkpoint_every_s = observer, checkpoint_every_s
        self.device = torch.device(record.device)
        self.state = folder.load_state()
        self.trials = list(self.state.trials)
        self.losses = folder.cut_losses(self.trials)
        self.groups = Groups()
        self.arrays: dict[int, TrialArray] = {}
        self.current, self.turns = self.state.current, self.state.turns
        self.last_turns: dict[int, int] = {}
        self.capacities: dict[int, int] = {}
        self.closed: set[int] = set()
        self._built: dict[int, tuple[Job, nn.Module]] = {}
        self.begin_s = time.perf_counter() - self.state.wall_time_s
        """When the sweep would have begun, had it not been interrupted; whoever measured before may set it back."""
        self._train_s, self._samples = self.state.train_time_s, self.state.num_samples
        self._committed_s = self._observed_s = time.perf_counter()
        self._restore()

    # What is the case.

    def view(self) -> View:
        """What the policy looks at."""
        return View(
            trials=self.trials,
            places=self.record.sizing.places,
            current=self.current,
            last_turns=self.last_turns,
            capacities=self.capacities,
        )

    def progress(self, ahead: dict[int, int] | None = None) -> SweepProgress:
        """What there is to show; `ahead` are steps since the last look, by trial."""
        ahead = ahead or {}
        shown = tuple(replace(t, step=t.step + ahead[t.number]) if t.number in ahead else t for t in self.trials)
        return SweepProgress(
            trials=shown,
            num_trials=self.record.num_trials,
            steps=self.record.steps,
            samples_per_s=self._samples / self._train_s if self._train_s else 0.0,
            serial_samples_per_s=self.record.sizing.serial_samples_per_s,
            num_arrays=len(self.arrays),
            wall_time_s=time.perf_counter() - self.begin_s,
        )

    # Acting.

    def run(self) -> SweepState:
        """Until nothing is left to do; raises InterruptedSweep on Ctrl-C, when a checkpoint is written."""
        if self.state.finished:
            return self.state
        with counted_interrupts() as interrupts:
            while not isinstance(move := decide(self.view(), self.search), Finish):
                match move:
                    case Assign(assignment=assignment):
                        self._assign(assignment)
                    case Place(trial=number, group=group):
                        self._place(number, group)
                    case Turn(group=group):
                        self.current, self.turns = group, self.turns + 1
                        self.last_turns[group] = self.turns
                    case Run(group=group):
                        self._run(group, interrupts)
                if interrupts():
                    self.commit()
                    raise InterruptedSweep(self.folder.path)
        self.trials = [replace(t, state="stopped") if t.state == "paused" else t for t in self.trials]
        return self.commit(finished=True)

    def _assign(self, assignment: Assignment) -> None:
        if assignment.trial < len(self.trials):
            self._update(assignment.trial, state="waiting", until=assignment.until)
            return
        trial = Trial(
            number=assignment.trial, settings=dict(assignment.settings), state="waiting", until=assignment.until
        )
        try:
            job = self.builder.job(trial.settings)
            model = job.build_model()
            group = self.groups.place(job, model, batch=self.record.batch)
        except Exception as error:  # the user's code may raise anything for settings it does not like
            self.trials.append(replace(trial, state="failed", reason=_reason(error)))
            return
        self._built[trial.number] = (job, model)
        self.trials.append(replace(trial, group=group))

    def _place(self, number: int, group: int) -> None:
        trial = self.trials[number]
        trial_array = self.arrays.setdefault(group, self._empty_array())
        alone = trial_array.array is None
        try:
            job, model = self._built.pop(number) if number in self._built else self._build(trial)
            saved = self.folder.load_trial(trial) if self.folder.has_trial(trial) else None
            trial_array.place(number, job, model, saved)
        except BurstpoolError as error:
            if alone:
                self._update(number, state="failed", reason=_reason(error))
                return
            _LOG.warning("trial %d trains apart: %s", number, _reason(error))
            self._update(number, group=self._closed_group(_reason(error)))
            return
        self._update(number, state="running")

    def _run(self, group: int, interrupts: Callable[[], int]) -> None:
        trial_array = self.arrays[group]
        trials = [self.trials[number] for number in trial_array.numbers]
        num_steps = steps_to_run(trials, clock=trial_array.clock, longest=_LONGEST_RUN)
        before = trial_array.state_dict()
        begin_s, done = time.perf_counter(), 0

        def stop() -> bool:
            nonlocal done
            done += 1
            if self.observer is not None and time.perf_counter() - self._observed_s > _OBSERVE_S:
                self._observed_s = time.perf_counter()
                self.observer(self.progress(dict.fromkeys(trial_array.numbers, done)))
            return interrupts() > 0

        try:
            losses_SM = trial_array.run(num_steps, [trial.step for trial in trials], stop)  # noqa: N806
        except torch.OutOfMemoryError as error:
            self._back_off(group, before, error)
            return
        except Exception as error:
            self._part(group, before, error)
            return
        self._train_s += time.perf_counter() - begin_s
        samples = self.record.batch or trial_array.jobs[0].batch
        self._samples += losses_SM.numel() * samples
        for number, losses in zip(trial_array.numbers, losses_SM.t().tolist(), strict=True):
            trial = self.trials[number]
            self.folder.add_losses(number, trial.step, losses)
            self.losses.setdefault(number, []).extend(losses)
            self._update(number, step=trial.step + len(losses), loss=losses[-1] if math.isfinite(losses[-1]) else None)
        if len(losses_SM) == num_steps:
            self._settle(group)
        if time.perf_counter() - self._committed_s > self.checkpoint_every_s:
            self.commit()

    def _settle(self, group: int) -> None:
        """Lets those go that have come to their next report, or whose loss is no number."""
        trial_array = self.arrays[group]
        gone = []
        for number in trial_array.numbers:
            losses = self.losses[number]
            bad = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
            if bad is not None:
                reason = f"its loss was {losses[bad]} at step {bad}"
                self._update(number, state="failed", step=bad, loss=None, reason=reason)
                gone.append(number)
        reporting = [n for n in trial_array.numbers if n not in gone and self.trials[n].step >= self.trials[n].until]
        for number, value in self._objectives(trial_array, reporting).items():
            self._report(trial_array, number, value)
        if reporting:
            self.current = None
        trial_array.remove([*gone, *reporting])

    def _report(self, trial_array: TrialArray, number: int, value: float) -> None:
        trial = self.trials[number]
        if not math.isfinite(value):
            self._update(number, state="failed", reason=f"its objective was {value} at step {trial.step}")
            return
        self._update(
            number,
            state="done" if trial.step >= self.record.steps else "paused",
            reports=(*trial.reports, Report(step=trial.step, value=value)),
        )
        self.folder.save_trial(self.trials[number], trial_array.saved(number))

    def _objectives(self, trial_array: TrialArray, numbers: list[int]) -> dict[int, float]:
        members = {number: trial_array.numbers.index(number) for number in numbers}
        evaluated = [m for m in members.values() if trial_array.jobs[m].evaluation is not None]
        values: dict[int, float] = {}
        if evaluated and trial_array.array is not None:
            batch = self.record.batch or trial_array.jobs[0].batch
            values = held_out(trial_array.array, trial_array.jobs, evaluated, batch=batch)
        return {
            number: values[member] if member in values else last_losses(self.losses[number], steps=self.record.steps)
            for number, member in members.items()
        }

    # When it goes wrong.

    def _back_off(self, group: int, before: dict[str, Any], error: BaseException) -> None:
        """Half of the array's trials go on; the others wait for a place, with all they had."""
        numbers = self._rewound(group, before)
        if len(numbers) == 1:
            self.arrays[group].remove(numbers)
            self._update(numbers[0], state="failed", reason=f"it does not fit into memory: {_reason(error)}")
            return
        self.capacities[group] = len(numbers) // 2
        _LOG.warning("out of memory with %d trials; going on with %d", len(numbers), self.capacities[group])
        self._release(group, numbers[self.capacities[group] :])

    def _part(self, group: int, before: dict[str, Any], error: BaseException) -> None:
        """Whoever's code raised is found by training all of the array's trials one by one."""
        numbers = self._rewound(group, before)
        if len(numbers) == 1:
            self.arrays[group].remove(numbers)
            self._update(numbers[0], state="failed", reason=_reason(error))
            return
        _LOG.warning("training the trials of an array one by one, as it failed: %s", _reason(error))
        self._release(group, numbers)
        for number in numbers:
            self._update(number, group=self._closed_group(_reason(error)))
        self.current = None

    def _rewound(self, group: int, before: dict[str, Any]) -> list[int]:
        trial_array = self.arrays[group]
        gc.collect()  # the failed step's tensors hang on the exception's frames
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        trial_array.load_state_dict(before)
        return list(trial_array.numbers)

    def _release(self, group: int, numbers: list[int]) -> None:
        for number in numbers:
            self.folder.save_trial(self.trials[number], self.arrays[group].saved(number))
            self._update(number, state="waiting")
        self.arrays[group].remove(numbers)

    # Writing down, and taking up again.

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
            train_time_s=self._train_s,
            num_samples=self._samples,
            finished=finished,
            notes={str(group): reason for group, reason in self.groups.reasons.items()},
        )
        arrays = {group: array.state_dict() for group, array in self.arrays.items() if array.numbers}
        best = best_trial(self.trials)
        kept = [t for t in self.trials if t.state in ("waiting", "paused") or t is best]
        if self.record.keep_all:
            kept += [t for t in self.trials if t.state == "done"]
        self.state = self.folder.commit(state, arrays, keep=kept)
        self._committed_s = time.perf_counter()
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
            trial_array = self._empty_array()
            for number in record.trials:
                trial_array.place(number, *self._build(self.trials[number]), None)
            if record.trials:
                trial_array.load_state_dict(states[record.group])
            if record.trials or record.clock:
                self.arrays[record.group] = trial_array
            trial_array.clock = record.clock
        firsts: dict[int, Trial] = {}
        for trial in self.trials:
            if trial.group is not None and trial.group not in self.closed:
                firsts.setdefault(trial.group, trial)
        for group in sorted(firsts):
            self.groups.reopen(group, *self._build(firsts[group]), batch=self.record.batch)

    def _build(self, trial: Trial) -> tuple[Job, nn.Module]:
        job = self.builder.job(trial.settings)
        return job, job.build_model()

    def _empty_array(self) -> TrialArray:
        mode: Execution = self.record.mode  # type: ignore[assignment]
        return TrialArray(device=self.device, mode=mode, batch=self.record.batch)

    def _closed_group(self, reason: str) -> int:
        group = self.groups.open(reason=reason)
        self.closed.add(group)
        return group

    def _update(self, number: int, **changes: Any) -> None:
        self.trials[number] = replace(self.trials[number], **changes)


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, BurstpoolError) else in_words(error)
    return " ".join(text.split())
