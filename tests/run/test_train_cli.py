"""`burstpool train` and torchrun, as a user types them."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from run_cases import train_alone
from safetensors.torch import load_file
from typer.testing import CliRunner

from burstpool.cli.train import train
from burstpool.errors import BurstpoolError
from burstpool.job import load_job
from burstpool.run.export import load_weights
from burstpool.run.folder import RunFolder, StepLoss, held, read_losses

app = typer.Typer()
app.command()(train)

JOB = """
import torch
from torch import nn
from burstpool import Job
from burstpool.data import digits

def job(lr: float = 0.05, widths=(64, 10)) -> Job:
    return Job(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(*widths)), loss=nn.functional.cross_entropy,
               data=digits(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr), batch=12)
"""


def _call(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    (tmp_path / "linear.py").write_text(JOB)
    return str(tmp_path / "linear.py")


def test_train_writes_a_run_folder_and_says_what_came_of_it(
    job_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(job_file).write_text(f"{JOB}print('a job may print; who reads --json does not see it')")
    words = ("--devices", "1", "--no-measure", "--batch", "16", "--set", "lr=0.1", "--clip-norm", "0.5", "--json")
    short = json.loads(_call(job_file, "--steps", "12", *words))
    assert short["steps"] == 12
    assert short["num_devices"] == 1
    assert short["strategy"] == "data"
    folder = tmp_path / short["run_folder"]
    assert folder.parent == tmp_path / "runs"
    assert json.loads((folder / "run.json").read_text())["settings"] == {"lr": 0.1, "widths": "[64,10]"}
    assert json.loads((folder / "plan.json").read_text())["batch"] == 16
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    longer = json.loads(_call("--resume", str(folder), "--steps", "20", "--json"))
    assert longer["steps"] == 20
    monkeypatch.chdir(tmp_path)
    whole = json.loads(_call(job_file, "--steps", "20", "--run-folder", "whole", *words))
    losses, expected = (read_losses(path / "losses.jsonl") for path in (folder, Path(whole["run_folder"])))
    assert [(loss.step, loss.loss) for loss in losses] == [(loss.step, loss.loss) for loss in expected]
    assert json.loads((folder / "options.json").read_text())["clip_norm"] == 0.5
    others = ("--steps", "22", "--clip-norm", "0.7", "--keep", "1", "--set", "lr=0.2", "--prepare")
    _call(job_file, "--resume", str(folder), *others)
    changed = json.loads((folder / "options.json").read_text())
    assert (changed["clip_norm"], changed["keep_checkpoints"], changed["timeout_s"]) == (0.7, 1, 300.0)
    assert json.loads((folder / "run.json").read_text())["settings"]["lr"] == 0.2
    with pytest.raises(BurstpoolError, match="has trained 20 steps already"):
        _call("--resume", str(folder), "--steps", "20")


def test_a_run_with_a_list_in_its_settings_goes_on_as_it_was(job_file: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    words = ("--devices", "1", "--no-measure", "--set", "widths=[64,12]", "--run-folder", folder, "--json")
    _call(job_file, "--steps", "2", *words)
    assert json.loads((Path(folder) / "run.json").read_text())["settings"]["widths"] == "[64,12]"
    longer = json.loads(_call("--resume", folder, "--steps", "3", "--json"))
    assert load_file(longer["weights"])["1.weight"].shape == (12, 64)


def test_torchrun_trains_the_same_model(job_file: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--devices", "2", "--no-measure", "--steps", "15", "--timeout", "60")
    command = _call(job_file, *words, "--run-folder", str(folder), "--prepare")
    assert command.split() == f"torchrun --nproc-per-node 2 -m burstpool.run.worker {folder}".split()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()[1:]]
    subprocess.run(torchrun, check=True, timeout=120, capture_output=True)
    expected, losses = train_alone(load_job(job_file), batch=12, steps=15)
    for key, tensor in load_file(folder / "weights.safetensors").items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)  # 32-bit sums in another order
    assert [x.loss for x in read_losses(folder / "losses.jsonl")] == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zoo:tiny_mlp",), "say on which devices"),
        (("zoo:tiny_mlp", "--devices", "2", "--plan", "plan.json"), "either --plan or --devices"),
        (("zoo:tiny_mlp", "--devices", "2", "--autocast", "fp8"), "--autocast: Input should be 'bf16' or 'fp16'"),
        (
            ("zoo:tiny_mlp", "--devices", "2", "--batch-norm", "none"),
            "--batch-norm: Input should be 'exact' or 'local'",
        ),
        (("zoo:tiny_mlp", "--resume", "nowhere"), "nowhere is no run folder: it has no run.json"),
        (("--devices", "2"), "say which job to train"),
        (("zoo:tiny_mlp", "--devices", "2", "--fallback", "layers"), "the only fallback is modules"),
        (("zoo:tiny_mlp", "--devices", "2", "--no-measure", "--batch", "5000"), "pass a smaller batch"),
        (("zoo:tiny_mlp", "--devices", "2", "--timeout", "nan"), "--timeout: Input should be a finite number"),
    ],
)
def test_mistakes_say_what_to_do(words: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BurstpoolError, match=message):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_prepare_gives_a_command_that_a_shell_takes_and_as_json_one_object(job_file: str, tmp_path: Path) -> None:
    folder = tmp_path / "two words"
    words = (job_file, "--devices", "1", "--no-measure", "--prepare", "--run-folder", str(folder))
    short = json.loads(_call(*words, "--json"))
    assert short["run_folder"] == str(folder)
    assert shlex.split(short["command"])[-1] == str(folder)
    with pytest.raises(BurstpoolError, match=f"holds a run already; pass --resume '{folder}'"):
        _call(*words)


def test_a_run_that_another_process_trains_is_left_alone(job_file: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _call(job_file, "--devices", "1", "--no-measure", "--steps", "3", "--prepare", "--run-folder", str(folder))
    (folder / "losses.jsonl").write_text('{"step": 0, "loss": 1.5, "step_time_s": 0.5}\n')
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with held(folder), pytest.raises(BurstpoolError, match=r"another process trains .*; wait until it has ended"):
        _call("--resume", str(folder), "--steps", "5")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert json.loads(_call("--resume", str(folder), "--json"))["steps"] == 3


def test_losses_that_cannot_be_read_or_written_are_no_traceback(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.add_losses([StepLoss(step=0, loss=1.5, step_time_s=0.5)])
    for broken in (b"[1]\n", b"\xff\xfe\n", b'{"step": 1}\n', b'{"step": 1, "lo'):
        kept = folder.losses.read_bytes()
        folder.losses.write_bytes(kept + broken)
        assert [loss.step for loss in read_losses(folder.losses)] == [0]
        folder.losses.write_bytes(kept)
    folder.losses.unlink()
    folder.losses.mkdir()
    with pytest.raises(BurstpoolError, match=r"cannot write .*losses\.jsonl: Is a directory"):
        folder.add_losses([StepLoss(step=1, loss=1.5, step_time_s=0.5)])


def test_a_folder_with_a_sweep_takes_no_run(job_file: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(BurstpoolError, match="holds a run already"):
        _call(job_file, "--devices", "1", "--no-measure", "--prepare", "--run-folder", str(tmp_path))
    with pytest.raises(BurstpoolError, match="is a sweep"):
        _call("--resume", str(tmp_path))


def test_a_checkpoint_that_cannot_be_read_is_named_and_the_one_before_it_is_gone_on_from(
    job_file: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    words = ("--devices", "1", "--no-measure", "--checkpoint-every", "2", "--run-folder", str(folder))
    _call(job_file, *words, "--steps", "4")
    left = folder / "checkpoints" / ".step-00000003.part"
    left.mkdir()
    newest = folder / "checkpoints" / "step-00000004"
    ways: list[tuple[str, Callable[[], object]]] = [
        ("__0_0.distcp", lambda: _call("--resume", str(folder), "--steps", "6")),
        ("__0_0.distcp", lambda: load_weights(newest)),
        (".metadata", lambda: load_weights(newest)),
    ]
    for name, read in ways:
        (newest / name).write_bytes((newest / name).read_bytes()[:20])
        with pytest.raises(BurstpoolError) as caught:
            read()
        assert f"checkpoint {newest} cannot be read (" in str(caught.value)
        assert "remove it to go on from the one before it" in str(caught.value)
        assert "goes on from" not in str(caught.value)
        assert "Traceback" not in str(caught.value)
    shutil.rmtree(newest)
    assert json.loads(_call("--resume", str(folder), "--steps", "6", "--json"))["steps"] == 6
    assert [loss.step for loss in read_losses(folder / "losses.jsonl")] == list(range(6))
    assert not left.exists()


def test_a_checkpoint_that_cannot_be_written_is_one_line_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = 'ulimit -f 20; "$0" -m burstpool train zoo:tiny_mlp --devices 1 --no-measure --steps 2 --run-folder "$1"'
    command = ["bash", "-c", script, sys.executable, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert said.startswith("burstpool: error: rank 0 failed: checkpoint ")
    assert "step-00000002 cannot be written (" in said
    assert "is the disk full?" in said
    assert "Traceback" not in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
