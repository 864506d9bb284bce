"""Every plan trains the same model as one process does: parameters after 50 steps (10 in CI), in 64 bits, within 1e-9.

Plans are splits, transitions between numbers of devices, burst plans drawn at random, and special cases. All run in one
set of processes; a deadlock ends as a failure that names who waits for whom. `BURSTPOOL_FULL_MATRIX=1` runs all splits,
all transitions and 200 random plans with every model; without it, some of each.
"""

import dataclasses
import itertools
import os
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from collected_cases import Cases
from random_plans import free_plan, planned_plan
from run_cases import BatchNormCheck, cut_evenly, double_job, make_plan
from run_models import dropout_job, frozen_job, modules_job, pooled_job, positions_job, tied_job, two_headed_job

from burstpool.job import Job, load_job
from burstpool.run.options import RunOptions

pytestmark = pytest.mark.alone  # all in one set of processes, which two at once would have twice

NUM_WORKERS = 5

MODELS: dict[str, dict[str, Any]] = {
    "tiny_vgg": {"width": 4},
    "tiny_resnet": {"width": 4},
    "tiny_inception": {"width": 2},
    "tiny_lstm": {"width": 16},
    "tiny_transformer": {"width": 8, "heads": 2},
}
SOME_SPLITS = {
    "tiny_vgg": [(2, 12), (4, 17)],
    "tiny_resnet": [(2, 17), (3, 16)],
    "tiny_inception": [(2, 16), (3, 12)],
    "tiny_lstm": [(4, 12), (4, 16)],
    "tiny_transformer": [(2, 12), (3, 17)],
}
"""(devices, batch): all nine combinations, though not with every model."""
ALL_SPLITS = {name: list(itertools.product((2, 3, 4), (12, 16, 17))) for name in MODELS}
IS_FULL = bool(os.environ.get("BURSTPOOL_FULL_MATRIX"))  # takes some minutes
CHOSEN = ALL_SPLITS if IS_FULL else SOME_SPLITS
SPLITS = [(name, num_devices, batch) for name, splits in CHOSEN.items() for num_devices, batch in splits]
TRANSITIONS = {
    "1-2-1": ([0], [1, 2], [3]),
    "1-4-2": ([2], [0, 1, 2, 3], [1, 3]),
    "2-4-1": ([3, 1], [0, 1, 2, 3], [0]),
    "3-5-2": ([4, 0, 2], [0, 1, 2, 3, 4], [3, 1]),
}
"""Devices of the first, second and last third of the layers."""
SOME_WAYS = [
    ("tiny_vgg", "1-4-2"),
    ("tiny_vgg", "3-5-2"),
    ("tiny_resnet", "2-4-1"),
    ("tiny_resnet", "3-5-2"),
    ("tiny_inception", "1-2-1"),
    ("tiny_inception", "3-5-2"),
    ("tiny_lstm", "1-2-1"),
    ("tiny_transformer", "1-4-2"),
]
WAYS = list(itertools.product(MODELS, TRANSITIONS)) if IS_FULL else SOME_WAYS
NUM_RANDOM = 200 if IS_FULL else 6
RANDOM_STEPS = 3
STEPS = 50 if IS_FULL else 10
BATCH_NORMS = {
    "images": BatchNormCheck(num_samples=(3, 1, 5), shape=(4, 3, 3)),
    "vectors": BatchNormCheck(num_samples=(2, 2, 2, 1), shape=(6,)),
    "plain": BatchNormCheck(num_samples=(4, 1), shape=(3, 5), affine=False, tracked=False),
}


@pytest.fixture(scope="module")
def cases() -> Cases:
    found = Cases(NUM_WORKERS, checks=BATCH_NORMS.values())
    _add_splits(found)
    _add_transitions(found)
    _add_random(found, range(NUM_RANDOM))
    _add_special(found)
    found.run()
    return found


def _add_splits(found: Cases) -> None:
    for name, num_devices, batch in SPLITS:
        job = double_job(f"zoo:{name}", **MODELS[name])
        graph = found.graph(name, job)
        groups = [(start, range(num_devices)) for start in cut_evenly(graph, 3)]
        plan = make_plan(graph, groups, num_devices=NUM_WORKERS, batch=batch)
        found.add(f"{name}/{num_devices}x{batch}", job, plan, steps=STEPS)


def _add_transitions(found: Cases) -> None:
    for name, way in WAYS:
        job = double_job(f"zoo:{name}", **MODELS[name])
        graph = found.graph(name, job)
        groups = list(zip(cut_evenly(graph, 3), TRANSITIONS[way], strict=False))
        plan = make_plan(graph, groups, num_devices=NUM_WORKERS, batch=13)
        found.add(f"{name}/{way}", job, plan, steps=STEPS)


def _random_name(seed: int) -> str:
    return f"{list(MODELS)[seed % len(MODELS)]}/random {seed}"


def _add_random(found: Cases, seeds: Iterable[int]) -> None:
    """Three of four drawn freely, one of four by the planner."""
    for seed in seeds:
        rng, name = random.Random(seed), _random_name(seed)
        family = name.partition("/")[0]
        job = double_job(f"zoo:{family}", **MODELS[family])
        graph = found.graph(family, job)
        draw = planned_plan if seed % 4 == 3 else free_plan
        plan = draw(graph, rng, num_devices=NUM_WORKERS, batch=rng.randint(NUM_WORKERS, 16))
        found.add(name, job, plan, steps=RANDOM_STEPS)


def _add_special(found: Cases) -> None:
    def add(name: str, job: Job, groups: Sequence[tuple[int, Sequence[int]]], **changes: Any) -> None:
        graph = found.graph(name.partition("/")[0], job)
        num_minibatches = changes.pop("num_minibatches", 1)
        batch = changes.pop("batch", 8)
        plan = make_plan(graph, groups, num_devices=NUM_WORKERS, batch=batch, num_minibatches=num_minibatches)
        found.add(name, job, plan, against={"num_minibatches": num_minibatches}, steps=20, **changes)

    vgg = double_job("zoo:tiny_vgg", width=4)
    add("tiny_vgg/accumulated", vgg, [(0, [0, 1]), (5, [0, 1])], num_minibatches=3, batch=7)
    add("tiny_vgg/pipelined", vgg, [(0, [0]), (3, [1]), (6, [2, 3])], num_minibatches=4, batch=5)
    add("tiny_vgg/clipped", vgg, [(0, [0, 1]), (3, [2]), (6, [1, 3])], options=RunOptions(clip_norm=0.5, timeout_s=60))
    add("tiny_vgg/few samples", vgg, [(0, [0, 1, 2, 3]), (5, [3, 2, 1, 0])], batch=2)
    add("tiny_vgg/autocast", load_job("zoo:tiny_vgg", {"width": 4}), [(0, [0, 1]), (3, [2]), (6, [1, 3])],
        options=RunOptions(autocast="bf16", timeout_s=60))  # fmt: skip
    for name, groups, changes in (
        ("whole", [(0, [0])], {}),
        ("data", [(0, [0, 1]), (3, [0, 1]), (6, [0, 1]), (7, [0, 1])], {}),
        ("burst", [(0, [0]), (3, [0, 1]), (6, [1, 3])], {}),
        ("pipelined", [(0, [0]), (3, [1]), (6, [2, 3])], {"num_minibatches": 3}),
    ):
        add(f"tiny_vgg/captured {name}", vgg, groups, captured=True, **changes)
    add("pooled/clipped", pooled_job(), [(0, [0, 1]), (1, [2, 3])], options=RunOptions(clip_norm=0.1, timeout_s=60))
    add("pooled/fp16", pooled_job(), [(0, [0, 1]), (1, [2, 3])], options=RunOptions(autocast="fp16", timeout_s=60))
    add("modules/split", modules_job(), [(0, [0, 1]), (1, [2, 1])],
        options=RunOptions(fallback="modules", timeout_s=60))  # fmt: skip
    add("positions/two blocks", positions_job(), [(0, [0, 1]), (2, [0, 1])])
    add("two heads/apart", two_headed_job(), [(0, [0, 1]), (2, [2]), (3, [1, 3])])
    apart = found.cases["two heads/apart"]
    body, early, late = apart.plan.blocks
    split = [dataclasses.replace(late, name=name, layers=(name,)) for name in late.layers]
    reordered = dataclasses.replace(apart.plan, blocks=(body, split[0], early, split[1]))
    found.add("two heads/reordered", apart.job, reordered, against={"num_minibatches": 1}, steps=20)
    add("frozen/split", frozen_job(), [(0, [0, 1]), (2, [1, 2])])
    add("tied/together", tied_job(), [(0, [0, 1]), (1, [0, 1]), (2, [0, 1])])
    dropouts = dropout_job()
    for name, groups in {
        "one": [(0, [0])],
        "data": [(0, [0, 1, 2])],
        "burst": [(0, [1]), (1, [0, 1, 2, 3]), (2, [2, 3])],
    }.items():
        add(f"dropout/{name}", dropouts, groups, batch=9)
    found.reference["dropout/data"] = found.reference["dropout/burst"] = "dropout/one"
    job = double_job("zoo:tiny_transformer", width=8, heads=2, dropout=0.2)
    add("attention dropout/one", job, [(0, [3])], batch=6)
    add("attention dropout/data", job, [(0, [0, 1, 2, 3])], batch=6)
    found.reference["attention dropout/data"] = "attention dropout/one"
    _add_tied_apart(found)


def _add_tied_apart(found: Cases) -> None:
    """Tied parameters on different devices, which lowering does not offer yet but the executor can run."""
    job = tied_job()
    graph = found.graph("tied", job)
    plan = make_plan(graph, [(0, [0, 1]), (1, [2]), (2, [1, 3])], num_devices=NUM_WORKERS, batch=8)
    renamed = dataclasses.replace(graph.layers[-1], parameters={"head.own": 1})
    untied = dataclasses.replace(graph, layers=(*graph.layers[:-1], renamed))
    found.add("tied/apart", job, plan, flow=untied, steps=20)


@pytest.mark.parametrize("name", [f"{name}/{n}x{batch}" for name, n, batch in SPLITS])
def test_data_parallelism_trains_the_same_model_as_one_process(cases: Cases, name: str) -> None:
    cases.check(name)


@pytest.mark.parametrize("name", [f"{name}/{way}" for name, way in WAYS])
def test_blocks_on_different_devices_train_the_same_model_as_one_process(cases: Cases, name: str) -> None:
    cases.check(name)


@pytest.mark.parametrize("seed", range(NUM_RANDOM))
def test_random_burst_plans_end_with_the_losses_and_parameters_of_one_process(cases: Cases, seed: int) -> None:
    cases.check(_random_name(seed))


def test_random_plans_are_not_all_alike(cases: Cases) -> None:
    plans = [case.plan for name, case in cases.cases.items() if "/random " in name]
    assert {plan.strategy for plan in plans} == {"random", "burst"}
    assert {len(plan.devices) for plan in plans} >= {2, NUM_WORKERS}
    assert any(len({block.devices for block in plan.blocks}) > 3 for plan in plans)
    sizes = [{share.num_samples for share in block.shares} for plan in plans for block in plan.blocks]
    assert any(max(counts) > min(counts) + 1 for counts in sizes)


@pytest.mark.parametrize("way", ["accumulated", "pipelined", "clipped", "few samples"])
def test_minibatches_clipping_and_idle_devices_change_nothing(cases: Cases, way: str) -> None:
    cases.check(f"tiny_vgg/{way}")
    cases.check("pooled/clipped")  # devices without parameters


@pytest.mark.parametrize("way", ["whole", "data", "burst", "pipelined"])
def test_captured_steps_train_the_same_model(cases: Cases, way: str) -> None:
    name = f"tiny_vgg/captured {way}"
    cases.check(name)
    place = list(cases.cases).index(name)
    working = cases.cases[name].plan.devices
    assert all(outcomes[place].is_captured for device, outcomes in enumerate(cases.outcomes) if device in working)


@pytest.mark.parametrize("way", ["together", "apart"])
def test_tied_parameters_stay_tied_wherever_their_blocks_run(cases: Cases, way: str) -> None:
    cases.check(f"tied/{way}")
    weights = [state["head.weight"] for state in cases.states(f"tied/{way}") if "head.weight" in state]
    assert len(weights) > 1
    assert all(torch.equal(weights[0], weight) for weight in weights[1:])


@pytest.mark.parametrize("name", ["positions/two blocks", "two heads/apart", "two heads/reordered", "frozen/split"])
def test_values_without_samples_early_outputs_and_frozen_parameters_work(cases: Cases, name: str) -> None:
    cases.check(name)


@pytest.mark.parametrize("name", ["dropout/data", "dropout/burst", "attention dropout/data"])
def test_dropout_masks_do_not_depend_on_the_plan(cases: Cases, name: str) -> None:
    cases.check(name)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm_over_devices_is_batch_norm_over_all_samples(cases: Cases, name: str) -> None:
    place = len(cases.cases) + list(BATCH_NORMS).index(name)
    assert max(outcomes[place] for outcomes in cases.outcomes) < 1e-12


def test_autocast_and_whole_modules_train(cases: Cases) -> None:
    for name in ("tiny_vgg/autocast", "modules/split", "pooled/fp16"):
        losses = cases.losses(name)
        assert sum(losses[-5:]) < sum(losses[:5])
    cases.check("modules/split")


def test_a_device_keeps_only_the_parameters_of_its_blocks(cases: Cases) -> None:
    first, second, third, fourth, idle = (set(state) for state in cases.states("tiny_vgg/pipelined"))
    assert first == {"features.0.weight", "features.0.bias", "features.2.weight", "features.2.bias"}
    assert second == {"features.5.weight", "features.5.bias", "features.7.weight", "features.7.bias"}
    assert third == fourth == {f"classifier.{i}.{name}" for i in (0, 3) for name in ("weight", "bias")}
    assert not idle


def test_copies_of_a_block_are_bit_equal_on_all_its_devices(cases: Cases) -> None:
    first, *others = (state for state in cases.states("tiny_resnet/3x16") if state)
    assert len(others) == 2
    for other in others:
        assert all(torch.equal(tensor, other[key]) for key, tensor in first.items())
