"""The memory of a shared GPU: backgrounds leave it and come back, and train as if they had stayed."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from share_on_gpu import (
    ARRAY,
    STEPS,
    alone,
    array_alone,
    at_work,
    say,
    start_background,
    start_eagerly,
    synchronising_loss,
    wide_job,
)

from burstpool.job import load_job
from burstpool.run.even import even_plan
from burstpool.run.graphs import WARM_UP_STEPS
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import train
from burstpool.share.base import Background, ShareOutcome, ShareRequest
from burstpool.share.budget import Budget
from burstpool.share.cuda import share_on_cuda
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper
from burstpool.share.gpu.array_steps import ArrayStep
from burstpool.share.gpu.at_work import BackgroundWork, JobAtWork, move
from burstpool.share.gpu.evictions import Evictions, Memory, Stay
from burstpool.share.gpu.feeding import Feeder
from burstpool.share.gpu.loop import SharedGpu, streams
from burstpool.share.gpu.moving import give_back
from burstpool.share.gpu.partition import confined_stream
from burstpool.share.gpu.second_process import SecondProcess
from burstpool.share.gpu.width import Widths
from burstpool.share.preparing import sliced_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def hungry_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Which takes memory anew in every step."""
    torch.empty(256 << 20, dtype=torch.uint8, device=output.device)
    return synchronising_loss(output, target)


WIDE_BYTES = 2 * 64 << 20
"""Of the weights of a `Wide` with two layers; there are gradients and momenta as well."""


def single(control: dist.ProcessGroup, low: torch.cuda.Stream, *, adam: bool) -> BackgroundWork:
    return start_background(at_work("wide", control, low, wide_job(adam=adam)))


def fused_array(control: dist.ProcessGroup, low: torch.cuda.Stream, *, adam: bool) -> BackgroundWork:
    jobs = [wide_job(lr=lr, adam=adam) for lr in (1e-3, 3e-4)]
    steps = ArrayStep(jobs, stream=low, piece_s=1e-4)
    return start_background(JobAtWork("array", steps, Feeder(jobs[0], jobs[0])))


def train_to(work: BackgroundWork, steps: int) -> None:
    deadline = time.monotonic() + 60
    while work.steps_done < steps:
        assert not work.ended, work.ended
        assert time.monotonic() < deadline
        work.launch(None)
    work.finish()


@pytest.mark.parametrize("part", [None, 0.3], ids=["whole GPU", "a part of it"])
@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "AdamW with a schedule"])
@pytest.mark.parametrize("make", [single, fused_array])
def test_a_background_that_left_the_gpu_and_came_back_trains_as_if_it_had_stayed(
    control: dist.ProcessGroup, make: Callable[..., BackgroundWork], adam: bool, part: float | None
) -> None:
    _, low = streams(torch.device("cuda", 0))
    stays, goes = make(control, low, adam=adam), make(control, low, adam=adam)
    if part is not None:
        move(goes.work.steps, confined_stream(0, part, low.priority))
    train_to(stays, 24)
    held: list[int] = []
    freed: list[int] = []
    for until in (8, 16, 24):
        train_to(goes, until)
        if until == 24:
            break
        give_back()
        before, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        begun_s = time.monotonic()
        goes.leave()
        left_s, begun_s = time.monotonic() - begun_s, time.monotonic()
        assert goes.where == "away", goes.ended
        assert goes.launch(None) is None
        held.append(before - torch.cuda.memory_reserved())
        freed.append(used - torch.cuda.memory_allocated())
        goes.come_back()
        assert goes.where == "here", goes.ended
        say(
            f"left in {left_s:.3f} s, came back in {time.monotonic() - begun_s:.3f} s, "
            f"{held[-1] >> 20} MiB, {freed[-1] >> 20} of them in use"
        )
    members = 2 if make is fused_array else 1
    assert min(held) > members * (2 if not adam else 3) * WIDE_BYTES  # weights, what the optimizer keeps, graphs
    assert max(freed) < 1.1 * min(freed)  # as much the second time: nothing is left behind
    assert goes.work.losses == stays.work.losses
    for work in (stays, goes):
        work.close()


def test_a_background_leaves_when_memory_runs_short_and_comes_back_when_it_is_free(
    control: dist.ProcessGroup,
) -> None:
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    give_back()
    free = torch.cuda.mem_get_info()[0]
    background = start_background(at_work("wide", control, low, wide_job()))
    give_back()
    held = free - torch.cuda.mem_get_info()[0]
    stay = Stay(held_bytes=held, first_pause_s=0.1)
    room = Evictions(
        [background], [stay], memory=lambda: Memory(*torch.cuda.mem_get_info()), clock=time.monotonic, slowdown=2.0
    )
    hog: list[torch.Tensor] = []
    back_at: list[int] = []

    def watch(gpu: SharedGpu) -> None:
        step = gpu.foreground.steps.step
        if background.steps_done >= 10 and not stay.evictions and not hog:
            free, total = torch.cuda.mem_get_info()
            hog.append(torch.empty(free - total // 40, dtype=torch.uint8, device="cuda"))
        if background.where == "away" and hog:
            hog.clear()
            torch.cuda.empty_cache()
        if stay.returning_s is not None and not back_at:
            back_at.append(step)

    deadline = time.monotonic() + 60
    gpu = SharedGpu(foreground, (background,), Budget(slowdown=2.0), watch=watch, evictions=room)
    gpu.run(
        10**6,
        stop=lambda: time.monotonic() > deadline or (bool(back_at) and foreground.steps.step > back_at[0] + 200),
    )
    say(f"{stay}, {len(foreground.losses)} steps, pauses {gpu.measured.paused_s}")
    assert stay.evictions == 1
    assert background.where == "here", background.ended
    assert "GPU's memory were free" in stay.reason
    assert background.steps_done > 10
    foreground.feeder.close()
    background.close()
    assert foreground.losses == alone("zoo:tiny_vgg", control, len(foreground.losses))
    mine = background.work.losses
    assert mine == alone("wide", control, len(mine), wide_job())
    long = [pause_s for pause_s in gpu.measured.paused_s.values() if pause_s > 0.01]
    assert 1 <= len(long) <= 2  # to leave and to come back; it waits for its step's end without a pause to speak of


def test_a_foreground_that_runs_out_of_memory_gets_the_backgrounds_and_does_its_step_again(
    control: dist.ProcessGroup,
) -> None:
    high, low = streams(torch.device("cuda", 0))
    job = dataclasses.replace(wide_job(name="foreground"), loss=hungry_loss)
    foreground = at_work("foreground", control, high, job)
    start_eagerly(foreground)
    background = start_background(at_work("wide", control, low, wide_job(num_layers=4)))
    stay = Stay(held_bytes=1, first_pause_s=0.1)
    plenty = Memory(1 << 40, 1 << 40)
    room = Evictions([background], [stay], memory=lambda: plenty, clock=time.monotonic, slowdown=2.0)
    hog: list[torch.Tensor] = []

    def watch(gpu: SharedGpu) -> None:
        if gpu.foreground.steps.step == 30:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            hog.append(torch.empty(free - (48 << 20), dtype=torch.uint8, device="cuda"))

    SharedGpu(foreground, (background,), Budget(slowdown=2.0), watch=watch, evictions=room).run(60)
    say(stay)
    assert hog
    hog.clear()
    torch.cuda.empty_cache()
    assert stay.evictions == 1
    assert stay.reason == "the foreground ran out of memory"
    foreground.feeder.close()
    background.close()
    assert foreground.losses == alone("foreground", control, len(foreground.losses), job, captured=False)


def test_where_memory_for_parts_is_missing_a_background_stays_on_the_whole_gpu(control: dist.ProcessGroup) -> None:
    high, low = streams(torch.device("cuda", 0))
    foreground = at_work("zoo:tiny_vgg", control, high)
    foreground.start()
    background = start_background(at_work("zoo:tiny_mlp", control, low))
    Widths(foreground.steps, background.work.steps).take(slowdown=1.0)  # all that trying takes, but for the parts' own
    move(background.work.steps, low)
    give_back()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (8 << 20), dtype=torch.uint8, device="cuda")
    confined_stream.cache_clear()  # new streams, for each of which cuBLAS wants 32 MiB
    tried = Widths(foreground.steps, background.work.steps)
    del hog
    say({share: (found.slowdown, found.kept) for share, found in tried.tried.items()})
    assert set(tried.tried) == {1.0}
    assert tried.take(slowdown=1.1) == 1.0
    SharedGpu(foreground, (background,), Budget(slowdown=1.5)).run(STEPS)
    foreground.feeder.close()
    background.work.feeder.close()
    assert foreground.losses == alone("zoo:tiny_vgg", control)
    mine = background.work.losses
    assert len(mine) > WARM_UP_STEPS
    assert mine == alone("zoo:tiny_mlp", control, len(mine))


def test_a_second_process_leaves_the_gpu_and_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    def trained(name: str, *leaves_at: int) -> list[list[float]]:
        job = wide_job(uncapturable=True, adam=True)
        process = SecondProcess(name, job, checkpoints=tmp_path / name)
        try:
            for until in (*leaves_at, 30):
                deadline = time.monotonic() + 120
                while len(process.losses) < until:
                    assert time.monotonic() < deadline
                    assert not process.ended, process.ended
                    process.launch(None)
                    process.look_after()
                if until != 30:
                    process.leave(at_once=True)
                    assert process.where == "away", process.ended
                    while process.where != "here":
                        assert not process.ended, process.ended
                        process.come_back()
                        time.sleep(0.01)
            return process.losses[:30]
        finally:
            process.close()

    assert trained("goes", 12, 20) == trained("stays")


def test_a_run_counts_evictions_and_its_losses_are_those_of_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(folder: str, short: Callable[[int], bool]) -> ShareOutcome:
        looks = itertools.count()

        class Told:
            def __init__(self, device: torch.device, *, grows: bool) -> None: ...

            def __call__(self) -> Memory:
                return Memory(1 << 30 if short(next(looks)) else 90 << 30, 100 << 30)

        monkeypatch.setattr("burstpool.share.cuda.MemoryOf", Told)
        job = load_job("zoo:tiny_vgg")
        return share_on_cuda(
            ShareRequest(
                foreground="zoo:tiny_vgg",
                settings={},
                plan=even_plan(trace_job(job).graph, num_devices=1, batch=job.batch, name=job.name),
                steps=6000,
                backgrounds=(Background(source="zoo:tiny_mlp"), Background(source="zoo:tiny_mlp", settings=ARRAY)),
                budget=Budget(slowdown=2.0),
                options=RunOptions(device="cuda", checkpoint_every=0),
                run_folder=tmp_path / folder,
            )
        )

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    quiet = shared("quiet", lambda look: False)
    moved = shared("moved", lambda look: look in (3, 4))
    say([(b.state, b.reason, b.evictions, b.steps, b.kept) for b in moved.backgrounds])
    assert list(moved.losses) == list(quiet.losses)
    assert sum(b.evictions for b in moved.backgrounds) >= 1
    for mine, theirs in zip(moved.backgrounds, quiet.backgrounds, strict=True):
        common = min(len(mine.losses), len(theirs.losses))
        assert common > 10
        assert mine.losses[:common] == theirs.losses[:common]


def test_a_gated_background_that_was_evicted_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    for number, settings in enumerate((({"lr": "0.03"},), ARRAY)):
        folder = tmp_path / str(number)
        folder.mkdir()
        gate = Gate.create(folder / "gate")
        keeper = Keeper(
            Background(source="zoo:tiny_mlp", settings=settings, lowest_priority=False), gate, folder / "run", gpu=0
        )
        keeper.start()
        try:
            for until in (30, 60):
                deadline = time.monotonic() + 120
                while gate.done().steps < until:
                    assert time.monotonic() < deadline, keeper.kept
                    assert keeper.kept.state in ("starting", "running"), keeper.kept
                    time.sleep(0.01)
                if until == 30:
                    assert keeper.evict("asked to")
                    while keeper.is_here:
                        time.sleep(0.01)
                    keeper.readmit()
                    while not keeper.is_here:
                        time.sleep(0.01)
        finally:
            keeper.stop()
        say((keeper.kept.state, keeper.kept.reason, keeper.kept.evictions, len(keeper.kept.losses)))
        assert keeper.kept.evictions == 1
        if len(settings) > 1:
            assert keeper.kept.losses[:50] == array_alone("zoo:tiny_mlp", settings, 50, folder)
        else:
            job = load_job("zoo:tiny_mlp", dict(settings[0]))
            own = train(
                "zoo:tiny_mlp",
                sliced_plan(trace_job(job).graph, batch=job.batch, name="own"),
                steps=50,
                settings=dict(settings[0]),
                run_folder=folder / "own",
                options=RunOptions(device="cuda", cuda_graphs=False),
            )
            assert keeper.kept.losses[:50] == [loss.loss for loss in own.losses]
