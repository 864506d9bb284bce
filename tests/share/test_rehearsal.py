"""A background's code is tried in a process of its own before it runs in the one that drives a GPU."""

import multiprocessing
from pathlib import Path

import pytest

from burstpool.engine.base import Place
from burstpool.errors import RunError, ShareError
from burstpool.run.torchrun import Silent
from burstpool.share.base import Background
from burstpool.share.rehearsal import Rehearsal, _rehearse, _Rehearsed

JOBS = str(Path(__file__).with_name("share_jobs.py"))


def rehearsed(*, source: str = JOBS, hang_s: float = 60.0, **settings: str) -> None:
    rehearsal = Rehearsal(Background(source=source, settings=(settings,)), memory_bytes=256 << 20, hang_s=hang_s)
    try:
        rehearsal.check()
        assert not multiprocessing.active_children()
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


ONLY_IN_ARRAYS = """
import torch
from burstpool.data import digits
from burstpool.job import Job

def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64, momentum=None), torch.nn.Linear(64, 10))

def job(lr: float = 0.1):
    return Job(model=model, loss=torch.nn.functional.cross_entropy, data=digits(),
               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr), batch=8)
"""


def test_an_array_is_tried_as_an_array_and_a_job_as_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm without momentum reads a number of its own, where layers cannot follow; arrays keep it a tensor."""
    (tmp_path / "job.py").write_text(ONLY_IN_ARRAYS)
    monkeypatch.setattr("burstpool.share.rehearsal.cap_memory", lambda num_bytes: None)  # of this process
    place = Place(
        rank=0, num_workers=1, host="", port=0, local_rank=0, num_local=1,
        doing=Silent(), report=lambda content: None, stop_asked=lambda: False,
    )  # fmt: skip

    def mistake(*settings: dict[str, str]) -> str:
        background = Background(source=str(tmp_path / "job.py"), settings=settings)
        return _rehearse(place, _Rehearsed(background=background, memory_bytes=1))

    assert mistake({"lr": "0.1"}, {"lr": "0.01"}) == ""
    assert "value inside a tensor" in mistake({"lr": "0.1"})
