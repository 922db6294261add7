"""The `manymax` command: the doors to the library, one file per command.

Exit codes: 0 done; 1 a package of the extra `study` is missing; 2 the command was called wrongly.
"""

from __future__ import annotations

import sys

from manymax.errors import ManymaxError


def main() -> None:
    """Run the command; whatever a user can cause ends in one line on stderr, never in a traceback."""
    try:
        from manymax.cli.app import build_app
    except ModuleNotFoundError as missing:
        package = (missing.name or "manymax").partition(".")[0]
        if package in ("manymax", "torch"):
            raise
        sys.exit(f'manymax: the command needs `{package}`. Install it with: pip install "manymax[study]"')
    try:
        build_app()()
    except ManymaxError as error:
        sys.stderr.write(f"manymax: {error}\n")
        sys.exit(2)
    except (OSError, MemoryError, RuntimeError) as error:
        if (text := _of_the_machine(error)) is None:
            raise
        sys.stderr.write(f"manymax: {text}\n")
        sys.exit(2)


def _of_the_machine(error: Exception) -> str | None:
    """What files or memory refused, in a line; None for an error of another kind."""
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch has no type for it
        return "there is not enough memory. Take smaller sizes (`dim`, `batch_size`, `pool`), or less data."
    return None
