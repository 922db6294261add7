"""The command line, `manymax COMMAND`; each command is a file of this package.

Exit codes: 0 the command did its work; 1 it failed (a check did not hold, a run diverged, no run of a study finished, a
package of the extra `study` is missing); 2 it was called wrongly, or a file or memory was refused; 130 it was stopped
by Ctrl-C or `kill`.
"""

from __future__ import annotations

import sys

from manymax.errors import ManymaxError
from manymax.study.plain_text import in_lines


def main() -> None:
    """Run the command. An error that the caller can cause ends in one line on stderr, never in a traceback."""
    try:
        from manymax.cli.app import build_app
    except ModuleNotFoundError as missing:
        package = (missing.name or "manymax").partition(".")[0]
        if package in ("manymax", "torch"):  # not a matter of the extra: the installation itself is broken
            raise
        if sys.argv[1:2] == ["doctor"] and sys.argv[2:] in ([], ["--json"]):  # what is wrong is asked where much is
            from manymax.cli.doctor_text import print_report

            sys.exit(print_report("--json" in sys.argv))
        sys.exit(f'manymax: the command needs `{package}`. Install it with: pip install "manymax[study]"')
    try:
        build_app()()
    except ManymaxError as error:
        sys.stderr.write(f"manymax: {in_lines(str(error))}\n")
        sys.exit(2)
    except (OSError, MemoryError, RuntimeError) as error:
        if (text := _resource_message(error)) is None:
            raise
        sys.stderr.write(f"manymax: {in_lines(text)}\n")
        sys.exit(2)


def _resource_message(error: Exception) -> str | None:
    """One line about a file or memory that the machine refused; None for any other error, which is a bug of ours."""
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    # torch raises a plain RuntimeError when the allocator fails; only its text tells it from others.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "there is not enough memory. Take smaller sizes (`dim`, `batch_size`, `pool`), or less data."
    return None
