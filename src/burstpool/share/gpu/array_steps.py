"""A fused array's training step on one GPU, captured as a CUDA graph and cut into short pieces.

The members share one batch, so they must be jobs of one seed and one batch size over the same data. As with a single
job (`graph_steps.py`), the first steps are called eagerly and are steps of the training like any other. How operators
run is chosen by measuring, in the first of them, once for a machine: what they compute differs in rounding only.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from burstpool.errors import CaptureError, ShareError, in_a_line
from burstpool.fusion.array import FusedArray
from burstpool.fusion.gradients import differentiate
from burstpool.fusion.jobs import attach
from burstpool.fusion.optim import FusedOptimizer
from burstpool.fusion.rules.concurrent import in_turn
from burstpool.fusion.serial import draws
from burstpool.job import Job
from burstpool.model.recording import recording
from burstpool.run.graphs import WARM_UP_STEPS
from burstpool.run.known_data import KnownData
from burstpool.run.loading import Batch
from burstpool.share.gpu.graph_steps import times_of_pieces, times_of_steps
from burstpool.share.gpu.kept import kept
from burstpool.share.gpu.moving import Away, give_back, or_else, ran_out
from burstpool.share.gpu.pieces import CutGraph, Cuts, Piece


def check_one_batch(jobs: Sequence[Job]) -> None:
    """Refuses jobs that do not all get the same samples at each step."""
    known = KnownData()
    if len({(id(known.shared(job).data), job.seed, job.batch) for job in jobs}) > 1:
        raise ShareError(
            "the members of an array in the background share their batches: give them one seed, one batch and one data "
            "set, which can be pickled so that it is known for one"
        )


class ArrayStep:
    """An array at work on a stream."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        stream: torch.cuda.Stream,
        piece_s: float = math.inf,
        autocast: Literal["bf16"] | None = None,
    ) -> None:
        check_one_batch(jobs)
        self.jobs, self.stream, self._autocast = list(jobs), stream, autocast
        self.piece_s = piece_s
        """About how long pieces are to be at the next capture."""
        inputs, _ = jobs[0].samples(jobs[0].batch)
        with torch.cuda.stream(stream):
            models = [job.build_model().to(stream.device).train() for job in jobs]
            seeds, example = [job.seed for job in jobs], _moved(inputs, stream.device)
            self.array = FusedArray(models, example, seeds=seeds, mode="measured")
            attach(self.array, jobs)
        optimizer = self.array.optimizers[0]
        if not isinstance(optimizer, FusedOptimizer):
            raise CaptureError(
                f"{type(optimizer.proxies[0]).__name__} has no formula for arrays and cannot be captured"
            )
        self._optimizer, optimizer.recorded = optimizer, True
        self._losses = torch.zeros(len(jobs))
        self.step = 0
        """Steps that have begun."""
        self._away = Away()
        self._cut: CutGraph | None = None
        self._cuts: Cuts | None = None
        """Where the graph was cut; known when it was let go once."""
        self.pieces: list[Piece] = []
        self.piece_times_s: list[float] = []
        self.alone_s = math.nan
        """How long a step takes alone, on the whole GPU."""

    @property
    def warm_up_steps(self) -> int:
        """Eager steps that are missing before the capture."""
        return max(WARM_UP_STEPS - self.step, 0)

    def warm_up(self, batches: Sequence[Sequence[Batch]]) -> torch.Tensor:
        """One eager step; returns the members' losses."""
        [[batch]] = batches
        with torch.cuda.stream(self.stream):
            self._fixed = _moved((batch.inputs, batch.target), self.stream.device)
            self._forward()
            self._backward()
            self._optimizer.step()
            self._schedule()
        self.step += 1
        return self._losses.detach()

    def capture(self) -> None:
        """Makes `pieces`. Trains nothing."""
        torch.cuda.synchronize()
        random = self.array.streams.states()
        try:
            self._capture()
        finally:
            self.array.streams.restore(random)

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[Callable[[], None]]:
        """Inside, the pieces may be replayed and train nothing; the call that is yielded does nothing."""
        random = self.array.streams.states()
        try:
            with torch.cuda.stream(self.stream), kept(self.state()):
                yield lambda: None
        finally:
            self.array.streams.restore(random)

    def leave(self) -> None:
        """Between two steps: everything goes to the host's memory, and the graphs are let go."""
        self.let_go()
        self._away.take(self._all_tensors())
        give_back()

    def let_go(self) -> None:
        """Of the graphs, and of all that lies in their memory."""
        torch.cuda.synchronize()
        self._cuts = self._cut.cuts if self._cut is not None else self._cuts
        self._cut, self.pieces = None, []
        self._losses = self._losses.detach().cpu()
        self._optimizer.zero_grad()

    def come_back(self) -> None:
        """Undoes `leave`; trains nothing. Where it raises, everything is in the host's memory as before."""
        with or_else(self.leave), torch.cuda.stream(self.stream):
            self._away.bring_back(self.stream.device)
            self.capture_as_cut()
        self._away.forget()

    def capture_as_cut(self) -> None:
        """Captures again: the pieces and their times are those of before, unless the step has come out otherwise."""
        random = self.array.streams.states()
        try:
            with torch.cuda.stream(self.stream):
                self._capture_again()
        finally:
            self.array.streams.restore(random)

    def _capture_again(self) -> None:
        try:
            self._cut_graph(self._cuts)
            if self._cuts is not None and len(self.pieces) == len(self.piece_times_s):
                return
        except CaptureError as error:
            if ran_out(error):
                raise torch.OutOfMemoryError(str(error)) from None
        self._cuts = None
        self._capture()

    def _cut_graph(self, cuts: Cuts | None) -> None:
        try:
            graph = self._captured()
        except Exception as error:  # whatever the user's operators do that a graph cannot hold
            raise CaptureError(in_a_line(error)) from error
        timed = partial(times_of_pieces, begin=lambda: None)
        self._cut = CutGraph(graph, target_s=self.piece_s, timed=timed, cuts=cuts)
        self.pieces = self._cut.pieces

    def _capture(self) -> None:
        with torch.cuda.stream(self.stream), kept(self.state()):
            self._cut_graph(None)
            self.piece_times_s = times_of_pieces(self.pieces, lambda: None)
            assert self._cut is not None
            if math.isnan(self.alone_s):
                self.alone_s = times_of_steps(self._cut.whole or self.pieces, lambda: None)
            self._cut.forget_whole()

    def begin(self, batches: Sequence[Sequence[Batch]]) -> None:
        """Puts the next step's samples in place, from pinned memory; `pieces` are to follow."""
        [[batch]] = batches
        with torch.cuda.stream(self.stream):
            given = pytree.tree_leaves((batch.inputs, batch.target))
            for mine, new in zip(pytree.tree_leaves(self._fixed), given, strict=True):
                mine.copy_(new, non_blocking=True)

    def end(self) -> torch.Tensor:
        """After the last piece: the members' losses, which the next step overwrites."""
        with torch.cuda.stream(self.stream):
            self._schedule()
        self.step += 1
        return self._losses.detach()

    def state(self) -> list[torch.Tensor]:
        """Everything that training changes, where it is."""
        return [tensor.detach() for tensor in self._tensors()]

    def undo(self) -> bool:
        """See `Steps`; a captured step takes no memory."""
        return False

    def _tensors(self) -> list[torch.Tensor]:
        slots = [slot for bucket in self._optimizer.buckets for slot in (bucket.step_M, *bucket.slots.values())]
        return [*self.array.state.tensors.values(), *slots, self.array.active]

    def _all_tensors(self) -> list[torch.Tensor]:
        """The same, and the samples that a capture begins with."""
        return self._tensors() + [x for x in pytree.tree_leaves(self._fixed) if isinstance(x, torch.Tensor)]

    def _forward(self) -> None:
        self._optimizer.zero_grad()
        inputs, target = self._fixed
        setting = torch.autocast("cuda", dtype=torch.bfloat16) if self._autocast else contextlib.nullcontext()
        self.array.recording = True  # operators are chosen by their times in a graph, in the eager steps too
        try:
            # Pieces have no branches: then operators are chosen that need none.
            with setting, in_turn() if math.isfinite(self.piece_s) else contextlib.nullcontext():
                self._losses = self.array.losses(inputs, self.jobs[0].loss, target)
        finally:
            self.array.recording = False

    def _backward(self) -> None:
        differentiate(self._losses.sum(), self.array.parameters())

    def _schedule(self) -> None:
        for scheduler in self.array.schedulers:
            scheduler.step()

    def _captured(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        streams = self.array.streams
        generators = streams.generators if draws(self.array.mode) or streams.draws_in_loss else []
        with recording(graph, generators=generators, stream=self.stream):
            self._forward()
            self._backward()
            self._optimizer.step()
        return graph


def _moved(tree: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tree)
