"""Outcome: what a run leaves when all its workers have ended.

Takes the joined losses and the workers' results. Writes the measured timeline and the weights into the run folder.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from burstpool.report.timeline import Timeline
from burstpool.run.export import export_weights
from burstpool.run.folder import RunFolder, StepLoss
from burstpool.run.measured import measured_timeline
from burstpool.run.recorder import RecordedStep
from burstpool.schedule.actions import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """What one worker hands back."""

    step: int
    """Steps that are done."""
    checkpoint: str
    """The last one that was written."""
    recorded: list[RecordedStep]
    """Times on a clock that all workers of a machine share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run left."""

    folder: Path
    """The run folder."""
    losses: tuple[StepLoss, ...]
    """Of the steps that this call ran."""
    timeline: Timeline | None
    """What each device did in the last steps."""
    checkpoint: Path
    """The last one."""
    weights: Path
    """The trained model in safetensors, with the user's own keys."""

    @property
    def step_time_s(self) -> float:
        """Median of the steps that this call ran."""
        return statistics.median(loss.step_time_s for loss in self.losses) if self.losses else 0.0


def write_outcome(
    folder: RunFolder, schedule: Schedule, losses: Sequence[StepLoss], results: Sequence[WorkerResult]
) -> Result:
    """Writes what is known at the end only; `results` is by rank."""
    checkpoint = Path(results[0].checkpoint)
    timeline = measured_timeline(
        schedule, [result.recorded for result in results], step_times_s=[loss.step_time_s for loss in losses]
    )
    if timeline is not None:
        timeline.save(folder.timeline)
    return Result(
        folder=folder.path,
        losses=tuple(losses),
        timeline=timeline,
        checkpoint=checkpoint,
        weights=export_weights(checkpoint, folder.weights),
    )
