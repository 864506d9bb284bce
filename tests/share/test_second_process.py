"""A background job as a second process, on a CPU: it trains on after it has left and come back, or was killed."""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from share_alone import JOBS, foreground_plan, losses_alone

from burstpool.errors import RunError
from burstpool.run.checkpoint import latest_checkpoint
from burstpool.run.folder import RunFolder
from burstpool.run.trainer import train
from burstpool.run.worker import JobSource
from burstpool.share.gpu.at_work import LAST_STEP
from burstpool.share.gpu.second_process import SecondProcess


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondProcess]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the workers have it: sums come out the same
    monkeypatch.setattr("burstpool.share.gpu.second_process._LEAVE_S", 300.0)  # none is killed for being slow
    source = JobSource(source=JOBS, settings={})
    made = SecondProcess("background", source, checkpoints=tmp_path / "checkpoints", device="cpu")
    yield made
    made.close()


def until(happens: Callable[[], bool], *, doing: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 300
    while not happens():
        assert time.monotonic() < deadline
        doing()
        time.sleep(1e-3)


def train_on(process: SecondProcess, steps: int) -> None:
    def launch() -> None:
        process.look_after()
        assert not process.ended
        process.launch(None)

    until(lambda: len(process.losses) >= steps, doing=launch)


def test_losses_are_those_of_a_job_that_never_left(process: SecondProcess) -> None:
    train_on(process, 12)
    until(lambda: process.finished == process._given)
    posted = process.launch(None)
    assert posted is not None
    process.leave()  # ends its step first
    until(lambda: process.where == "away", doing=process.leave)
    assert posted.query()
    assert process.launch(None) is None
    left_at = len(process.losses)
    assert left_at >= 13
    process.come_back()
    assert process.where == "returning"
    until(lambda: process.where == "here", doing=process.come_back)
    train_on(process, left_at + 5)
    process.leave(at_once=True)
    assert process.where == "away"
    count = len(process.losses)
    assert [loss for [loss] in process.losses] == losses_alone(foreground_plan(devices=1), steps=count)


def test_one_that_comes_to_its_last_step_leaves_a_run_that_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("burstpool.share.gpu.second_process._LEAVE_S", 300.0)
    run, steps = RunFolder(tmp_path / "run"), 11
    source = JobSource(source=JOBS, settings={"lr": "0.02"})
    process = SecondProcess("background", source, checkpoints=run.checkpoints, device="cpu", most_steps=steps)
    try:
        until(lambda: process.last_step_s is not None, doing=lambda: (process.look_after(), process.launch(None)))
        assert process.ended == LAST_STEP
        assert process.launch(None) is None
        process.leave(at_once=True)
        assert process.where == "away"
        assert process.finished == len(process.losses) == steps
    finally:
        process.close()
    further = train(JOBS, 1, steps=steps + 2, resume=run.path, settings={"lr": 0.02})
    assert [loss.step for loss in further.losses] == [steps, steps + 1]
    alone = losses_alone(foreground_plan(devices=1), steps=steps + 2, lr=0.02)
    assert [loss for [loss] in process.losses] + [loss.loss for loss in further.losses] == alone


@pytest.mark.parametrize("steps", [1, 8])
def test_one_whose_last_step_is_among_those_that_tell_its_speed_trains_no_further(steps: int, tmp_path: Path) -> None:
    source = JobSource(source=JOBS, settings={})
    process = SecondProcess("background", source, checkpoints=tmp_path / "run", device="cpu", most_steps=steps)
    try:
        assert process.ended == LAST_STEP
        assert process.finished == len(process.losses) == steps
        assert process.alone_s > 0
    finally:
        process.close()


def test_one_that_is_killed_has_ended_and_counts_as_away(process: SecondProcess) -> None:
    pid = process._process.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: bool(process.ended), doing=process.look_after)
    assert "SIGKILL" in process.ended
    assert process.where == "away"
    process.leave(at_once=True)  # nothing to wait for


def test_it_leaves_signals_to_its_owner_and_saves_what_it_has_learnt(process: SecondProcess, tmp_path: Path) -> None:
    train_on(process, 10)
    for number in (signal.SIGINT, signal.SIGTERM):  # as whoever stops a whole group of processes sends them
        os.kill(process._process.pid, number)
    process.finish()
    process.save()
    assert process.where == "away"
    assert not process.ended
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{len(process.losses):08}"
    process.save()  # it is, already


def test_one_that_dies_as_it_saves_says_what_is_missing(process: SecondProcess) -> None:
    train_on(process, 10)
    process.finish()
    os.kill(process._process.pid, signal.SIGKILL)
    process._process.join()
    with pytest.raises(RunError, match="of step 0"):
        process.save()


def test_a_loss_that_is_not_finite_is_the_end_whatever_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SecondProcess, "_start", lambda process: None)
        patch.setattr(SecondProcess, "_calibrated", lambda process: 1e-3)
        source = JobSource(source=JOBS, settings={})
        process = SecondProcess("background", source, checkpoints=tmp_path, device="cpu", most_steps=2)
    process._answers, theirs = multiprocessing.Pipe(duplex=False)
    for loss in (math.nan, 0.5):
        theirs.send(("step", loss, 1e-3))
    process.finish()
    process.finish()
    assert process.ended == "the loss is not finite"
    assert len(process.losses) == 1
    assert process.last_step_s is None
    process.save()  # there is nothing worth saving


def at_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[SecondProcess, Mock]:
    """One whose process writes what it has learnt for ever."""
    monkeypatch.setattr("burstpool.share.gpu.second_process._LEAVE_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(SecondProcess, "_start", lambda process: None)
        patch.setattr(SecondProcess, "_calibrated", lambda process: 1e-3)
        source = JobSource(source=JOBS, settings={})
        process = SecondProcess("background", source, checkpoints=tmp_path, device="cpu", most_steps=1, **options)
    process._answers, theirs = multiprocessing.Pipe(duplex=False)
    process._permits, process._wants_out = Mock(), Mock()
    process._process = running = Mock(pid=1)
    theirs.send(("step", 0.5, 1e-3))
    process.look_after()
    assert (process.ended, process.where) == (LAST_STEP, "leaving")
    return process, running


def test_one_that_writes_after_its_last_step_has_time_for_it_unless_memory_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, running = at_its_last_step(tmp_path, monkeypatch)
    time.sleep(0.2)
    process.leave()
    assert process.where == "leaving"
    begun = time.monotonic()
    process.leave(at_once=True)
    assert 0.1 <= time.monotonic() - begun < 5  # it is given some time from now on
    assert process.where == "away"
    running.kill.assert_called_once()
    with pytest.raises(RunError, match="of step 0"):
        process.save()


def test_one_that_begins_anew_has_trained_no_step_before(process: SecondProcess) -> None:
    assert process.steps_before == len(process.losses) == 8
    train_on(process, 10)
    os.kill(process._process.pid, signal.SIGKILL)  # before it has saved anything
    process._process.join()
    process.leave(at_once=True)
    process.come_back()
    until(lambda: process.where == "here", doing=process.come_back)
    assert (process.steps_before, process.losses) == (0, [])


def test_whoever_is_in_a_hurry_waits_for_nothing_and_blames_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("burstpool.share.gpu.second_process._QUIETLY_S", 0.05)
    begun = time.monotonic()
    process, running = at_its_last_step(
        tmp_path, monkeypatch, is_in_a_hurry=lambda: bool(caplog.messages) and time.monotonic() > begun + 0.5
    )
    process.finish()
    process.save()
    assert time.monotonic() - begun < 5
    assert caplog.messages == ["background background writes what it has learnt; press Ctrl-C to end it at once"]
    running.kill.assert_called_once()
    assert (process.ended, process.where) == (LAST_STEP, "away")


def test_a_step_that_does_not_end_is_not_waited_for_in_a_hurry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, _ = at_its_last_step(tmp_path, monkeypatch, is_in_a_hurry=lambda: True)
    process.ended, process.last_step_s, process.where = "", None, "here"
    process._given = 1
    begun = time.monotonic()
    process.finish()
    assert time.monotonic() - begun < 5
    assert not process.ended


def test_stopped_while_its_first_steps_are_waited_for_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(process: SecondProcess) -> None:
        assert multiprocessing.active_children()
        raise KeyboardInterrupt

    monkeypatch.setattr(SecondProcess, "look_after", stopped)
    with pytest.raises(KeyboardInterrupt):
        SecondProcess("background", JobSource(source=JOBS, settings={}), checkpoints=tmp_path, device="cpu")
    assert not multiprocessing.active_children()


def test_one_that_cannot_be_started_again_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(SecondProcess, "_start", lambda process: None)
        patch.setattr(SecondProcess, "_calibrated", lambda process: 1e-3)
        process = SecondProcess("background", JobSource(source=JOBS, settings={}), checkpoints=tmp_path, device="cpu")
    process.where = "away"
    monkeypatch.setattr(process._context.Process, "start", refused)
    process.come_back()
    assert "temporarily unavailable" in process.ended
    assert process.where == "away"
    process.close()
