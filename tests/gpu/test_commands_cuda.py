"""The command line on a CUDA device: each verb does there what it does on the CPU, one after the other on one job."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burstpool.profiling.profile import Profile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
NO_GPU = """
import torch
from burstpool import Job

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        assert not torch.cuda.is_initialized(), "this process uses the GPU"
        return torch.ones(3), torch.zeros(2)

def job():
    return Job(
        model=lambda: torch.nn.Linear(3, 2), loss=torch.nn.functional.mse_loss, data=Samples(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch=4,
    )
"""


def command(*arguments: object, folder: Path) -> dict[str, Any]:
    """What a verb prints with --json."""
    program = "from burstpool.cli import main; main()"
    given = [sys.executable, "-c", program, *map(str, arguments), "--json"]
    done = subprocess.run(given, capture_output=True, text=True, check=False, cwd=folder, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_is_profiled_and_its_layers_have_times(tmp_path: Path) -> None:
    found = command("profile", "zoo:tiny_vgg", "--device", DEVICE, "--batches", "1,8", "-o", "p.json", folder=tmp_path)
    kept = Profile.load(tmp_path / "p.json")
    assert kept.device == found["device"]
    assert all(kept.forward_s(layer.name, 8) > 0 for layer in kept.layers)


def test_a_job_that_goes_on_trains_what_it_trains_in_one_go(tmp_path: Path) -> None:
    train = ("train", "zoo:tiny_mlp", "--device", DEVICE, "--devices", 1, "--no-measure")
    whole = command(*train, "--steps", 30, "--run-folder", "whole", folder=tmp_path)
    command(*train, "--steps", 20, "--run-folder", "parts", folder=tmp_path)
    parts = command(*train, "--steps", 30, "--resume", "parts", folder=tmp_path)
    assert parts["loss"] == whole["loss"]


def test_training_on_the_cpu_uses_no_gpu(tmp_path: Path) -> None:
    """It would hold memory of each, and fail where one is full. Samples are loaded by every process that trains."""
    (tmp_path / "job.py").write_text(NO_GPU)
    train = ("train", "job.py", "--devices", 2, "--no-measure", "--checkpoint-every", 2)
    assert command(*train, "--steps", 8, "--run-folder", "run", folder=tmp_path)["steps"] == 8


def test_jobs_share_the_device_and_both_get_on(tmp_path: Path) -> None:
    share = ("share", "zoo:tiny_vgg", "--device", DEVICE, "--with", "zoo:tiny_mlp lr=0.1,0.01", "--slowdown", 1.5)
    found = command(*share, "--steps", 1500, "--run-folder", "shared", folder=tmp_path)
    assert len(found["losses"]) == 1500
    assert found["background_steps"] > 5
    assert found["slowdown"] < 1.6
    page = command("report", "shared", folder=tmp_path)
    assert (tmp_path / page["report"]).is_file()


def test_what_a_background_learns_is_kept_and_can_be_gone_on_with(tmp_path: Path) -> None:
    share = ("share", "zoo:tiny_vgg", "--device", DEVICE, "--slowdown", 1.5, "--steps", 1500)
    small = ("--with", "zoo:tiny_mlp lr=0.1,0.01 --steps 60", "--with", "zoo:tiny_mlp lr=0.1 --steps 60")
    array, single = command(*share, *small, "--run-folder", "shared", folder=tmp_path)["backgrounds"]
    assert (array["state"], len(array["losses"])) == (single["state"], len(single["losses"])) == ("ended", 60)
    for member in range(2):
        assert load_file(tmp_path / array["folder"] / "weights" / f"member-{member:02}.safetensors")
    run = Path(single["folder"]) / "run"
    assert load_file(tmp_path / run / "weights.safetensors")
    further = command("train", "--resume", run, "--steps", 80, folder=tmp_path)
    alone = ("train", "zoo:tiny_mlp", "--set", "lr=0.1", "--device", DEVICE, "--devices", 1, "--no-measure")
    whole = command(*alone, "--steps", 80, "--run-folder", "alone", folder=tmp_path)
    assert further["loss"] == pytest.approx(whole["loss"], rel=1e-4)


@pytest.mark.parametrize("more", [(), ("--search", "asha", "--eta", 2)], ids=["grid", "halving"])
def test_a_sweep_fuses_its_trials_and_finds_the_best(more: tuple[object, ...], tmp_path: Path) -> None:
    sweep = ("sweep", "zoo:tiny_mlp", "--device", DEVICE, "--set", "lr=0.1,0.03,0.01,0.003", "--steps", 40)
    found = command(*sweep, *more, "--run-folder", "sweep", folder=tmp_path)
    assert found["num_arrays"] == 1, found["apart"]
    assert found["best"]["settings"] == {"lr": 0.1}
    assert (tmp_path / found["weights"]).is_file()
