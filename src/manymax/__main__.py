"""`python -m manymax` runs the `manymax` command."""

from manymax.cli import main

if __name__ == "__main__":
    main()
