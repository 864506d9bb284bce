"""What background jobs leave in the run folder of the foreground, whichever way they were run.

background/0/background.json   which job, its members' settings, how far it came and at what share of its speed
background/0/run/              of a single job: a run folder, which `burstpool train --resume` goes on with
background/0/losses.jsonl      of an array: a line a step, one number a member, null where it is none
background/0/weights/          of an array: `member-00.safetensors` and so on, with the user's own keys
background/0/array.pt          of an array: what is needed to go on

Reading them imports no torch: reports do.
"""

import contextlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from burstpool.artifact import STRICT, Artifact, write_whole
from burstpool.errors import ArtifactError, in_a_line
from burstpool.run.folder import RunFolder, RunRecord, Setting, read_losses
from burstpool.share.base import BACKGROUND, ENDLESS, Background, BackgroundOutcome, background_path

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundRecord(Artifact):
    """What became of one background job."""

    __pydantic_config__ = STRICT
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError

    schema_version: int = 1
    job: str
    """How reports call it."""
    source: str
    """`/home/me/job.py`, `zoo:vgg16`."""
    settings: tuple[Mapping[str, Setting], ...]
    """One for each member."""
    device: int
    steps: int
    """Trained in all, also before the foreground began."""
    steps_beside: int
    """Trained while the foreground did."""
    kept: float | None
    """Its speed then over its speed alone."""
    state: str
    reason: str
    """Why it failed or was evicted, last."""
    restarts: int
    evictions: int
    saved_steps: int | None = None
    """Of which step the weights are: an earlier one than the last where it was not given the time to save that."""


class BackgroundFolder:
    """Paths of one background job, absolute ones: several processes write there."""

    def __init__(self, path: Path) -> None:
        self.path = path = path.resolve()
        self.record = path / "background.json"
        self.run = RunFolder(path / "run")
        self.array = path / "array.pt"
        self.losses = path / "losses.jsonl"
        self.weights = path / "weights"

    @classmethod
    def of(cls, run_folder: Path, number: int) -> "BackgroundFolder":
        """That of background `number` in the foreground's run folder."""
        return cls(background_path(run_folder, number))

    @classmethod
    def all_in(cls, run_folder: Path) -> "list[BackgroundFolder]":
        """Those that have a record, by number."""
        numbers = sorted(int(path.name) for path in (run_folder / BACKGROUND).glob("*") if path.name.isdecimal())
        folders = [cls.of(run_folder, number) for number in numbers]
        return [folder for folder in folders if folder.record.is_file()]

    def note(
        self, background: Background, outcome: BackgroundOutcome, *, saved_steps: int | None = None
    ) -> BackgroundOutcome:
        """Writes the record, and an array's losses: what is small and can always be had.

        Neither this nor `keep` raises, whatever happens to the disk: the foreground has what it needs. What could not
        be saved has failed, in the outcome that is returned.
        """
        with Saving(background.name) as saving:
            self._note(background, outcome, saved_steps)
        return saving.judged(outcome)

    def keep(self, background: Background, outcome: BackgroundOutcome) -> BackgroundOutcome:
        """Writes the weights, then the same."""
        saved_steps = None
        with Saving(background.name) as saving:
            saved_steps = self._export(background)
        return self.note(background, saving.judged(outcome), saved_steps=saved_steps)

    def _note(self, background: Background, outcome: BackgroundOutcome, saved_steps: int | None) -> None:
        from burstpool.job import as_recorded, from_anywhere

        self.path.mkdir(parents=True, exist_ok=True)
        BackgroundRecord(
            job=background.name,
            source=from_anywhere(background.source),
            settings=tuple({k: as_recorded(v) for k, v in member.items()} for member in background.settings),
            device=outcome.device,
            steps=len(outcome.losses),
            steps_beside=outcome.steps,
            kept=outcome.kept,
            state=outcome.state,
            reason=outcome.reason,
            restarts=outcome.restarts,
            evictions=outcome.evictions,
            saved_steps=saved_steps,
        ).save(self.record)
        if len(background.settings) > 1:
            write_whole(self.losses, "".join(_line(step, losses) for step, losses in enumerate(outcome.losses)))
        elif self.run.record.is_file():
            # A run without an end of its own has come to it: else whoever goes on with it would train for ever.
            ends_at = len(outcome.losses) if background.steps == ENDLESS else background.steps
            replace(RunRecord.load(self.run.record), steps=ends_at).save(self.run.record)

    def _export(self, background: Background) -> int | None:
        """The weights that were saved last, for `safetensors`; of which step they are, None where none were saved."""
        from burstpool.run.checkpoint import CheckpointState, latest_checkpoint
        from burstpool.run.export import export_weights
        from burstpool.share.array_file import export_members, load_array

        if self.array.is_file():
            saved = load_array(self.array)
            export_members(saved, self.weights)
            return saved.step
        if (checkpoint := latest_checkpoint(self.run.checkpoints)) is None:
            return None
        export_weights(checkpoint, self.run.weights)
        return CheckpointState.load(checkpoint / "state.json").step

    def losses_by_member(self) -> list[tuple[float, ...]]:
        """Each member's, step by step; a single job is one. NaN where a loss was no finite number."""
        if not self.losses.is_file():
            return [tuple(loss.loss for loss in read_losses(self.run.losses))]
        lines = self.losses.read_text(encoding="utf-8").splitlines()
        steps = [[math.nan if x is None else float(x) for x in json.loads(line)["losses"]] for line in lines]
        return [tuple(losses) for losses in zip(*steps, strict=True)]


class Saving(contextlib.AbstractContextManager["Saving"]):
    """Takes in what goes wrong inside, and says so."""

    def __init__(self, name: str) -> None:
        self._name, self.failure = name, ""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failure = f"what it has learnt could not be saved: {in_a_line(error)}"
        _LOG.warning("background %s: %s", self._name, self.failure)
        return True

    def judged(self, outcome: BackgroundOutcome) -> BackgroundOutcome:
        """One of which something could not be saved has failed; why it had already comes first."""
        is_worse = self.failure and outcome.state != "failed"
        return replace(outcome, state="failed", reason=self.failure) if is_worse else outcome


def _line(step: int, losses: Sequence[Any]) -> str:
    return json.dumps({"step": step, "losses": [x if math.isfinite(x) else None for x in losses]}) + "\n"
