"""Timing in step: each layer's time inside of real training steps on the CPU.

Small models run largely out of the processor's caches, and a layer alone finds there what a whole step has long
pushed out. So where all activations fit into memory, steps are run layer by layer with the clock read in between;
whole steps of the user's own model alternate with them, so that both see the same machine. Where the job is known, the
rest of a step (`rest.py`) runs in between. Takes a `Session` and a batch; returns each layer's times, the loss's, the
whole step's, and the rest's.
"""

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from burstpool.cluster.heap import freed_memory_kept
from burstpool.model.block import Block
from burstpool.profiling.rest import MeasuredRest, RestOfStep
from burstpool.profiling.session import Session
from burstpool.profiling.timing import CpuStopwatch, EngineStart, Measured, repeat, sum_of_copies

_TARGET_S = 1.0
_MAX_STEPS = 200


@dataclass(slots=True)
class _Times:
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def measured(self, steps: Sequence[int]) -> Measured:
        """Means over these steps, spreads over all but the first, which warms up."""
        spread = Measured.of(self.forward[1:], self.backward[1:] or [0.0])
        return dataclasses.replace(
            spread,
            forward_s=statistics.fmean(self.forward[step] for step in steps),
            backward_s=statistics.fmean(self.backward[step] for step in steps) if self.backward else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Of one batch."""

    layers: list[Measured]
    loss: Measured
    whole_s: float
    rest: MeasuredRest | None
    """None where the job is not known."""


def measure_in_step(session: Session, blocks: Sequence[Block], batch: int, watch: CpuStopwatch) -> StepTimes:
    """All of a step at one batch."""
    rest = RestOfStep(session.job, session.traced.model, batch) if session.job else None
    steps = _LayeredSteps(session, blocks, batch, watch.engine_start)
    whole_step = session.step(batch)
    whole: list[float] = []

    def once() -> None:
        if rest:
            rest.run(steps.parameter_gradients)
        start = time.perf_counter()
        whole_step()
        whole.append(time.perf_counter() - start)
        if rest:
            rest.run(steps.parameter_gradients)
        steps.run()

    collecting = gc.isenabled()
    gc.disable()
    try:
        with freed_memory_kept(), rest.parameters_left_as_they_were() if rest else contextlib.nullcontext():
            repeat(once, target_s=_TARGET_S, most=_MAX_STEPS)
    finally:
        if collecting:
            gc.enable()
    usual = usual_steps(
        [part for times in (*steps.times, steps.loss_times) for part in (times.forward, times.backward)]
    )
    return StepTimes(
        layers=[times.measured(usual) for times in steps.times],
        loss=steps.loss_times.measured(usual),
        whole_s=statistics.median(whole[1:]),
        rest=rest.measured() if rest else None,
    )


def usual_steps(parts: Sequence[Sequence[float]]) -> list[int]:
    """The half of the steps, without the first, that took neither long nor short; `parts` are seconds, step by step.

    Parts averaged over these add up to a usual step. Their medians would not: where something short disturbs every
    step, each time another layer, no layer's median knows of it. Pure.
    """
    totals = [sum(step) for step in zip(*(part for part in parts if part), strict=True)]
    order = sorted(range(1, len(totals)), key=totals.__getitem__)
    return order[len(order) // 4 : len(order) - len(order) // 4]


class _LayeredSteps:
    """Runs steps layer by layer and keeps their times."""

    def __init__(self, session: Session, blocks: Sequence[Block], batch: int, engine_start: EngineStart) -> None:
        self.session, self.blocks, self.engine_start = session, blocks, engine_start
        self.callers = [session.caller(block, batch) for block in blocks]
        self.parameters = [[p for p in block.parameters.values() if p.requires_grad] for block in blocks]
        self.inputs = session.traced.input_values(*session.arguments(batch)[0], **session.arguments(batch)[1])
        self.target = session.targets(batch)
        self.times = [_Times() for _ in blocks]
        self.loss_times = _Times()
        self.parameter_gradients: dict[nn.Parameter, torch.Tensor] = {}
        """Of the last step, for the optimizer."""

    def run(self) -> None:
        """One step."""
        values, passes = dict(self.inputs), []
        for block, call, times in zip(self.blocks, self.callers, self.times, strict=True):
            leaves = self.session.leaves(block, [values[name] for name in block.inputs])
            start = time.perf_counter()
            outputs = call(leaves)
            times.forward.append(time.perf_counter() - start)
            values.update(zip(block.outputs, (output.detach() for output in outputs), strict=True))
            passes.append((leaves, outputs))
        gradients = self._loss(values)
        for place in reversed(range(len(self.blocks))):
            self._backward(place, *passes.pop(), gradients)

    def _loss(self, values: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        leaves = self.session.output_leaves(values)
        output = self.session.traced.output(leaves)
        start = time.perf_counter()
        with self.session.autocasting():
            result = self.session.loss(output, self.target)
        self.loss_times.forward.append(time.perf_counter() - start)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        if not wanted or not result.requires_grad:
            return {}
        start = time.perf_counter()
        found = torch.autograd.grad(result, wanted, allow_unused=True)
        self.loss_times.backward.append(time.perf_counter() - start)  # with it, the engine starts in any case
        names = [name for name, leaf in leaves.items() if leaf.requires_grad]
        return {name: [gradient] for name, gradient in zip(names, found, strict=True) if gradient is not None}

    def _backward(
        self,
        place: int,
        leaves: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        gradients: dict[str, list[torch.Tensor]],
    ) -> None:
        block = self.blocks[place]
        received = [
            (output, gradients.pop(name))
            for name, output in zip(block.outputs, outputs, strict=True)
            if output.requires_grad and name in gradients
        ]
        entering = [(name, leaf) for name, leaf in zip(block.inputs, leaves, strict=True) if leaf.requires_grad]
        wanted = [*(leaf for _, leaf in entering), *self.parameters[place]]
        if not received or not wanted:
            self.times[place].backward.append(0.0)
            return

        def backward() -> Sequence[torch.Tensor]:
            summed = [sum_of_copies(found[0], len(found)) for _, found in received]
            return torch.autograd.grad([output for output, _ in received], wanted, summed, allow_unused=True)

        start = time.perf_counter()
        found = backward()
        seconds = time.perf_counter() - start - self.engine_start.seconds(len(wanted))
        self.times[place].backward.append(max(0.0, seconds))
        for (name, _), gradient in zip(entering, found, strict=False):
            if gradient is not None:
                gradients.setdefault(name, []).append(gradient)
        if self.session.job is not None:
            own = zip(self.parameters[place], found[len(entering) :], strict=True)
            self.parameter_gradients.update((parameter, found) for parameter, found in own if found is not None)
