"""The keeper of a background: how it leaves, ends and fails; its attempts to train are stand-ins."""

import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from share_alone import JOBS, wait_for
from share_stand_ins import allowance

from burstpool.errors import RunError
from burstpool.run.progress import Progress
from burstpool.run.trainer import InterruptedRun
from burstpool.share.base import Background
from burstpool.share.budget import Moment
from burstpool.share.fused import FusedReport
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


class _Sleeper:
    """A process that does nothing, and what it says that it is doing."""

    def __init__(self, doing: Callable[[], str]) -> None:
        self.process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        self.process.start()
        self.doing_now = doing

    def pids(self) -> list[int | None]:
        return [self.process.pid]

    def ask_to_stop(self) -> None: ...

    def doing(self, rank: int) -> str:
        return self.doing_now()


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[_Attempts, _Sleeper]]]:
    """A keeper whose job is at work in such a process until that is killed, or for `ends_s` after it was asked."""
    monkeypatch.setattr("burstpool.share.gates.keeper._LEAVE_S", 0.1)
    made: list[_Sleeper] = []

    def make(doing: Callable[[], str], *, ends_s: float = 600.0) -> tuple[_Attempts, _Sleeper]:
        made.append(sleeper := _Sleeper(doing))

        def attempt(keeper: _Attempts) -> None:
            while sleeper.process.is_alive() and keeper.gate.allowed_s(Moment.COMPUTING) != math.inf:
                time.sleep(0.001)
            sleeper.process.join(ends_s)
            if sleeper.process.exitcode is not None:
                raise RunError("rank 0 was killed by SIGKILL")
            raise InterruptedRun(tmp_path, 7)

        keeper = _Attempts(tmp_path, attempt)
        keeper._prepared = Mock()
        keeper._engine.workers = sleeper  # type: ignore[assignment]
        keeper.gate.allow(allowance(), step=0)
        keeper.start()
        wait_for(lambda: keeper.is_here)
        return keeper, sleeper

    yield make
    for sleeper in made:
        sleeper.process.kill()
        sleeper.process.join()


Sleeping = Callable[..., tuple[_Attempts, _Sleeper]]


def test_a_job_that_hangs_when_it_is_asked_to_end_has_failed_and_says_where(sleeping: Sleeping) -> None:
    keeper, _ = sleeping(lambda: "in step 7, forward a")
    keeper.stop()
    assert keeper.kept.state == "failed"
    assert keeper.kept.reason == "it did not answer for 0.1 s when it was asked to end; it was in step 7, forward a"


def test_a_job_that_writes_what_it_has_learnt_is_given_time_to(sleeping: Sleeping) -> None:
    keeper, sleeper = sleeping(lambda: "in step 7, writing a checkpoint", ends_s=0.5)
    keeper.stop()
    assert sleeper.process.is_alive()
    assert keeper.kept.state == "ended"


def test_a_job_that_goes_from_one_thing_to_the_next_is_not_killed_for_being_slow(sleeping: Sleeping) -> None:
    keeper, sleeper = sleeping(lambda: f"in step 7, forward {int(50 * time.monotonic())}", ends_s=0.4)
    keeper.stop()
    assert sleeper.process.is_alive()
    assert (keeper.kept.state, keeper.kept.reason) == ("ended", "")


def test_a_job_that_never_ends_is_killed_in_the_end_however_busy(
    sleeping: Sleeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.share.gates.keeper._WRITE_S", 0.3)
    keeper, sleeper = sleeping(lambda: f"in step {int(50 * time.monotonic())}")
    keeper.stop()
    assert not sleeper.process.is_alive()
    assert keeper.kept.state == "failed"
    assert "it had not ended 0.3 s after it was asked to" in keeper.kept.reason


def test_where_memory_is_short_nobody_waits_for_what_is_written_and_it_comes_back(sleeping: Sleeping) -> None:
    keeper, sleeper = sleeping(lambda: "in step 7, writing a checkpoint")
    assert keeper.evict("no memory")
    wait_for(lambda: not keeper.is_here)
    assert not sleeper.process.is_alive()
    assert (keeper.kept.state, keeper.kept.reason, keeper.kept.restarts) == ("evicted", "no memory", 0)
    keeper.attempt = until_asked
    keeper.readmit()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert keeper.attempts == 2
    assert (keeper.kept.state, keeper.kept.reason) == ("ended", "")


def test_whoever_is_in_a_hurry_waits_for_nothing_and_blames_nobody(sleeping: Sleeping) -> None:
    keeper, sleeper = sleeping(lambda: "in step 7, writing a checkpoint")
    stopping = threading.Thread(target=keeper.stop)
    stopping.start()
    time.sleep(0.3)
    assert sleeper.process.is_alive()
    keeper.hurry()
    stopping.join(60)
    assert not sleeper.process.is_alive()
    assert (keeper.kept.state, keeper.kept.reason) == ("ended", "")


def test_a_job_that_fails_at_its_last_checkpoint_has_failed(tmp_path: Path) -> None:
    def full(keeper: _Attempts) -> None:
        with pytest.raises(InterruptedRun):
            until_asked(keeper)
        raise RunError("checkpoint step-7 cannot be written; is the disk full?")

    keeper = _Attempts(tmp_path, full)
    keeper.gate.allow(allowance(), step=0)
    keeper.start()
    wait_for(lambda: keeper.is_here)
    keeper.stop()
    assert keeper.attempts == 1
    assert (keeper.kept.state, keeper.kept.restarts) == ("failed", 0)
    assert "is the disk full?" in keeper.kept.reason


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


def test_a_job_that_has_failed_is_not_evicted_while_its_losses_are_read(tmp_path: Path) -> None:
    def full(keeper: _Attempts) -> None:
        raise OSError(28, "No space left on device")

    class Reading(_Attempts):
        def _losses(self) -> list[Any]:
            assert not self.evict("no memory")
            return []

    keeper = Reading(tmp_path, full)
    keeper.start()
    assert keeper.join(60)
    assert keeper.kept.state == "failed"
    assert "No space left" in keeper.kept.reason


def _of_an_array(keeper: Keeper) -> None:
    keeper._note(FusedReport(step=0, losses=(1.0, 2.0)))


def _of_a_job(keeper: Keeper) -> None:
    keeper._train(Mock(), Mock())


@pytest.mark.parametrize("trains", [_of_an_array, _of_a_job])
def test_what_is_written_after_the_last_step_is_no_part_of_it(
    trains: Callable[[Keeper], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_s: list[float] = []

    def run(task: Any, start: Any, *, engine: Any, observer: Callable[[Progress], None]) -> None:
        observer(Progress(step=1, steps=1, loss=1.0, samples_per_s=1.0, utilisation=None))

    def attempt(keeper: _Attempts) -> None:
        trains(keeper)
        ended_s.append(time.time())
        time.sleep(0.3)  # the checkpoint, and the end of its process

    monkeypatch.setattr("burstpool.share.gates.keeper.run_for_others", run)
    keeper = _Attempts(tmp_path, attempt)
    keeper.background = Background(source=JOBS, steps=1)
    keeper.start()
    assert keeper.join(60)
    assert keeper.kept.state == "ended"
    assert keeper.kept.last_step_s is not None
    assert keeper.kept.last_step_s <= ended_s[0]


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
