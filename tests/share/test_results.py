"""What backgrounds leave in their folders; whole runs' are in `test_share_cpu.py` and `test_share_on_gpu.py`."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from burstpool.run.folder import RunRecord
from burstpool.share.base import Background, BackgroundOutcome
from burstpool.share.results import BackgroundFolder, BackgroundRecord

OUTCOME = BackgroundOutcome(
    name="job", device=0, steps=2, kept=None, alone_step_s=None, state="ended", reason="", restarts=0, evictions=0,
    losses=[1.0, 0.5],
)  # fmt: skip
ARRAY = Background(source="job.py", settings=({"lr": "1"}, {"lr": "2"}))


def test_what_cannot_be_made_weights_of_has_failed_and_its_losses_are_there(tmp_path: Path) -> None:
    folder = BackgroundFolder(tmp_path)
    folder.array.write_bytes(b"half a file")
    found = folder.keep(ARRAY, replace(OUTCOME, losses=[[1.0, 2.0], [0.5, float("nan")]]))
    assert found.state == "failed"
    assert found.reason.startswith("what it has learnt could not be saved: cannot read")
    record = BackgroundRecord.load(folder.record)
    assert (record.state, record.reason, record.steps, record.saved_steps) == ("failed", found.reason, 2, None)
    assert [losses[0] for losses in folder.losses_by_member()] == [1.0, 2.0]


def test_a_disk_that_takes_nothing_is_told_of_and_nothing_is_raised(tmp_path: Path) -> None:
    (tmp_path / "background").write_text("")
    found = BackgroundFolder.of(tmp_path, 0).keep(ARRAY, OUTCOME)
    assert (found.state, found.steps) == ("failed", 2)
    assert "could not be saved" in found.reason


@pytest.mark.parametrize(("wanted", "ends"), [(None, 2), (20, 20)])
def test_a_run_without_an_end_has_come_to_it(
    wanted: int | None, ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with it would else train for ever."""
    background = Background(source="job.py") if wanted is None else Background(source="job.py", steps=wanted)
    folder = BackgroundFolder(tmp_path)
    RunRecord(job="job", source="job.py", settings={}, steps=background.steps, started="", versions={}).save(
        folder.run.record
    )
    monkeypatch.setattr("burstpool.run.checkpoint.latest_checkpoint", lambda path: path)
    monkeypatch.setattr("burstpool.run.export.export_weights", lambda checkpoint, path: path)
    monkeypatch.setattr("burstpool.run.checkpoint.CheckpointState.load", lambda path: Mock(step=7))
    folder.keep(background, OUTCOME)
    assert RunRecord.load(folder.run.record).steps == ends
    assert BackgroundRecord.load(folder.record).saved_steps == 7


def test_folders_are_found_by_number_whether_or_not_one_before_has_a_record(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        folder = BackgroundFolder.of(tmp_path, number)
        folder.path.mkdir(parents=True)
        if number:
            folder.note(ARRAY, OUTCOME)
    (tmp_path / "background" / "notes").mkdir()
    assert [folder.path.name for folder in BackgroundFolder.all_in(tmp_path)] == ["2", "10"]
