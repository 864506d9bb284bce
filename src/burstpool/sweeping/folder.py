"""A sweep's run folder: everything of it lies together.

sweep.json           what was asked: job, space, search, steps, array size, versions
trials.json          every trial, and who is in which array; names the checkpoint it goes with
losses.jsonl         training losses: trial, first step, losses
checkpoints/         the arrays' state
choices.json         how arrays compute, where that was measured: a sweep that goes on must not choose otherwise
states/              the state of trials that are in no array: paused ones, and the best
weights.safetensors  the best trial, with the user's own keys
weights/             with `keep_all`: every trial that was trained to its end
report.html          curves of all trials

`trials.json` is written last and whole: what it names is there, and what it does not name is of no account. So a sweep
that is killed at any moment goes on from the last `trials.json`.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from burstpool.artifact import STRICT, Artifact, write_whole
from burstpool.errors import ArtifactError, RunError
from burstpool.run.folder import used
from burstpool.sweeping.options import StepOptions
from burstpool.sweeping.sizing import Sizing
from burstpool.sweeping.space import Space
from burstpool.sweeping.trials import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord(Artifact):
    """What was asked, and what was measured before it began."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    job: str
    """How reports call it."""
    source: str
    """`/home/me/job.py`, `zoo:tiny_mlp`; "" for a function of a program."""
    source_fingerprint: str = ""
    """Of the job's file when the sweep began; "" where there is none."""
    space: Space
    search: str
    num_trials: int
    steps: int
    seed: int
    eta: int
    first_rung: int | None
    mode: str
    device: str
    threads: int
    """Of torch on the CPU: sums depend on it in their last digits."""
    batch: int | None
    """None for the job's own."""
    step_options: StepOptions = field(default_factory=StepOptions)
    """How steps are computed; a sweep that goes on computes them alike."""
    keep_all: bool
    objective: str
    """In words."""
    sizing: Sizing
    started: str
    """When, in ISO format."""
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRecord:
    """One array."""

    __pydantic_config__ = STRICT

    group: int
    trials: tuple[int, ...]
    """In the order of members."""
    clock: int
    """Steps it has run."""
    last_turn: int
    capacity: int
    closed: bool = False
    """Whether no other trial may join its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepState(Artifact):
    """How far a sweep has come."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    trials: tuple[Trial, ...] = ()
    """By number."""
    arrays: tuple[ArrayRecord, ...] = ()
    current: int | None = None
    """The group whose turn it is."""
    turns: int = 0
    checkpoint: str = ""
    """The file in `checkpoints/` with the arrays' state; "" where no array has a trial."""
    num_arrays: int = 0
    """Arrays that have trained, those that are gone included."""
    wall_time_s: float = 0.0
    """Of all calls together, measuring included."""
    train_time_s: float = 0.0
    """Of that, in steps."""
    num_samples: int = 0
    """That trials were trained on."""
    finished: bool = False
    notes: Mapping[str, str] = field(default_factory=dict)
    """Group → why it is apart from earlier ones."""


class SweepFolder:
    """Paths of one sweep, and how they are written and read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "sweep.json"
        self.state = path / "trials.json"
        self.losses = path / "losses.jsonl"
        self.checkpoints = path / "checkpoints"
        self.states = path / "states"
        self.choices = path / "choices.json"
        self.weights = path / "weights.safetensors"
        self.all_weights = path / "weights"
        self.report = path / "report.html"

    @classmethod
    def create(cls, path: Path) -> "SweepFolder":
        """Makes the folder; one that holds a run already is refused."""
        folder = cls(path)
        if folder.record.exists() or (path / "run.json").exists():
            raise RunError(used(path))
        folder.make(folder.checkpoints)
        folder.make(folder.states)
        return folder

    def make(self, inside: Path) -> None:
        """A folder in it."""
        try:
            inside.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make run folder {self.path}: {error.strerror}") from None

    @classmethod
    def open(cls, path: Path) -> "SweepFolder":
        """A folder that holds a sweep."""
        folder = cls(path)
        if not folder.record.is_file():
            what = "a run of burstpool train" if (path / "run.json").is_file() else "no sweep: it has no sweep.json"
            raise RunError(f"{path} is {what}; give the run folder of a sweep")
        return folder

    def load_state(self) -> SweepState:
        """How far it had come; the beginning where it had not come anywhere."""
        return SweepState.load(self.state) if self.state.is_file() else SweepState()

    def commit(self, state: SweepState, arrays: Mapping[int, Any], *, keep: Iterable[Trial]) -> SweepState:
        """Writes the arrays' state, then `trials.json`, then removes what that does not need any more.

        `keep` are the trials outside of arrays whose state is needed.
        """
        name = ""
        if arrays:
            earlier = int(state.checkpoint.partition(".")[0] or 0)
            name = f"{earlier + 1:08d}.pt"
            _save(dict(arrays), self.checkpoints / name)
        written = replace(state, checkpoint=name)
        self._sync_losses()
        written.save(self.state)
        _remove_others(self.checkpoints, {name})
        _remove_others(self.states, {self._state_name(trial) for trial in keep})
        return written

    def load_arrays(self, state: SweepState) -> dict[int, Any]:
        """Group → the array's state."""
        if not any(array.trials for array in state.arrays):
            return {}
        arrays: dict[int, Any] = _load(self.checkpoints / state.checkpoint)
        return arrays

    def save_trial(self, trial: Trial, saved: Mapping[str, Any]) -> None:
        """Keeps the state of a trial that leaves its array."""
        _save(dict(saved), self.states / self._state_name(trial))

    def load_trial(self, trial: Trial) -> dict[str, Any]:
        """The state with which it left."""
        saved: dict[str, Any] = _load(self.states / self._state_name(trial))
        return saved

    def _state_name(self, trial: Trial) -> str:
        return f"trial-{trial.number:05d}-step-{trial.step:08d}.pt"

    def add_losses(self, trial: int, step: int, losses: Sequence[float]) -> None:
        """Appends the losses of a trial's steps from `step` on."""
        try:
            with self.losses.open("a", encoding="utf-8") as file:
                file.write(_line(trial, step, losses))
        except OSError as error:
            raise RunError(f"cannot write {self.losses}: {error.strerror}") from None

    def _sync_losses(self) -> None:
        """On the disk before `trials.json` speaks of them."""
        if self.losses.is_file():
            with self.losses.open("rb") as file:
                os.fsync(file.fileno())

    def cut_losses(self, trials: Sequence[Trial]) -> dict[int, list[float]]:
        """Forgets losses of steps that will be trained again; returns the rest, by trial."""
        found = {trial.number: losses[: trial.step] for trial, losses in self.read_losses(trials)}
        for trial in trials:
            if len(found[trial.number]) < trial.step:
                raise RunError(
                    f"{self.losses} ends at step {len(found[trial.number])} of trial {trial.number}, which has trained "
                    f"{trial.step}; the sweep cannot go on without the rest"
                )
        write_whole(self.losses, "".join(_line(number, 0, losses) for number, losses in found.items() if losses))
        return found

    def read_losses(self, trials: Sequence[Trial]) -> list[tuple[Trial, list[float]]]:
        """Each trial's losses; of a step that was trained twice, the later."""
        found: dict[int, list[float]] = {trial.number: [] for trial in trials}
        text = self.losses.read_text(encoding="utf-8", errors="replace") if self.losses.is_file() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                number, step, new = entry["trial"], entry["step"], entry["losses"]
            except (ValueError, TypeError, KeyError):
                break  # the last line, cut short
            if number in found and step <= len(found[number]):
                found[number][step:] = new
        return [(trial, found[trial.number]) for trial in trials]


def _line(trial: int, step: int, losses: Sequence[float]) -> str:
    return json.dumps({"trial": trial, "step": step, "losses": list(losses)}) + "\n"


def _remove_others(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink(missing_ok=True)


def _save(content: Any, path: Path) -> None:
    """Whole or not at all, and on the disk before anything speaks of it."""
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error}") from None


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RunError(f"{path} is gone; the sweep cannot go on without it") from None
    except Exception as error:
        raise RunError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
