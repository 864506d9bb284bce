"""The command line: `burstpool VERB …`, one file a verb."""


def main() -> None:
    """Runs the command line and ends the process."""
    import sys

    from burstpool.cli.app import run

    sys.exit(run(sys.argv[1:]))
