"""A job's training step on one GPU, captured as short CUDA graphs that are replayed one by one.

The step is the executor's own on one device, captured whole and cut into graphs of about the wanted length. Cutting
changes no kernel, so the job trains as it would alone. The first steps are called eagerly, because libraries choose
kernels and optimizers make their state in them; they are steps of the training like any other.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from burstpool.errors import CaptureError
from burstpool.job import Job
from burstpool.run.even import even_plan
from burstpool.run.executor import Executor
from burstpool.run.graphs import WARM_UP_STEPS, StepGraphs
from burstpool.run.loading import Batch
from burstpool.run.options import RunOptions
from burstpool.run.setup import Seat, set_up, trace_job
from burstpool.run.torchrun import Silent
from burstpool.schedule.lower import lower
from burstpool.share.gpu.kept import counts_kept, kept
from burstpool.share.gpu.moving import Away, give_back, or_else, ran_out
from burstpool.share.gpu.pieces import CutGraph, Cuts, Piece

_REPEATS = 6
"""Replays of the whole step when its pieces are timed."""
_BLIND_CYCLES, _BLIND_CYCLES_A_PIECE = 2_000_000, 30_000
"""For a millisecond, and 15 µs a piece, the device spins while the host queues a step: then it never waits for it."""


class GraphStep:
    """A job at work on a stream."""

    def __init__(
        self,
        job: Job,
        *,
        stream: torch.cuda.Stream,
        control: dist.ProcessGroup,
        piece_s: float = math.inf,
        options: RunOptions | None = None,
    ) -> None:
        """Builds and traces the model; `warm_up` as many times as `warm_up_steps` says, then `capture`."""
        self.job, self.stream = job, stream
        self.piece_s = piece_s
        """About how long pieces are to be at the next capture."""
        options = replace(options or RunOptions(), device="cuda", device_timeline=False, cuda_graphs=True)
        traced = trace_job(job, fallback=options.fallback)
        self.options = options
        self.plan = even_plan(traced.graph, num_devices=1, batch=job.batch, name=job.name)
        self.schedule = lower(self.plan, traced.graph)
        seat = Seat(device=0, on=stream.device, backend="gloo", control=control, doing=Silent())
        before = torch.cuda.current_stream()
        try:
            self.executor, self._loader = set_up(job, self.plan, self.schedule, options, seat, traced=traced)
        finally:
            torch.cuda.set_stream(before)
        self.executor.wants_graphs = False  # captured here, in pieces
        self.step = 0
        """Steps that have begun."""
        self._graphs: StepGraphs | None = None
        self._cut: list[CutGraph] = []
        self._uncut: list[Piece] = []
        """The step in as few pieces as it can be, for as long as it is timed."""
        self._cuts: list[Cuts] = []
        """Where the graphs were cut, in order; known from the first capture on."""
        self._away = Away()
        self._before: _Before | None = None
        self._loss: torch.Tensor | None = None
        self.pieces: list[Piece] = []
        """What a step does, in order, after `begin`; on this step's stream."""
        self.piece_times_s: list[float] = []
        """How long each takes alone."""
        self.alone_s = math.nan
        """How long a step takes alone, on the whole GPU."""

    @property
    def warm_up_steps(self) -> int:
        """Eager steps that are missing before the capture."""
        return max(WARM_UP_STEPS - self.step, 0)

    def warm_up(self, batches: Sequence[Sequence[Batch]]) -> torch.Tensor:
        """One eager step; returns the loss."""
        with torch.cuda.stream(self.stream):
            loaded = self._loader.move(self._loader.name(batches))
            loss = self.executor.run(self.step, loaded)
            self._example = loaded
        self.step += 1
        assert loss is not None
        return loss

    def capture(self) -> None:
        """Makes `pieces`; raises CaptureError where a graph cannot hold the step. Trains nothing."""
        torch.cuda.synchronize()
        with self._unchanged():
            offset = _default_offset(self.stream.device)
            graphs = self._cut_graphs(())
            self.piece_times_s = self._timed(self.pieces)
            if math.isnan(self.alone_s):
                self.alone_s = times_of_steps(self._uncut, lambda: graphs.begin(self.step, self._example))
            self._uncut = []
            for cut in self._cut:
                cut.forget_whole()
            if _default_offset(self.stream.device) != offset:
                raise CaptureError(
                    "its layers draw from torch's own random stream, which another job may draw from too"
                )

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[Callable[[], None]]:
        """Inside, the pieces may be replayed, after the call that is yielded, and train nothing."""
        assert self._graphs is not None
        graphs = self._graphs
        with self._unchanged():
            yield lambda: graphs.begin(self.step, self._example)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """What runs inside, on the step's stream, trains nothing."""
        optimizer = self.executor.update.optimizer
        with torch.cuda.stream(self.stream), kept(self.state()), counts_kept(optimizer):
            yield

    def _cut_graphs(self, known: Sequence[Cuts]) -> StepGraphs:
        """Captures the step and cuts it into `pieces`: as it was cut before, or as the pieces' times say."""
        self._graphs = graphs = self.executor.capture(self._example, keep_graphs=True)
        self._cut, self.pieces, self._uncut = [], [], []
        cuts = iter(known)
        for piece in graphs.pieces:
            graph = graphs.graph_of(piece)
            if graph is None:  # what the host does itself, such as an optimizer that cannot be captured
                self.pieces.append(piece)
                self._uncut.append(piece)
            else:
                where = next(cuts, None)
                self._cut.append(CutGraph(graph, target_s=self.piece_s, timed=self._timed, cuts=where))
                self.pieces += self._cut[-1].pieces
                self._uncut += self._cut[-1].whole or self._cut[-1].pieces
        self._cuts = [cut.cuts for cut in self._cut]
        return graphs

    def leave(self) -> None:
        """Between two steps: everything goes to the host's memory, and the graphs are let go."""
        self.let_go()
        self._away.take(self._all_tensors())
        give_back()

    def let_go(self) -> None:
        """Of the graphs, and of all that lies in their memory."""
        torch.cuda.synchronize()
        self._graphs, self._cut, self.pieces, self._loss = None, [], [], None
        self.executor.update.forget()
        self.executor.passes.begin_step(())

    def come_back(self) -> None:
        """Undoes `leave`; trains nothing. Where it raises, everything is in the host's memory as before."""
        with or_else(self.leave), torch.cuda.stream(self.stream):
            self._away.bring_back(self.stream.device)
            self.capture_as_cut()
        self._away.forget()

    def capture_as_cut(self) -> None:
        """Captures again: the pieces and their times are those of before, unless the step has come out otherwise."""
        with torch.cuda.stream(self.stream):
            self._capture_again()

    def _capture_again(self) -> None:
        known = self._cuts
        try:
            self._cut_graphs(known)
            if known and len(self.pieces) == len(self.piece_times_s):
                return
        except CaptureError as error:
            if ran_out(error):
                raise torch.OutOfMemoryError(str(error)) from None
        self._cuts = []
        self.capture()

    def run_uncaptured(self) -> None:
        """Makes the whole step, called eagerly, the only piece: for a foreground that graphs cannot hold."""
        self._graphs, self._cut = None, []
        self.pieces = [self._run_eagerly]
        self.piece_times_s = [self.alone_s]

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed: then they take no more memory than they have."""
        return self._graphs is not None

    def _run_eagerly(self) -> None:
        self._before = self._before or _Before(self.executor)
        self._before.note()
        self._loss = self.executor.run(self.step, self._example)

    def undo(self) -> bool:
        """After a step that ran out of memory: puts everything as it was before; False where it cannot.

        A step that has changed parameters, or what the optimizer remembers, cannot be taken back.
        """
        if self.is_captured:
            return False
        self.executor.update.forget()
        self.executor.passes.begin_step(())
        with torch.cuda.stream(self.stream):
            return self._before is None or self._before.restore()

    def begin(self, batches: Sequence[Sequence[Batch]]) -> None:
        """Puts the next step's samples in place, from pinned memory; `pieces` are to follow."""
        if self._graphs is None:
            with torch.cuda.stream(self.stream):
                self._example = self._loader.move(self._loader.name(batches))
            return
        self.executor.begin(self.step)
        with torch.cuda.stream(self.stream):
            self._graphs.begin(self.step, self._loader.name(batches))

    def end(self) -> torch.Tensor:
        """After the last piece: the loss, which the next step overwrites."""
        self.step += 1
        if self._graphs is None:
            assert self._loss is not None
            assert self._before is not None
            self._before.forget()
            return self._loss
        assert self._graphs.loss is not None
        with torch.cuda.stream(self.stream):
            self.executor.update.end_step()
        return self._graphs.loss

    def state(self) -> list[torch.Tensor]:
        """Everything that training changes, where it is."""
        return [tensor.detach() for tensor in self._tensors()]

    def _tensors(self) -> list[torch.Tensor]:
        model = self.executor.part.traced.model
        return [*model.parameters(), *model.buffers(), *_remembered(self.executor)]

    def _all_tensors(self) -> list[torch.Tensor]:
        """The same, and the samples that a capture begins with."""
        samples = [[part.values, part.target] for minibatch in self._example for part in minibatch]
        return self._tensors() + [x for x in pytree.tree_leaves(samples) if isinstance(x, torch.Tensor)]

    def _timed(self, pieces: Sequence[Piece]) -> list[float]:
        assert self._graphs is not None
        graphs = self._graphs
        return times_of_pieces(pieces, lambda: graphs.begin(self.step, self._example))


class _Before:
    """What a step that is called eagerly began with, as far as it can be put back.

    Buffers change in the forward, by operators that do not say so, and are copied. Parameters and what the optimizer
    remembers change at the end; torch counts how often, and whether they have is all that is asked.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._buffers = [buffer.detach() for buffer in executor.part.traced.model.buffers()]
        self._copies = [buffer.clone() for buffer in self._buffers]
        self._versions: list[int] | None = None
        """None between steps."""

    def note(self) -> None:
        """A step begins."""
        _copy(self._copies, self._buffers)
        self._versions = self._counted()

    def forget(self) -> None:
        """The step has ended."""
        self._versions = None

    def restore(self) -> bool:
        """Puts the buffers back; False where more than they has changed."""
        if self._versions is None:
            return True
        if self._counted() != self._versions:
            return False
        _copy(self._buffers, self._copies)
        return True

    def _counted(self) -> list[int]:
        model = self._executor.part.traced.model
        return [tensor._version for tensor in (*model.parameters(), *_remembered(self._executor))]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _remembered(executor: Executor) -> list[torch.Tensor]:
    """The optimizer's state."""
    optimizer = executor.update.optimizer
    slots = (slot for slots in optimizer.state.values() for slot in slots.values()) if optimizer is not None else ()
    return [slot for slot in slots if isinstance(slot, torch.Tensor)]


def times_of_pieces(pieces: Sequence[Piece], begin: Callable[[], None]) -> list[float]:
    """Seconds of each piece on the current stream, the smallest of some; `begin` precedes each step."""
    best = [math.inf] * len(pieces)
    for _ in range(_REPEATS):
        begin()
        torch.cuda._sleep(_BLIND_CYCLES + _BLIND_CYCLES_A_PIECE * len(pieces))  # type: ignore[no-untyped-call]
        marks = [_mark()]
        for piece in pieces:
            piece()
            marks.append(_mark())
        torch.cuda.synchronize()
        best = [min(pair) for pair in zip(best, _seconds_between(marks), strict=True)]
    return best


def times_of_steps(pieces: Sequence[Piece], begin: Callable[[], None]) -> float:
    """Seconds of a whole step on the current stream, one after the other as fast as they go."""
    torch.cuda._sleep(_BLIND_CYCLES)  # type: ignore[no-untyped-call]
    marks = [_mark()]
    for _ in range(_REPEATS):
        begin()
        for piece in pieces:
            piece()
        marks.append(_mark())
    torch.cuda.synchronize()
    return statistics.median(_seconds_between(marks))


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(marks: Sequence[torch.cuda.Event]) -> list[float]:
    return [float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(marks)]


def _default_offset(device: torch.device) -> int:
    index = device.index if device.index is not None else torch.cuda.current_device()
    return int(torch.cuda.default_generators[index].get_offset())
