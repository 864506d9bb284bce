"""The outcome: what a sweep leaves when it has ended.

Takes the folder. Exports the best trial's weights, makes the page with all trials' curves, and says what came of it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burstpool.artifact import write_whole
from burstpool.errors import RunError
from burstpool.report.sweep_contents import SweepContents, TrialCurve
from burstpool.report.sweep_page import sweep_page
from burstpool.run.export import write_weights
from burstpool.sweeping.folder import SweepFolder, SweepRecord, SweepState
from burstpool.sweeping.trials import Trial, best_trial, described, short
from burstpool.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep left."""

    folder: Path
    record: SweepRecord
    """What was asked."""
    state: SweepState
    """What came of it."""
    best: Trial
    """The lowest objective among the trials that were trained the longest."""
    weights: Path
    """The best trial in safetensors, with the user's own keys."""
    report: Path

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All, by number."""
        return self.state.trials

    @property
    def samples_per_s(self) -> float:
        """Over all trials, of the time spent in steps."""
        return self.state.num_samples / self.state.train_time_s if self.state.train_time_s else 0.0

    @property
    def speed_up(self) -> float:
        """Over one trial after another, as estimated before the sweep began."""
        return self.samples_per_s / self.record.sizing.serial_samples_per_s


def write_outcome(folder: SweepFolder, record: SweepRecord, state: SweepState) -> SweepResult:
    """Exports and reports; refuses a sweep in which no trial could be trained."""
    best = best_trial(state.trials)
    if best is None:
        failed = next((trial for trial in state.trials if trial.reason), None)
        why = f"; trial {failed.number} ({described(failed.settings)}): {failed.reason}" if failed else ""
        raise RunError(f"no trial of {record.job} could be trained{why}")
    weights = folder.weights
    if not weights.is_file():
        if record.keep_all:
            folder.make(folder.all_weights)
            for trial in (trial for trial in state.trials if trial.state == "done"):
                saved = folder.load_trial(trial)["state"]
                write_weights(saved, folder.all_weights / f"trial-{trial.number:05d}.safetensors")
        write_weights(folder.load_trial(best)["state"], weights)  # last: that it is there says that all are
    report = write_whole(folder.report, sweep_page(sweep_contents(folder)))
    return SweepResult(folder=folder.path, record=record, state=state, best=best, weights=weights, report=report)


def in_short(result: SweepResult) -> dict[str, Any]:
    """What scripts want to know of a sweep."""
    return {
        "run_folder": str(result.folder),
        "job": result.record.job,
        "search": result.record.search,
        "objective": result.record.objective,
        "trials": [_trial(trial) for trial in result.trials],
        "best": _trial(result.best),
        "wall_time_s": result.state.wall_time_s,
        "train_time_s": result.state.train_time_s,
        "num_arrays": result.state.num_arrays,
        "apart": [{"trials": list(trials), "reason": reason} for trials, reason in apart(result.state)],
        "array_size": result.record.sizing.places,
        "num_samples": result.state.num_samples,
        "samples_per_s": result.samples_per_s,
        "serial_samples_per_s": result.record.sizing.serial_samples_per_s,
        "weights": str(result.weights),
        "report": str(result.report),
    }


def apart(state: SweepState) -> list[tuple[tuple[int, ...], str]]:
    """Trials of each group that could not be fused with those before, and why."""
    found = []
    for group, reason in state.notes.items():
        trials = tuple(trial.number for trial in state.trials if trial.group == int(group))
        if trials:
            found.append((trials, reason))
    return found


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "settings": dict(trial.settings),
        "state": trial.state,
        "steps": trial.step,
        "loss": trial.loss,
        "objective": trial.value,
        "reason": trial.reason or None,
    }


def sweep_contents(folder: SweepFolder) -> SweepContents:
    """All that a report shows of a sweep, in the report's words; also of one that still runs."""
    record, state = SweepRecord.load(folder.record), folder.load_state()
    best = best_trial(state.trials)
    curves = tuple(
        TrialCurve(
            number=trial.number,
            name=f"trial {trial.number}: {described(trial.settings)}",
            settings={name: short(value) for name, value in trial.settings.items()},
            state=trial.state,
            losses=tuple(losses[: trial.step]),
            reports=tuple((report.step, report.value) for report in trial.reports),
            reason=trial.reason,
        )
        for trial, losses in folder.read_losses(state.trials)
    )
    rate = state.num_samples / state.train_time_s if state.train_time_s else None
    return SweepContents(
        job=record.job,
        search=record.search,
        objective=record.objective,
        trials=curves,
        best=best.number if best else None,
        samples_per_s=rate,
        serial_samples_per_s=record.sizing.serial_samples_per_s,
        num_arrays=state.num_arrays,
        wall_time_s=state.wall_time_s,
        details=_details(folder, record),
        apart=tuple(apart(state)),
        notes=() if state.finished else ("The sweep has not come to its end.",),
        made_by=f"Burstpool {__version__}",
    )


def _details(folder: SweepFolder, record: SweepRecord) -> dict[str, str]:
    axes = record.space.axes
    found = {"source": record.source, "started": record.started, "folder": str(folder.path)}
    found |= {name: ", ".join(map(str, getattr(axis, "values", (axis,)))) for name, axis in axes.items()}
    found |= {"steps": str(record.steps), "array size": str(record.sizing.places), "mode": record.mode}
    options = record.step_options
    found |= {"autocast": options.autocast or "", "clip norm": str(options.clip_norm or ""), "device": record.device}
    found |= {"compiled": "where faster" if options.compiled else ""}
    found |= {"seed of the search": str(record.seed)}
    found |= {f"{name} version": version for name, version in record.versions.items()}
    return {name: text for name, text in found.items() if text}
