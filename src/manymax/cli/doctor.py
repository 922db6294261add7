"""`manymax doctor`: what heads compute on here, and whether it is in order."""

from __future__ import annotations

from typing import Annotated

import typer

from manymax.cli.doctor_text import print_report


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, for programs.")] = False,
) -> None:
    """Show what losses are computed on here, check it, and say what could be better.

    Use it when something is slower than it should be, or before you report a fault. It shows the processor, the levels
    of native code with the machines that each was tested on, which one is used and why, and compares each level that
    runs here with plain torch. It also works without the extra `study`. The exit code is 1 if something is wrong.

    \\b
    Examples:
      manymax doctor
      manymax doctor --json | python -m json.tool
    """
    raise typer.Exit(print_report(json))
