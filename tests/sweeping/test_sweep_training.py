"""Sweeps train: every trial comes out as if it were alone, whoever came and went beside it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sweep_alone import alone, assert_as_alone
from sweep_jobs import diverging, drawn, faulty, grouped, job, judged, noisy, refusing, scheduled, untraceable

import burstpool
from burstpool.errors import RunError
from burstpool.fusion.array import FusedArray
from burstpool.job import make_job
from burstpool.sweeping.folder import SweepFolder
from burstpool.sweeping.outcome import SweepResult, in_short
from burstpool.sweeping.sizing import smallest_fast
from burstpool.sweeping.space import Range
from burstpool.sweeping.trial_array import TrialArray


def swept(function: Callable[..., Any], space: dict[str, Any], folder: Path, **options: Any) -> SweepResult:
    """Without measuring anything, so that each test does the same every time."""
    given = {"steps": 20, "array_size": 4, "mode": "rules", "keep_all": True, "checkpoint_every_s": 1e9} | options
    return burstpool.sweep(function, space, run_folder=folder, **given)  # type: ignore[arg-type]


def jobs_of(result: SweepResult, function: Callable[..., Any]) -> list[Any]:
    return [function(**trial.settings) for trial in result.trials]


def test_a_grid_with_refills_trains_every_trial_as_if_alone(tmp_path: Path) -> None:
    space = {"lr": [0.1, 0.03], "dropout": [0.0, 0.2], "width": [4, 6], "seed": [0, 1]}
    result = swept(job, space, tmp_path / "run", array_size=3)
    assert len(result.trials) == 16
    assert result.state.num_arrays == 2, "width changes shapes; the rest does not"
    assert_as_alone(result, jobs_of(result, job))


def test_asha_goes_on_from_where_trials_stopped_and_its_survivors_are_as_if_alone(tmp_path: Path) -> None:
    space = {"lr": Range(low=1e-3, high=1.0, kind="log"), "momentum": [0.0, 0.9], "gamma": [0.5, 1.0], "width": [4, 6]}
    result = swept(job, space, tmp_path / "run", search="asha", trials=13, steps=27, first_rung=3)
    steps = [trial.step for trial in result.trials]
    assert {3, 9, 27} <= set(steps)
    assert sum(steps) == sum(len(losses) for _, losses in SweepFolder(result.folder).read_losses(result.trials)), (
        "no step is trained twice"
    )
    assert result.best.state == "done"
    assert_as_alone(result, jobs_of(result, job))


def test_members_at_different_places_in_the_data_share_an_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, bool]] = set()
    before = FusedArray.losses

    def spying(self: FusedArray, *args: Any, per_member: bool = False) -> torch.Tensor:
        seen.add((len(self), per_member))
        return before(self, *args, per_member=per_member)

    monkeypatch.setattr(FusedArray, "losses", spying)
    # The trial that fails at once leaves its place to one that starts later than its neighbours.
    result = swept(diverging, {"lr": [1e300, 0.1, 0.01, 0.001]}, tmp_path / "run", array_size=2, steps=60)
    assert (2, False) in seen
    assert (2, True) in seen
    assert result.trials[0].state == "failed"
    for trial, losses in SweepFolder(result.folder).read_losses(result.trials[1:]):
        expected, _ = alone(diverging(**trial.settings), 60)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-9, atol=0)


def test_a_loss_that_is_no_number_stops_its_trial_alone_and_no_other_changes_by_a_bit(tmp_path: Path) -> None:
    mixed = swept(diverging, {"lr": [0.1, 1e200, 0.01]}, tmp_path / "mixed")
    failed = mixed.trials[1]
    assert (failed.state, failed.loss, failed.step) == ("failed", None, 1)
    assert "its loss was" in failed.reason
    assert [trial.state for trial in mixed.trials] == ["done", "failed", "done"]
    # In an array of as many, so that the same kernels run: 0.5 instead of 1e200.
    sound = swept(diverging, {"lr": [0.1, 0.5, 0.01]}, tmp_path / "sound")
    for number in (0, 2):
        assert mixed.trials[number].loss == sound.trials[number].loss
        mine, other = (load_file(r.folder / "weights" / f"trial-{number:05d}.safetensors") for r in (mixed, sound))
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_trials_whose_losses_or_groups_of_parameters_differ_are_as_if_alone(tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.03], "decay": [0.0, 0.1], "smoothing": [0.0, 0.1]}
    result = swept(grouped, space, tmp_path / "run")
    assert result.state.num_arrays == 2, "a loss that holds another number is another loss"
    assert_as_alone(result, jobs_of(result, grouped))


def test_running_out_of_memory_halves_the_array_and_loses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = FusedArray.losses
    calls = 0

    def limited(self: FusedArray, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        losses = before(self, *args, **options)
        if len(self) > 3 and calls > 7:  # after it went well for a while; buffers and streams have moved by now
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return losses

    monkeypatch.setattr(FusedArray, "losses", limited)
    result = swept(job, {"lr": [0.1, 0.03, 0.01], "seed": [0, 1]}, tmp_path / "run", array_size=6)
    monkeypatch.undo()
    assert calls > 7
    assert_as_alone(result, jobs_of(result, job))


def test_a_trial_that_does_not_fit_alone_fails_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: FusedArray, *args: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(FusedArray, "losses", never)
    with pytest.raises(RunError, match=r"no trial of job could be trained; .* does not fit into memory"):
        swept(job, {"lr": [0.1, 0.03]}, tmp_path / "run")


def test_settings_that_make_the_job_raise_fail_alone(tmp_path: Path) -> None:
    result = swept(refusing, {"lr": [0.1, 0.5, 0.01]}, tmp_path / "run")
    assert [trial.state for trial in result.trials] == ["done", "failed", "done"]
    assert "half a rate" in result.trials[1].reason
    with pytest.raises(RunError, match="half a rate"):
        swept(refusing, {"lr": [0.5]}, tmp_path / "none")


def test_a_loss_that_raises_fails_its_own_trials(tmp_path: Path) -> None:
    result = swept(refusing, {"classes": [10, 3], "lr": [0.1, 0.01]}, tmp_path / "run")
    assert [trial.state for trial in result.trials] == ["done", "done", "failed", "failed"]
    assert "not among 3 classes" in result.trials[2].reason


def test_what_raises_in_an_array_is_found_by_training_its_trials_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = FusedArray.losses

    def raising(self: FusedArray, *args: Any, **options: Any) -> torch.Tensor:
        if any(one.settings_lr == 0.03 for one in map(_Lr, self.jobs)):
            raise ValueError("not with this rate")
        return before(self, *args, **options)

    monkeypatch.setattr(FusedArray, "losses", raising)
    result = swept(job, {"lr": [0.1, 0.03, 0.01]}, tmp_path / "run")
    monkeypatch.undo()
    assert [trial.state for trial in result.trials] == ["done", "failed", "done"]
    assert "not with this rate" in result.trials[1].reason
    done = [trial for trial in result.trials if trial.state == "done"]
    for trial, losses in SweepFolder(result.folder).read_losses(done):
        assert losses == pytest.approx(alone(job(**trial.settings), 20)[0], rel=1e-9)


class _Lr:
    """The rate in a job's settings."""

    def __init__(self, made: Any) -> None:
        self.settings_lr = made.settings["lr"]


def test_a_model_that_cannot_be_traced_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no trial of untraceable could be trained; trial 0") as caught:
        swept(untraceable, {"lr": [0.1, 0.01]}, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert "sweep_jobs.py:" in str(caught.value), "names the user's line"


def test_held_out_data_is_the_objective_where_there_is_some(tmp_path: Path) -> None:
    result = swept(job, {"lr": [0.1, 0.01], "held_out": [True]}, tmp_path / "run")
    assert result.record.objective == "mean loss over the held-out data"
    for trial in result.trials:
        made = job(**trial.settings)  # type: ignore[arg-type]
        _, state = alone(made, 20)
        model = made.build_model().eval()
        model.load_state_dict(state)
        inputs, target = (torch.stack(column) for column in zip(*made.evaluation, strict=True))  # type: ignore[arg-type]
        assert trial.value == pytest.approx(made.loss(model(inputs), target).item(), rel=1e-9)
    assert result.best is min(result.trials, key=lambda trial: trial.value or math.inf)


def test_without_held_out_data_the_objective_is_the_mean_loss_of_the_last_tenth(tmp_path: Path) -> None:
    result = swept(job, {"lr": [0.1, 0.01]}, tmp_path / "run")
    assert result.record.objective == "mean training loss of the last steps"
    for trial, losses in SweepFolder(result.folder).read_losses(result.trials):
        assert trial.value == pytest.approx(sum(losses[-2:]) / 2, rel=1e-12)


def test_the_best_trials_weights_have_the_users_keys_and_only_they_are_kept(tmp_path: Path) -> None:
    result = swept(job, {"lr": [0.1, 0.01, 1e-4]}, tmp_path / "run", keep_all=False)
    model = job().build_model()
    model.load_state_dict(load_file(result.weights))
    assert result.best.number == 0
    assert not (result.folder / "weights").exists()
    assert [path.name for path in (result.folder / "states").iterdir()] == ["trial-00000-step-00000020.pt"]
    assert json.loads(json.dumps(in_short(result)))["best"]["settings"] == {"lr": 0.1}


def test_sizes_are_measured_where_none_is_given(tmp_path: Path) -> None:
    result = swept(job, {"seed": list(range(6))}, tmp_path / "run", array_size=None, mode="fastest")
    sizing = result.record.sizing
    assert 1 <= sizing.places <= 6
    assert {1, 2} <= sizing.samples_per_s.keys()
    assert all(rate > 0 for rate in (*sizing.samples_per_s.values(), sizing.serial_samples_per_s))
    assert_as_alone(result, jobs_of(result, job))


def test_the_smallest_size_that_is_nearly_as_fast_is_chosen_whatever_one_measurement_says() -> None:
    assert smallest_fast({1: 10.0, 2: 19.0, 4: 36.0, 8: 60.0, 16: 65.0, 32: 66.0}) == 8
    assert smallest_fast({1: 10.0, 2: 9.0, 4: 36.0, 8: 37.0, 16: 38.0}) == 4
    assert smallest_fast({1: 10.0}) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"array_size": 0}, "--array-size 0"),
        ({"mode": "warp"}, "--mode warp is unknown"),
        ({"device": "abacus"}, "--device abacus is unknown"),
        ({"device": "cpu:foo"}, "--device cpu:foo is no device"),
        ({"device": "cuda:999"}, "--device cuda:999: there "),
        ({"search": "asha", "eta": 1}, "--eta 1"),
        ({"search": "random", "seed": -1}, "--seed -1 must be at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RunError, match=says):
        swept(job, {"lr": [0.1]}, tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_settings_that_make_the_schedule_raise_fail_alone(tmp_path: Path) -> None:
    result = swept(scheduled, {"gamma": [2.0, 0.9, 1.5, 0.5]}, tmp_path / "run")
    assert [trial.state for trial in result.trials] == ["failed", "done", "failed", "done"]
    assert "a rate that rises" in result.trials[2].reason


def test_sizes_are_measured_with_a_trial_that_trains(tmp_path: Path) -> None:
    result = swept(refusing, {"classes": [3, 10], "lr": [0.1, 0.01]}, tmp_path / "run")
    assert [trial.state for trial in result.trials] == ["failed", "failed", "done", "done"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("data", "a torn page"),
        ("loss", "does not require grad"),
        ("branches", "cannot trace Branching"),
        ("schedule", "ReduceLROnPlateau"),
        ("evaluation", "the held-out data of job 'faulty' is empty"),
    ],
)
def test_a_first_trial_that_cannot_be_trained_keeps_no_other_from_it(fault: str, says: str, tmp_path: Path) -> None:
    result = swept(faulty, {"fault": [fault, "none"]}, tmp_path / "run", steps=9, array_size=None)
    assert [trial.state for trial in result.trials] == ["failed", "done"]
    assert says in result.trials[0].reason
    with pytest.raises(RunError, match="no trial of faulty can be trained; the first fails: ") as caught:
        swept(faulty, {"fault": [fault]}, tmp_path / "none", array_size=None)
    assert says in str(caught.value)
    assert not (tmp_path / "none").exists()


def test_every_trial_gets_the_same_random_data_and_the_programs_own_draws_go_on(tmp_path: Path) -> None:
    first = swept(drawn, {"lr": [0.1, 0.1000001]}, tmp_path / "first")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    make_job(drawn, {}, source="drawn", name="drawn")
    assert torch.equal(torch.rand(3), expected), "drawn in the function, and yet the stream goes on as it was"
    second = swept(drawn, {"lr": [0.1, 0.1000001]}, tmp_path / "second")
    assert second.trials == first.trials
    near = [trial.value for trial in first.trials]
    assert near[0] == pytest.approx(near[1], rel=1e-4), "the same split, the same noise"


def test_an_observer_hears_what_is_measured(tmp_path: Path) -> None:
    sizes: list[int | None] = []
    swept(
        job,
        {"lr": [0.1, 0.2]},
        tmp_path / "run",
        array_size=None,
        observer=lambda progress: sizes.append(progress.measured_size),
    )
    assert sizes[:2] == [1, 2]
    assert set(sizes[2:]) <= {None}


def test_held_out_data_that_makes_the_loss_raise_fails_its_own_trials(tmp_path: Path) -> None:
    result = swept(judged, {"lr": [0.1, 0.01], "sound": [True, False]}, tmp_path / "run", array_size=4)
    assert [trial.state for trial in result.trials] == ["done", "failed", "done", "failed"]
    for trial in result.trials:
        if trial.state == "done":
            made = judged(**trial.settings)  # type: ignore[arg-type]
            _, state = alone(made, 20)
            model = made.build_model().eval()
            model.load_state_dict(state)
            inputs, target = (torch.stack(column) for column in zip(*made.evaluation, strict=True))  # type: ignore[arg-type]
            assert trial.value == pytest.approx(made.loss(model(inputs), target).item(), rel=1e-9)


@pytest.mark.parametrize(
    ("cls", "method", "most"), [(FusedArray, "admit", 2), (TrialArray, "state_dict", 2), (FusedArray, "eval", 2)]
)
def test_no_memory_for_a_place_a_copy_or_the_objective_loses_nobody(
    cls: Any, method: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, failures = getattr(cls, method), 0

    def limited(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal failures
        members = len(self) if isinstance(self, FusedArray) else len(self.numbers)
        if members + (method == "admit") > most:
            failures += 1
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return before(self, *args, **options)

    monkeypatch.setattr(cls, method, limited)
    result = swept(job, {"lr": [0.1, 0.03, 0.01], "seed": [0, 1], "held_out": [True]}, tmp_path / "run", array_size=6)
    monkeypatch.undo()
    assert failures
    assert_as_alone(result, jobs_of(result, job))


def test_a_sweep_without_trials_in_arrays_names_no_checkpoint(tmp_path: Path) -> None:
    result = swept(job, {"lr": [0.1]}, tmp_path / "run", steps=60, checkpoint_every_s=0.0)
    assert result.state.checkpoint == ""
    assert not list((result.folder / "checkpoints").iterdir())


@pytest.mark.parametrize("options", [{}, {"search": "asha", "trials": 3, "first_rung": 6, "steps": 18}])
def test_a_trial_that_is_alone_in_its_array_is_trained_by_the_plain_module_and_as_if_alone(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: FusedArray, *args: Any, **options: Any) -> torch.Tensor:
        raise AssertionError("the array was run")

    monkeypatch.setattr(FusedArray, "losses", never)
    # Dropout, batch norm, momentum and a schedule must come back from the array and go there again at every rung.
    result = swept(job, {"lr": [0.1, 0.03, 0.01]}, tmp_path / "run", array_size=1, mode="fastest", **options)
    assert_as_alone(result, jobs_of(result, job))


@pytest.mark.parametrize("array_size", [1, 2])
def test_a_loss_that_draws_random_numbers_draws_each_trials_own(tmp_path: Path, array_size: int) -> None:
    """Alone in its array a trial is trained by its plain module; rungs are evaluated between its steps."""
    space = {"lr": [0.1, 0.03], "seed": [3, 4]}
    options = {"search": "asha", "trials": 4, "steps": 9, "first_rung": 3, "mode": "fastest"}
    result = swept(noisy, space, tmp_path / "run", array_size=array_size, **options)
    assert_as_alone(result, jobs_of(result, noisy))
