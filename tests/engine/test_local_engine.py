"""The local engine: what workers hand back, how failures are told, and that no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_workers
import pytest

from burstpool.engine.base import Report
from burstpool.engine.failure import WorkerError, died, explain, failure_of, user_line
from burstpool.engine.local import LocalEngine, LocalWorkers, kill_running


@pytest.fixture
def start() -> Iterator[Callable[..., LocalWorkers]]:
    started: list[LocalWorkers] = []

    def run(work: Any, task: Any = None, *, num_workers: int = 2, silence_s: float = 30) -> LocalWorkers:
        started.append(LocalEngine().start(work, task, num_workers=num_workers, silence_s=silence_s))
        return started[-1]

    yield run
    for workers in started:
        workers.terminate()
    assert not [line for line in _children() if "spawn_main" in line]


def _children() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.append(path.with_name("cmdline").read_text())
        except OSError:
            continue
    return found


def _finish(workers: LocalWorkers, *, within_s: float = 120) -> tuple[list[Any], list[Report]]:
    reports: list[Report] = []
    deadline = time.monotonic() + within_s
    while (results := workers.results()) is None:
        assert time.monotonic() < deadline
        reports += workers.poll(0.1)
    return results, reports


def test_workers_report_and_return_by_rank(start: Callable[..., LocalWorkers]) -> None:
    results, reports = _finish(start(engine_workers.echo, "worker", num_workers=3))
    assert results == [f"worker {rank} of 3" for rank in range(3)]
    assert sorted((report.rank, report.content) for report in reports) == [(r, f"hello from {r}") for r in range(3)]


def test_large_results_do_not_block(start: Callable[..., LocalWorkers]) -> None:
    results, _ = _finish(start(engine_workers.large, 5_000_000))
    assert [len(result) for result in results] == [5_000_000] * 2


def test_a_worker_that_raises_is_named_with_what_it_did_and_the_users_line(start: Callable[..., LocalWorkers]) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 failed: ValueError: no luck \(.*engine_workers\.py:\d+\)") as caught:
        _finish(start(engine_workers.fail_second))
    assert str(caught.value).endswith("it was in step 3, thinking")
    assert "engine_workers.py" in caught.value.traces[1]


def test_the_cause_is_named_and_not_the_worker_that_lost_it(
    start: Callable[..., LocalWorkers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burstpool.engine.local._GRACE_S", 30.0)  # it takes no longer than until the cause is heard
    with pytest.raises(WorkerError, match=r"^rank 1 ended with exit status 7; it was about to die$"):
        _finish(start(engine_workers.lose_peer, str(tmp_path / "met")))


def test_a_worker_that_others_wait_for_in_vain_is_named(start: Callable[..., LocalWorkers], tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match=r"no answer from rank 1 \(hanging\) within 30 s; rank 0, waiting, waited for"
    ):
        _finish(start(engine_workers.hang_second, str(tmp_path / "met")))


def test_silence_ends_the_workers(start: Callable[..., LocalWorkers]) -> None:
    workers = start(engine_workers.hang, num_workers=1, silence_s=0.5)
    deadline = time.monotonic() + 120
    while workers.doing(0) != "hanging":  # starting may take longer than that on a busy machine
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(WorkerError, match=r"no answer from rank 0 \(hanging\) within 0\.5 s"):
        _finish(workers)


def test_workers_stop_when_asked(start: Callable[..., LocalWorkers]) -> None:
    workers = start(engine_workers.until_asked)
    workers.poll(0.1)
    workers.ask_to_stop()
    assert _finish(workers)[0] == ["stopped", "stopped"]


def test_asking_again_and_again_blocks_nobody_where_a_worker_does_not_listen(
    start: Callable[..., LocalWorkers],
) -> None:
    workers = start(engine_workers.hang, num_workers=1)
    for _ in range(2000):  # a pipe takes some hundred
        workers.ask_to_stop()


def test_sigterm_ends_no_worker_but_its_children(start: Callable[..., LocalWorkers]) -> None:
    assert _finish(start(engine_workers.outlive_sigterm))[0] == [signal.SIGTERM] * 2


def test_a_task_that_cannot_be_pickled_leaves_no_process(start: Callable[..., LocalWorkers]) -> None:
    with pytest.raises(Exception, match="pickle"):
        start(engine_workers.echo, lambda: None)


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit()"])
def test_workers_die_with_the_process_that_started_them(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import engine_workers\n"
        "from burstpool.engine.local import LocalEngine\n"
        "if __name__ == '__main__':\n"
        "    workers = LocalEngine().start(engine_workers.hang, None, num_workers=2, silence_s=600)\n"
        "    while 'hanging' not in workers.doing(1): time.sleep(0.05)\n"
        "    print(*workers.pids(), flush=True)\n"
        f"    {end}\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = [int(word) for word in process.stdout.readline().split()]
        if end != "sys.exit()":
            process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(_alive(pid) for pid in workers):
        time.sleep(0.05)
    assert len(workers) == 2
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_users_line_is_the_innermost_outside_of_libraries() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        sorted([1, 2], key=lambda number: int("x" * number))
    assert user_line(caught.value).startswith(f"{__file__}:")
    assert failure_of(0, caught.value, doing="").message.startswith("ValueError: invalid literal")


def test_a_death_by_signal_is_named() -> None:
    assert died(2, -9, doing="").message == "was killed by SIGKILL (out of memory?)"
    assert died(2, 3, doing="").message == "ended with exit status 3"
    assert str(explain([died(2, -11, doing="in step 1")], {}, silence_s=1)).startswith("rank 2 was killed by SIGSEGV")


class _InTheKernel:
    """A process that waits for a file system that does not answer: killed, it is there still."""

    pid, was_killed = 1, False

    def is_alive(self) -> bool:
        return True

    def kill(self) -> None:
        self.was_killed = True

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None
        time.sleep(timeout)

    def close(self) -> None:
        raise ValueError("Cannot close a process while it is still running.")


def test_nobody_waits_for_ever_for_a_process_that_is_killed_and_does_not_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burstpool.engine.local._END_S", 0.05)
    processes, begun = [_InTheKernel(), _InTheKernel()], time.monotonic()
    kill_running(processes)
    assert all(process.was_killed for process in processes)
    assert time.monotonic() - begun < 1
    workers = LocalWorkers(0, silence_s=30)
    workers._processes.append(processes[0])
    workers.terminate()
