"""The Plan artifact: what it accepts and refuses, and that it goes to JSON and back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstpool.errors import PlanError
from burstpool.plan.plan import Plan, PlannedBlock, Share, even_shares
from burstpool.plan.strategies import STRATEGIES, planner


def block(name: str = "a", shares: tuple[Share, ...] = even_shares(4, (0, 1)), *layers: str) -> PlannedBlock:
    return PlannedBlock(name=name, layers=layers or (name,), shares=shares)


def plan(*blocks: PlannedBlock, **changes: Any) -> Plan:
    fields: dict[str, Any] = {"model": "tiny", "strategy": "data", "num_devices": 2, "batch": 4}
    return Plan(blocks=blocks or (block(),), **(fields | changes))


def test_a_plan_goes_to_json_and_back() -> None:
    found = plan(block(), block("b", even_shares(4, (1,)), "b", "c"), num_minibatches=3, step_time_s=0.5)
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Share(device=0, start=2, stop=2), "share 2:2 of device 0 is empty; leave it out"),
        (lambda: Share(device=-1, start=0, stop=2), "device=-1 must be 0 or more"),
        (lambda: PlannedBlock(name="a", layers=(), shares=()), "block 'a' has no layers"),
        (
            lambda: block("a", (Share(device=0, start=0, stop=2), Share(device=0, start=2, stop=4))),
            "names a device twice",
        ),
        (lambda: block("a", (Share(device=0, start=1, stop=4),)), "leave or repeat sample 0"),
        (lambda: plan(block(), block("a", even_shares(4, (0,)), "b")), "two blocks are named 'a'"),
        (lambda: plan(block(), block("b", even_shares(4, (0,)), "a")), "layer 'a' is in two blocks"),
        (lambda: plan(num_minibatches=0), "num_minibatches=0 must be at least 1"),
        (lambda: plan(batch=5), "block 'a' runs 4 samples of 5"),
        (lambda: plan(num_devices=1), "block 'a' names device 1; there are 1"),
    ],
)
def test_plans_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_file_that_makes_no_sense_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match=r"plan\.json: .*names device 1; there are 1"):
        Plan.from_json(plan().to_json().replace('"num_devices": 2', '"num_devices": 1'), source="plan.json")


@given(st.integers(1, 50), st.integers(1, 20))
def test_even_shares_cover_the_batch_and_differ_by_one(batch: int, num_devices: int) -> None:
    shares = even_shares(batch, tuple(range(num_devices)))
    assert sum(share.num_samples for share in shares) == batch
    assert max(share.num_samples for share in shares) - min(share.num_samples for share in shares) <= 1
    assert len(shares) == min(batch, num_devices)


def test_devices_and_blocks_can_be_asked_for() -> None:
    found = plan(block(), block("b", even_shares(4, (3,))), num_devices=5)
    assert found.devices == (0, 1, 3)
    assert found.block("b").devices == (3,)
    with pytest.raises(PlanError, match="no block 'c'"):
        found.block("c")


def test_a_plan_prints_as_a_person_would_write_it() -> None:
    first, second = str(plan(step_time_s=0.5)).splitlines()
    assert first == "tiny, batch 4, strategy data: 2 of 2 devices, 0.5 s a step"
    assert second.split() == ["a", "1", "layers", "on", "2", "devices"]


def test_strategies_are_found_by_name() -> None:
    assert planner("data") is STRATEGIES["data"]
    with pytest.raises(PlanError, match="there is no strategy 'magic'; give data"):
        planner("magic")
