"""CUDA graphs: a step captured once and replayed, with communication in between.

What a device computes between two communications becomes one graph; a device that does not communicate replays its
whole step, optimizer included, as a single one. A capture runs the step's own functions without executing anything, so
replays do exactly what an eager step does, on tensors that stay where they are: samples are copied in, messages
received into and sent out of fixed places. All graphs of a step share one pool of memory, which is sound because they
are always replayed in the order in which they were captured.

The optimizer is captured if it can be (`Update.can_be_captured`), else called after the graphs. Steps whose blocks
communicate inside (exact batch norm over several devices) or that the host must decide on (fp16's loss scale) are not
captured; `why_not` says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from burstpool.engine.base import Doing, phrase
from burstpool.model.recording import recording
from burstpool.run.agreement import Agreement
from burstpool.run.dropout import Masks
from burstpool.run.links import Links
from burstpool.run.loading import Loaded
from burstpool.run.passes import Passes
from burstpool.run.reduction import Bucket
from burstpool.run.update import Update
from burstpool.schedule.actions import Action, Kind

WARM_UP_STEPS = 3
"""Eager steps before the capture: libraries choose kernels, optimizers make their state, shapes become known."""

Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What a step is made of."""

    actions: Sequence[Action]
    computing: Sequence[Work | None]
    """Action → its forward or backward."""
    passes: Passes
    links: Links
    agreement: Agreement
    update: Update
    masks: Masks
    doing: Doing


def why_not(parts: StepParts, loaded: Sequence[Sequence[Loaded]], *, talks_inside: bool) -> str | None:
    """The reason for which a step cannot be captured; None where it can."""
    if talks_inside:
        return "batch norm over several devices communicates in the middle of blocks"
    if parts.update.scale is not None:
        return "with fp16 the host decides after each step whether gradients overflowed"
    leaves = pytree.tree_leaves([part.target for parts_ in loaded for part in parts_])
    if odd := [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]:
        return f"the targets hold a {type(odd[0]).__name__}, which is no tensor"
    return None


class StepGraphs:
    """A captured step."""

    def __init__(self, parts: StepParts, loaded: Sequence[Sequence[Loaded]], *, keep_graphs: bool = False) -> None:
        """Captures; raises whatever the step's functions raise when they do what a capture cannot hold.

        With `keep_graphs` the graphs are there to be looked at and changed until they are replayed first.
        """
        self._parts, self._keep_graphs = parts, keep_graphs
        self._pool = torch.cuda.graph_pool_handle()
        self._pending: list[Work] = []
        self._kept: list[Any] = []
        """Tensors that communication reads: their memory must not be used again within the step."""
        self._entries: list[tuple[bytes, Work]] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._samples = [[_copied(part) for part in minibatch] for minibatch in loaded]
        parts.update.forget()
        parts.passes.begin_step(self._samples)
        for index, action in enumerate(parts.actions):
            self._take(index, action)
        if parts.agreement.stepped_last:
            self._step(parts.agreement.stepped_last, phrase("step"))
        self._capture(phrase("the end of the step"))
        self.loss = parts.passes.loss
        """This device's part of the loss, after each replay."""

    def run(self, step: int, loaded: Sequence[Sequence[Loaded]]) -> torch.Tensor | None:
        """Replays the step on other samples."""
        self.begin(step, loaded)
        say = self._parts.doing.say
        for words, entry in self._entries:
            say(words)
            entry()
        return self.loss

    def begin(self, step: int, loaded: Sequence[Sequence[Loaded]]) -> None:
        """Puts a step's samples and random numbers in place; `pieces` then run it."""
        for fixed, new in zip(self._samples, loaded, strict=True):
            for target, source in zip(fixed, new, strict=True):
                _copy_into(target, source)
        self._parts.masks.reseed(step)

    @property
    def pieces(self) -> list[Work]:
        """What a step does, in order: replays of graphs, and the communication between them."""
        return [entry for _, entry in self._entries]

    def graph_of(self, piece: Work) -> torch.cuda.CUDAGraph | None:
        """The graph that a piece replays; None where it does something else."""
        return next((graph for graph in self._graphs if graph.replay == piece), None)

    def _take(self, index: int, action: Action) -> None:
        parts, words = self._parts, phrase(f"{action.kind} {action.value or action.block}")
        match action.kind:
            case Kind.FORWARD | Kind.BACKWARD:
                compute = parts.computing[index]
                assert compute is not None
                self._pending.append(compute)
                for bucket in parts.agreement.shared_after.get(index, ()):
                    self._reduce(bucket, words)
            case Kind.SEND:
                self._send(action, words)
            case Kind.RECEIVE:
                self._receive(action, words)
            case Kind.REDUCE:
                if action.block in parts.agreement.of_block:
                    self._reduce(parts.agreement.of_block[action.block], words)
            case Kind.STEP:
                if keys := parts.agreement.stepped_at.get(index):
                    self._step(keys, words)

    def _send(self, action: Action, words: bytes) -> None:
        find = self._parts.passes.pop_gradient if action.gradient else self._parts.passes.take
        found: list[torch.Tensor] = []

        def keep() -> None:
            found.append(find(action.value, action.minibatch, action.start, action.stop).contiguous())

        self._pending.append(keep)
        self._capture(words)
        self._kept += found
        self._entries.append((words, partial(self._parts.links.send, action, found[0])))

    def _receive(self, action: Action, words: bytes) -> None:
        self._capture(words)
        buffer = self._parts.links.empty(action)
        keep = self._parts.passes.add_gradient if action.gradient else self._parts.passes.put
        self._entries.append((words, lambda: buffer.copy_(self._parts.links.receive(action))))
        self._pending.append(partial(keep, action.value, action.minibatch, action.start, action.stop, buffer))

    def _reduce(self, bucket: Bucket, words: bytes) -> None:
        self._pending.append(bucket.gather)
        self._capture(words)
        self._entries.append((words, bucket.launch))

    def _step(self, keys: Sequence[str], words: bytes) -> None:
        update, buckets = self._parts.update, self._parts.agreement.buckets(keys)
        if buckets:
            self._capture(words)
            self._entries += [(words, bucket.wait) for bucket in buckets]
        if update.can_be_captured:
            self._pending += [*(bucket.adopt for bucket in buckets), partial(update.apply, keys)]
            return
        self._capture(words)
        for bucket in buckets:
            bucket.adopt()
        gradients = [(update.trained[key], update.trained[key].grad) for key in keys]
        self._entries.append((words, partial(_step_eagerly, update, keys, gradients)))

    def _capture(self, words: bytes) -> None:
        """Captures what is pending as one graph."""
        if not self._pending:
            return
        graph = torch.cuda.CUDAGraph(keep_graph=self._keep_graphs)
        generators = list(self._parts.masks.generators.values())
        with recording(graph, generators=generators, pool=self._pool, stream=torch.cuda.current_stream()):
            for work in self._pending:
                work()
        self._pending = []
        self._graphs.append(graph)
        self._entries.append((words, graph.replay))


def _step_eagerly(
    update: Update, keys: Sequence[str], gradients: Sequence[tuple[nn.Parameter, torch.Tensor | None]]
) -> None:
    for parameter, gradient in gradients:
        parameter.grad = gradient
    update.apply(keys)


def _copied(part: Loaded) -> Loaded:
    return Loaded(
        start=part.start,
        stop=part.stop,
        values={name: tensor.clone() for name, tensor in part.values.items()},
        target=pytree.tree_map_only(torch.Tensor, torch.clone, part.target),
    )


def _copy_into(fixed: Loaded, new: Loaded) -> None:
    for name, tensor in fixed.values.items():
        tensor.copy_(new.values[name], non_blocking=True)
    for target, source in zip(pytree.tree_leaves(fixed.target), pytree.tree_leaves(new.target), strict=True):
        target.copy_(source, non_blocking=True)
