"""`python -m burstpool`: the command line, where its script is not on the path."""

from burstpool.cli import main

if __name__ == "__main__":
    main()
