"""A background job as a second process, on a CPU: it trains on after it has left and come back, or was killed."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from share_alone import JOBS, foreground_plan, losses_alone

from burstpool.run.worker import JobSource
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


def test_one_that_is_killed_has_ended_and_counts_as_away(process: SecondProcess) -> None:
    pid = process._process.pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: bool(process.ended), doing=process.look_after)
    assert "SIGKILL" in process.ended
    assert process.where == "away"
    process.leave(at_once=True)  # nothing to wait for


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
