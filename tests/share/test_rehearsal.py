"""A background's code is tried in a process of its own before it runs in the one that drives a GPU."""

from pathlib import Path

import pytest

from burstpool.errors import RunError, ShareError
from burstpool.share.base import Background
from burstpool.share.rehearsal import Rehearsal

JOBS = str(Path(__file__).with_name("share_jobs.py"))


def rehearsed(*, source: str = JOBS, hang_s: float = 60.0, **settings: str) -> None:
    rehearsal = Rehearsal(Background(source=source, settings=(settings,)), memory_bytes=256 << 20, hang_s=hang_s)
    try:
        rehearsal.check()
    finally:
        rehearsal.close()


def test_what_goes_well_is_let_through() -> None:
    rehearsed()


@pytest.mark.parametrize(("what", "words"), [("kill", "killed"), ("hang", "no answer from .* within 1 s")])
def test_what_goes_wrong_goes_wrong_there(what: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        rehearsed(what=what, after="1", hang_s=1 if what == "hang" else 60)


def test_a_mistake_is_told_apart() -> None:
    with pytest.raises(ShareError, match="sample 7 is broken"):
        rehearsed(what="raise", after="1")
