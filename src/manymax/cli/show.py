"""`manymax show NAME`: one member in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from manymax.cli import console as display
from manymax.cli.member_text import calls, fact_title, fact_word, member_as_json, settings_text
from manymax.engine.member import Member, Setting
from manymax.members import FAMILY


def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A member of the family, by the name in `manymax losses` or by an alias."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the member as JSON.")] = False,
) -> None:
    """Show one loss in full: formulas, calls, settings and facts.

    Use it when you have picked a loss and want to know how to call it, which settings it takes, and what is proved or
    measured about it, with the sources.

    \b
    Examples:
      manymax show entmax
      manymax show entmax --json
    """
    member = FAMILY[name]
    if json:
        display.put_json(member_as_json(member))
        return
    console = display.open_console()
    console.print(f"{member.name}: {member.title} ({member.kind})", style="bold")
    for title, rows in _sections(member):
        console.print(f"\n{title}")
        display.put(console, display.pairs(rows))


def _sections(member: Member) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The parts of the output: (title, [(name, text), ...])."""
    formulas = member_as_json(member)["formulas"]
    yield "Formulas", [(part, text) for part, text in formulas.items() if text is not None]
    yield "In Python", list(calls(member).items())
    if member.settings:
        yield "Settings", [(setting.public_name, _setting(setting)) for setting in member.settings]
    yield "Facts", list(_facts(member))
    names = [("other names", ", ".join(member.aliases))] if member.aliases else []
    settings = "; ".join(map(settings_text, member.examples))
    yield "More", [*names, ("tested with", settings), ("citation", member.citation)]


def _setting(setting: Setting) -> str:
    """The meaning of a setting, its range and its default, in sentences."""
    values = f"one of {', '.join(setting.choices)}" if setting.choices else setting.range
    default = "" if setting.default is None else f"; {setting.default} by default"
    return f"{setting.help} It is {values}{default}."


def _facts(member: Member) -> Iterator[tuple[str, str]]:
    """Two or three lines per fact: what holds, how sure it is and from where, what the paper prints instead."""
    for name, fact in member.facts.items():
        yield fact_title(name), fact.text if fact.value is None else f"{fact_word(fact)}: {fact.text}"
        yield "", f"{fact.status}; source: {fact.source}"
        if fact.printed is not None:
            yield "", f"the paper prints: {fact.printed}"
