"""Artifacts: frozen dataclasses that go to JSON and back unchanged.

Decides how every file of ours is written (aside, then renamed) and read (strictly: unknown fields, wrong
types, NaN and newer schema versions are refused in one line that says where and what would be right).
Takes and returns plain dataclasses; knows nothing of what they mean.
"""

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import pydantic

from burstpool.errors import ArtifactError, BurstpoolError

STRICT = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
"""Goes into each (nested) dataclass as `__pydantic_config__`, so that reading it refuses what it does not know."""


class Artifact:
    """Mix-in for a top-level artifact; its first field must be `schema_version: int`."""

    __slots__ = ()

    SCHEMA_VERSION: ClassVar[int] = 1
    """The newest schema this code reads, and the one it writes."""
    ERROR: ClassVar[type[ArtifactError]] = ArtifactError
    """What is raised when reading fails."""

    def to_json(self) -> str:
        """One field a line, and one line an entry of each list of objects, so that artifacts diff well."""
        fields = _adapter(type(self)).dump_python(self, mode="json")
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in fields.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = "this JSON") -> Self:
        """Reads what `to_json` wrote; `source` names the text in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also text that is not UTF-8, numbers of 4301 digits
            raise cls.ERROR(f"{source} is not whole JSON ({error}); was it cut short?") from None
        if not isinstance(data, dict):
            raise cls.ERROR(f"{source} holds a {type(data).__name__}; expected an object with schema_version")
        version = data.get("schema_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise cls.ERROR(f"{source} has schema_version {version!r}; expected {cls.SCHEMA_VERSION}")
        if version > cls.SCHEMA_VERSION:
            raise cls.ERROR(
                f"{source} has schema_version {version}, newer than {cls.SCHEMA_VERSION}, "
                "the newest this release reads; upgrade burstpool"
            )
        return cls.from_data(data, source=source)

    @classmethod
    def from_data(cls, data: dict[str, Any], *, source: str) -> Self:
        """Reads already parsed JSON or TOML."""
        try:
            return _adapter(cls).validate_python(data)  # type: ignore[no-any-return]
        except pydantic.ValidationError as error:
            raise cls.ERROR(f"{source}: {first_line(error)}") from None
        except BurstpoolError as error:  # a check in __post_init__, which does not know the file's name
            raise cls.ERROR(f"{source}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the JSON file whole or not at all."""
        return write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that `save` wrote."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise cls.ERROR(f"cannot read {path}: {error.strerror}") from None
        return cls.from_json(text, source=str(path))


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(f" {json.dumps(entry, allow_nan=False)}" for entry in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def json_line(value: Any) -> str:
    """What scripts read: one line of JSON, with null for a number that is not finite, which JSON has no word for."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Writes text to a temporary file beside `path` and renames it, so that no reader sees half a file."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would hide the file from the user's group
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise ArtifactError(f"cannot write {path}: {error.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def first_line(error: pydantic.ValidationError) -> str:
    """The first thing that is wrong, as `layers[3].forward_s: Input should be …`."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        message = "unknown field; remove it or correct its name"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where}: {message}{more}" if where else f"{message}{more}"


_ADAPTERS: dict[type[Any], pydantic.TypeAdapter[Any]] = {}


def _adapter(cls: type[Any]) -> pydantic.TypeAdapter[Any]:
    """Reads and writes a class; made once, since making one takes milliseconds."""
    assert dataclasses.is_dataclass(cls)
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = pydantic.TypeAdapter(cls)
    return _ADAPTERS[cls]
