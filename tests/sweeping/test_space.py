"""Spaces: how they are written, what they refuse, what they draw."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstpool.errors import JobError
from burstpool.job import check_settings
from burstpool.sweeping.space import Range, Space, Values, checked_space, parse_space


def make(lr: float = 0.1, width: int = 8, kind: str = "a", deep: bool = False) -> None:
    """The hyper-parameters of these tests."""


def space(*words: str) -> Space:
    return checked_space(parse_space(words), make, source="job.py")


def test_values_get_the_types_of_the_annotations() -> None:
    axes = space("lr=1,0.5", "width=4,8", "deep=true", "kind=a,b").axes
    assert axes["lr"] == Values(values=(1.0, 0.5))
    assert axes["width"] == Values(values=(4, 8))
    assert axes["deep"] == Values(values=(True,))
    assert axes["kind"] == Values(values=("a", "b"))


def test_a_grid_has_every_combination_once_and_the_last_name_varies_fastest() -> None:
    found = space("lr=1,2", "width=3,4,5")
    assert found.size == 6
    assert [tuple(found.grid(i).values()) for i in range(3)] == [(1.0, 3), (1.0, 4), (1.0, 5)]
    assert len({tuple(found.grid(i).values()) for i in range(6)}) == 6


def test_random_draws_of_values_take_none_twice_and_follow_from_the_seed() -> None:
    found = space("lr=1,2,3", "width=3,4,5")
    drawn = [tuple(found.draw(i, seed=1).values()) for i in range(9)]
    assert len(set(drawn)) == 9
    assert drawn == [tuple(found.draw(i, seed=1).values()) for i in range(9)]
    assert drawn != [tuple(found.draw(i, seed=2).values()) for i in range(9)]


@given(
    kind=st.sampled_from(["float", "log", "int", "logint"]),
    low=st.integers(1, 1000),
    span=st.integers(1, 1000),
    place=st.floats(0, 1, exclude_max=True),
)
def test_a_range_never_leaves_its_ends(kind: str, low: int, span: int, place: float) -> None:
    found = Range(low=low, high=low + span, kind=kind)  # type: ignore[arg-type]
    value = found.at(place)
    assert isinstance(value, int if found.whole else float)
    assert low <= value <= low + span


def test_whole_ranges_reach_both_ends_and_logarithmic_ones_are_even_in_the_logarithm() -> None:
    assert {Range(low=2, high=4, kind="int").at(i / 99) for i in range(99)} == {2, 3, 4}
    middle = Range(low=1e-4, high=1e-2, kind="log").at(0.5)
    assert isinstance(middle, float)
    assert math.isclose(middle, 1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rate=1"], "no hyper-parameter 'rate'; it has: lr, width, kind, deep"),
        (["lr=fast"], "unable to parse string as a number"),
        (["width=4,wide"], "unable to parse string as an integer"),
        (["lr=1,,2"], "lr has an empty value"),
        (["lr=log:1..x"], "write lr=log:LOW..HIGH"),
        (["lr=log:1"], "write lr=log:LOW..HIGH"),
        (["lr=log:0..1"], "must begin above 0"),
        (["lr=float:2..1"], "is empty"),
        (["width=float:1.0..2.0"], "takes whole numbers; give width=int:1..2"),
        (["width=int:1.5..2"], "the range int:1.5..2 must have whole ends"),
        (["lr=1,1"], "a value twice"),
        (["lr=0.1,inf"], "lr=inf cannot be a trial's"),
        (["lr=nan"], "lr=nan cannot be a trial's"),
        (["lr"], "not of the form name=value"),
        (["lr=1", "lr=2"], "given twice"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(words: list[str], says: str) -> None:
    with pytest.raises(JobError, match=says.replace("(", "\\(")) as caught:
        space(*words)
    assert "\n" not in str(caught.value)


def test_a_program_gives_lists_ranges_or_texts() -> None:
    found = checked_space({"lr": Range(low=0.1, high=0.2), "width": [4, 8], "kind": "a,b"}, make, source="make")
    assert found.axes["width"] == Values(values=(4, 8))
    assert found.axes["kind"] == Values(values=("a", "b"))
    assert found.size is None


def test_values_that_no_file_can_hold_are_refused_before_anything_is_trained() -> None:
    def layered(widths: frozenset[int] = frozenset()) -> None:
        """A hyper-parameter that is neither a number nor a text nor a list."""

    with pytest.raises(JobError, match=r"widths=frozenset\(\{8\}\) cannot be a trial's; give numbers, or words"):
        checked_space({"widths": [frozenset({8}), frozenset({4})]}, layered, source="layered")


def lists(widths: list[int] = [8], pair: tuple[int, float] = (1, 0.5), kind: str = "a") -> None:  # noqa: B006
    """Hyper-parameters that are lists."""


def test_lists_are_values_in_brackets_and_kept_as_texts_that_the_job_reads() -> None:
    axes = checked_space(parse_space(["widths=[8,8],[16],[]", "pair=[ 2, 1 ]", "kind=a,b"]), lists, source="l").axes
    assert axes["widths"] == Values(values=("[8,8]", "[16]", "[]"))
    assert axes["pair"] == Values(values=("[2,1.0]",))
    assert axes["kind"] == Values(values=("a", "b"))
    assert check_settings(lists, {"pair": "[2,1.0]", "widths": "[8,8]"}, source="l") == {
        "pair": (2, 1.0),
        "widths": [8, 8],
    }


def test_a_program_gives_lists_of_lists() -> None:
    found = checked_space({"widths": [[8, 8], (4,)], "pair": [(1, 2.5)]}, lists, source="lists")
    assert found.axes["widths"] == Values(values=("[8,8]", "[4]"))
    assert found.axes["pair"] == Values(values=("[1,2.5]",))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["widths=8,16"], "a list is written in brackets"),
        (["widths=[8,16"], "widths=[8,16: a bracket is not closed; write 'name=[64,128]'"),
        (["widths=[8],[x]"], "entry 0 of the list: input should be a valid integer"),
        (["widths=[8],,[9]"], "widths has an empty value"),
        (["widths=[8,8],[8, 8]"], "widths has a value twice"),
        (["widths=int:8..16"], "input should be a valid list"),
    ],
)
def test_lists_that_cannot_be_searched_are_refused_in_one_line(words: list[str], says: str) -> None:
    with pytest.raises(JobError) as caught:
        checked_space(parse_space(words), lists, source="job.py")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_space_too_large_to_write_down_is_drawn_from_at_once_and_without_repeats() -> None:
    huge = Space(axes={name: Values(values=tuple(range(100))) for name in "abcdefghij"})
    drawn = [tuple(huge.draw(number, seed=3).values()) for number in range(2000)]
    assert len(set(drawn)) == 2000
    assert drawn[7] == tuple(huge.draw(7, seed=3).values()) != tuple(huge.draw(7, seed=4).values())
    for column in zip(*drawn, strict=True):
        # The mean of 2000 even draws from 0 … 99 has a deviation of 0.65; five of them.
        assert abs(sum(column) / 2000 - 49.5) < 3.3


def test_every_setting_of_a_large_space_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burstpool.sweeping.space._LARGEST_ORDER", 1)
    small = Space(axes={"a": Values(values=tuple(range(7))), "b": Values(values=tuple(range(11)))})
    assert len({tuple(small.draw(number, seed=0).values()) for number in range(77)}) == 77


def test_annotations_that_are_postponed_count() -> None:
    def postponed(width: "int" = 8) -> None:
        """As `from __future__ import annotations` leaves it."""

    with pytest.raises(JobError, match="takes whole numbers"):
        checked_space({"width": "float:1..4"}, postponed, source="job.py")


def test_values_that_are_the_same_number_are_one() -> None:
    with pytest.raises(JobError, match="lr has a value twice"):
        space("lr=0.1,0.10")
