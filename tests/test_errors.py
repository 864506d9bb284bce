"""Errors in words: what burstpool says is whole, what others raise is a line of bearable length."""

from burstpool.errors import RunError, in_a_line


def test_what_an_error_of_ours_says_at_its_end_is_not_cut_off() -> None:
    where = "; burstpool train --resume runs/1 goes on from step-7; tracebacks in runs/1/error.txt"
    assert in_a_line(RunError("rank 0 died\n" + 300 * "x" + where)) == "rank 0 died " + 300 * "x" + where


def test_what_others_raise_goes_with_its_kind_and_is_cut() -> None:
    assert in_a_line(OSError(28, "No space\nleft")) == "OSError: [Errno 28] No space left"
    assert in_a_line(ValueError("x" * 1000)) == "ValueError: " + "x" * 288
