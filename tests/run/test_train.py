"""Whole runs with real processes: what they leave, how they fail, and how they go on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from run_jobs import small_job
from safetensors.torch import load_file

from burstpool.errors import RunError
from burstpool.plan.plan import Plan
from burstpool.report.timeline import Timeline
from burstpool.run.checkpoint import all_checkpoints
from burstpool.run.even import even_plan
from burstpool.run.folder import read_losses
from burstpool.run.options import RunOptions
from burstpool.run.setup import trace_job
from burstpool.run.trainer import Result, train
from burstpool.schedule.actions import Schedule

STEPS = 24
OPTIONS = RunOptions(checkpoint_every=5, keep_checkpoints=2, timeout_s=20)
SAMPLES_A_STEP = 5
"""That each of two devices loads."""
FIRST = 8
"""The first sample of step 0, after two twice to trace the model and three to see whether the data is random."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(small_job(), 2, steps=STEPS, run_folder=folder, options=OPTIONS)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    assert _children() == []


def _processes() -> Iterator[tuple[int, int, str]]:
    """Parent, group and command line of all that are alive: one that has ended is not, though nobody took notice."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group, *_ = path.read_text().rpartition(")")[2].split()
            words = path.with_name("cmdline").read_text()
        except OSError:
            continue
        if state != "Z":
            yield int(parent), int(group), words


def _children() -> list[str]:
    """Workers of this process that are alive."""
    return [words for parent, _, words in _processes() if parent == os.getpid() and "spawn_main" in words]


def _assert_bit_equal(result: Result, other: Result) -> None:
    own, others = load_file(result.weights), load_file(other.weights)
    assert own.keys() == others.keys()
    assert all(torch.equal(own[key], others[key]) for key in own)
    assert [x.loss for x in read_losses(result.folder / "losses.jsonl")] == [x.loss for x in other.losses]


def test_a_run_leaves_everything_in_its_folder(whole: Result) -> None:
    assert [loss.step for loss in whole.losses] == list(range(STEPS))
    assert whole.losses[-1].loss < whole.losses[0].loss
    assert read_losses(whole.folder / "losses.jsonl") == [*whole.losses] or len(whole.losses) == STEPS
    assert Plan.load(whole.folder / "plan.json").num_devices == 2
    assert len(Schedule.load(whole.folder / "schedule.json").devices) == 2
    assert json.loads((whole.folder / "run.json").read_text())["steps"] == STEPS
    names = [path.name for path in all_checkpoints(whole.folder / "checkpoints")]
    assert names == ["step-00000020", "step-00000024"]
    model = small_job().build_model()
    model.load_state_dict(load_file(whole.weights))


def test_the_measured_timeline_has_the_events_the_simulator_makes(whole: Result) -> None:
    timeline = Timeline.load(whole.folder / "timeline.json")
    assert timeline == whole.timeline
    assert timeline.source == "measured"
    assert timeline.num_steps == 20
    lanes = {event.kind: event.lane for event in timeline.events}
    assert lanes == {"forward": "compute", "backward": "compute", "reduce": "communication", "step": "compute"}
    assert all(0 <= event.start_s <= event.stop_s for event in timeline.events)
    assert 0 < sum(timeline.all_busy_s()) < 2 * (timeline.stop_s - timeline.start_s)
    starts = [event.start_s for event in timeline.events]
    assert starts == sorted(starts)


def test_a_killed_run_goes_on_and_ends_bit_equal(whole: Result, tmp_path: Path) -> None:
    rank, step = 1, 17  # others, at random, in benchmarks/faults
    job = small_job(what="kill", after=FIRST + step * SAMPLES_A_STEP, rank=rank, marker=str(tmp_path / "marker"))
    said = rf"rank {rank} was killed by SIGKILL.*it was in step {step}, loading samples; train\(…, resume=…\) with "
    with pytest.raises(RunError, match=said):
        train(job, 2, steps=STEPS, run_folder=tmp_path / "run", options=OPTIONS)
    result = train(job, 2, steps=STEPS, resume=tmp_path / "run", options=OPTIONS)
    assert result.losses[0].step == step // 5 * 5
    _assert_bit_equal(result, whole)


def test_a_checkpoint_moves_to_another_plan(whole: Result, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "earlier")
    shutil.rmtree(all_checkpoints(tmp_path / "earlier" / "checkpoints")[-1])
    graph = trace_job(small_job()).graph
    plan = even_plan(graph, num_devices=3, batch=10, name="small", bucket_bytes=1)
    moved = train(small_job(), plan, steps=STEPS, run_folder=tmp_path / "moved", resume=tmp_path / "earlier")
    assert moved.losses[0].step == 20
    for key, tensor in load_file(moved.weights).items():
        expected = load_file(whole.weights)[key]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
    assert [x.loss for x in moved.losses] == pytest.approx([x.loss for x in whole.losses[20:]], abs=1e-9)


def test_a_raising_data_set_is_named_with_the_users_line(tmp_path: Path) -> None:
    job = small_job(what="raise", after=FIRST + 2 * SAMPLES_A_STEP, rank=1, marker=str(tmp_path / "marker"))
    line = (
        Path(__file__)
        .with_name("run_jobs.py")
        .read_text()
        .splitlines()
        .index('            raise ValueError("sample 7 is broken")')
    )
    with pytest.raises(RunError) as caught:
        train(job, 2, steps=STEPS, run_folder=tmp_path / "run", options=OPTIONS)
    message = str(caught.value)
    assert message.startswith("rank 1 failed: ValueError: sample 7 is broken (")
    assert f"run_jobs.py:{line + 1}); it was in step 2, loading samples" in message
    assert "sample 7 is broken" in (tmp_path / "run" / "error.txt").read_text()


def test_a_hanging_worker_ends_the_run_in_time(tmp_path: Path) -> None:
    said = []
    for timeout_s in (3, 15, 60):  # on a busy machine the workers may not even have started within the first
        folder, marker = tmp_path / str(timeout_s), tmp_path / f"{timeout_s}.marker"
        job = small_job(what="hang", after=FIRST + 3 * SAMPLES_A_STEP, rank=1, marker=str(marker))
        with pytest.raises(RunError) as caught:
            train(job, 2, steps=STEPS, run_folder=folder, options=RunOptions(timeout_s=timeout_s))
        said.append(str(caught.value))
        if f"no answer from rank 1 (in step 3, loading samples) within {timeout_s} s; rank 0" in said[-1]:
            assert time.time() - marker.stat().st_mtime < timeout_s + 60  # it would hang for 600
            return
    pytest.fail("\n".join(said))


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the loss is (nan|inf) in step \d+; lower the learning rate"):
        train(small_job(lr=1e30), 1, steps=STEPS, run_folder=tmp_path / "run", options=OPTIONS)


def test_a_script_that_trains_as_it_is_imported_is_told_where_to_do_so(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(
        f"from burstpool.run.trainer import train\ntrain('zoo:tiny_mlp', 1, steps=3, run_folder={str(folder)!r})\n"
    )
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    first, *others = found.stderr.splitlines()
    assert first == 'burstpool: each worker imports your script; put what it does under `if __name__ == "__main__":`'
    assert others[-1].endswith("RunError: rank 0 ended with exit status 2; it was starting")
    assert found.stderr.count("Traceback") == 1  # the script's own


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_writes_a_checkpoint_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from run_jobs import small_job\n"
        "from burstpool.run.trainer import train\n"
        "if __name__ == '__main__':\n"
        f"    train(small_job(), 2, steps=100_000, run_folder={str(tmp_path / 'run')!r})\n"
    )
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py")], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    losses = tmp_path / "run" / "losses.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (losses.exists() and losses.stat().st_size):
        time.sleep(0.1)
    os.killpg(process.pid, number)  # as a terminal or a batch system does: to all of the group
    _, errors = process.communicate(timeout=120)
    assert "InterruptedRun: stopped after step" in errors
    *_, checkpoint = all_checkpoints(tmp_path / "run" / "checkpoints")
    assert int(checkpoint.name.removeprefix("step-")) > 0
    assert not _alive_in_group(process.pid)


def _alive_in_group(group: int) -> bool:
    deadline = time.monotonic() + 60  # Python's own resource tracker takes a moment to notice
    while time.monotonic() < deadline:
        if not any(own == group for _, own, _ in _processes()):
            return False
        time.sleep(0.1)
    return True
