"""`burstpool demo`: the whole story on this machine, step by step, in about two minutes.

What is shown is the list STEPS; each step's code lies in a file of its own (`cli/demo_*.py`). With `--json`, the story
goes to standard error and its figures, one JSON object, to standard output.
"""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from burstpool.artifact import json_line
from burstpool.cli.demo_burst import plan_and_train
from burstpool.cli.demo_measure import measure_layers, trace_model
from burstpool.cli.demo_share import share_gaps
from burstpool.cli.demo_story import Step, Story
from burstpool.cli.demo_sweep import sweep_many

STEPS = (
    Step(title="{job}: an unmodified nn.Module, traced into layers", tell=trace_model),
    Step(title="Each layer measured on one core of this machine", tell=measure_layers),
    Step(title="A burst plan for {num_devices} workers, trained beside data parallelism", tell=plan_and_train),
    Step(title="The same burst plan with a fused sweep in its gaps", tell=share_gaps),
    Step(title="{num_trials} settings of a small model, those of one width trained as one", tell=sweep_many),
)
_MODEL = "zoo:tiny_vgg"
_MODEL_SETTINGS = {"width": 64, "batch": 32}
"""Large enough that its layers differ in how many devices they pay for."""


def demo(
    model: Annotated[str, typer.Argument(metavar="[JOB]", help="What to look at: job.py or zoo:NAME.")] = _MODEL,
    devices: Annotated[int, typer.Option(help="Workers that stand for devices.", min=1)] = 4,
    steps: Annotated[int, typer.Option(help="Training steps of each run.", min=1)] = 60,
    trials: Annotated[int, typer.Option(help="Settings that the sweep tries.", min=1)] = 64,
    run_folder: Annotated[
        Path | None, typer.Option(help="Where to write runs and reports; runs/demo-TIME if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Trace, measure, plan, train, share and sweep small models, and show each step."""
    from burstpool.job import load_job
    from burstpool.run.folder import new_run_path

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    settings: dict[str, Any] = dict(_MODEL_SETTINGS) if model == _MODEL else {}
    story = Story(
        console=Console(stderr=as_json),
        source=model,
        settings=settings,
        job=load_job(model, settings),
        num_devices=devices,
        steps=steps,
        num_trials=trials,
        folder=run_folder or new_run_path("demo", Path("runs")),
    )
    for number, step in enumerate(STEPS, 1):
        title = step.title.format(job=story.job.name, num_devices=devices, num_trials=trials)
        story.say(f"{'' if number == 1 else chr(10)}{number}. {title}", style="bold")
        step.tell(story)
    if as_json:
        print(json_line({"job": story.job.name, "num_devices": devices, "folder": str(story.folder)} | story.figures))
