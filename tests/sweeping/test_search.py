"""Searches: what every one of them promises, and what each does."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from burstpool.errors import RunError
from burstpool.sweeping.policy import Assign, Finish, Place, Run, Turn, View, decide, steps_to_run
from burstpool.sweeping.search import SEARCHES, Search, SearchSetting, make_search, number_of_trials
from burstpool.sweeping.search.asha import rungs
from burstpool.sweeping.space import Range, Space, Values
from burstpool.sweeping.trials import Report, Trial

VALUES = Space(axes={"a": Values(values=(1, 2, 3)), "b": Values(values=(0.1, 0.2, 0.3, 0.4))})
RANGES = Space(axes={"a": Range(low=0.0, high=1.0), "b": Range(low=1, high=100, kind="logint")})
Objective = Callable[[Trial], float]


def searched(name: str, setting: SearchSetting) -> Search:
    if name == "optuna":
        pytest.importorskip("optuna", reason="Optuna is an optional dependency: pip install burstpool[optuna]")
    return make_search(name, setting)


def run_without_training(
    search: Search,
    *,
    steps: int,
    places: int,
    groups: Callable[[Trial], int] = lambda trial: 0,
    objective: Objective = lambda trial: float(trial.number),
    fails: Sequence[int] = (),
) -> tuple[list[Trial], list[str]]:
    """The policy with a runner that trains nothing: all trials as they end, and the moves."""
    trials: list[Trial] = []
    clocks: dict[int, int] = {}
    turns: dict[int, int] = {}
    current, moves = None, []
    for _ in range(100_000):
        move = decide(View(trials=trials, places=places, current=current, last_turns=turns), search)
        moves.append(type(move).__name__)
        match move:
            case Finish():
                return trials, moves
            case Assign(assignment=found) if found.trial == len(trials):
                made = Trial(number=found.trial, settings=found.settings, state="waiting", until=found.until)
                trials.append(replace(made, group=groups(made)))
            case Assign(assignment=found):
                assert trials[found.trial].state == "paused"
                assert found.until > trials[found.trial].step, "a promoted trial goes on, it does not start again"
                trials[found.trial] = replace(trials[found.trial], state="waiting", until=found.until)
            case Place(trial=number):
                assert trials[number].state == "waiting"
                trials[number] = replace(trials[number], state="running")
            case Turn(group=current):
                turns[current] = len(turns) + max(turns.values(), default=0)
            case Run(group=group):
                running = [trial for trial in trials if trial.state == "running" and trial.group == group]
                assert 0 < len(running) <= places
                count = steps_to_run(running, clock=clocks.get(group, 0), longest=5)
                assert count > 0
                clocks[group] = clocks.get(group, 0) + count
                for trial in running:
                    moved = replace(trial, step=trial.step + count)
                    assert moved.step <= moved.until
                    if trial.number in fails:
                        moved = replace(moved, state="failed")
                    elif moved.step == moved.until:
                        report = Report(step=moved.step, value=objective(moved))
                        state = "done" if moved.step == steps else "paused"
                        moved = replace(moved, state=state, reports=(*moved.reports, report))
                        current = None
                    trials[trial.number] = moved
    raise AssertionError("the sweep does not end")


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("space", [VALUES, RANGES], ids=["values", "ranges"])
def test_every_search_ends_asks_for_settings_of_the_space_and_is_a_function_of_the_trials(
    name: str, space: Space
) -> None:
    setting = SearchSetting(space=space, num_trials=11, steps=12, seed=3)
    if name == "grid" and space is RANGES:
        with pytest.raises(RunError.__base__, match="a grid needs values; use --search random"):  # type: ignore[arg-type]
            searched(name, setting)
        return
    search = searched(name, setting)
    trials, _ = run_without_training(search, steps=12, places=4, groups=lambda trial: trial.number % 3, fails=(2, 5))
    assert [trial.number for trial in trials] == list(range(11))
    assert {trial.state for trial in trials} <= {"done", "paused", "failed"}
    for trial in trials:
        for key, axis in space.axes.items():
            value = trial.settings[key]
            assert value in axis.values if isinstance(axis, Values) else axis.low <= value <= axis.high  # type: ignore[operator]
    again = searched(name, setting)
    for count in (0, 1, 5):
        assert again.next(trials[:count]) == search.next(trials[:count])


@pytest.mark.parametrize("name", ["grid", "random", "optuna"])
def test_without_early_stopping_every_trial_is_trained_to_its_end(name: str) -> None:
    search = searched(name, SearchSetting(space=VALUES, num_trials=12, steps=9))
    trials, _ = run_without_training(search, steps=9, places=5, groups=lambda trial: trial.number % 2)
    assert {(trial.state, trial.step) for trial in trials} == {("done", 9)}


def test_optuna_takes_a_large_seed() -> None:
    found = searched("optuna", SearchSetting(space=RANGES, num_trials=2, steps=9, seed=2**40)).next([])
    assert found is not None
    assert found.trial == 0


def test_optuna_learns_from_what_it_is_told() -> None:
    setting = SearchSetting(space=RANGES, num_trials=60, steps=1, seed=0)
    told, _ = run_without_training(
        searched("optuna", setting),
        steps=1,
        places=1,
        objective=lambda t: abs(float(t.settings["a"]) - 0.3),  # type: ignore[arg-type]
    )
    late = [abs(float(trial.settings["a"]) - 0.3) for trial in told[40:]]  # type: ignore[arg-type]
    assert sum(late) / len(late) < 0.15, "drawn evenly the mean distance is 0.29"


def test_asha_promotes_one_in_eta_of_each_rung_and_the_best_come_to_the_end() -> None:
    search = make_search("asha", SearchSetting(space=RANGES, num_trials=27, steps=27, eta=3))
    trials, _ = run_without_training(search, steps=27, places=27, objective=lambda trial: float(trial.number))
    assert [trial.number for trial in trials if trial.state == "done"] == [0]
    assert sorted(trial.step for trial in trials) == [1] * 18 + [3] * 6 + [9] * 2 + [27]


def test_asha_with_few_places_promotes_before_all_have_started_and_wastes_little() -> None:
    search = make_search("asha", SearchSetting(space=RANGES, num_trials=81, steps=27, eta=3))
    trials, moves = run_without_training(search, steps=27, places=4, objective=lambda t: (t.number * 37 % 81) / 81)
    best = min(trials, key=lambda trial: trial.number * 37 % 81)
    assert best.state == "done"
    spent = sum(trial.step for trial in trials)
    assert spent < 81 * 27 / 3, "most trials stop early"
    assert moves.index("Run") < len(moves) - 1 - moves[::-1].index("Assign")


def test_asha_is_not_stopped_by_trials_that_fail() -> None:
    search = make_search("asha", SearchSetting(space=RANGES, num_trials=27, steps=27, eta=3))
    trials, _ = run_without_training(search, steps=27, places=5, fails=range(0, 27, 2))
    assert any(trial.state == "done" for trial in trials)


def test_rungs_are_few_enough_for_one_trial_to_reach_the_last() -> None:
    assert rungs(200, eta=3, first=None, num_trials=16) == (22, 66, 200)
    assert rungs(200, eta=3, first=None, num_trials=1000) == (7, 22, 66, 200)
    assert rungs(200, eta=3, first=None, num_trials=2) == (200,)
    assert rungs(100, eta=2, first=10, num_trials=4) == (10, 20, 40, 80, 100)
    assert rungs(90, eta=3, first=10, num_trials=4) == (10, 30, 90)
    assert rungs(90, eta=3, first=90, num_trials=4) == (90,)
    assert rungs(2, eta=3, first=None, num_trials=99) == (2,)
    for wrong in ({"eta": 1, "first": None}, {"eta": 3, "first": 0}, {"eta": 3, "first": 101}):
        with pytest.raises(RunError, match="must be"):
            rungs(100, num_trials=9, **wrong)  # type: ignore[arg-type]


def test_freed_places_are_filled_before_the_array_goes_on() -> None:
    search = make_search("random", SearchSetting(space=RANGES, num_trials=9, steps=10))
    _, moves = run_without_training(search, steps=10, places=3, fails=(0, 4))
    assert moves[:7] == ["Assign", "Turn", "Place", "Assign", "Place", "Assign", "Place"]
    after = moves[moves.index("Run") + 1 :]
    assert after[:2] == ["Assign", "Place"], "the place of the trial that failed"


def test_arrays_take_turns_where_trials_report() -> None:
    search = make_search("grid", SearchSetting(space=VALUES, num_trials=12, steps=5))
    trials, moves = run_without_training(search, steps=5, places=2, groups=lambda trial: trial.number % 2)
    assert moves.count("Turn") == 6
    assert all(trial.state == "done" for trial in trials)


def test_the_number_of_trials_is_at_most_that_of_the_settings() -> None:
    assert number_of_trials("grid", VALUES, None) == 12
    assert number_of_trials("random", VALUES, 100) == 12
    assert number_of_trials("random", RANGES, 100) == 100
    with pytest.raises(RunError, match="say how many trials"):
        number_of_trials("asha", RANGES, None)
    with pytest.raises(RunError, match="--trials 0 must be at least 1"):
        number_of_trials("grid", VALUES, 0)


def test_an_unknown_search_says_which_there_are() -> None:
    with pytest.raises(RunError, match="grid, random, asha, optuna"):
        make_search("annealing", SearchSetting(space=VALUES, num_trials=1, steps=1))
