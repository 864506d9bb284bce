"""`burstpool sweep`: trains many settings of one job at once, and says which is best.

Takes a job and the values its hyper-parameters may have. Trials that can be fused train as one; each comes out as if it
had been trained alone. Shows a table while it runs and writes a run folder with every trial, the best one's weights and
a page of curves. Ctrl-C writes a checkpoint; `--resume RUN` goes on. `--json` prints what came of it as one object.
"""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from burstpool.artifact import json_line
from burstpool.cli.show import seconds
from burstpool.errors import RunError
from burstpool.report.words import runs

if TYPE_CHECKING:
    from burstpool.sweeping.outcome import SweepResult
    from burstpool.sweeping.runner import Observer, SweepProgress
    from burstpool.sweeping.trials import Trial

_MOST_ROWS = 20
"""Of the live table."""
_MOST_REASONS = 5
_PLAIN_INTERVAL_S = 5.0
_WHEN_RESUMING = ("source", "resume", "checkpoint_every", "as_json", "help")
"""What a sweep that goes on may be told."""
_ORDER = {"running": 0, "waiting": 1, "done": 2, "paused": 3, "stopped": 4, "failed": 5}
_SPACE = "Values of a hyper-parameter: name=a,b,c or a range, name=float:0.1..0.9, log:1e-4..1e-1, int:16..64, logint:…"


def sweep(
    context: typer.Context,
    source: Annotated[
        str | None, typer.Argument(metavar="JOB", help="job.py, job.py:function or zoo:NAME.", show_default=False)
    ] = None,
    space: Annotated[list[str] | None, typer.Option("--set", help=_SPACE)] = None,
    search: Annotated[str, typer.Option(help="grid, random, asha or optuna.")] = "grid",
    trials: Annotated[int | None, typer.Option(help="How many; all there are if left out.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a trial that is trained to its end.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the search; a trial's own seed is its job's.", min=0)] = 0,
    eta: Annotated[int, typer.Option(help="With asha: one in so many trials goes on at each rung.")] = 3,
    first_rung: Annotated[int | None, typer.Option(help="With asha: steps after which the first trials stop.")] = None,
    array_size: Annotated[int | None, typer.Option(help="Trials trained as one; measured if left out.")] = None,
    mode: Annotated[str, typer.Option(help="How arrays run: fastest, measured, rules or serial.")] = "fastest",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Torch's threads on the CPU; 1 suits small models.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step; the job's if left out.")] = None,
    autocast: Annotated[
        str | None, typer.Option(help="bf16 or fp16, with a loss scale for each trial; also in evaluation.")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Clip each trial's gradients to this norm over its whole model.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Try torch.compile's steps, too; keep the fastest. Compiling takes long.")
    ] = False,
    keep_all: Annotated[
        bool, typer.Option("--keep-all", help="Export every finished trial, not the best alone.")
    ] = False,
    checkpoint_every: Annotated[float, typer.Option(help="Seconds between checkpoints.", min=0)] = 30.0,
    run_folder: Annotated[Path | None, typer.Option(help="Where to write; runs/NAME-sweep-TIME if left out.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A sweep's run folder to go on with, as it was.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as one JSON object.")] = False,
) -> None:
    """Train many settings of a job, fused into arrays, and find the best."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if resume is not None and (given := _given(context)):
        raise RunError(f"--resume {resume} goes on as it was; leave out {', '.join(given)}")
    from burstpool.sweeping import runner
    from burstpool.sweeping.outcome import in_short
    from burstpool.sweeping.space import parse_space
    from burstpool.sweeping.sweep import sweep as run_sweep

    options: dict[str, Any] = {
        "search": search,
        "trials": trials,
        "steps": steps,
        "seed": seed,
        "eta": eta,
        "first_rung": first_rung,
        "array_size": array_size,
        "mode": mode,
        "device": device,
        "threads": threads,
        "batch": batch,
        "autocast": autocast,
        "clip_norm": clip_norm,
        "compiled": compiled,
        "keep_all": keep_all,
        "checkpoint_every_s": checkpoint_every,
        "run_folder": run_folder,
        "resume": resume,
    }
    axes = parse_space(space or [])
    with live_table() as observer:
        try:
            result = run_sweep(source, axes, observer=observer, **options)
        except runner.InterruptedSweep as error:
            print(f"burstpool: {error}; go on with: burstpool sweep --resume {error.folder}", file=sys.stderr)
            raise
    if as_json:
        print(json_line(in_short(result)))
        return
    show_result(result, Console())


def _given(context: typer.Context) -> list[str]:
    """Options on the command line that say what to sweep, and how."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name}
    sources = {name: context.get_parameter_source(name) for name in options if name not in _WHEN_RESUMING}
    return [options[name] for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


@contextmanager
def live_table() -> "Iterator[Observer]":
    """A table on a terminal, a line now and then elsewhere; on standard error."""
    if not sys.stderr.isatty():
        yield _plain()
        return
    with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:
        yield lambda progress: live.update(_table(progress))


def _plain() -> "Observer":
    last = time.monotonic()

    def tell(progress: "SweepProgress") -> None:
        nonlocal last
        if time.monotonic() - last >= _PLAIN_INTERVAL_S:
            with suppress(OSError):  # whoever read along may have gone; the sweep goes on
                print(f"sweeping: {_summary(progress)}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return tell


def _summary(progress: "SweepProgress") -> str:
    if progress.measured_size is not None:
        size = f"{progress.measured_size} trial{'s' if progress.measured_size > 1 else ''}"
        return f"measuring how fast an array of {size} trains; {progress.wall_time_s:.0f} s"
    states = [trial.state for trial in progress.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
    over = progress.samples_per_s / progress.serial_samples_per_s
    rate = f"{progress.samples_per_s:,.0f} samples/s, {over:.1f}× one after another (estimated)"
    return f"{len(states)} of {progress.num_trials} trials: {counts}; {rate}; {progress.wall_time_s:.0f} s"


def _table(progress: "SweepProgress") -> Table:
    ordered = sorted(progress.trials, key=lambda trial: (_ORDER[trial.state], trial.value or 0.0, trial.number))
    table = _trials_table(ordered[:_MOST_ROWS], progress.steps)
    table.caption = Text(_summary(progress))
    table.caption_justify = "left"
    return table


def _trials_table(trials: "list[Trial]", steps: int) -> Table:
    from burstpool.sweeping.trials import described

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    for title in ("step", "loss", "objective"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold")
    for trial in trials:
        table.add_row(
            str(trial.number),
            Text(described(trial.settings)),
            f"{trial.step}/{steps}",
            "" if trial.loss is None else f"{trial.loss:.4g}",
            "" if trial.value is None else f"{trial.value:.4g}",
            Text(f"{trial.state}: {trial.reason}" if trial.reason else trial.state),
        )
    return table


def show_result(result: "SweepResult", console: Console, *, most: int = _MOST_ROWS, files: bool = True) -> None:
    """The best trials as a table, and where everything is."""
    from burstpool.sweeping.outcome import apart
    from burstpool.sweeping.trials import described

    ranked = sorted(
        result.trials, key=lambda t: (t.state == "failed", -t.step, t.value if t.value is not None else 0.0)
    )
    console.print(_trials_table(ranked[:most], result.record.steps))
    if len(ranked) > most:
        failed = sum(trial.state == "failed" for trial in ranked[most:])
        console.print(f"and {len(ranked) - most} more{f', {failed} failed' if failed else ''}", highlight=False)
    line = (
        f"Best: trial {result.best.number}, {described(result.best.settings)}, {result.record.objective} "
        f"{result.best.value:.4g}"
    )
    console.print(line, markup=False, highlight=False)
    trained, whole = sum(trial.step for trial in result.trials), len(result.trials) * result.record.steps
    arrays = f"{result.state.num_arrays} array{'s' if result.state.num_arrays > 1 else ''}"
    console.print(
        f"{len(result.trials)} trials in {arrays} of up to {result.record.sizing.places}, "
        f"{trained:,} of {whole:,} steps in {seconds(result.state.wall_time_s)}: "
        f"{result.samples_per_s:,.0f} samples/s, {result.speed_up:.1f}× one after another (estimated)",
        highlight=False,
    )
    for trials, reason in apart(result.state)[:_MOST_REASONS]:
        console.print(f"Trials {runs(trials)} train apart: {reason}", markup=False, highlight=False)
    if files:
        paths = f"Weights: {result.weights}\nReport: {result.report}"
        console.print(paths, markup=False, highlight=False, soft_wrap=True)  # a path is copied whole
