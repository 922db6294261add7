"""`manymax losses`: the family and its facts."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from manymax.cli import console as display
from manymax.cli.member_text import CONTRADICTED_MARK, fact_cell, fact_title, member_as_json, stated_facts
from manymax.engine.member import Member
from manymax.members import FAMILY

MARK_NOTE = (
    f"{CONTRADICTED_MARK} differs from what the paper prints: manymax show NAME gives both, formulas and sources."
)


def losses(
    json: Annotated[
        bool, typer.Option("--json", help="Print everything that is known about each member, as JSON.")
    ] = False,
) -> None:
    """List the losses of the family with their facts, one row each.

    Use it to see at a glance which losses there are and how they differ. A cell with * differs from what the paper
    prints; `manymax show NAME` gives both values, with formulas and sources.

    \b
    Examples:
      manymax losses
      manymax losses --json | python -m json.tool
    """
    if json:
        display.put_json([member_as_json(member) for member in FAMILY.values()])
        return
    console = display.open_console()
    display.put(console, _family(console))
    display.put(console, MARK_NOTE)


def _family(console: Console) -> Table:
    """The facts as a table with one column per fact; as one sentence per member if the terminal is too narrow."""
    names = stated_facts(FAMILY.values())
    rows = [[member.name, *(fact_cell(getattr(member.facts, name)) for name in names)] for member in FAMILY.values()]
    table = display.table(["member", *map(fact_title, names)], rows)
    if not console.is_terminal or display.natural_width(console, table) <= console.width:
        return table
    return display.pairs((member.name, _sentence(member)) for member in FAMILY.values())


def _sentence(member: Member) -> str:
    return "; ".join(f"{fact_title(name)} {fact_cell(fact)}" for name, fact in member.facts.items())
