"""Setup: everything one worker needs before its first step.

Builds the whole model on the CPU under the job's seed, so that every parameter starts as one process would have it,
traces it, keeps the device's own parameters and frees the rest. Decides the same on every rank, and makes process
groups in the same order.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from burstpool.cluster.cores import calm_gloo
from burstpool.engine.base import Doing
from burstpool.errors import RunError
from burstpool.job import Job
from burstpool.model.block import Block
from burstpool.model.trace import trace
from burstpool.model.traced import TracedModel
from burstpool.plan.plan import Plan
from burstpool.run.dropout import Masks
from burstpool.run.executor import DevicePart, Executor
from burstpool.run.groups import GroupNeeds, check_orders, make_groups
from burstpool.run.holdings import Holdings, find_holdings, keep_only
from burstpool.run.loading import Loader
from burstpool.run.moment import Moment
from burstpool.run.options import RunOptions
from burstpool.run.substitutes import Substitutes, needs_statistics
from burstpool.schedule.actions import Schedule

_TRACED_SAMPLES = 2
"""Samples of the example that a model is traced with; the code is then valid at any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which device a worker is, and how it reaches the others."""

    device: int
    """Its index in the plan, and its rank."""
    on: torch.device
    backend: Literal["gloo", "nccl"]
    """For tensors; control goes over gloo."""
    control: dist.ProcessGroup
    """All ranks."""
    doing: Doing


def trace_job(job: Job, *, fallback: Literal["modules"] | None = None) -> TracedModel:
    """The job's model in training mode, with the weights its seed gives, split into layers."""
    example, _ = job.samples(_TRACED_SAMPLES)
    return trace(job.build_model().train(), example, fallback=fallback)


def set_up(
    job: Job, plan: Plan, schedule: Schedule, options: RunOptions, seat: Seat, *, traced: TracedModel | None = None
) -> tuple[Executor, Loader]:
    """The executor and the loader of one device; every rank must call it.

    `traced` is the job's model, if somebody has traced it already; it is no longer whole afterwards.
    """
    traced = traced or trace_job(job, fallback=options.fallback)
    layers = {layer.name: layer for layer in traced.layers}
    _check(plan, traced)
    holdings = find_holdings(plan, _blocks(plan, traced), traced.model)
    normalised = {block.name: tuple(sorted(block.devices)) for block in needs_statistics(plan, layers, options)}
    check_orders(schedule, normalised)
    needs = GroupNeeds(
        schedule=schedule,
        statistics=list(normalised.values()),
        shared=list(holdings.shared),
        norm=_judges(plan, holdings, options),
    )
    with calm_gloo():
        groups = make_groups(
            needs, rank=seat.device, control=seat.control, backend=seat.backend, timeout_s=options.timeout_s
        )
    keep_only(traced.model, holdings.of(seat.device), seat.on)
    if seat.on.type == "cuda":
        # Graphs cannot be captured on the default stream, and what they use should have run on theirs before.
        torch.cuda.set_stream(torch.cuda.Stream(seat.on))  # type: ignore[no-untyped-call]
    moment = Moment(batch=plan.batch)
    masks = Masks(seed=job.seed, device=seat.on, moment=moment)
    changed = Substitutes(plan, options, device=seat.device, statistics=groups.statistics, masks=masks).apply(traced)
    part = DevicePart(
        device=seat.device,
        plan=plan,
        schedule=schedule,
        traced=changed,
        blocks=_blocks(plan, changed),
        holdings=holdings,
        groups=groups,
        on=seat.on,
        moment=moment,
        masks=masks,
    )
    loader = Loader(job, changed, plan, device=seat.device, on=seat.on)
    return Executor(part, job, options, seat.doing), loader


def _judges(plan: Plan, holdings: Holdings, options: RunOptions) -> tuple[int, ...] | None:
    """Devices that agree on the gradients' norm before parameters change."""
    if options.autocast == "fp16":
        return plan.devices  # also those without parameters: they scale their losses by the same factor
    return holdings.trainers() if options.clip_norm is not None else None


def _blocks(plan: Plan, traced: TracedModel) -> dict[str, Block]:
    """The plan's blocks, by name, in its order."""
    places = {layer.name: place for place, layer in enumerate(traced.layers)}
    found = {}
    for block in plan.blocks:
        first = places[block.layers[0]]
        found[block.name] = traced.block(first, first + len(block.layers))
    return found


def _check(plan: Plan, traced: TracedModel) -> None:
    known = [layer.name for layer in traced.layers]
    planned = [layer for block in plan.blocks for layer in block.layers]
    if odd := sorted(set(planned) ^ set(known)):
        raise RunError(f"the plan is not of this model: they differ in layer {odd[0]!r}; plan the job again")
    for block in plan.blocks:
        first = known.index(block.layers[0])
        if tuple(known[first : first + len(block.layers)]) != block.layers:
            raise RunError(f"the layers of block {block.name!r} do not follow one another in the model")
    if plan.agreement != "reduce":
        raise RunError(f"agreement={plan.agreement!r} cannot be executed yet; plan with agreement='reduce'")
