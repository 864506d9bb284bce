"""The figures of a report: headline numbers, and the seconds of each block.

Takes Contents and Timelines. Returns numbers; `words.py` writes them. Pure.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from burstpool.report.contents import Contents
from burstpool.report.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one wants to know first; None where nobody knows."""

    model: str
    strategy: str
    num_devices: int
    num_used_devices: int
    """Those that have anything to do."""
    samples_per_step: int | None
    num_steps: int | None
    """Trained so far."""
    predicted_step_s: float | None
    measured_step_s: float | None
    """The median."""
    step_error: float | None
    """Predicted over measured, less 1: below 0 where the prediction was too fast."""
    predicted_samples_per_s: float | None
    measured_samples_per_s: float | None
    predicted_utilisation: float | None
    """Mean over the devices that have anything to do."""
    measured_utilisation: float | None
    first_loss: float | None
    """The first that is a finite number."""
    last_loss: float | None
    """None where it is no finite number."""


def figures(contents: Contents) -> Figures:
    """The headline of a report."""
    predicted_s = contents.predicted.step_time_s if contents.predicted else contents.predicted_step_s
    measured_s = _measured_step_s(contents)
    losses = [step.loss for step in contents.trained if math.isfinite(step.loss)]
    return Figures(
        model=contents.model,
        strategy=contents.strategy,
        num_devices=max([contents.num_devices, *(timeline.num_devices for timeline in contents.timelines)]),
        num_used_devices=len(used_devices(contents)),
        samples_per_step=contents.samples_per_step,
        num_steps=contents.trained[-1].step + 1 if contents.trained else None,
        predicted_step_s=predicted_s,
        measured_step_s=measured_s,
        step_error=predicted_s / measured_s - 1 if predicted_s is not None and measured_s else None,
        predicted_samples_per_s=_rate(contents.samples_per_step, predicted_s),
        measured_samples_per_s=_rate(contents.samples_per_step, measured_s),
        predicted_utilisation=_utilisation(contents.predicted),
        measured_utilisation=_utilisation(contents.measured),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses and math.isfinite(contents.trained[-1].loss) else None,
    )


def used_devices(contents: Contents) -> tuple[int, ...]:
    """Those that the plan, or else a timeline, gives something to do."""
    planned = {device for block in contents.blocks for device in block.devices}
    seen = {event.device for timeline in contents.timelines for event in timeline.events if event.lane != "background"}
    return tuple(sorted(planned or seen))


def block_seconds(timeline: Timeline) -> Mapping[tuple[str, str], float]:
    """(block, kind) → seconds a step on its slowest device, median over the steps; background work is left out."""
    spent: dict[tuple[str, str, int, int], float] = defaultdict(float)
    for event in timeline.events:
        if event.lane != "background":
            spent[event.block, event.kind, event.step, event.device] += event.stop_s - event.start_s
    slowest: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for (block, kind, step, _), total_s in spent.items():
        of_step = slowest[block, kind]
        of_step[step] = max(of_step.get(step, 0.0), total_s)
    return {key: statistics.median(of_step.values()) for key, of_step in slowest.items()}


def _measured_step_s(contents: Contents) -> float | None:
    if contents.measured is not None:
        return contents.measured.step_time_s
    return statistics.median(step.time_s for step in contents.trained) if contents.trained else None


def _rate(samples: int | None, step_s: float | None) -> float | None:
    return samples / step_s if samples is not None and step_s else None


def _utilisation(timeline: Timeline | None) -> float | None:
    if timeline is None:
        return None
    used = [share for share in timeline.utilisation() if share]
    return statistics.fmean(used) if used else None
