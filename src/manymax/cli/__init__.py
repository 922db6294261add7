"""The `manymax` command: the doors to the library, one file per command.

Exit codes: 0 done; 1 a package of the extra `study` is missing; 2 the command was called wrongly.
"""

from __future__ import annotations

import sys

from manymax.errors import ManymaxError


def main() -> None:
    """Run the command; whatever a user can cause ends in one line on stderr, never in a traceback."""
    try:
        from manymax.cli.app import app
    except ModuleNotFoundError as missing:
        package = (missing.name or "manymax").partition(".")[0]
        if package in ("manymax", "torch"):
            raise
        sys.exit(f'manymax: the command needs `{package}`. Install it with: pip install "manymax[study]"')
    try:
        app()
    except ManymaxError as error:
        sys.stderr.write(f"manymax: {error}\n")
        sys.exit(2)
