"""Sweep: every layer run alone, once through the model.

Walks forward with real activations, freeing each when its last consumer has run, so that never more than a few
layers' memory is held. Layers that do the same work on the same shapes are looked at once. Takes a `Session` and a
batch; returns what each layer keeps and needs, and its times where a stopwatch is given.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from burstpool.model.block import Block
from burstpool.profiling.memory import Kept, kept_by, peak_bytes
from burstpool.profiling.session import Session
from burstpool.profiling.timing import Measured, Stopwatch, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One layer at one batch."""

    kept: Kept
    peak_bytes: int
    time: Measured | None
    """None where no stopwatch was given."""


def sweep(
    session: Session,
    blocks: Sequence[Block],
    batch: int,
    *,
    watch: Stopwatch | None,
    report: Callable[[str], None],
) -> tuple[list[LayerRun], Measured | None]:
    """All layers in order, then the loss."""
    args, kwargs = session.arguments(batch)
    values = session.traced.input_values(*args, **kwargs)
    last_use = {name: index for index, block in enumerate(blocks) for name in block.inputs}
    uses = session.uses()
    runs: list[LayerRun] = []
    same_work: dict[str, LayerRun] = {}
    for index, block in enumerate(blocks):
        report(f"{block.layers[0].name}, batch {batch}")
        inputs = [values[name] for name in block.inputs]
        consumers = [uses[name] for name in block.outputs]
        shapes = [(t.dtype, t.shape, t.stride()) for t in inputs]  # under autocast, dtypes are known only now
        work = f"{block.signature()} {consumers} {shapes}"
        if work not in same_work:
            same_work[work] = _run_alone(session, block, inputs, consumers, batch, watch)
        runs.append(same_work[work])
        with torch.no_grad():
            values.update(zip(block.outputs, session.caller(block, batch)(inputs), strict=True))
        for name in block.inputs:
            if last_use[name] == index and name not in session.traced.graph.outputs:
                values.pop(name, None)
    return runs, _loss_alone(session, values, batch, watch) if watch else None


def _run_alone(
    session: Session,
    block: Block,
    inputs: Sequence[torch.Tensor],
    consumers: Sequence[int],
    batch: int,
    watch: Stopwatch | None,
) -> LayerRun:
    leaves = session.leaves(block, inputs)
    parameters = list(block.parameters.values())
    call = session.caller(block, batch)
    flows = [output.requires_grad for output in call(leaves)]
    work = Work(
        forward=(lambda: call(leaves)) if all(flows) else (lambda: tuple(itertools.compress(call(leaves), flows))),
        inputs=leaves,
        wanted=[tensor for tensor in (*leaves, *parameters) if tensor.requires_grad],
        consumers=[max(1, count) for count in itertools.compress(consumers, flows)],
    )
    return LayerRun(
        kept=kept_by(lambda: call(leaves), inputs=leaves, state=block.state_tensors.values()),
        peak_bytes=peak_bytes(work, given=[*leaves, *parameters], device=session.device),
        time=watch.measure(work) if watch else None,
    )


def _loss_alone(session: Session, values: dict[str, torch.Tensor], batch: int, watch: Stopwatch) -> Measured:
    target = session.targets(batch)
    leaves = session.output_leaves(values)

    def forward() -> list[torch.Tensor]:
        with session.autocasting():
            return [session.loss(session.traced.output(leaves), target)]

    wanted = [tensor for tensor in leaves.values() if tensor.requires_grad]
    return watch.measure(Work(forward=forward, inputs=list(leaves.values()), wanted=wanted, consumers=[1]))
