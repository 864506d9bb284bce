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
from torch import Tensor, nn

from burstpool.errors import BurstpoolError
from burstpool.job import Job, in_words
from burstpool.run.trainer import counted_interrupts
from burstpool.sweeping.floor import Floor
from burstpool.sweeping.folder import SweepState
from burstpool.sweeping.objective import held_out, last_losses
from burstpool.sweeping.policy import Assign, Finish, Place, Run, Turn, decide, steps_to_run
from burstpool.sweeping.search import Assignment, Search
from burstpool.sweeping.trial_array import TrialArray
from burstpool.sweeping.trials import Report, Trial

_LOG = logging.getLogger(__name__)
_LONGEST_RUN = 50
"""Steps between two looks at the losses."""
_OBSERVE_S = 0.25


class InterruptedSweep(KeyboardInterrupt):
    """Ctrl-C, or SIGTERM, ended a sweep; it can be gone on with."""

    def __init__(self, folder: Path, said: str = "stopped; a checkpoint was written") -> None:
        super().__init__(said)
        self.folder = folder


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """What there is to show while a sweep runs."""

    trials: tuple[Trial, ...] = ()
    """By number; steps of running ones are up to date, their losses those of the last look."""
    num_trials: int
    """That the search may ask for."""
    steps: int
    samples_per_s: float = 0.0
    """Over all trials, of the time spent in steps."""
    serial_samples_per_s: float = 0.0
    """What one after another would reach, estimated; 0 while that is measured."""
    num_arrays: int = 0
    wall_time_s: float
    measured_size: int | None = None
    """The array size that is measured, before the sweep begins."""


Observer = Callable[[SweepProgress], None]


class Runner:
    """One sweep, from where its folder says it is."""

    def __init__(
        self, floor: Floor, search: Search, *, checkpoint_every_s: float, observer: Observer | None = None
    ) -> None:
        self.floor, self.search = floor, search
        self.record, self.folder = floor.record, floor.folder
        self.observer, self.checkpoint_every_s = observer, checkpoint_every_s
        self._built: dict[int, tuple[Job, nn.Module]] = {}
        """Jobs and models of trials that wait for their first place."""
        self._committed_s = self._observed_s = time.perf_counter()
        self._observer_error: Exception | None = None

    def progress(self, ahead: dict[int, int] | None = None) -> SweepProgress:
        """What there is to show; `ahead` are steps since the last look, by trial."""
        ahead = ahead or {}
        shown = tuple(replace(t, step=t.step + ahead[t.number]) if t.number in ahead else t for t in self.floor.trials)
        return SweepProgress(
            trials=shown,
            num_trials=self.record.num_trials,
            steps=self.record.steps,
            samples_per_s=self.floor.num_samples / self.floor.train_s if self.floor.train_s else 0.0,
            serial_samples_per_s=self.record.sizing.serial_samples_per_s,
            num_arrays=len(self.floor.arrays),
            wall_time_s=time.perf_counter() - self.floor.begin_s,
        )

    # Acting.

    def run(self) -> SweepState:
        """Until nothing is left to do; raises InterruptedSweep on Ctrl-C, when a checkpoint is written.

        A second Ctrl-C ends it at once, for a step that hangs: it then goes on from the checkpoint before. What an
        observer raises ends it as the first does, and is raised then.
        """
        if self.floor.state.finished:
            return self.floor.state
        try:
            with counted_interrupts(most=1) as interrupts:
                self._act(interrupts)
        except InterruptedSweep:
            raise
        except KeyboardInterrupt:
            raise InterruptedSweep(self.folder.path, "stopped at once, as it was at its last checkpoint") from None
        self.floor.trials = [replace(t, state="stopped") if t.state == "paused" else t for t in self.floor.trials]
        return self.floor.commit(finished=True)

    def _act(self, interrupts: Callable[[], int]) -> None:
        """Does what the policy says, until it says that all is done."""
        while not isinstance(move := decide(self.floor.view(), self.search), Finish):
            match move:
                case Assign(assignment=assignment):
                    self._assign(assignment)
                case Place(trial=number, group=group):
                    self._place(number, group)
                case Turn(group=group):
                    self.floor.current, self.floor.turns = group, self.floor.turns + 1
                    self.floor.last_turns[group] = self.floor.turns
                case Run(group=group):
                    self._run(group, interrupts)
            if interrupts() or self._observer_error is not None:
                self.floor.commit()
                raise self._observer_error or InterruptedSweep(self.folder.path)

    def _assign(self, assignment: Assignment) -> None:
        if assignment.trial < len(self.floor.trials):
            self.floor.update(assignment.trial, state="waiting", until=assignment.until)
            return
        trial = Trial(
            number=assignment.trial, settings=dict(assignment.settings), state="waiting", until=assignment.until
        )
        try:
            job = self.floor.builder.job(trial.settings)
            model = job.build_model()
            group = self.floor.groups.place(job, model, batch=self.record.batch)
        except Exception as error:  # the user's code may raise anything for settings it does not like
            self.floor.trials.append(replace(trial, state="failed", reason=_reason(error)))
            return
        self._built[trial.number] = (job, model)
        self.floor.trials.append(replace(trial, group=group))

    def _place(self, number: int, group: int) -> None:
        trial = self.floor.trials[number]
        trial_array = self.floor.array_of(group)
        alone = trial_array.array is None
        saved = self.folder.load_trial(trial) if trial.step else None  # what cannot be read is no trial's fault
        try:
            job, model = self._built.pop(number) if number in self._built else self.floor.build(trial)
            trial_array.place(number, job, model, saved)
        except torch.OutOfMemoryError as error:
            self._no_room(number, group, error)
            return
        except Exception as error:  # the user's code may raise anything
            if alone or not isinstance(error, BurstpoolError):
                self.floor.update(number, state="failed", reason=_reason(error))
                return
            _LOG.warning("trial %d trains apart: %s", number, _reason(error))
            self.floor.update(number, group=self.floor.closed_group(_reason(error)))
            return
        self.floor.update(number, state="running")

    def _run(self, group: int, interrupts: Callable[[], int]) -> None:
        trial_array = self.floor.arrays[group]
        trials = [self.floor.trials[number] for number in trial_array.numbers]
        num_steps = steps_to_run(trials, clock=trial_array.clock, longest=_LONGEST_RUN)
        if num_steps == 0:  # it had come to its report, and the array failed in finding the objectives
            self._settle(group)
            return
        self._observe({})  # the first step may take long, to compile or to measure
        before: dict[str, Any] | None = None
        try:
            before = trial_array.state_dict()
            begin_s = time.perf_counter()
            losses_SM = trial_array.run(  # noqa: N806 -- S = steps, M = members
                num_steps, [trial.step for trial in trials], self._after_step(trial_array, interrupts)
            )
        except torch.OutOfMemoryError as error:
            self._back_off(group, before, error)
            return
        except Exception as error:  # the user's loss may raise anything
            self._part(group, before, error)
            return
        self.floor.train_s += time.perf_counter() - begin_s
        self._take_down(trial_array, losses_SM)
        if len(losses_SM) == num_steps:  # an interrupted run is settled when it has been ended
            self._settle(group)
        if time.perf_counter() - self._committed_s > self.checkpoint_every_s:
            self.floor.commit()
            self._committed_s = time.perf_counter()

    def _after_step(self, trial_array: TrialArray, interrupts: Callable[[], int]) -> Callable[[], bool]:
        """Shows how far it is now and then; says whether to stop."""
        done = 0

        def stop() -> bool:
            nonlocal done
            done += 1
            self._observe(dict.fromkeys(trial_array.numbers, done))
            return interrupts() > 0 or self._observer_error is not None

        return stop

    def _observe(self, ahead: dict[int, int]) -> None:
        if self.observer is None or time.perf_counter() - self._observed_s <= _OBSERVE_S:
            return
        self._observed_s = time.perf_counter()
        try:
            self.observer(self.progress(ahead))
        except Exception as error:  # no trial's fault: raised among its steps, it would be taken for one
            self._observer_error = error

    def _take_down(self, trial_array: TrialArray, losses_SM: Tensor) -> None:  # noqa: N803
        self.floor.num_samples += losses_SM.numel() * (self.record.batch or trial_array.jobs[0].batch)
        for number, losses in zip(trial_array.numbers, losses_SM.t().tolist(), strict=True):
            trial = self.floor.trials[number]
            self.folder.add_losses(number, trial.step, losses)
            self.floor.losses.setdefault(number, []).extend(losses)
            last = losses[-1] if math.isfinite(losses[-1]) else None
            self.floor.update(number, step=trial.step + len(losses), loss=last)

    def _settle(self, group: int) -> None:
        """Lets those go that have come to their next report, or whose loss is no number."""
        trial_array = self.floor.arrays[group]
        gone = []
        for number in trial_array.numbers:
            losses = self.floor.losses[number]
            new = range(max(0, len(losses) - _LONGEST_RUN), len(losses))  # earlier ones have been looked at
            bad = next((step for step in new if not math.isfinite(losses[step])), None)
            if bad is not None:
                reason = f"its loss was {losses[bad]} at step {bad}"
                self.floor.update(number, state="failed", step=bad, loss=None, reason=reason)
                gone.append(number)
        trial_array.remove(gone)
        trials = [self.floor.trials[number] for number in trial_array.numbers]
        reporting = [trial.number for trial in trials if trial.step >= trial.until]
        try:
            values = self._objectives(trial_array, reporting)
        except torch.OutOfMemoryError as error:
            self._back_off(group, None, error)
            return
        except Exception as error:  # the user's loss may raise anything for held-out data
            self._part(group, None, error)
            return
        for number, value in values.items():
            self._report(trial_array, number, value)
        if reporting:
            self.floor.current = None
        trial_array.remove(reporting)

    def _report(self, trial_array: TrialArray, number: int, value: float) -> None:
        trial = self.floor.trials[number]
        if not math.isfinite(value):
            self.floor.update(number, state="failed", reason=f"its objective was {value} at step {trial.step}")
            return
        self.floor.update(
            number,
            state="done" if trial.step >= self.record.steps else "paused",
            reports=(*trial.reports, Report(step=trial.step, value=value)),
        )
        self.folder.save_trial(self.floor.trials[number], trial_array.saved(number))

    def _objectives(self, trial_array: TrialArray, numbers: list[int]) -> dict[int, float]:
        members = {number: trial_array.numbers.index(number) for number in numbers}
        evaluated = [m for m in members.values() if trial_array.jobs[m].evaluation is not None]
        values: dict[int, float] = {}
        if evaluated and trial_array.array is not None:
            batch = self.record.batch or trial_array.jobs[0].batch
            with self.record.step_options.autocasting(self.floor.device):
                values = held_out(trial_array.array, trial_array.jobs, evaluated, batch=batch)
        for number, member in members.items():
            if member not in values:
                values[member] = last_losses(self.floor.losses[number], steps=self.record.steps)
        return {number: values[member] for number, member in members.items()}

    # When it goes wrong.

    def _no_room(self, number: int, group: int, error: BaseException) -> None:
        """The array goes on with those it has; the trial waits until one of them leaves."""
        self._freed()
        trial_array = self.floor.arrays[group]
        present = len(trial_array.numbers)
        if not present and trial_array.array is not None:
            trial_array.array = None  # what the last trial left behind takes the room; the next try is without it
            return
        if not present:
            self.floor.update(number, state="failed", reason=f"it does not fit into memory: {_reason(error)}")
            return
        self.floor.capacities[group] = present
        _LOG.warning("out of memory with %d trials; going on with %d", present + 1, present)

    def _back_off(self, group: int, before: dict[str, Any] | None, error: BaseException) -> None:
        """Half of the array's trials go on; the others wait for a place, with all they had."""
        numbers = self._rewound(group, before)
        if len(numbers) == 1:
            self.floor.arrays[group].remove(numbers)
            self.floor.update(numbers[0], state="failed", reason=f"it does not fit into memory: {_reason(error)}")
            return
        self.floor.capacities[group] = len(numbers) // 2
        _LOG.warning("out of memory with %d trials; going on with %d", len(numbers), self.floor.capacities[group])
        self._release(group, numbers[self.floor.capacities[group] :])

    def _part(self, group: int, before: dict[str, Any] | None, error: BaseException) -> None:
        """Whoever's code raised is found by training all of the array's trials one by one."""
        numbers = self._rewound(group, before)
        if len(numbers) == 1:
            self.floor.arrays[group].remove(numbers)
            self.floor.update(numbers[0], state="failed", reason=_reason(error))
            return
        _LOG.warning("training the trials of an array one by one, as it failed: %s", _reason(error))
        self._release(group, numbers)
        for number in numbers:
            self.floor.update(number, group=self.floor.closed_group(_reason(error)))
        self.floor.current = None

    def _rewound(self, group: int, before: dict[str, Any] | None) -> list[int]:
        """Who is in the array, which is as it was; None where nothing has changed it."""
        self._freed()
        trial_array = self.floor.arrays[group]
        if before is not None:
            trial_array.load_state_dict(before)
        return list(trial_array.numbers)

    def _freed(self) -> None:
        gc.collect()  # the failed step's tensors hang on the exception's frames
        if self.floor.device.type == "cuda":
            torch.cuda.empty_cache()

    def _release(self, group: int, numbers: list[int]) -> None:
        for number in numbers:
            self.folder.save_trial(self.floor.trials[number], self.floor.arrays[group].saved(number))
            self.floor.update(number, state="waiting")
        self.floor.arrays[group].remove(numbers)


def _reason(error: BaseException) -> str:
    text = str(error) if isinstance(error, BurstpoolError) else in_words(error)
    return " ".join(text.split())
