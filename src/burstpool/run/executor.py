"""Executor: runs one device's actions of a schedule, step after step.

Takes a schedule, the device's blocks, parameters and process groups. Forward and backward are `passes.py`, messages
`links.py`, sums of gradients `reduction.py`, changes of parameters `update.py`. Actions are called one by one
(`eager.py`) or, on CUDA, captured and replayed (`graphs.py`). Waves (push, pull) are not executed yet.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from burstpool.engine.base import Doing
from burstpool.errors import CaptureError
from burstpool.job import Job
from burstpool.model.block import Block
from burstpool.model.traced import TracedModel
from burstpool.plan.plan import Plan
from burstpool.run.agreement import Agreement
from burstpool.run.dropout import Masks
from burstpool.run.eager import EagerStep
from burstpool.run.graphs import WARM_UP_STEPS, StepGraphs, StepParts, why_not
from burstpool.run.groups import Groups
from burstpool.run.holdings import Holdings, state_tensors
from burstpool.run.links import Links
from burstpool.run.loading import Loaded
from burstpool.run.moment import Moment
from burstpool.run.options import RunOptions
from burstpool.run.passes import Passes
from burstpool.run.recorder import Recorder
from burstpool.run.seeds import mix, seed_device
from burstpool.run.update import LossScale, Update
from burstpool.run.waiting import naming_peers
from burstpool.schedule.actions import Kind, Schedule

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """What one device needs to execute its part of a plan."""

    device: int
    plan: Plan
    schedule: Schedule
    traced: TracedModel
    """With the operators replaced that must see whole minibatches."""
    blocks: Mapping[str, Block]
    """The plan's, by name, in its order."""
    holdings: Holdings
    groups: Groups
    on: torch.device
    moment: Moment
    masks: Masks


class Executor:
    """One device at work."""

    def __init__(self, part: DevicePart, job: Job, options: RunOptions, doing: Doing) -> None:
        self.part, self._options, self._doing, self._seed = part, options, doing, job.seed
        self.actions = part.schedule.devices[part.device]
        self.recorder = Recorder(self.actions, num_steps=options.timeline_steps)
        self.update = _update(part, job, options)
        self.passes = _passes(part, job, options)
        self.links = Links(
            part.schedule,
            device=part.device,
            pairs=part.groups.pairs,
            control=part.groups.control,
            on=part.on,
            timeout_s=options.timeout_s,
        )
        self._agreement = Agreement(
            self.actions,
            part.holdings,
            part.groups,
            device=part.device,
            parameters=self.update.trained,
            all_at_once=self.update.judges_all,
            timeout_s=options.timeout_s,
        )
        self._eager = EagerStep(
            self.actions,
            part.blocks,
            passes=self.passes,
            links=self.links,
            agreement=self._agreement,
            update=self.update,
            recorder=self.recorder,
        )
        self._random = any(layer.random for layer in part.traced.layers)
        self._graphs: StepGraphs | None = None
        self.wants_graphs = options.cuda_graphs and part.on.type == "cuda" and not options.device_timeline
        self._warm_up_left = WARM_UP_STEPS
        if self.wants_graphs:
            self.update.make_capturable()

    @property
    def times_compute(self) -> bool:
        """Whether it knows how long the device computes: on CUDA only by events on the device."""
        return self.part.on.type == "cpu" or self._options.device_timeline

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return self._graphs is not None

    def run(self, step: int, loaded: Sequence[Sequence[Loaded]]) -> torch.Tensor | None:
        """Runs one step; returns this device's part of the loss, None where it does not compute any."""
        self.begin(step)
        if self.wants_graphs:
            self._try_to_capture(loaded)
        with naming_peers("other devices in the middle of it"):
            self.links.begin_step()
            loss = self._run_eagerly(step, loaded) if self._graphs is None else self._graphs.run(step, loaded)
            self.update.end_step()
            if self._graphs is None:
                self.links.end_step()
            else:
                self.links.flush()  # the next replay writes to what is being sent
        return loss

    def begin(self, step: int) -> None:
        """Everything that depends on which step it is, before any action; `run` calls it."""
        self._doing.begin_step(step)
        self.part.moment.step = step
        if self._random:
            # Also what draws its own numbers is then the same when a run is resumed at this step.
            seed_device(mix(self._seed, "step", step, self.part.device), self.part.on)

    def _run_eagerly(self, step: int, loaded: Sequence[Sequence[Loaded]]) -> torch.Tensor | None:
        if self.update.scale is not None:
            self.passes.loss_scale = self.update.scale.factor
        self.passes.begin_step(loaded)
        if self._options.device_timeline and self.part.on.type == "cuda":
            self._eager.run_timed_on_device(step, self._doing)
        else:
            self._eager.run(step, self._doing)
        return self.passes.loss

    def _try_to_capture(self, loaded: Sequence[Sequence[Loaded]]) -> None:
        """After some eager steps, once; a step that cannot be captured goes on eagerly."""
        if self._warm_up_left > 0:
            self._warm_up_left -= 1
            return
        self.wants_graphs = False
        try:
            self._graphs = self.capture(loaded)
        except CaptureError as error:
            _LOG.warning("device %d runs without CUDA graphs: %s", self.part.device, error)
        else:
            self.recorder.clear()

    def capture(self, loaded: Sequence[Sequence[Loaded]], *, keep_graphs: bool = False) -> StepGraphs:
        """The step as CUDA graphs; some steps must have run before. `keep_graphs` as in StepGraphs.

        Raises a CaptureError that says what a graph cannot hold.
        """
        parts = StepParts(
            actions=self.actions,
            computing=self._eager.computing,
            passes=self.passes,
            links=self.links,
            agreement=self._agreement,
            update=self.update,
            masks=self.part.masks,
            doing=self._doing,
        )
        if reason := why_not(parts, loaded, talks_inside=bool(self.part.groups.statistics)):
            raise CaptureError(reason)
        try:
            return StepGraphs(parts, loaded, keep_graphs=keep_graphs)
        except Exception as error:  # whatever the user's operators do that a graph cannot hold
            self.update.forget()
            raise CaptureError(" ".join(f"{type(error).__name__}: {error}".split())[:300]) from error


def _update(part: DevicePart, job: Job, options: RunOptions) -> Update:
    held = state_tensors(part.traced.model, part.holdings.of(part.device))
    return Update(
        job,
        {key: tensor for key, tensor in held.items() if isinstance(tensor, nn.Parameter)},
        counted=[key for key in part.holdings.block if part.holdings.counted_by(key) == part.device],
        group=part.groups.norm,
        clip_norm=options.clip_norm,
        scale=LossScale() if options.autocast == "fp16" else None,
        on=part.on,
    )


def _passes(part: DevicePart, job: Job, options: RunOptions) -> Passes:
    passes = Passes(
        part.traced,
        part.blocks,
        job.loss,
        moment=part.moment,
        num_minibatches=part.plan.num_minibatches,
        on=part.on,
        autocast=options.autocast,
    )
    actions = part.schedule.devices[part.device]
    passes.allow_nan = options.allow_nan or part.on.type != "cpu"  # looking stalls a GPU: `LossReader` does it later
    passes.sent_back = frozenset(x.value for x in actions if x.kind is Kind.SEND and x.gradient)
    return passes
