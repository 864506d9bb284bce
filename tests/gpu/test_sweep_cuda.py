"""Sweeps on a CUDA device: number formats and compiled steps train what the plain step trains, up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch

import burstpool
from burstpool.sweeping.folder import SweepFolder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 20
SPACE = {"lr": [0.1, 0.03, 0.01]}


def curves(folder: Path, **options: Any) -> torch.Tensor:
    """Losses of all trials, a row each."""
    given = {"steps": STEPS, "array_size": 3, "mode": "rules", **options}
    result = burstpool.sweep("zoo:tiny_mlp", SPACE, run_folder=folder, device="cuda", **given)
    assert result.state.num_arrays == 1
    return torch.tensor([losses for _, losses in SweepFolder(result.folder).read_losses(result.trials)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return curves(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
def test_a_compiled_sweep_trains_what_a_plain_one_trains(plain: torch.Tensor, tmp_path: Path) -> None:
    torch.testing.assert_close(curves(tmp_path / "run", compiled=True), plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_a_sweep_under_autocast_differs_by_the_formats_rounding(
    autocast: str, plain: torch.Tensor, tmp_path: Path
) -> None:
    found = curves(tmp_path / "run", autocast=autocast)
    assert found.shape == (3, STEPS)
    assert not torch.equal(found, plain)
    torch.testing.assert_close(found, plain, rtol=5e-2, atol=2e-2)


def test_a_sweep_that_measures_its_size_and_its_ways_trains_the_same(plain: torch.Tensor, tmp_path: Path) -> None:
    torch.testing.assert_close(curves(tmp_path / "run", array_size=None, mode="fastest"), plain, rtol=1e-3, atol=1e-4)


def test_trials_that_go_on_after_others_were_stopped_train_the_same(plain: torch.Tensor, tmp_path: Path) -> None:
    """Halving, three trials in two places: one that is freed is filled again, arrays are recorded anew."""
    given = {"search": "asha", "steps": STEPS, "array_size": 2, "mode": "rules"}
    result = burstpool.sweep("zoo:tiny_mlp", SPACE, run_folder=tmp_path / "run", device="cuda", **given)
    lengths = [trial.step for trial in result.trials]
    assert len(lengths) == 3
    assert min(lengths) < max(lengths) == STEPS
    for trial, losses in SweepFolder(result.folder).read_losses(result.trials):
        alone = plain[SPACE["lr"].index(trial.settings["lr"])]
        assert losses
        torch.testing.assert_close(torch.tensor(losses), alone[: len(losses)], rtol=1e-3, atol=1e-4)
