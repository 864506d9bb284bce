"""This machine as a cluster: what the executor adds to what detection finds."""

import os
from pathlib import Path
from typing import Any

import pytest
from run_jobs import small_job

from burstpool.cluster.detect import detect, num_cores
from burstpool.engine.base import Place
from burstpool.engine.local import LocalEngine
from burstpool.run import machine
from burstpool.run.even import even_plan
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.worker import Task, joined, train_at
from burstpool.schedule.lower import lower


@pytest.mark.alone
def test_the_hosts_time_is_an_interpreters() -> None:
    tries = []
    for turns in (1, 3, 5):  # a difference of two times: other load may spoil one measurement, and hardly several
        found = machine.host_times(timeout_s=300, turns=turns)
        # A few dozen calls: not less than a microsecond, not more than some milliseconds.
        if 1e-6 < found.block_s < 5e-3 and 0 <= found.step_s < 5e-3:
            return
        tries.append(found)
    pytest.fail(f"no interpreter's: {tries}")


def test_cores_get_the_hosts_time_and_workers_that_take_turns_get_more_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "detect", lambda *, measure, **options: detect(measure=False, **options))
    monkeypatch.setattr(machine, "host_times", lambda **_: machine.HostTimes(step_s=1e-4, block_s=2e-5))
    for each_core in (1, 2):
        found = machine.this_machine(device="cpu", num_devices=each_core * num_cores()).device_type("cpu-core")
        assert (found.host_step_s, found.host_block_s) == (each_core * 1e-4, each_core * 2e-5)


def test_nothing_is_measured_unless_asked() -> None:
    assert machine.this_machine(measure=False, device="cpu", num_devices=3) == detect(
        measure=False, device="cpu", num_devices=3
    )


def _threads_left(place: Place, folder: str) -> tuple[list[int], list[str]]:
    """How many threads this process has after each of some runs, and which it has when it has left the others."""
    counts = _train_again_and_again(place, folder)
    return counts, [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def _train_again_and_again(place: Place, folder: str) -> list[int]:
    options = RunOptions(checkpoint_every=0, timeout_s=60)
    job = small_job()
    graph = trace_job(job).graph
    plan = even_plan(graph, num_devices=place.num_workers, batch=job.batch, name=job.name)
    found = []
    with joined(place, options) as seat:
        for run in range(3):
            task = Task(
                job=job,
                plan=plan,
                schedule=lower(plan, graph),
                options=options,
                steps=2,
                checkpoints=str(Path(folder) / str(run)),
            )
            train_at(seat, place, task)
            found.append(len(os.listdir("/proc/self/task")))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_runs_in_one_process_leave_no_threads_behind(tmp_path: Path) -> None:
    workers = LocalEngine().start(_threads_left, str(tmp_path), num_workers=2, silence_s=60)
    found: list[Any] | None = None
    try:
        while (found := workers.results()) is None:
            workers.poll(0.5)
    finally:
        workers.terminate()
    for counts, names in found:
        assert counts[-1] == counts[0]
        assert not [name for name in names if "gloo" in name]  # one of these could end the interpreter with an abort
