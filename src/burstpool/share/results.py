"""What background jobs leave in the run folder of the foreground, whichever way they were run.

background/0/background.json   which job, its members' settings, how far it came and at what share of its speed
background/0/run/              of a single job: a run folder, which `burstpool train --resume` goes on with
background/0/losses.jsonl      of an array: a line a step, one number a member, null where it is none
background/0/weights/          of an array: `member-00.safetensors` and so on, with the user's own keys
background/0/array.pt          of an array: what is needed to go on

Reading them imports no torch: reports do.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from burstpool.artifact import STRICT, Artifact, write_whole
from burstpool.errors import ArtifactError
from burstpool.run.folder import RunFolder, Setting, read_losses
from burstpool.share.base import Background, BackgroundOutcome, background_path

if TYPE_CHECKING:
    from burstpool.fusion.array import FusedArray


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

    def keep(self, background: Background, outcome: BackgroundOutcome) -> None:
        """Writes what is known at the end: the record, an array's losses, and the weights of a single job."""
        from burstpool.job import as_recorded, from_anywhere
        from burstpool.run.checkpoint import latest_checkpoint
        from burstpool.run.export import export_weights

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
        ).save(self.record)
        if len(background.settings) > 1:
            write_whole(self.losses, "".join(_line(step, losses) for step, losses in enumerate(outcome.losses)))
        elif (checkpoint := latest_checkpoint(self.run.checkpoints)) is not None:
            export_weights(checkpoint, self.run.weights)

    def losses_by_member(self) -> list[tuple[float, ...]]:
        """Each member's, step by step; a single job is one. NaN where a loss was no finite number."""
        if not self.losses.is_file():
            return [tuple(loss.loss for loss in read_losses(self.run.losses))]
        lines = self.losses.read_text(encoding="utf-8").splitlines()
        steps = [[math.nan if x is None else float(x) for x in json.loads(line)["losses"]] for line in lines]
        return [tuple(losses) for losses in zip(*steps, strict=True)]


def write_members(array: "FusedArray", folder: Path) -> None:
    """The weights of each member, under the user's own keys."""
    from burstpool.run.export import write_weights

    folder.mkdir(parents=True, exist_ok=True)
    digits = max(len(str(len(array) - 1)), 2)
    for index in range(len(array)):
        weights = {key: tensor.detach().cpu().clone() for key, tensor in array.state.member(index).items()}
        write_weights(weights, folder / f"member-{index:0{digits}}.safetensors")


def _line(step: int, losses: Sequence[Any]) -> str:
    return json.dumps({"step": step, "losses": [x if math.isfinite(x) else None for x in losses]}) + "\n"
