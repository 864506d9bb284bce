"""Folders of a share: refused where they hold a run, given back where nothing has begun."""

from pathlib import Path

import pytest
from share_alone import JOBS, share

from burstpool.errors import ShareError
from burstpool.share.base import Background, refuse_used
from burstpool.share.claim import claimed, gate_folder


@pytest.mark.parametrize("left", ["run.json", "background/0/array.pt", "checkpoints/step-00000050/state.json"])
def test_a_folder_that_holds_anything_of_a_run_is_refused_before_it_is_changed(left: str, tmp_path: Path) -> None:
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).write_text("{}")
    with pytest.raises(ShareError, match=r"choose another --run-folder"):
        share(tmp_path, Background(source=JOBS), devices=1, steps=2)
    with pytest.raises(ShareError, match=r"choose another --run-folder"):
        refuse_used(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / left]


def test_a_share_that_never_began_gives_its_folder_back_as_it_was(tmp_path: Path) -> None:
    own = tmp_path / "there" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")

    def stopped(folder: Path, *, has_begun: bool) -> None:
        with claimed(folder) as begin:
            (folder / "background" / "0").mkdir(parents=True)
            (folder / "run.json").write_text("{}")
            if has_begun:
                begin()
            raise KeyboardInterrupt

    for folder in (own.parent, tmp_path / "runs" / "new"):
        with pytest.raises(KeyboardInterrupt):
            stopped(folder, has_begun=False)
    assert sorted(tmp_path.rglob("*")) == [own.parent, own]
    with pytest.raises(KeyboardInterrupt):
        stopped(own.parent, has_begun=True)
    assert (own.parent / "run.json").exists()


def test_gates_of_a_killed_command_go_with_the_next_one_and_those_of_a_live_one_stay(tmp_path: Path) -> None:
    left, other = tmp_path / "burstpool-share-left", tmp_path / "burstpool-share-other"
    for folder in (left, other):
        folder.mkdir()
        (folder / "gate-0").write_bytes(b"")
    (left / "owner").write_bytes(b"")  # nobody holds it
    with gate_folder(str(tmp_path)) as first, gate_folder(str(tmp_path)) as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second, other])  # one without an owner is not ours to judge
    assert list(tmp_path.iterdir()) == [other]
