"""`burstpool interference`: measures how much kinds of layers slow each other down on this machine's CPU or GPU.

Writes the table that `burstpool simulate --interference` takes. Wants a machine that does nothing else meanwhile.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from burstpool.artifact import json_line
from burstpool.cli.progress import progress_bar
from burstpool.errors import RunError, ShareError

if TYPE_CHECKING:
    from burstpool.share.interference.table import InterferenceTable


def interference(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the table.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    window: Annotated[float | None, typer.Option(help="Seconds a pair; 0.25 on cpu, 0.06 on cuda.", min=0.01)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as one JSON object.")] = False,
) -> None:
    """Measure how much kinds of layers slow each other down."""
    if device not in ("cpu", "cuda"):
        raise ShareError(f"--device {device} is not there; pass cpu or cuda")
    with progress_bar("measuring pairs") as progress:
        table = _measured(device, window, progress)
    if output is not None:
        table.save(output)
    if as_json:
        print(json_line({"device": table.device, "pairs": [asdict(pair) for pair in table.pairs]}))
        return
    console = Console()
    console.print(str(table), markup=False, highlight=False)
    if output is not None:
        console.print(f"Written to {output}", markup=False, highlight=False)


def _measured(device: str, window_s: float | None, progress: Any) -> "InterferenceTable":
    if device == "cpu":
        from burstpool.share.interference.measure_cpu import measure_on_cpu

        return measure_on_cpu(window_s=window_s or 0.25, progress=progress)
    import torch

    if not torch.cuda.is_available():
        raise RunError("there is no CUDA device here; pass --device cpu")
    from burstpool.share.interference.measure_cuda import measure_on_cuda

    return measure_on_cuda(window_s=window_s or 0.06, progress=progress)
