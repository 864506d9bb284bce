"""The folders of one share. Its run folder: taken before anything is written, given back if nothing comes of it.

A command that is refused, or stopped before the foreground has begun, leaves no half-made folder behind, so that the
same command can be given again. Once the foreground has begun, everything stays. The folder of its gates lies in the
machine's memory and goes with the command; of one that was killed, with the next.
"""

import fcntl
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from burstpool.engine.local import refuse_while_imported
from burstpool.share.base import refuse_used

_PREFIX, _OWNER = "burstpool-share-", "owner"


@contextmanager
def claimed(folder: Path) -> Iterator[Callable[[], None]]:
    """Refuses a used folder; yields what is to be called when the foreground begins, from where on all is kept."""
    refuse_while_imported()
    refuse_used(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    before = set(folder.iterdir()) if folder.is_dir() else set()
    begun = False

    def begin() -> None:
        nonlocal begun
        begun = True

    try:
        yield begin
    finally:
        if not begun:
            _give_back(folder, before, missing)


@contextmanager
def gate_folder(within: str | None) -> Iterator[Path]:
    """A new folder that is gone afterwards; removes those that killed commands have left."""
    for owner in Path(within).glob(f"{_PREFIX}*/{_OWNER}") if within is not None else ():
        _remove_if_left(owner)
    with (
        TemporaryDirectory(prefix=_PREFIX, dir=within) as name,
        Path(name, "new").open("wb") as owner_file,
    ):
        fcntl.flock(owner_file, fcntl.LOCK_EX)
        Path(name, "new").rename(Path(name, _OWNER))  # locked before anybody can find it
        yield Path(name)


def _remove_if_left(owner: Path) -> None:
    """The kernel lets go of a lock when the process that held it is gone."""
    try:
        with owner.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent, ignore_errors=True)
    except OSError:  # it is held, somebody else's, or gone
        return


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C: what was begun is cleared away. While the foreground trains, that is its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _give_back(folder: Path, before: set[Path], missing: list[Path]) -> None:
    """Removes what is new in the folder, and folders that were not there."""
    for path in set(folder.iterdir()) - before if folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in missing:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
