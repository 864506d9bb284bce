"""The keeper of a background: how it leaves, ends and fails; its attempts to train are stand-ins."""

import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from share_alone import JOBS, wait_for
from share_stand_ins import allowance

from burstpool.errors import RunError
from burstpool.run.trainer import InterruptedRun
from burstpool.share.base import Background
from burstpool.share.budget import Moment
from burstpool.share.gates.gate import Gate
from burstpool.share.gates.keeper import Keeper


class _Attempts(Keeper):
    """A keeper whose attempts are the test's."""

    def __init__(self, folder: Path, attempt: Callable[["_Attempts"], None]) -> None:
        self.attempt, self.attempts = attempt, 0
        super().__init__(Background(source=JOBS), Gate.create(folder / "gate"), folder)

    def _prepare(self) -> Any:
        return None

    def _losses(self) -> list[Any]:
        return []

    def _attempt(self) -> None:
        self.attempts += 1
        self.attempt(self)


def until_asked(keeper: _Attempts) -> None:
    while keeper.gate.allowed_s(Moment.COMPUTING) != math.inf:
        time.sleep(0.001)
    raise InterruptedRun(keeper.folder.path, 0)


def test_stopping_a_job_that_was_evicted_does_not_start_it_again(tmp_path: Path) -> None:
    keeper = _Attempts(tmp_path, until_asked)
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    wait_for(lambda: keeper.is_here)
    assert not keeper.gate.is_away
    assert keeper.evict("no memory")
    wait_for(lambda: not keeper.is_here)
    assert keeper.gate.is_away
    keeper.stop()
    assert keeper.join(0)
    assert keeper.attempts == keeper.kept.evictions == 1
    assert keeper.kept.state == "evicted"


def test_a_job_that_was_just_starting_when_it_was_asked_to_leave_is_asked_again(tmp_path: Path) -> None:
    def forget_once(keeper: _Attempts) -> None:
        time.sleep(0.05)
        keeper.gate.let_leave(False)
        until_asked(keeper)

    keeper = _Attempts(tmp_path, forget_once)
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert keeper.join(0)
    assert keeper.kept.state == "ended"


def test_a_job_that_hangs_when_it_is_asked_to_end_has_failed_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 0.05)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()

    def hang(keeper: _Attempts) -> None:
        process.join()
        raise RunError("rank 0 was killed by SIGKILL")

    keeper = _Attempts(tmp_path, hang)
    keeper._prepared = Mock()
    keeper._engine.workers = Mock(**{"pids.return_value": [process.pid], "doing.return_value": "in step 7, forward a"})
    keeper.start()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert keeper.kept.state == "failed"
    assert keeper.kept.reason == "it did not answer for 0.05 s when it was asked to end; it was in step 7, forward a"


def test_a_job_that_writes_what_it_has_learnt_is_given_time_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 0.05)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()

    def write(keeper: _Attempts) -> None:
        until_asked(keeper)
        process.join(0.5)
        raise InterruptedRun(tmp_path, 7)

    keeper = _Attempts(tmp_path, write)
    keeper._prepared = Mock()
    words = "in step 7, writing a checkpoint"
    keeper._engine.workers = Mock(**{"pids.return_value": [process.pid], "doing.return_value": words})
    keeper.start()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert process.is_alive()
    assert keeper.kept.state == "ended"
    process.kill()
    process.join()


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [(None, "ended", ""), (OSError(28, "No space left on device"), "failed", "OSError: [Errno 28] No space left")],
)
def test_a_job_that_is_over_says_what_it_was_and_is_not_evicted(
    error: Exception | None, state: str, reason: str, tmp_path: Path
) -> None:
    def attempt(keeper: _Attempts) -> None:
        if error is not None:
            raise error

    keeper = _Attempts(tmp_path, attempt)
    assert not keeper.evict("not started")
    keeper.start()
    assert keeper.join(60)
    assert not keeper.evict("no memory")
    assert keeper.kept.state == state
    assert keeper.kept.reason.startswith(reason)
    assert keeper.kept.evictions == 0
    assert keeper.gate.is_away
    assert bool(keeper.kept.reason) == bool(reason)


def test_a_process_that_goes_while_it_is_asked_to_leave_raises_nothing(tmp_path: Path) -> None:
    class Closed:
        def pids(self) -> list[int]:
            raise ValueError("process object is closed")

        def ask_to_stop(self) -> None: ...

        def doing(self, rank: int) -> str:
            return "in step 3"

    keeper = _Attempts(tmp_path, until_asked)
    keeper._engine.workers = Closed()  # type: ignore[assignment]
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    assert keeper.pid is None
    keeper.stop()
    assert keeper.join(0)
