"""The command line: `burstpool VERB …`, one file a verb."""


def main() -> None:
    """Runs the command line and ends the process."""
    import sys

    from burstpool.cli.streams import flushed, open_closed

    open_closed()  # before anything else is opened
    from burstpool.cli.app import run

    sys.exit(flushed(run(sys.argv[1:])))
