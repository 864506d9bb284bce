"""`burstpool sweep`: trains many settings of one job at once, and says which is best.

Takes a job and the values its hyper-parameters may have. Trials that can be fused train as one; each comes out as if it
had been trained alone. Shows a table while it runs and writes a run folder with every trial, the best one's weights and
a page of curves. Ctrl-C writes a checkpoint; `--resume RUN` goes on. `--json` prints what came of it as one object.
"""

import logging
import shlex
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
from burstpool.cli.given import given_options
from burstpool.cli.json_alone import json_alone
from burstpool.cli.show import seconds
from burstpool.errors import RunError
from burstpool.report.words import runs

if TYPE_CHECKING:
    from burstpool.sweeping.outcome import SweepResult
    from burstpool.sweeping.runner import Observer, SweepProgress
    from burstpool.sweeping.trials import Trial

_MOST_ROWS = 20
"""Of the live table."""
_NUMBERS = ("step", "loss", "objective")
_NARROW = 60
"""Columns below which a table has the last of the numbers alone."""
_GAP = 2
"""Blanks between columns."""
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
    given = [written for name, written in given_options(context).items() if name not in _WHEN_RESUMING]
    if resume is not None and given:
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
    try:
        with json_alone(as_json), live_table() as observer:
            result = run_sweep(source, axes, observer=observer, **options)
    except runner.InterruptedSweep as error:  # said when the table is gone, which would wipe it out
        again = f"burstpool sweep --resume {shlex.quote(str(error.folder))}"
        print(f"burstpool: {error}; go on with: {again}", file=sys.stderr)
        raise
    if as_json:
        print(json_line(in_short(result)))
        return
    show_result(result, Console())


@contextmanager
def live_table() -> "Iterator[Observer]":
    """A table on a terminal, a line now and then elsewhere; on standard error."""
    if not sys.stderr.isatty():
        yield _plain()
        return
    console = Console(stderr=True)
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        yield lambda progress: live.update(_table(progress, console))


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
    rate = ""
    if progress.samples_per_s:  # known from the first look at the losses on
        over = progress.samples_per_s / progress.serial_samples_per_s
        rate = f"; {progress.samples_per_s:,.0f} samples/s, {over:.1f}× one after another (estimated)"
    return f"{len(states)} of {progress.num_trials} trials: {counts}{rate}; {progress.wall_time_s:.0f} s"


def _table(progress: "SweepProgress", console: Console) -> Table:
    """As many trials as fit, a line each; below, how far the sweep is."""
    ordered = sorted(progress.trials, key=lambda trial: (_ORDER[trial.state], trial.value or 0.0, trial.number))
    caption = Text(_summary(progress))
    most = max(1, min(_MOST_ROWS, console.height - len(caption.wrap(console, console.width)) - 2))
    table = _trials_table(ordered[:most], progress.steps, width=console.width, short=True)
    table.caption = caption
    table.caption_justify = "left"
    return table


def _trials_table(trials: "list[Trial]", steps: int, *, width: int, short: bool = False) -> Table:
    """One row a trial, and where `short` one line; a narrow terminal gets no steps and losses."""
    shown = _NUMBERS[-1:] if width < _NARROW else _NUMBERS
    rows = [_cells(trial, steps) for trial in trials]
    words = _limits(rows, shown, width) if short else dict.fromkeys(("settings", "state"))
    titles = ("trial", "settings", *shown, "state")
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for title in titles:
        if title in words:
            overflow: Any = "ellipsis" if short else "fold"
            table.add_column(title, overflow=overflow, no_wrap=short, max_width=words[title])
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(row[title]) for title in titles))
    return table


def _limits(rows: list[dict[str, str]], shown: tuple[str, ...], width: int) -> dict[str, int | None]:
    """Widths of the columns with words so that each row is one line; settings go before the state's reason."""

    def widest(title: str) -> int:
        return max(map(len, (title, *(row[title] for row in rows))))

    room = width - sum(map(widest, ("trial", *shown))) - _GAP * (len(shown) + 2)
    settings = max(len("settings"), min(widest("settings"), room - len("running")))
    return {"settings": settings, "state": max(len("running"), room - settings)}


def _cells(trial: "Trial", steps: int) -> dict[str, str]:
    from burstpool.sweeping.trials import described

    return {
        "trial": str(trial.number),
        "settings": described(trial.settings),
        "step": f"{trial.step}/{steps}",
        "loss": "" if trial.loss is None else f"{trial.loss:.4g}",
        "objective": "" if trial.value is None else f"{trial.value:.4g}",
        "state": f"{trial.state}: {trial.reason}" if trial.reason else trial.state,
    }


def show_result(result: "SweepResult", console: Console, *, most: int = _MOST_ROWS, files: bool = True) -> None:
    """The best trials as a table, and where everything is."""
    from burstpool.sweeping.outcome import apart
    from burstpool.sweeping.trials import described

    ranked = sorted(
        result.trials, key=lambda t: (t.state == "failed", -t.step, t.value if t.value is not None else 0.0)
    )
    console.print(_trials_table(ranked[:most], result.record.steps, width=console.width))
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
