"""Reader of Burstpool's own plain JSON, which others may write too (docs/profile.md shows it)."""

from pathlib import Path

from burstpool.errors import ProfileError
from burstpool.profiling.profile import Profile


def recognises(text: str) -> bool:
    """Whether it begins as JSON; what is wrong with it, reading says best."""
    return text.lstrip().startswith(("{", "["))


def read(path: Path) -> Profile:
    """The profile in the file."""
    return Profile.load(path)


def read_text(path: Path) -> str:
    """A file's text, for all importers."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not text ({error.reason} at byte {error.start})") from None
