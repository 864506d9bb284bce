"""`burstpool report`: what a run did, and what was predicted, on one page.

Takes a run folder, or timeline, plan and profile files; those go before the folder's own. Writes one HTML file that
needs nothing else and, with `--perfetto`, a trace for ui.perfetto.dev. Shows what is there: where a folder has no
predicted timeline, the plan is simulated if `plan.inputs.json` says what it was made from.
"""

import dataclasses
import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from burstpool import __version__
from burstpool.artifact import json_line, write_whole
from burstpool.cli.plan import load_profiles
from burstpool.errors import ArtifactError, BurstpoolError, PlanError
from burstpool.plan.inputs import PlanInputs
from burstpool.plan.plan import Plan
from burstpool.profiling.profile import Profile
from burstpool.report.contents import BackgroundJob, Contents, LayerTime, PlannedWork, TrainedStep
from burstpool.report.figures import Figures, figures
from burstpool.report.html import page
from burstpool.report.perfetto import trace
from burstpool.report.sweep_contents import TrialCurve
from burstpool.report.sweep_page import sweep_page
from burstpool.report.timeline import WHOLE_STEP, Timeline
from burstpool.report.words import percent, seconds, signed_percent
from burstpool.run.folder import RunFolder, RunRecord, read_losses
from burstpool.run.options import RunOptions
from burstpool.schedule.lower import lower
from burstpool.schedule.simulate import simulate
from burstpool.share.results import BackgroundFolder, BackgroundRecord
from burstpool.share.step_log import SHARING, StepLog, slowdowns

PREDICTED = "predicted.json"
"""The predicted timeline in a run folder, where whoever started the run had one."""
PROFILE = "profile.json"
"""The profile in a run folder, likewise."""


def report(
    run_folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run folder.", show_default=False)
    ] = None,
    timelines: Annotated[
        list[Path] | None, typer.Option("--timeline", help="A timeline file; one predicted, one measured.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan file.")] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the page; report.html in the run folder.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Where to write a trace for ui.perfetto.dev.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Make one page of a run: predicted and measured, plan, losses, layers."""
    if run_folder is not None and (run_folder / "sweep.json").is_file():
        unused = {"--timeline": timelines, "--plan": plan, "--profile": profile, "--perfetto": perfetto}
        if given := [option for option, value in unused.items() if value]:
            raise ArtifactError(
                f"{run_folder} is a sweep, which has no plan and no timeline; leave out {', '.join(given)}"
            )
        _report_sweep(run_folder, output, open_page=open_page, as_json=as_json)
        return
    contents = gather(run_folder, timelines=timelines or (), plan_file=plan, profile_file=profile)
    if perfetto is not None and not contents.timelines:
        raise ArtifactError("there is no timeline to make a trace of; give --timeline timeline.json")
    written = write_whole(output or (run_folder or Path()) / "report.html", page(contents))
    if perfetto is not None:
        write_whole(perfetto, json.dumps(trace(contents.timelines), separators=(",", ":")))
    found = figures(contents)
    if as_json:
        files = {"report": str(written), "perfetto": str(perfetto) if perfetto is not None else None}
        print(json_line(files | dataclasses.asdict(found) | {"notes": list(contents.notes)}))
    else:
        _show(found, contents, [written, *([perfetto] if perfetto is not None else [])])
    if open_page:
        webbrowser.open(written.resolve().as_uri())


def _report_sweep(run_folder: Path, output: Path | None, *, open_page: bool, as_json: bool) -> None:
    """The page of a sweep: curves of all trials; also of one that still runs."""
    from burstpool.sweeping.folder import SweepFolder  # imports torch
    from burstpool.sweeping.outcome import sweep_contents

    contents = sweep_contents(SweepFolder.open(run_folder))
    written = write_whole(output or run_folder / "report.html", sweep_page(contents))
    if as_json:
        print(json_line({"report": str(written), "trials": len(contents.trials), "best": contents.best}))
    else:
        line = f"{contents.job}: {len(contents.trials)} trials by {contents.search} search"
        for text in (line, *(f"note: {note}" for note in contents.notes), f"Written to {written}"):
            Console().print(text, markup=False, highlight=False, soft_wrap=True)
    if open_page:
        webbrowser.open(written.resolve().as_uri())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What there is."""

    folder: RunFolder | None
    plan: Plan | None
    inputs: PlanInputs | None
    profile: Profile | None
    timelines: dict[str, Timeline]
    """By source."""


def gather(
    run_folder: Path | None,
    *,
    timelines: Sequence[Path] = (),
    plan_file: Path | None = None,
    profile_file: Path | None = None,
) -> Contents:
    """All that can be shown of a run folder, of files, or of both; files go first."""
    if run_folder is None and not timelines and plan_file is None and profile_file is None:
        raise ArtifactError("give a run folder, or what to report on: --timeline, --plan or --profile")
    folder = RunFolder.open(run_folder) if run_folder is not None else None
    plan_file = plan_file or _inside(folder, "plan.json")
    plan = Plan.load(plan_file) if plan_file is not None else None
    inputs_file = PlanInputs.path(plan_file) if plan_file is not None else None
    inputs = PlanInputs.load(inputs_file) if inputs_file is not None and inputs_file.is_file() else None
    profile_file = profile_file or _inside(folder, PROFILE)
    profile = load_profiles([profile_file])[0] if profile_file is not None else None
    if profile is None and inputs is not None:
        profile = inputs.profiles[0]
    found = _Found(folder=folder, plan=plan, inputs=inputs, profile=profile, timelines=_timelines(timelines, folder))
    return _contents(found)


def _inside(folder: RunFolder | None, name: str) -> Path | None:
    path = folder.path / name if folder is not None else None
    return path if path is not None and path.is_file() else None


def _timelines(given: Sequence[Path], folder: RunFolder | None) -> dict[str, Timeline]:
    found: dict[str, Timeline] = {}
    for path in given:
        timeline = Timeline.load(path)
        if timeline.source in found:
            raise ArtifactError(f"{path} is a second {timeline.source} timeline; give one predicted and one measured")
        found[timeline.source] = timeline
    for source, name in (("predicted", PREDICTED), ("measured", "timeline.json")):
        path_inside = _inside(folder, name)
        if source not in found and path_inside is not None:
            found[source] = Timeline.load(path_inside)
    return found


def _contents(found: _Found) -> Contents:
    record = RunRecord.load(found.folder.record) if found.folder is not None else None
    plan, profile = found.plan, found.profile
    predicted, failed = found.timelines.get("predicted"), ""
    if predicted is None:
        predicted, failed = _simulated(plan, found.inputs)
    measured = found.timelines.get("measured")
    names = (record.job if record else "", plan.model if plan else "", profile.model if profile else "", "a step")
    batch = max(share.num_samples for block in plan.blocks for share in block.shares) if plan and plan.blocks else None
    return Contents(
        model=next(name for name in names if name),
        strategy=plan.strategy if plan else "",
        num_devices=plan.num_devices if plan else 0,
        samples_per_step=plan.batch * plan.num_minibatches if plan else None,
        predicted_step_s=plan.step_time_s if plan else None,
        predicted=predicted,
        measured=measured,
        blocks=planned_work(plan),
        layers=_layers(profile, batch),
        layers_title=f"{profile.model} on {profile.device}, batch {_near(profile, batch)}" if profile else "",
        trained=_trained(found.folder),
        backgrounds=_backgrounds(found.folder),
        details=_details(record, found.folder),
        notes=tuple(note for note in (failed, *_notes(found, predicted, measured)) if note),
        made_by=f"Burstpool {__version__}",
    )


def _trained(folder: RunFolder | None) -> tuple[TrainedStep, ...]:
    losses = read_losses(folder.losses) if folder is not None else []
    return tuple(TrainedStep(step=loss.step, loss=loss.loss, time_s=loss.step_time_s) for loss in losses)


def _backgrounds(folder: RunFolder | None) -> tuple[BackgroundJob, ...]:
    if folder is None:
        return ()
    found: list[BackgroundJob] = []
    for job in BackgroundFolder.all_in(folder.path):
        record = BackgroundRecord.load(job.record)
        members = tuple(
            TrialCurve(
                number=member,
                name=", ".join(f"{name}={value}" for name, value in settings.items()) or record.job,
                settings={},
                state="done" if record.state == "ended" else record.state,  # as a trial's is called
                losses=losses,
                reports=(),
            )
            for member, (settings, losses) in enumerate(zip(record.settings, job.losses_by_member(), strict=False))
        )
        found.append(
            BackgroundJob(
                name=record.job,
                device=record.device,
                steps=record.steps_beside,
                kept=record.kept,
                state=record.state,
                reason=record.reason,
                members=members,
            )
        )
    return tuple(found)


def _simulated(plan: Plan | None, inputs: PlanInputs | None) -> tuple[Timeline | None, str]:
    """The predicted timeline, or why there is none."""
    if plan is None or inputs is None:
        return None, ""
    try:
        flow = inputs.dataflow(plan)
        return simulate(lower(plan, flow), inputs.cost(), flow), ""
    except PlanError as error:
        return None, f"The plan cannot be simulated: {error}."
    except BurstpoolError as error:
        return None, f"The plan cannot be simulated with what it was made from: {error}."


def planned_work(plan: Plan | None) -> tuple[PlannedWork, ...]:
    """The plan's blocks, in the words of a report."""
    return tuple(
        PlannedWork(
            name=block.name,
            num_layers=len(block.layers),
            devices=block.devices,
            samples=tuple(share.num_samples for share in block.shares),
        )
        for block in (plan.blocks if plan else ())
    )


def _layers(profile: Profile | None, batch: int | None) -> tuple[LayerTime, ...]:
    return tuple(
        LayerTime(name=row.name, kind=row.kind, forward_s=row.forward_s, backward_s=row.backward_s)
        for row in (profile.rows(_near(profile, batch)) if profile else ())
    )


def _near(profile: Profile, batch: int | None) -> int:
    """The samples a device gets, or the nearest that was measured."""
    return profile.batches[-1] if batch is None else min(max(batch, profile.batches[0]), profile.batches[-1])


def _details(record: RunRecord | None, folder: RunFolder | None) -> dict[str, str]:
    if record is None or folder is None:
        return {}
    found = {"source": record.source, "started": record.started, "folder": str(folder.path)}
    found |= {name: str(value) for name, value in record.settings.items()}
    if folder.options.is_file():
        options, usual = RunOptions.load(folder.options), RunOptions()
        for entry in dataclasses.fields(RunOptions):
            if (value := getattr(options, entry.name)) != getattr(usual, entry.name):
                found[entry.name] = str(value)
    found |= {f"{name} version": version for name, version in record.versions.items()}
    return {name: text for name, text in found.items() if text}


def _notes(found: _Found, predicted: Timeline | None, measured: Timeline | None) -> list[str]:
    notes = []
    if found.folder is not None and found.folder.error.is_file():
        lines = found.folder.error.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((text.strip() for text in reversed(lines) if text.strip()), "")
        notes.append(f"The run failed: {last} ({found.folder.error.name} says where).")
    if predicted is not None and measured is not None and predicted.num_devices != measured.num_devices:
        notes.append(f"{predicted.num_devices} devices were predicted, {measured.num_devices} were measured.")
    if measured is not None and any(event.kind == WHOLE_STEP for event in measured.events):
        notes.append("Measured steps were replayed whole, as one graph: the plan's blocks are not told apart in them.")
    if found.folder is not None and (found.folder.path / SHARING).is_file():
        notes.append(_shared(StepLog.load(found.folder.path / SHARING)))
    known = {block.name for block in found.plan.blocks} if found.plan else set()
    for timeline in (predicted, measured):
        own = (e for e in timeline.events if e.lane != "background" and e.kind != WHOLE_STEP) if timeline else ()
        names = {event.block for event in own}
        if timeline is not None and known and (strange := sorted(names - known)):
            notes.append(f"The {timeline.source} timeline is of another plan: this one has no block {strange[0]!r}.")
    return notes


def _shared(log: StepLog) -> str:
    """What a run beside background jobs is to be compared with: a prediction is of the step alone."""
    found = slowdowns(log)
    if found["alone_step_s"] is None:
        return "Background jobs were to run beside it; none did while it was measured."
    words = f"{found['slowdown']:.2f} times the {seconds(found['alone_step_s'])} that they took without"
    return f"Background jobs ran beside it: measured steps took {words}, predicted ones are without."


def _show(found: Figures, contents: Contents, written: Sequence[Path]) -> None:
    console = Console()
    words = []
    if found.predicted_step_s is not None:
        words.append(f"{seconds(found.predicted_step_s)} predicted")
    if found.measured_step_s is not None:
        words.append(f"{seconds(found.measured_step_s)} measured")
    line = f"{found.model}: a step takes {', '.join(words)}" if words else found.model
    line += f" (error {signed_percent(found.step_error)})" if found.step_error is not None else ""
    if found.measured_utilisation is not None:
        line += f"; devices are {percent(found.measured_utilisation)} busy"
    for text in (line, *(f"note: {note}" for note in contents.notes), *(f"Written to {path}" for path in written)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
