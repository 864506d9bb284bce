"""Cache: profiles measured before, on disk, one file for each thing that was measured.

A file's name is a hash of all that the measurement depends on (layers, shapes, device, versions, options); the file
is a `Profile` of all batches measured so far. `BURSTPOOL_CACHE` moves the folder. A file that cannot be read is
measured again.
"""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burstpool.errors import ArtifactError
from burstpool.profiling.profile import TABLES, Profile

_LOG = logging.getLogger(__name__)
_STEP_TABLES = ("step_s", "loss_forward_s", "loss_backward_s", "load_s")


def folder() -> Path:
    """Where profiles are kept."""
    root = os.environ.get("BURSTPOOL_CACHE") or Path.home() / ".cache" / "burstpool"
    return Path(root) / "profiles"


def path(description: Sequence[str]) -> Path:
    """The file for a measurement so described."""
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()
    return folder() / f"{digest[:32]}.json"


def read(file: Path) -> Profile | None:
    """The profile, or None where there is none that can be read."""
    if not file.exists():
        return None
    try:
        return Profile.load(file)
    except ArtifactError:
        return None


def write(file: Path, profile: Profile) -> None:
    """Keeps the profile; what was measured is not lost because the folder cannot be written."""
    try:
        profile.save(file)
    except ArtifactError as error:
        _LOG.warning("the profile is not kept for another time: %s", error)


def merged(old: Profile, new: Profile) -> Profile:
    """The same measurement with the batches of both; `new` wins where both have one."""

    def both(a: Any, b: Any, tables: Sequence[str]) -> dict[str, Any]:
        return {table: {**getattr(a, table), **getattr(b, table)} for table in tables}

    pairs = zip(old.layers, new.layers, strict=True)
    layers = tuple(dataclasses.replace(a, **both(a, b, TABLES)) for a, b in pairs)
    return dataclasses.replace(new, layers=layers, **both(old, new, _STEP_TABLES))


def selected(profile: Profile, batches: Sequence[int]) -> Profile:
    """The profile of just these batches."""

    def only(entry: Any, tables: Sequence[str]) -> dict[str, Any]:
        return {name: {b: v for b, v in getattr(entry, name).items() if b in batches} for name in tables}

    layers = tuple(dataclasses.replace(layer, **only(layer, TABLES)) for layer in profile.layers)
    return dataclasses.replace(profile, layers=layers, **only(profile, _STEP_TABLES))
