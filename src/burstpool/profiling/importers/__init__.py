"""Importers: profiles from measurements that others have made.

A format is a module with `recognises(text)` and `read(path)`; FORMATS lists them, so a new one is a file
and a line here. Each `read` returns a whole Profile, or raises a ProfileError that names the file and the
line.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from burstpool.errors import ProfileError
from burstpool.profiling.importers import deeppool, placement_graph, plain
from burstpool.profiling.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How files of one format are told apart and read."""

    recognises: Callable[[str], bool]
    """Whether a text is, or was meant to be, of this format."""
    read: Callable[[Path], Profile]
    """Reads the file."""


FORMATS = {
    "placement-graph": Format(recognises=placement_graph.recognises, read=placement_graph.read),
    "deeppool": Format(recognises=deeppool.recognises, read=deeppool.read),
    "burstpool": Format(recognises=plain.recognises, read=plain.read),
}
"""Name of a format → how it is read; a text is of the first format that recognises it."""


def import_profile(path: str | os.PathLike[str], format: str | None = None) -> Profile:
    """Reads a profile in any known format; recognises the format by the text unless it is named."""
    path = Path(path)
    known = ", ".join(FORMATS)
    if format is None:
        text = plain.read_text(path)
        format = next((name for name, entry in FORMATS.items() if entry.recognises(text)), None)
        if format is None:
            raise ProfileError(f"{path} is in none of the known formats ({known}); name one if it should be")
    if format not in FORMATS:
        raise ProfileError(f"there is no profile format {format!r}; known are: {known}")
    try:
        return FORMATS[format].read(path)
    except ProfileError as error:
        if str(path) in str(error):
            raise
        raise ProfileError(f"{path}: {error}") from None  # a check of the Profile, which knows no file
