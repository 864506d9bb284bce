"""`burstpool profile`: measures a job's layers on this machine, or shows a profile that someone measured.

Takes a job (`job.py`, `zoo:vgg16`) or a profile file of any known format. Prints a table for people or, with
`--json`, the profile; `-o` writes it. `--estimate` turns it into an estimate for a device one does not have.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from burstpool.cli.fallback import Fallback, checked_fallback
from burstpool.cli.json_alone import json_alone
from burstpool.cli.progress import progress_bar
from burstpool.cli.show import show_profile
from burstpool.errors import ProfileError
from burstpool.job import is_job
from burstpool.profiling.profile import Profile

_SHOWN_LAYERS = 40
"""Layers in the table unless all are asked for."""


def profile(
    source: Annotated[str, typer.Argument(metavar="JOB", help="job.py, zoo:NAME, or a profile file to show.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    batches: Annotated[str, typer.Option(help="Samples a step, e.g. 1,2,4,8.")] = "1,2,4,8,16,32",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A hyper-parameter: name=value.")] = None,
    autocast: Annotated[str | None, typer.Option(help="bf16 or fp16.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of the one worker that is measured.", min=1)] = 1,
    estimate: Annotated[str | None, typer.Option(help="Estimate for this device type instead, e.g. V100.")] = None,
    fallback: Fallback = None,
    cache: Annotated[bool, typer.Option(help="Use what was measured before.")] = True,
    show_all: Annotated[bool, typer.Option("--all", help="Show every layer, however cheap.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the profile.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Show where each layer's time, memory and bytes go."""
    if is_job(source):
        with json_alone(as_json):
            found = _measure(source, device, parse_batches(batches), settings, autocast, threads, fallback, cache)
    else:
        from burstpool.profiling.importers import import_profile

        found = import_profile(source)
    if estimate is not None:
        from burstpool.profiling.estimate import estimate as estimate_for

        found = estimate_for(found, estimate)
    if output is not None:
        found.save(output)
    if as_json:
        sys.stdout.write(found.to_json())
        return
    console = Console()
    show_profile(found, console, most=None if show_all else _SHOWN_LAYERS)
    if output is not None:
        console.print(f"Written to {output}", markup=False, highlight=False)


def parse_batches(text: str) -> list[int]:
    """`"1,2,4"` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ProfileError(f"--batches {text} is not a list of whole numbers such as 1,2,4") from None


def _measure(
    source: str,
    device: str,
    batches: list[int],
    settings: list[str] | None,
    autocast: str | None,
    threads: int,
    fallback: str | None,
    cache: bool,
) -> Profile:
    from burstpool.job import load_job, parse_settings
    from burstpool.profiling.measure import profile_job

    how = checked_fallback(fallback)
    job = load_job(source, parse_settings(settings or []))
    with progress_bar(f"profiling {job.name}") as progress:
        return profile_job(
            job,
            fallback=how,
            device=device,
            batches=batches,
            autocast=autocast,
            threads=threads,
            use_cache=cache,
            progress=progress,
        )
