"""Sharing one GPU, from the request to the outcome: sets the jobs up, runs them, keeps what they have learnt.

The foreground's step is captured as CUDA graphs on a stream of high priority; background jobs are cut into short graphs
on one of low priority (`gpu/loop.py`), or run as a process of their own where they cannot be captured. The process that
calls this drives the GPU. Under a plan of several devices each has a worker, and its background a process, as on CPUs
(`gates/`): a process that drives a GPU for two jobs would have to be a worker of the plan too.
"""

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burstpool.errors import CaptureError, RunError, ShareError, in_a_line
from burstpool.job import load_jobs
from burstpool.run.checkpoint import held_tensors, save_checkpoint, state_of
from burstpool.run.export import export_weights
from burstpool.run.folder import RunFolder, StepLoss
from burstpool.run.options import RunOptions
from burstpool.run.trainer import InterruptedRun, counted_interrupts, write_artifacts
from burstpool.run.worker import JobSource, Task
from burstpool.share.array_file import save_array
from burstpool.share.base import (
    Background,
    BackgroundOutcome,
    ShareOutcome,
    ShareProgress,
    ShareRequest,
    refuse_fp16,
)
from burstpool.share.claim import claimed, terminable
from burstpool.share.gates.workers import share_among_workers
from burstpool.share.gpu.array_steps import ArrayStep
from burstpool.share.gpu.at_work import BackgroundWork, Filler, JobAtWork, move
from burstpool.share.gpu.capabilities import capabilities
from burstpool.share.gpu.evictions import Evictions, Stay
from burstpool.share.gpu.feeding import Feeder
from burstpool.share.gpu.graph_steps import GraphStep
from burstpool.share.gpu.loop import SharedGpu, alone_in_a_group, streams
from burstpool.share.gpu.memory import MemoryOf, memory_cap
from burstpool.share.gpu.moving import give_back
from burstpool.share.gpu.pieces import piece_length_s
from burstpool.share.gpu.second_process import SecondProcess
from burstpool.share.gpu.timeline import timeline_of
from burstpool.share.gpu.width import Widths
from burstpool.share.preparing import prepare_foreground
from burstpool.share.rehearsal import Rehearsal
from burstpool.share.results import BackgroundFolder, Saving
from burstpool.share.room import RESERVE
from burstpool.share.step_log import SHARING, StepLog, slowdowns

_LOG = logging.getLogger(__name__)
_VIEW_S = 0.5
"""Between two looks of a live view."""
_MOST_INTERRUPTS = 2
"""The first Ctrl-C ends the run, which is then saved; one more ends backgrounds in processes of their own at once, and
does no other harm; the next gives up what is not saved by then."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Beside:
    """A background job and what became of it."""

    wanted: Background
    filler: Filler | None = None
    alone_s: float | None = None
    reason: str = ""
    """Why it never ran, or runs no more."""
    steps_before: int = 0
    """Trained before the foreground's first shared step."""
    held_bytes: int = 0
    """What it takes of the GPU's memory."""
    capture_s: float = 0.0
    """How long its capture took, with all that is only done the first time."""
    multiprocessors: float = 1.0
    """Share of the GPU's that it is confined to."""
    losses: list[list[float]] = field(default_factory=list)
    was_away: bool = False
    """Whether it was in the host's memory when the foreground ended."""


def share_on_cuda(request: ShareRequest, *, observer: Callable[[ShareProgress], None] | None = None) -> ShareOutcome:
    """See `ShareFunction`."""
    refuse_fp16(request.options)
    if not torch.cuda.is_available():
        raise RunError("there is no CUDA device here; pass --device cpu")
    if request.plan.num_devices > 1:
        return share_among_workers(request, observer=observer)
    if request.plan.num_minibatches != 1:
        raise ShareError(
            "a GPU is shared under a plan of one minibatch a step; plan with more devices or fewer samples"
        )
    with terminable(), claimed(request.run_folder) as begin:
        _, start = prepare_foreground(request)
        with alone_in_a_group() as control, contextlib.ExitStack() as stack:
            return _Sharing(request, start.folder, control, stack, observer).run(begin)


class _Sharing:
    """One run."""

    def __init__(
        self,
        request: ShareRequest,
        folder: RunFolder,
        control: dist.ProcessGroup,
        stack: contextlib.ExitStack,
        observer: Callable[[ShareProgress], None] | None,
    ) -> None:
        self.request, self.folder, self.control, self.stack, self.observer = request, folder, control, stack, observer
        self.high, self.low = streams(torch.device("cuda", torch.cuda.current_device()))
        self.backgrounds = [_Beside(wanted=background) for background in request.backgrounds]
        self._seen_s = 0.0
        self._interrupts: Callable[[], int] = lambda: 0
        self._borne = 1
        """So many of them do not mean that anybody is in a hurry."""

    def run(self, begin: Callable[[], None]) -> ShareOutcome:
        """Until the foreground has ended, or was interrupted; whatever ends it, what it has learnt is kept.

        Calls `begin` when it is made ready, with its background.
        """
        rehearsals = [self._rehearsal(beside) for beside in self.backgrounds]
        self._front = foreground = self._foreground()
        for beside, rehearsal in zip(self.backgrounds, rehearsals, strict=True):
            self._start(beside, rehearsal)
        fillers = [beside.filler for beside in self.backgrounds if beside.filler is not None]
        self._evictions = self._make_evictions(foreground)
        gpu = SharedGpu(
            foreground,
            fillers,
            self.request.budget,
            watch=self._watch,
            allow_nan=self.request.options.allow_nan,
            evictions=self._evictions,
        )
        self._begun_s = time.monotonic()
        begin()
        warm_up = len(foreground.losses)
        with counted_interrupts(most=_MOST_INTERRUPTS) as self._interrupts:
            try:
                gpu.run(self.request.steps - warm_up, stop=lambda: self._interrupts() > 0)
            finally:
                self._took_s = time.monotonic() - self._begun_s
                self._outcomes = self._keep_all(foreground, gpu, warm_up)
        if len(foreground.losses) < self.request.steps:
            raise InterruptedRun(self.folder.path, len(foreground.losses))
        return self._outcome(foreground, gpu)

    def _foreground(self) -> JobAtWork:
        source = JobSource(source=self.request.foreground, settings=dict(self.request.settings))
        job = replace(source.load(), batch=self.request.plan.batch)
        steps = GraphStep(job, stream=self.high, control=self.control, options=self.request.options)
        feeder = Feeder(source, job)
        self.stack.callback(feeder.close)
        work = JobAtWork(job.name, steps, feeder)
        try:
            work.start(most_steps=self.request.steps)
        except CaptureError as error:
            _LOG.warning("the foreground runs without CUDA graphs: %s", error)
            steps.run_uncaptured()
        work.read(all_of_them=True)
        return work

    def _make_evictions(self, foreground: JobAtWork) -> Evictions:
        """Who makes room when the foreground needs it."""
        there = [beside for beside in self.backgrounds if beside.filler is not None]
        assert isinstance(foreground.steps, GraphStep)
        return Evictions(
            [beside.filler for beside in there if beside.filler is not None],
            [Stay(held_bytes=beside.held_bytes, first_pause_s=beside.capture_s) for beside in there],
            memory=MemoryOf(self.low.device, grows=not foreground.steps.is_captured),
            clock=time.monotonic,
            slowdown=self.request.budget.slowdown,
        )

    def _rehearsal(self, beside: _Beside) -> Rehearsal:
        rehearsal = Rehearsal(beside.wanted)
        self.stack.callback(rehearsal.close)
        return rehearsal

    def _start(self, beside: _Beside, rehearsal: Rehearsal) -> None:
        """Makes a background ready; whatever its code does wrong, it is left out and the reason kept.

        Raises ShareError for one that could never be used.
        """
        give_back()
        free_bytes, _ = torch.cuda.mem_get_info()
        try:
            rehearsal.check()
        except RunError as error:
            self._leave_out(beside, error)
            return
        try:
            beside.filler = self._filler(beside)
        except (Exception, SystemExit) as error:
            self._leave_out(beside, error)
            return
        self.stack.callback(beside.filler.close)
        give_back()
        beside.held_bytes = max(free_bytes - torch.cuda.mem_get_info()[0], 0)

    def _leave_out(self, beside: _Beside, error: BaseException) -> None:
        beside.reason = in_a_line(error)
        _LOG.warning("background %s is left out: %s", beside.wanted.name, beside.reason)

    def _filler(self, beside: _Beside) -> Filler:
        wanted = beside.wanted
        sources = [JobSource(source=wanted.source, settings=dict(settings)) for settings in wanted.settings]
        try:
            return self._captured(beside, sources)
        except CaptureError as error:
            if len(sources) > 1:
                raise
            how = (
                "beside the foreground's, by MPS" if capabilities(0).side_by_side else "in turns with the foreground's"
            )
            _LOG.warning("background %s runs as a process of its own, %s: %s", wanted.name, how, error)
        give_back()
        process = SecondProcess(
            wanted.name,
            sources[0],
            checkpoints=self._folder(beside).run.checkpoints,
            autocast=self._autocast,
            memory_bytes=self._memory_bytes(wanted),
            most_steps=wanted.steps,
            is_in_a_hurry=lambda: self._interrupts() > self._borne,
        )
        beside.alone_s, beside.losses = process.alone_s, process.losses
        return process

    def _captured(self, beside: _Beside, sources: Sequence[JobSource]) -> BackgroundWork:
        wanted, jobs = beside.wanted, load_jobs(beside.wanted.source, beside.wanted.settings)
        steps: GraphStep | ArrayStep
        piece_s = piece_length_s(self._front.steps.alone_s)
        with contextlib.ExitStack() as cleaning:
            with memory_cap(wanted.name, self.low.device, self._memory_bytes(wanted)):
                if len(jobs) > 1:
                    steps = ArrayStep(jobs, stream=self.low, piece_s=piece_s, autocast=self._autocast)
                else:
                    options = RunOptions(device="cuda", autocast=self._autocast)
                    steps = GraphStep(jobs[0], stream=self.low, control=self.control, piece_s=piece_s, options=options)
                feeder = Feeder(sources[0], jobs[0], memory_bytes=wanted.memory_bytes or 4 << 30, niceness=10)
                cleaning.callback(feeder.close)
                work = JobAtWork(wanted.name, steps, feeder)
                work.start(most_steps=wanted.steps)
            beside.capture_s = work.capture_s
            # Without the cap: for a moment the foreground's state, too, is there twice.
            beside.multiprocessors = self._found_width(steps)
            cleaning.pop_all()
        work.read(all_of_them=True)
        beside.alone_s, beside.losses, beside.steps_before = steps.alone_s, work.losses, len(work.losses)
        return BackgroundWork(work, most_steps=wanted.steps)

    def _found_width(self, steps: GraphStep | ArrayStep) -> float:
        """The part of the GPU for a background; the whole where nothing can be tried.

        Nothing can beside a foreground that is not captured, nor without memory for copies of both jobs' state.
        """
        front = self._front.steps
        if not isinstance(front, GraphStep) or not front.is_captured:
            return 1.0
        try:
            return Widths(front, steps).take(slowdown=self.request.budget.slowdown)
        except (CaptureError, RuntimeError) as error:
            _LOG.info("a background stays on the whole GPU: %s", in_a_line(error))
        # Outside of the handler: an exception keeps alive whatever was made.
        if steps.stream != self.low or not steps.pieces:
            move(steps, self.low)
        return 1.0

    def _memory_bytes(self, wanted: Background) -> int:
        """An equal share of what the foreground leaves, or what was asked for if that is less."""
        free, total = torch.cuda.mem_get_info()
        waiting = sum(1 for beside in self.backgrounds if beside.filler is None and not beside.reason)
        share = int((free - RESERVE * total) / max(waiting, 1))
        if share <= 0:
            raise ShareError("the foreground leaves no memory of the GPU")
        return min(share, wanted.memory_bytes or share)

    def _folder(self, beside: _Beside) -> BackgroundFolder:
        return BackgroundFolder.of(self.folder.path, self.backgrounds.index(beside))

    @property
    def _autocast(self) -> Any:
        return self.request.options.autocast

    def _watch(self, gpu: SharedGpu) -> bool:
        """Writes checkpoints and shows progress; whether the foreground had to wait for it."""
        every = self.request.options.checkpoint_every
        step = gpu.foreground.steps.step
        saves = bool(every) and step % every == 0 and step < self.request.steps
        if saves:
            torch.cuda.synchronize()
            self._save(gpu.foreground, self.folder.checkpoints)
        self._show(gpu)
        return saves

    def _show(self, gpu: SharedGpu) -> None:
        now_s = time.monotonic()
        if self.observer is None or now_s - self._seen_s < _VIEW_S or not gpu.measured.step_s:
            return
        self._seen_s = now_s
        recent = gpu.measured.step_s[-30:]
        mean_s, alone_s = sum(recent) / len(recent), gpu.controller.alone_s
        trained = sum(background.steps_done for background in gpu.backgrounds)
        self.observer(
            ShareProgress(
                step=len(gpu.foreground.losses),
                steps=self.request.steps,
                samples_per_s=self.request.plan.batch / mean_s,
                slowdown=mean_s / alone_s if alone_s else None,
                background_steps=trained,
                background_steps_per_s=trained / max(now_s - self._begun_s, 1e-9),
            )
        )

    def _keep_all(self, foreground: JobAtWork, gpu: SharedGpu, warm_up: int) -> list[BackgroundOutcome]:
        """What all have learnt; backgrounds' too where the foreground's cannot be saved.

        What takes longest comes last: whoever gives that up has a record and the losses of all.
        """
        failed: Exception | None = None
        try:
            self._keep(foreground, gpu, warm_up)
        except Exception as error:
            failed = error
        finally:  # also of a foreground that is given up: after so many Ctrl-C nobody is waited for
            self._borne = min(self._interrupts(), 1)
            are_whole = [self._ended(beside) for beside in self.backgrounds]
        for beside, is_whole in zip(self.backgrounds, are_whole, strict=True):
            if is_whole:
                with self._saving(beside):
                    self._save_learnt(beside)
        outcomes = [
            self._folder(beside).keep(beside.wanted, self._background_outcome(beside)) for beside in self.backgrounds
        ]
        if failed is not None:
            raise failed
        return outcomes

    def _keep(self, foreground: JobAtWork, gpu: SharedGpu, warm_up: int) -> None:
        """The foreground's losses, checkpoint and weights.

        A step's time is from the end of the one before: the first after the warm-up has none, nor one that was not
        waited for.
        """
        torch.cuda.synchronize()
        foreground.read(all_of_them=True)
        times_s = itertools.chain([0.0] * (warm_up + 1), gpu.measured.step_s, itertools.repeat(0.0))
        self.folder.add_losses(
            StepLoss(step=step, loss=loss, step_time_s=time_s)
            for (step, [loss]), time_s in zip(enumerate(foreground.losses), times_s, strict=False)
        )
        finite = self.request.options.allow_nan or all(math.isfinite(loss) for [loss] in foreground.losses)
        checkpoint = self._save(foreground, self.folder.checkpoints) if finite and gpu.is_whole else None
        if checkpoint is not None:
            export_weights(checkpoint, self.folder.weights)

    def _ended(self, beside: _Beside) -> bool:
        """Ends a background, and notes what became of it; whether nothing went wrong."""
        beside.was_away = beside.filler is not None and beside.filler.where in ("away", "returning")
        with self._saving(beside) as saving:
            self._finish(beside)
        self._folder(beside).note(beside.wanted, self._background_outcome(beside))
        return not saving.failure

    @contextlib.contextmanager
    def _saving(self, beside: _Beside) -> Iterator[Saving]:
        """What goes wrong inside, as with a full disk, is the background's: the foreground has what it needs."""
        with Saving(beside.wanted.name) as saving:
            yield saving
        beside.reason = _why_failed(beside) or saving.failure

    def _finish(self, beside: _Beside) -> None:
        """Ends a background's last step; writes a single job's losses."""
        filler, folder = beside.filler, self._folder(beside)
        if filler is None:
            return
        try:
            filler.finish()
        finally:
            if len(beside.wanted.settings) == 1:
                folder.run.path.mkdir(parents=True, exist_ok=True)
                folder.run.add_losses(
                    StepLoss(step=step, loss=loss, step_time_s=0.0) for step, [loss] in enumerate(beside.losses)
                )

    def _save_learnt(self, beside: _Beside) -> None:
        """A checkpoint, or an array's file."""
        filler, folder = beside.filler, self._folder(beside)
        if isinstance(filler, SecondProcess):
            filler.save()
        elif isinstance(filler, BackgroundWork) and filler.is_sound:
            if isinstance(filler.work.steps, GraphStep):
                self._save(filler.work, folder.run.checkpoints)
                self._describe(beside, filler.work.steps)
            else:
                if not beside.was_away:
                    filler.work.steps.leave()  # it is copied to be saved, and the GPU may be full
                self._save(filler.work, folder.path)

    def _describe(self, beside: _Beside, steps: GraphStep) -> None:
        """Makes the run folder of a background one that can be gone on with."""
        wanted, run = beside.wanted, self._folder(beside).run
        task = Task(
            job=JobSource(source=wanted.source, settings=dict(wanted.settings[0])),
            plan=steps.plan,
            schedule=steps.schedule,
            options=steps.options,
            steps=steps.step,
            checkpoints=str(run.checkpoints),
        )
        write_artifacts(run, task, steps.job, wanted.source)

    def _save(self, work: JobAtWork, folder: Path) -> Path | None:
        """A checkpoint; None of an array, whose file is not one of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        if isinstance(work.steps, ArrayStep):
            array, position = work.steps.array, work.position
            save_array(array, BackgroundFolder(folder).array, step=work.steps.step, positions=[position] * len(array))
            return None
        assert isinstance(work.steps, GraphStep)
        executor = work.steps.executor
        part = executor.part
        state = state_of(
            model=part.traced.model,
            holdings=part.holdings,
            step=work.steps.step,
            position=work.position,
            seed=work.steps.job.seed,
            scale=None,
        )
        return save_checkpoint(
            folder,
            state,
            tensors=held_tensors(part.traced.model, part.holdings, 0),
            update=executor.update,
            control=self.control,
            keep=self.request.options.keep_checkpoints,
        )

    def _outcome(self, foreground: JobAtWork, gpu: SharedGpu) -> ShareOutcome:
        measured = gpu.measured
        log = StepLog(
            times_s=measured.step_s,
            alone=[work_s == 0 for work_s in measured.background_s],
            overlapped_s=measured.background_s,
            in_gaps_s=[0.0] * len(measured.step_s),
            paused_s=sum(measured.paused_s.values()),
        )
        log.save(self.folder.path / SHARING)
        losses = [loss for [loss] in foreground.losses]
        timeline = timeline_of(gpu, self.request.options.timeline_steps)
        if timeline is not None:
            timeline.save(self.folder.timeline)
        return ShareOutcome(
            folder=self.folder.path,
            losses=tuple(losses),
            step_time_s=sum(measured.step_s) / max(len(measured.step_s), 1),
            backgrounds=tuple(self._outcomes),
            timeline=timeline,
            **slowdowns(log),
        )

    def _background_outcome(self, beside: _Beside) -> BackgroundOutcome:
        filler = beside.filler
        before = filler.steps_before if isinstance(filler, SecondProcess) else beside.steps_before
        trained = len(beside.losses) - before
        last_step_s = filler.last_step_s if filler is not None else None
        reason = _why_failed(beside)
        many = len(beside.wanted.settings) > 1
        stay = self._evictions.of(filler)
        away = stay if beside.was_away and not reason and last_step_s is None else None
        span_s = self._took_s if last_step_s is None else last_step_s - self._begun_s
        return BackgroundOutcome(
            name=beside.wanted.name,
            device=0,
            steps=trained,
            kept=trained * beside.alone_s / span_s if beside.alone_s and span_s > 0 else None,
            alone_step_s=beside.alone_s,
            state="failed" if reason else "evicted" if away else "ended",
            reason=away.reason if away else reason,
            restarts=filler.work.feeder.restarts if isinstance(filler, BackgroundWork) else 0,
            evictions=stay.evictions if stay else 0,
            losses=[values if many else values[0] for values in beside.losses],
            multiprocessors=beside.multiprocessors,
        )


def _why_failed(beside: _Beside) -> str:
    """Why it never ran, or runs no more; empty where nothing is wrong with it."""
    has_failed = beside.filler is not None and beside.filler.last_step_s is None
    return beside.reason or (beside.filler.ended if beside.filler is not None and has_failed else "")
