"""Progress on standard error: a bar with the time left on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_INTERVAL_S = 5.0
"""Between two lines where there is no terminal."""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function to be told (done, total, what comes next)."""
    if not sys.stderr.isatty():
        yield _plain(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, what="")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, what=what)


def _plain(title: str) -> Callable[[int, int, str], None]:
    last = time.monotonic()
    first: tuple[float, int] | None = None
    """When the first was done, and how many then: what came before, such as starting processes, says nothing of
    the rest."""

    def tell(done: int, total: int, what: str) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = first or (now, done)
        if now - last >= _PLAIN_INTERVAL_S:
            pace_s = (now - first[0]) / (done - first[1]) if done > first[1] else None
            left = f", about {pace_s * (total - done):.0f} s left" if pace_s is not None else ""
            print(f"{title}: {done}/{total}{left} ({what})", file=sys.stderr)
            last = now

    return tell
