"""`burstpool demo`: the story so far, on this machine: trace a small model, measure it, show it."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from burstpool.cli.progress import progress_bar
from burstpool.cli.show import show_graph, show_profile

_BATCHES = (1, 4, 16, 64)


def demo(
    model: Annotated[str, typer.Argument(help="What to look at.")] = "zoo:tiny_vgg",
) -> None:
    """Trace, profile and show a small model."""
    from burstpool.job import load_job
    from burstpool.model.trace import trace
    from burstpool.profiling.measure import profile

    console = Console()
    job = load_job(model)
    example, target = job.samples(4)
    console.print(Text(f"1. {job.name}: an unmodified nn.Module, traced into layers", style="bold"))
    traced = trace(job.build_model().train(), example)
    show_graph(traced.graph, console)
    console.print(Text("\n2. Each layer measured on one core of this machine", style="bold"))
    with progress_bar("profiling") as progress:
        measured = profile(
            traced, batches=_BATCHES, loss=job.loss, target=target, name=job.name, use_cache=False, progress=progress
        )
    show_profile(measured, console)
    small, large = _BATCHES[0], _BATCHES[-1]
    lost = (measured.step_time_s(small) / small) / (measured.step_time_s(large) / large)
    console.print(
        Text(
            f"\nA sample costs {lost:.1f}× as much at batch {small} as at batch {large}: what a job wastes when it "
            "is spread thin over many devices, and what Burstpool is there to win back.",
            style="bold",
        )
    )
