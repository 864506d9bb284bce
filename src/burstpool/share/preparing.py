"""Preparing jobs: what has to be known of a foreground and its background before either can be started.

Loading a background and tracing its model run the user's code, which may hang, allocate without end or take its process
with it. So this is done in a process of its own, as training is, with the same cap. Takes Preparing. Returns the task
to be trained, or the user's mistake in words: a background that cannot be used at all is told of before anything is
trained. A foreground is the main thing, and is prepared where it is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from burstpool.engine.base import Place, phrase
from burstpool.errors import BurstpoolError, ShareError
from burstpool.fusion.structure import checked_models
from burstpool.job import Job, load_jobs
from burstpool.model.graph import LayerGraph
from burstpool.plan.plan import Plan, PlannedBlock, even_shares
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import Start, prepare
from burstpool.run.worker import Task
from burstpool.share.base import Background, ShareRequest
from burstpool.share.fused import FusedTask
from burstpool.share.results import BackgroundFolder

_CHECKPOINT_EVERY = 50
_BLOCKS = 8
"""Blocks that a background's model is cut into: twice as many slices a step, and one for each change."""
LOADING, TRACING = phrase("loading the job"), phrase("tracing the model")


def prepare_foreground(request: ShareRequest) -> tuple[Task, Start]:
    """What `burstpool train` would run; its folder is made."""
    return prepare(
        request.foreground,
        request.plan,
        steps=request.steps,
        run_folder=request.run_folder,
        settings=request.settings,
        options=request.options,
        inputs=request.inputs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """What is to be prepared; picklable."""

    background: Background
    folder: BackgroundFolder
    """The run folder in it is made, or gone on with if an attempt before this one has made it."""
    device: Literal["cpu", "cuda"]
    autocast: Literal["bf16", "fp16"] | None
    hang_s: float
    """For how long it may be silent when it trains."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """Why a background cannot be used; of the user's making."""

    words: str


def prepare_work(place: Place, wanted: Preparing) -> Task | FusedTask | Mistake:
    """What the process runs."""
    try:
        place.doing.say(LOADING)
        return _prepared(place, wanted)
    except BurstpoolError as error:
        return Mistake(str(error))


def _prepared(place: Place, wanted: Preparing) -> Task | FusedTask:
    background = wanted.background
    job, *others = load_jobs(background.source, background.settings)
    if others:
        _check_array([job, *others])
        return FusedTask(
            source=background.source,
            settings=background.settings,
            steps=background.steps,
            checkpoint=str(wanted.folder.array),
            checkpoint_every=_CHECKPOINT_EVERY,
            autocast=wanted.autocast == "bf16",
            device=wanted.device,
        )
    place.doing.say(TRACING)
    run = wanted.folder.run
    options = RunOptions(
        device=wanted.device,
        cuda_graphs=False,  # a graph of the whole step could not be held up between slices
        autocast=wanted.autocast,
        checkpoint_every=_CHECKPOINT_EVERY,
        keep_checkpoints=1,
        timeout_s=wanted.hang_s,
        timeline_steps=0,
    )
    return prepare(
        background.source,
        sliced_plan(trace_job(job).graph, batch=job.batch, name=job.name),
        steps=background.steps,
        run_folder=run.path,
        resume=run.path if run.record.exists() else None,
        settings=dict(background.settings[0]),
        options=options,
    )[0]


def _check_array(jobs: Sequence[Job]) -> None:
    """Refuses members that are surely no array; what else cannot be fused is found when the array is made."""
    if len(batches := sorted({job.batch for job in jobs})) > 1:
        raise ShareError(
            f"members of one array have one batch, these have {batches[0]} and {batches[1]}: give each its own --with"
        )
    checked_models(job.build_model() for job in jobs)


def sliced_plan(graph: LayerGraph, *, batch: int, name: str) -> Plan:
    """One device, the model cut into a few blocks of as many layers each. Pure."""
    count = min(_BLOCKS, len(graph.layers))
    bounds = [round(i * len(graph.layers) / count) for i in range(count + 1)]
    parts = [graph.layers[a:b] for a, b in pairwise(bounds)]
    shares = even_shares(batch, (0,))
    return Plan(
        model=name or graph.model,
        strategy="data",
        num_devices=1,
        batch=batch,
        blocks=tuple(
            PlannedBlock(name=part[0].name, layers=tuple(layer.name for layer in part), shares=shares) for part in parts
        ),
    )
