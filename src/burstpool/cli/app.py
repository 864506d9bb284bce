"""The command-line app: which verbs there are, and how a user's mistake ends.

A mistake (a BurstpoolError, or words the parser does not know) is one line on standard error and exit status 2,
with no traceback; so are a full disk and too little memory. Ctrl-C is exit status 130. Anything else is a defect and
keeps its traceback.
"""

import errno
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from burstpool import __version__
from burstpool.cli.cluster import cluster
from burstpool.cli.demo import demo
from burstpool.cli.interference import interference
from burstpool.cli.plan import plan
from burstpool.cli.profile import profile
from burstpool.cli.report import report
from burstpool.cli.share import share
from burstpool.cli.simulate import simulate
from burstpool.cli.sweep import sweep
from burstpool.cli.train import train
from burstpool.errors import BurstpoolError
from burstpool.limits import is_out_of_memory

MISTAKE = 2
INTERRUPTED = 130

# The base of what the parser raises. Some releases of typer carry a click of their own, so click's class will not do.
_PARSER_ERROR: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="burstpool",
    help="Gets the most training out of a pool of GPUs.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (demo, profile, cluster, plan, simulate, train, sweep, share, interference, report):
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Gets the most training out of a pool of GPUs."""


def run(words: Sequence[str]) -> int:
    """Runs one command, or shows the help where there is none; returns the exit status."""
    try:
        status = app(list(words) or ["--help"], prog_name="burstpool", standalone_mode=False)
    except _PARSER_ERROR as error:
        return _mistake(error.format_message())
    except BurstpoolError as error:
        return _mistake(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _mistake("memory ran out; try smaller numbers: batches, devices, trials or the model's own")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return _mistake(f"cannot write {error.filename or 'what came of it'}: {error.strerror}")
    return status if isinstance(status, int) else 0


def _mistake(message: str) -> int:
    written = message.replace('fallback="modules"', "--fallback modules")  # as Python has it
    print("burstpool: error:", " ".join(written.split()), file=sys.stderr)
    return MISTAKE
