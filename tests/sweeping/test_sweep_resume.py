"""Sweeps that are killed or interrupted, in real processes: they end with the same numbers as one that was not."""

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sweep_jobs import Few, job, single

import burstpool
from burstpool.errors import JobError, RunError
from burstpool.run.folder import held
from burstpool.sweeping.folder import SweepFolder, SweepRecord, SweepState
from burstpool.sweeping.outcome import SweepResult
from burstpool.sweeping.runner import InterruptedSweep

JOBS = Path(__file__).with_name("sweep_jobs.py")
SPACE = {"lr": "log:1e-3..1e0", "momentum": "0.0,0.9", "width": "4,6"}
OPTIONS = {"search": "asha", "trials": 10, "steps": 54, "first_rung": 6, "array_size": 3, "mode": "rules"}
RATES = {"lr": [0.1, 0.03, 0.01], "held_out": [False]}
PATIENCE_S = 300.0


def start(*words: str) -> "subprocess.Popen[str]":
    """So slow that it takes seconds more when it has got to where it is stopped."""
    environment = os.environ | {"SWEEP_TEST_SLOW": "0.002", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from burstpool.cli import main; main()", "sweep", *words]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def steps_done(folder: Path) -> int:
    path = folder / "trials.json"
    return sum(trial["step"] for trial in json.loads(path.read_text())["trials"]) if path.is_file() else 0


def wait_for_steps(process: "subprocess.Popen[str]", folder: Path, steps: int) -> None:
    """Until so many more steps are in the last checkpoint."""
    end = time.monotonic() + PATIENCE_S
    while steps_done(folder) < steps:
        assert process.poll() is None, f"it ended too early: {process.communicate()[1]}"
        assert time.monotonic() < end, "it does not get on"
        time.sleep(0.01)


def test_a_sweep_that_was_killed_and_interrupted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    # Both sweeps find the same measurements in the cache, and the second keeps its own.
    options = OPTIONS | {"mode": "fastest"}
    whole = burstpool.sweep(str(JOBS), SPACE, run_folder=tmp_path / "whole", **options)  # type: ignore[arg-type]
    broken = tmp_path / "broken"
    words = [word for name, axis in SPACE.items() for word in ("--set", f"{name}={axis}")]
    words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    killed = start(str(JOBS), *words, "--run-folder", str(broken), "--checkpoint-every", "0")
    wait_for_steps(killed, broken, 20)
    killed.kill()
    killed.communicate()
    before = steps_done(broken)
    interrupted = start("--resume", str(broken), "--checkpoint-every", "0")
    wait_for_steps(interrupted, broken, before + 20)
    interrupted.send_signal(signal.SIGINT)
    said = interrupted.communicate(timeout=PATIENCE_S)[1]
    assert interrupted.returncode == 130, said
    assert f"burstpool sweep --resume {broken}" in said
    assert "Traceback" not in said
    state = SweepState.load(broken / "trials.json")
    assert before < steps_done(broken) < sum(trial.step for trial in whole.trials)
    assert not state.finished
    resumed = burstpool.sweep(None, resume=broken)
    assert resumed.trials == whole.trials, "settings, steps, losses and objectives, bit for bit"
    mine, other = load_file(resumed.weights), load_file(whole.weights)
    assert all(torch.equal(mine[key], other[key]) for key in other)
    curves = [SweepFolder(path).read_losses(whole.trials) for path in (broken, tmp_path / "whole")]
    assert curves[0] == curves[1]


def interrupted_after(done: int, folder: Path, **options: Any) -> None:
    """A sweep that a Ctrl-C ends after so many steps."""
    seen = 0

    def observer(progress: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == done:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(InterruptedSweep):
        burstpool.sweep(single, RATES, run_folder=folder, observer=observer, **options)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sweep_goes_on_with_the_ways_it_had_measured_though_others_are_faster_by_now(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("burstpool.sweeping.runner._OBSERVE_S", -1.0)  # at every step
    options = {"steps": 20, "array_size": 3, "mode": "fastest", "compiled": compiled}

    # Measured last are one member after another, and each compiled on its own: they seem the fastest at first.
    times_s: Iterator[float] = (1.0 / count for count in itertools.count(1))
    for module in ("lowering", "step"):
        monkeypatch.setattr(f"burstpool.fusion.{module}.timed", lambda function, device: (function(), next(times_s))[1])
    whole = burstpool.sweep(single, RATES, run_folder=tmp_path / "whole", **options)
    interrupted_after(7, tmp_path / "broken", **options)
    monkeypatch.setenv("BURSTPOOL_CACHE", str(tmp_path / "another"))
    times_s = map(float, itertools.count(1))  # now all members at once, as written
    fresh = burstpool.sweep(single, RATES, run_folder=tmp_path / "fresh", **options)
    resumed = burstpool.sweep(single, resume=tmp_path / "broken")
    assert resumed.trials == whole.trials
    # Whether other ways round otherwise depends on the processor, so that what was chosen is looked at too.
    assert chosen(resumed) == chosen(whole)
    assert all(way != chosen(whole)[key] for key, way in chosen(fresh).items())


def chosen(sweep: SweepResult) -> dict[str, str]:
    """The fastest of each choice's ways, as kept with the sweep."""
    choices = json.loads(SweepFolder(sweep.folder).choices.read_text())
    return {key: min(times_s, key=times_s.get) for key, times_s in choices.items()}


def test_a_finished_sweep_can_be_resumed_and_says_the_same(tmp_path: Path) -> None:
    first = burstpool.sweep(
        str(JOBS), {"lr": [0.1, 0.01]}, steps=3, array_size=2, mode="rules", run_folder=tmp_path / "run"
    )
    again = burstpool.sweep(None, resume=tmp_path / "run")
    assert again.trials == first.trials
    with pytest.raises(RunError, match="holds a run already; pass --resume"):
        burstpool.sweep(str(JOBS), {"lr": [0.1]}, steps=3, array_size=2, run_folder=tmp_path / "run")
    with pytest.raises(RunError, match=r"is a sweep of .*, not of other\.py"):
        burstpool.sweep("other.py", resume=tmp_path / "run")


def test_a_sweep_goes_on_from_another_folder_with_a_job_that_lies_elsewhere_and_says_if_it_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    file = tmp_path / "old" / "mine.py"
    file.write_text(JOBS.read_text())
    monkeypatch.chdir(tmp_path / "old")

    def interrupt(progress: object) -> None:
        signal.raise_signal(signal.SIGINT)

    options: dict[str, Any] = {"steps": 300, "array_size": 2, "mode": "rules", "run_folder": tmp_path / "run"}
    with pytest.raises(InterruptedSweep):
        burstpool.sweep("mine.py", {"lr": [0.1, 0.01]}, observer=interrupt, **options)
    monkeypatch.chdir(tmp_path)
    file.rename(tmp_path / "new" / "moved.py")
    with pytest.raises(JobError, match=r"there is no job file .*old/mine\.py"):
        burstpool.sweep(None, resume=tmp_path / "run")
    with pytest.raises(RunError, match=r"is a sweep of .*old/mine\.py, not of zoo:tiny_mlp"):
        burstpool.sweep("zoo:tiny_mlp", resume=tmp_path / "run")
    with pytest.raises(RunError, match=r"is a sweep of .*old/mine\.py, not of new/moved\.py:single"):
        burstpool.sweep("new/moved.py:single", resume=tmp_path / "run")
    caplog.clear()
    file.write_text(JOBS.read_text() + "\n# changed\n")
    with pytest.raises(InterruptedSweep):
        burstpool.sweep(None, resume=tmp_path / "run", observer=interrupt)
    assert "mine.py was changed since the sweep began" in caplog.text
    caplog.clear()
    found = burstpool.sweep("new/moved.py", resume=tmp_path / "run")
    assert [trial.step for trial in found.trials] == [300, 300]
    assert "changed" not in caplog.text


def test_artifacts_go_to_json_and_back_unchanged(tmp_path: Path) -> None:
    result = burstpool.sweep(
        str(JOBS), {"lr": "log:1e-3..1e-1", "width": [4]}, search="random", trials=2, steps=3, array_size=2,
        mode="rules", run_folder=tmp_path / "run",
    )  # fmt: skip
    assert (
        SweepRecord.from_json(result.record.to_json())
        == result.record
        == SweepRecord.load(tmp_path / "run" / "sweep.json")
    )
    assert SweepState.from_json(result.state.to_json()) == result.state


def test_a_folder_that_holds_no_sweep_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is no sweep: it has no sweep\.json"):
        burstpool.sweep(None, resume=tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunError, match="is a run of burstpool train"):
        burstpool.sweep(None, resume=tmp_path)


def test_a_checkpoint_that_is_gone_or_broken_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(InterruptedSweep):
        burstpool.sweep(
            str(JOBS),
            {"lr": [0.1, 0.2]},
            steps=100_000,
            array_size=2,
            mode="rules",
            run_folder=folder,
            observer=lambda progress: signal.raise_signal(signal.SIGINT),
        )
    assert steps_done(folder) > 0
    (checkpoint,) = (folder / "checkpoints").iterdir()
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(RunError, match=f"{checkpoint.name} cannot be read"):
        burstpool.sweep(None, resume=folder)
    checkpoint.unlink()
    with pytest.raises(RunError, match="is gone"):
        burstpool.sweep(None, resume=folder)


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep with successive halving that an observer ends between two rungs, by raising."""
    monkeypatch.setattr("burstpool.sweeping.runner._OBSERVE_S", -1.0)  # at every step

    def observer(progress: Any) -> None:
        if sum(trial.state == "paused" for trial in progress.trials) >= 2:
            raise LookupError("seen enough")

    with pytest.raises(LookupError, match="seen enough"):
        burstpool.sweep(str(JOBS), SPACE, run_folder=folder, observer=observer, **OPTIONS)  # type: ignore[arg-type]


def test_what_an_observer_raises_ends_the_sweep_and_is_no_trials_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = burstpool.sweep(str(JOBS), SPACE, run_folder=tmp_path / "whole", **OPTIONS)  # type: ignore[arg-type]
    stopped(tmp_path / "run", monkeypatch)
    assert {trial.state for trial in SweepState.load(tmp_path / "run" / "trials.json").trials} <= {"running", "paused"}
    assert burstpool.sweep(None, resume=tmp_path / "run").trials == whole.trials


def test_a_trial_whose_state_is_gone_is_not_trained_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path / "run", monkeypatch)
    kept = sorted((tmp_path / "run" / "states").iterdir())
    for path in kept:
        path.rename(path.with_suffix(".aside"))
    with pytest.raises(RunError, match=r"states/trial-0000\d-step-00000006\.pt is gone"):
        burstpool.sweep(None, resume=tmp_path / "run")
    for path in kept:
        path.with_suffix(".aside").rename(path)
    assert burstpool.sweep(None, resume=tmp_path / "run").best.state == "done"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]\n", b'{"trial": 0, "step": 3, "losses": [1.0]}\n'])
def test_losses_that_are_not_all_there_are_named(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path / "run", monkeypatch)
    (tmp_path / "run" / "losses.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"losses\.jsonl ends at step 0 of trial 0, which has trained 6"):
        burstpool.sweep(None, resume=tmp_path / "run")


def test_a_sweep_that_another_process_trains_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path / "run", monkeypatch)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with (
        held(tmp_path / "run"),
        pytest.raises(RunError, match=r"another process trains .*; wait until it has ended"),
    ):
        burstpool.sweep(None, resume=tmp_path / "run")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert burstpool.sweep(None, resume=tmp_path / "run").state.finished


def test_weights_that_cannot_be_written_are_written_by_going_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    in_the_way = folder / ".weights.safetensors.part"
    in_the_way.mkdir(parents=True)
    with pytest.raises(RunError, match=r"cannot write .*weights\.safetensors: "):
        burstpool.sweep(str(JOBS), {"lr": [0.1]}, steps=2, array_size=1, mode="rules", run_folder=folder)
    in_the_way.rmdir()
    assert burstpool.sweep(None, resume=folder).weights.is_file()


def test_a_sweep_does_not_go_on_where_its_device_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    burstpool.sweep(job, {"lr": [0.1]}, steps=2, array_size=1, mode="rules", run_folder=folder)
    (folder / "trials.json").unlink()
    record = folder / "sweep.json"
    record.write_text(record.read_text().replace('"cpu"', '"cuda:999"'))
    with pytest.raises(RunError, match="--device cuda:999: there "):
        burstpool.sweep(job, resume=folder)


@pytest.mark.parametrize(("wait_s", "said"), [(0.4, "stopped at once"), (0.0, "a checkpoint was written")])
def test_a_second_interrupt_ends_a_step_that_hangs_and_one_signal_that_comes_twice_does_not(
    wait_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space: dict[str, Any] = {"lr": [0.1, 0.01], "held_out": [False]}
    options: dict[str, Any] = {"steps": 12, "array_size": 2, "mode": "rules"}
    whole = burstpool.sweep(job, space, run_folder=tmp_path / "whole", **options)
    load, loads = Few.__getitem__, itertools.count()

    def hanging(data: Few, index: int) -> Any:
        if (tmp_path / "run" / "sweep.json").is_file() and next(loads) == 40:
            signal.raise_signal(signal.SIGINT)
            time.sleep(wait_s)
            signal.raise_signal(signal.SIGINT)
        return load(data, index)

    monkeypatch.setattr(Few, "__getitem__", hanging)
    with pytest.raises(InterruptedSweep, match=said):
        burstpool.sweep(job, space, run_folder=tmp_path / "run", **options)
    again = burstpool.sweep(job, resume=tmp_path / "run")
    assert [trial.value for trial in again.trials] == [trial.value for trial in whole.trials]
    assert next(loads) > 40
