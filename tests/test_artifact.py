"""Artifacts: written whole or not at all, read strictly."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from burstpool.artifact import STRICT, Artifact, json_line, write_whole
from burstpool.errors import ArtifactError


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    __pydantic_config__ = STRICT
    name: str
    seconds: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing(Artifact):
    __pydantic_config__ = STRICT
    SCHEMA_VERSION: ClassVar[int] = 2
    schema_version: int = 2
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a thing has parts; give it at least one")


THING = Thing(parts=(Part(name="a", seconds={1: 0.1, 64: 2e-9}),))


def test_json_comes_back_equal(tmp_path: Path) -> None:
    assert Thing.from_json(THING.to_json()) == THING
    assert Thing.load(THING.save(tmp_path / "new" / "thing.json")) == THING


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema_version": 2, "parts": [{"name": "a", "seconds": {"1": "x"}}]}', "parts[0].seconds.1"),
        ('{"schema_version": 2, "parts": [{"name": "a", "seconds": {"1": NaN}}]}', "finite number"),
        ('{"schema_version": 2, "parts": [{"name": "a"}]}', "parts[0].seconds: Field required"),
        ('{"schema_version": 2, "parts": [{"name": "a", "seconds": {}, "colour": 1}]}', "colour: unknown field"),
        ('{"schema_version": 2, "parts": []}', "a thing has parts; give it at least one"),
        ('{"schema_version": 3, "parts": []}', "newer than 2, the newest this release reads; upgrade"),
        ('{"schema_version": "2"}', "schema_version '2'; expected 2"),
        ('{"parts": []}', "schema_version None; expected 2"),
        ("[1, 2]", "holds a list"),
        ("", "not whole JSON"),
    ],
)
def test_unsound_json_is_refused_in_one_line_that_says_where(text: str, says: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        Thing.from_json(text, source="thing.json")
    assert says in str(caught.value)
    assert str(caught.value).startswith("thing.json")
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_anywhere_is_refused() -> None:
    text = THING.to_json().rstrip()
    for length in range(len(text)):
        with pytest.raises(ArtifactError):
            Thing.from_json(text[:length])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read .*none.json: No such file"):
        Thing.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = THING.save(tmp_path / "thing.json")
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match=r"cannot write .*No space left"):
        write_whole(path, "half of")
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["thing.json"]


def test_what_scripts_read_has_null_for_numbers_that_json_does_not_know() -> None:
    value = {"loss": math.nan, "losses": [1.5, (math.inf, -math.inf)], "name": "nan", "steps": 3}
    assert json_line(value) == '{"loss": null, "losses": [1.5, [null, null]], "name": "nan", "steps": 3}'


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        THING.save(tmp_path / "file" / "thing.json")


def test_importing_burstpool_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import burstpool; s = time.perf_counter() - t;"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules; print(s)"
    )
    seconds = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(3))
    assert seconds < 0.2


def test_every_public_name_is_there() -> None:
    import burstpool

    for name in burstpool.__all__:
        assert getattr(burstpool, name) is not None
    assert set(burstpool.__all__) == set(burstpool._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        burstpool.nothing  # noqa: B018
