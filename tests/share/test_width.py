"""The part of a GPU that a background gets: the choice, by what was tried."""

import itertools
from typing import Any

import pytest
import torch
from fake_cuda import without_collector

from burstpool.errors import CaptureError
from burstpool.share.gpu import width
from burstpool.share.gpu.capabilities import Capabilities
from burstpool.share.gpu.width import PARTS, Together, Widths, best_width, digest


def tried(slowdown: float, kept: float) -> Together:
    return Together(step_s=(slowdown * 2e-3, slowdown * 2e-3), alone_s=2e-3, kept=kept)


def test_a_background_that_is_held_back_keeps_what_its_cost_leaves() -> None:
    free = tried(1.5, 0.6)
    assert free.slowdown == pytest.approx(1.5)
    cost = 0.5 / (1.5 * 0.6)  # foreground seconds lost for each second of the background's work
    kept = free.kept_within(1.10)
    assert kept * 1.10 * cost == pytest.approx(0.10)
    assert free.kept_within(1.5) == pytest.approx(0.6)


def test_a_background_within_the_budget_keeps_all_it_can_and_no_more() -> None:
    assert tried(1.05, 0.3).kept_within(1.10) == 0.3
    assert tried(0.99, 0.3).kept_within(1.10) == 0.3
    assert tried(1.3, 0.0).kept_within(1.10) == 0.0
    assert tried(1.1001, 0.3).kept_within(1.10) <= 0.3


def test_a_part_is_taken_where_it_keeps_clearly_more() -> None:
    assert best_width({1.0: 0.15, 0.5: 0.19, 0.3: 0.21}) == 0.3
    assert best_width({1.0: 0.20, 0.5: 0.205, 0.3: 0.1}) == 1.0
    assert best_width({1.0: 0.20}) == 1.0
    assert best_width({1.0: 0.0, 0.5: 0.01}) == 0.5


def test_a_larger_budget_may_want_a_larger_part() -> None:
    found = {1.0: tried(1.38, 0.48), 0.5: tried(1.20, 0.34), 0.3: tried(1.11, 0.23)}
    parts = [best_width({k: v.kept_within(budget) for k, v in found.items()}) for budget in (1.05, 1.10, 1.20, 1.5)]
    assert parts == [0.3, 0.3, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_difference_of_one_bit_is_seen_and_so_are_two_that_cancel_out(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 1000).to(dtype)
    same, swapped = tensor.clone(), tensor.clone()
    swapped[0, 7] = 0
    moved = swapped.clone()
    moved[0, 7], moved[2, 900] = 1, 0
    assert digest(same) == digest(tensor)
    assert len({tuple(digest(x)) for x in (tensor, swapped, moved)}) == 3


def test_what_is_compared_in_several_goes_is_compared_whole() -> None:
    tensor = torch.arange(2.0 * width._WEIGHTS + 5)
    other = tensor.clone()
    other[-1], other[4] = 4, tensor[-1]
    assert len(digest(tensor)) == 3
    assert digest(tensor) != digest(other)
    assert digest(torch.tensor(float("nan"))) == digest(torch.tensor(float("nan")))


class Moved:
    """Steps that only know where they are captured, and cannot be on some streams."""

    def __init__(self, refused: dict[float, Exception]) -> None:
        self.stream: Any = Whole()
        self.refused, self.pieces = refused, [lambda: None]
        self.is_cut_anew, self.captures = True, 0

    def let_go(self) -> None:
        self.pieces = []

    def capture(self, *, anew: bool = True) -> None:
        if self.stream in self.refused:
            raise self.refused[self.stream]
        self.pieces, self.is_cut_anew = [lambda: None], anew
        self.captures += 1

    def capture_as_cut(self) -> None:
        self.capture(anew=False)


class Whole:
    """The stream of the whole GPU."""

    device, priority = torch.device("cuda", 0), 0


def there_are_parts(monkeypatch: pytest.MonkeyPatch, *, no_parts: str = "") -> None:
    without_collector(monkeypatch)
    monkeypatch.setattr(width, "confined_stream", lambda device, share, priority: share)
    monkeypatch.setattr(width, "capabilities", lambda device: Capabilities(no_parts=no_parts, side_by_side=False))


def test_without_parts_nothing_is_tried_but_the_whole_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    there_are_parts(monkeypatch, no_parts="the driver is too old")
    monkeypatch.setattr(width, "together", lambda _, steps, seconds: tried(1.3, 0.1))
    steps: Any = Moved({})
    widths = Widths(steps, steps)
    assert widths.left_out == dict.fromkeys(PARTS, "the driver is too old")
    assert (widths.take(slowdown=1.1), steps.captures) == (1.0, 0)


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_part_with_other_numbers_is_left_out_unless_the_job_has_others_each_time(
    reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count()
    there_are_parts(monkeypatch)
    monkeypatch.setattr(width, "together", lambda _, steps, seconds: tried(1.3, 0.1))
    monkeypatch.setattr(width, "_fingerprint", lambda steps: [steps.stream == 0.5] if reproducible else [next(count)])
    steps: Any = Moved({})
    assert set(Widths(steps, steps).left_out) == ({0.5} if reproducible else set())


def test_a_part_that_cannot_be_tried_is_left_out_and_the_background_stays_where_it_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there_are_parts(monkeypatch)
    monkeypatch.setattr(width, "_fingerprint", lambda steps: [0])
    monkeypatch.setattr(width, "together", lambda _, steps, seconds: tried(1.3, 0.3 if steps.stream == 0.5 else 0.1))
    refused: dict[float, Exception] = {0.75: torch.OutOfMemoryError("full"), 0.3: CaptureError("no such part")}
    steps: Any = Moved(refused)
    widths = Widths(steps, steps)
    assert set(widths.tried) == {1.0, *PARTS} - set(refused)
    assert set(widths.left_out) == set(refused)
    assert not steps.is_cut_anew
    assert (widths.take(slowdown=1.1), steps.stream, len(steps.pieces)) == (0.5, 0.5, 1)
    assert steps.is_cut_anew, "pieces are of the wanted length where they run"
    before = steps.captures
    assert widths.take(slowdown=1.1) == 0.5
    assert steps.captures == before, "it is there already"
    steps = Moved({part: torch.OutOfMemoryError("full") for part in PARTS})
    whole = steps.stream
    assert Widths(steps, steps).take(slowdown=1.1) == 1.0
    assert steps.stream is whole
    assert steps.pieces
