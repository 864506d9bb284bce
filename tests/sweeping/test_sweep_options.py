"""How steps are computed (number formats, clipping, compiling): each trial still comes out as if it were alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from sweep_alone import alone
from sweep_jobs import job, single

import burstpool
from burstpool.cli.app import run
from burstpool.fusion.compiled import APART, TOGETHER
from burstpool.fusion.step import WRITTEN, RecordedStep
from burstpool.sweeping.folder import SweepFolder, SweepRecord
from burstpool.sweeping.outcome import SweepResult

STEPS = 12


def swept(space: dict[str, Any], folder: Path, function: Any = single, **options: Any) -> SweepResult:
    given = {"steps": STEPS, "array_size": 4, "mode": "serial"} | options
    return burstpool.sweep(function, space, run_folder=folder, **given)


def curves(result: SweepResult) -> list[list[float]]:
    return [losses for _, losses in SweepFolder(result.folder).read_losses(result.trials)]


@pytest.mark.parametrize(("autocast", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_under_autocast_every_trial_is_as_if_alone_under_autocast(
    autocast: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    # mode="serial" runs the same kernels as training alone: other sums would round otherwise in these formats.
    result = swept({"lr": [0.1, 0.03], "seed": [0, 1]}, tmp_path / "run", autocast=autocast)
    for trial, losses in zip(result.trials, curves(result), strict=True):
        expected, _ = alone(single(**trial.settings), STEPS, autocast=dtype)
        assert losses == pytest.approx(expected, rel=1e-5), trial
        assert losses != pytest.approx(alone(single(**trial.settings), STEPS)[0], rel=1e-5), "autocast does something"


@pytest.mark.parametrize(
    ("space", "options"),
    [
        ({"scale": [1.0, 3e3], "lr": [1e-5, 3e-6]}, {}),
        ({"scale": [3e3], "lr": [3e-5, 1e-5, 3e-6]}, {"search": "asha", "first_rung": 4, "array_size": 2}),
    ],
    ids=["in one array", "from rung to rung"],
)
def test_an_overflow_in_fp16_skips_its_own_trials_step_alone(
    space: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    result = swept(space, tmp_path / "run", autocast="fp16", keep_all=True, **options)
    assert result.state.num_arrays == 1
    for trial, losses in zip(result.trials, curves(result), strict=True):
        expected, _ = alone(single(**trial.settings), trial.step, autocast=torch.float16)  # type: ignore[arg-type]
        assert losses == pytest.approx(expected, rel=1e-5), trial
    for trial in (trial for trial in result.trials if trial.state == "done"):
        (scaler,) = SweepFolder(result.folder).load_trial(trial)["scalers"]
        assert (scaler["scale"] < 2.0**16) == (trial.settings["scale"] == 3e3), "these overflow, the others do not"


def test_fused_under_autocast_trials_differ_from_alone_by_the_formats_rounding(tmp_path: Path) -> None:
    result = swept({"lr": [0.1, 0.03], "seed": [0, 1]}, tmp_path / "run", autocast="bf16", mode="rules")
    for trial, losses in zip(result.trials, curves(result), strict=True):
        expected, _ = alone(single(**trial.settings), STEPS, autocast=torch.bfloat16)  # type: ignore[arg-type]
        assert losses == pytest.approx(expected, rel=2e-2), "bf16 has 8 bits: 0.4% an operator"


def test_gradients_are_clipped_for_each_trial_by_its_own_norm(tmp_path: Path) -> None:
    result = swept({"lr": [0.1, 0.03], "seed": [0, 1]}, tmp_path / "run", job, mode="rules", clip_norm=0.5)
    for trial, losses in zip(result.trials, curves(result), strict=True):
        made = job(**trial.settings)  # type: ignore[arg-type]
        assert losses == pytest.approx(alone(made, STEPS, clip_norm=0.5)[0], rel=1e-9), trial
        assert losses != pytest.approx(alone(made, STEPS)[0], rel=1e-3), "clipping does something"


def test_scaled_gradients_are_clipped_as_if_they_were_not_scaled(tmp_path: Path) -> None:
    space = {"scale": [1.0, 3e3], "lr": [1e-3]}
    result = swept(space, tmp_path / "run", autocast="fp16", clip_norm=0.5)
    for trial, losses in zip(result.trials, curves(result), strict=True):
        made = single(**trial.settings)  # type: ignore[arg-type]
        assert losses == pytest.approx(alone(made, STEPS, autocast=torch.float16, clip_norm=0.5)[0], rel=1e-5), trial


@pytest.mark.filterwarnings("ignore")  # of the compiler's own code
@pytest.mark.parametrize("way", [WRITTEN, TOGETHER, APART])
def test_a_compiled_sweep_trains_every_trial_as_if_alone_whatever_is_fastest(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is handed to the compiler is tested here; what Inductor makes of it is torch's.
    monkeypatch.setattr("torch.compile", functools.partial(torch.compile, backend="aot_eager"))
    used, before = set(), RecordedStep.__call__

    def spying(self: RecordedStep, *batch: Any) -> torch.Tensor:
        self.way = way  # as if it were the fastest
        used.add((way, len(self.array)))
        return before(self, *batch)

    monkeypatch.setattr(RecordedStep, "__call__", spying)
    space = {"lr": [0.1, 0.03, 0.01], "dropout": [0.0]}
    result = swept(space, tmp_path / "run", job, mode="rules", array_size=2, compiled=True, clip_norm=0.5)
    assert used == {(way, 2), (way, 1)}
    for trial, losses in zip(result.trials, curves(result), strict=True):
        made = job(**trial.settings)  # type: ignore[arg-type]
        assert losses == pytest.approx(alone(made, STEPS, clip_norm=0.5)[0], rel=1e-9), trial


def test_evaluation_runs_under_the_same_autocast(tmp_path: Path) -> None:
    result = swept({"lr": [0.1]}, tmp_path / "run", autocast="bf16")
    made = single(**result.best.settings)  # type: ignore[arg-type]
    model = made.build_model().eval()
    model.load_state_dict(alone(made, STEPS, autocast=torch.bfloat16)[1])
    inputs, target = (torch.stack(column) for column in zip(*made.evaluation, strict=True))  # type: ignore[arg-type]
    with torch.no_grad():
        plain = made.loss(model(inputs), target).item()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = made.loss(model(inputs), target).item()
    assert result.best.value == pytest.approx(cast, rel=1e-5)
    assert result.best.value != pytest.approx(plain, rel=1e-5)


def test_a_sweep_goes_on_with_the_options_it_began_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = swept({"lr": [0.1, 0.03]}, folder, autocast="bf16", clip_norm=0.5)
    assert SweepRecord.load(folder / "sweep.json").step_options == whole.record.step_options
    (folder / "trials.json").unlink()  # as if it had been killed before its first checkpoint
    again = burstpool.sweep(single, resume=folder)
    assert again.trials == whole.trials


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--autocast", "fp8"], "--autocast fp8 is unknown; give bf16 or fp16"),
        (["--clip-norm", "0"], "--clip-norm 0.0 must be more than 0; leave it out not to clip"),
        (["--compile", "--autocast", "fp16"], "--compile does not go with fp16"),
        (["--clip-norm", "nan"], "--clip-norm nan must be more than 0"),
        (["--clip-norm", "inf"], "--clip-norm inf clips nothing; leave it out"),
    ],
)
def test_options_that_cannot_be_are_refused_in_one_line(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = f"{Path(__file__).with_name('sweep_jobs.py')}:single"
    assert run(["sweep", source, "--set", "lr=0.1", *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("runs/*"))
