"""Run folders: where everything of one run lies together.

run.json             what was run: job, hyper-parameters, steps, versions
plan.json            on which devices
schedule.json        the actions of each of them
options.json         how
losses.jsonl         a line a step: step, loss, step_time_s
timeline.json        what each device did in the last steps
checkpoints/         the last ones, `step-00000200/`
weights.safetensors  the trained model, with the user's own keys
error.txt            the workers' tracebacks, if the run failed
"""

import contextlib
import datetime
import fcntl
import json
import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from burstpool.artifact import STRICT, Artifact, write_whole
from burstpool.errors import ArtifactError, RunError

_LOG = logging.getLogger(__name__)

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Artifact):
    """What was run."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    job: str
    """How reports call it."""
    source: str
    """`/home/me/job.py`, `zoo:vgg16`; "" for a job that was made in a program."""
    settings: Mapping[str, Setting]
    """The hyper-parameters."""
    steps: int
    """At which step it ends, those before a resume included."""
    started: str
    """When, in ISO format."""
    versions: Mapping[str, str]
    """Of burstpool, torch and Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """One line of `losses.jsonl`."""

    step: int
    loss: float
    """Mean over the samples of the step."""
    step_time_s: float


class RunFolder:
    """Paths of one run, and its losses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = path / "run.json"
        self.plan = path / "plan.json"
        self.schedule = path / "schedule.json"
        self.options = path / "options.json"
        self.losses = path / "losses.jsonl"
        self.timeline = path / "timeline.json"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"
        self.error = path / "error.txt"

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """Makes the folder; one that holds a run already is refused."""
        folder = cls(path)
        if folder.record.exists() or (path / "sweep.json").exists():
            raise RunError(used(path))
        try:
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make run folder {path}: {error.strerror}") from None
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """A folder that holds a run."""
        folder = cls(path)
        if not folder.record.is_file():
            is_sweep = (path / "sweep.json").is_file()
            raise RunError(
                f"{path} is "
                + ("a sweep; burstpool sweep goes on with it" if is_sweep else "no run folder: it has no run.json")
            )
        return folder

    def cut_losses(self, step: int) -> None:
        """Forgets the losses from this step on: they are about to be computed again."""
        kept = [line for line in read_losses(self.losses) if line.step < step]
        write_whole(self.losses, "".join(_line(loss) for loss in kept))

    def add_losses(self, losses: Iterable[StepLoss]) -> None:
        """Appends lines."""
        try:
            with self.losses.open("a", encoding="utf-8") as file:
                file.writelines(_line(loss) for loss in losses)
        except OSError as error:
            raise RunError(f"cannot write {self.losses}: {error.strerror}") from None


def used(path: Path) -> str:
    """What is said of a folder that holds a run, and is given for a new one."""
    return f"{path} holds a run already; pass --resume {shlex.quote(str(path))} to go on with it, or another folder"


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps other processes from training in the same folder; the system lets go of it when this one ends or dies."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process trains {path}; wait until it has ended, or stop it") from None
        except OSError as error:
            _LOG.debug("%s cannot be locked: %s", path, error)  # not every network file system can
        yield
    finally:
        os.close(descriptor)


def read_losses(path: Path) -> list[StepLoss]:
    """All whole lines; a last one that was cut short is left out."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    found = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            found.append(StepLoss(step=int(entry["step"]), loss=entry["loss"], step_time_s=entry["step_time_s"]))
        except (ValueError, TypeError, KeyError):
            break
    return found


def new_run_path(name: str, root: Path) -> Path:
    """`runs/tiny_vgg-20260114-093012`, with a number behind it where that is taken."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    stem = re.sub(r"[^\w.-]+", "-", name).strip("-") or "run"
    path, count = root / f"{stem}-{stamp}", 1
    while path.exists():
        count += 1
        path = root / f"{stem}-{stamp}-{count}"
    return path


def _line(loss: StepLoss) -> str:
    return json.dumps({"step": loss.step, "loss": loss.loss, "step_time_s": round(loss.step_time_s, 9)}) + "\n"
