"""`burstpool interference`: measures how much kinds of layers slow each other down on this machine's CPU.

Writes the table that `burstpool simulate --interference` takes. Wants a machine that does nothing else meanwhile.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from burstpool.cli.progress import progress_bar


def interference(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the table.")] = None,
    window: Annotated[float, typer.Option(help="Seconds a pair.", min=0.01)] = 0.25,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON object.")] = False,
) -> None:
    """Measure how much kinds of layers slow each other down."""
    from burstpool.share.measure_interference import measure_on_cpu

    with progress_bar("measuring pairs") as progress:
        table = measure_on_cpu(window_s=window, progress=progress)
    if output is not None:
        table.save(output)
    if as_json:
        print(json.dumps({"device": table.device, "pairs": [asdict(pair) for pair in table.pairs]}))
        return
    console = Console()
    console.print(str(table), markup=False, highlight=False)
    if output is not None:
        console.print(f"Written to {output}", markup=False, highlight=False)
