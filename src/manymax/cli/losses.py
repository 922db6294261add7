"""`manymax losses`: the family and its facts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from manymax.cli import console as look
from manymax.cli.member_text import CONTRADICTED, cell, columns, heading, member_json
from manymax.engine.member import Member
from manymax.members import FAMILY

NOTE = f"{CONTRADICTED} not what the paper prints. Formulas, sources and what it prints: manymax show NAME"


def losses(
    json: Annotated[bool, typer.Option("--json", help="Print all that is known of each member, as JSON.")] = False,
) -> None:
    """List the family with its facts, one row a member.

    \b
    Examples:
      manymax losses
      manymax losses --json | python -m json.tool
    """
    if json:
        look.put_json([member_json(member) for member in FAMILY.values()])
        return
    console = look.open_console()
    look.put(console, _family(console))
    look.put(console, NOTE)


def _family(console: Console) -> Table:
    """The facts in columns, or, where the terminal is too narrow for them, in sentences."""
    names = columns(FAMILY.values())
    rows = [[member.name, *(cell(getattr(member.facts, name)) for name in names)] for member in FAMILY.values()]
    table = look.table(["member", *map(heading, names)], rows)
    if not console.is_terminal or look.natural_width(console, table) <= console.width:
        return table
    return look.pairs((member.name, _sentence(member)) for member in FAMILY.values())


def _sentence(member: Member) -> str:
    return "; ".join(f"{heading(name)} {cell(fact)}" for name, fact in member.facts.items())
