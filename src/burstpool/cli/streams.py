"""Standard streams as a command finds and leaves them: closed ones, and readers that do not wait for the end."""

import os
import sys


def open_closed() -> None:
    """Streams that are closed lead nowhere from now on: else the next file that is opened gets their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 -- as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def flushed(status: int) -> int:
    """The exit status when all is written; 1 where whoever read it is gone, as after `| head`."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing is said of what is left
        if isinstance(error, BrokenPipeError):
            return status or 1
        if not status:
            print(f"burstpool: error: cannot write what came of it: {error.strerror}", file=sys.stderr)
        return status or 2
    return status
