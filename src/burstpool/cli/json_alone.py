"""Standard output for one JSON object alone: what jobs print goes to standard error meanwhile.

A user's code prints in its data set or its model, in this process and in those that it starts. Scripts that read
`--json` are to find nothing else.
"""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def json_alone(wanted: bool) -> Iterator[None]:
    """Inside, nothing reaches standard output, from this process or from those started; as ever if not wanted."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)
