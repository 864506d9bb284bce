"""The run folder of one share: taken before anything is written, given back as it was if nothing comes of it.

A command that is refused, or stopped before the foreground has begun, leaves no half-made folder behind, so that the
same command can be given again. Once the foreground has begun, everything stays.
"""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from burstpool.share.base import refuse_used


@contextmanager
def claimed(folder: Path) -> Iterator[Callable[[], None]]:
    """Refuses a used folder; yields what is to be called when the foreground begins, from where on all is kept."""
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
