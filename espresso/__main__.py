"""``python -m espresso``: the command line, installed or from the repository root."""

from espresso.cli import main

if __name__ == "__main__":
    main()
