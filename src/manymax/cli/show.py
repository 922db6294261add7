"""`manymax show NAME`: one member in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from manymax.cli import console as look
from manymax.cli.member_text import calls, heading, member_json, settings_text, word
from manymax.engine.member import Member, Setting
from manymax.members import FAMILY


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A member of the family, or another name for it.")],
    json: Annotated[bool, typer.Option("--json", help="Print the member as JSON.")] = False,
) -> None:
    """Show one member: formulas, calls, facts with their sources.

    \b
    Examples:
      manymax show entmax
      manymax show entmax --json
    """
    member = FAMILY[name]
    if json:
        look.put_json(member_json(member))
        return
    console = look.open_console()
    console.print(f"{member.name}: {member.title} ({member.kind})", style="bold")
    for title, rows in _sections(member):
        console.print(f"\n{title}")
        look.put(console, look.pairs(rows))


def _sections(member: Member) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    formulas = member_json(member)["formulas"]
    yield "Formulas", [(part, text) for part, text in formulas.items() if text is not None]
    yield "In Python", list(calls(member).items())
    if member.settings:
        yield "Settings", [(setting.public_name, _setting(setting)) for setting in member.settings]
    yield "Facts", list(_facts(member))
    names = [("other names", ", ".join(member.aliases))] if member.aliases else []
    settings = "; ".join(map(settings_text, member.examples))
    yield "More", [*names, ("tested with", settings), ("reference", member.citation)]


def _setting(setting: Setting) -> str:
    """What a setting means, what it can be and what it is."""
    values = f"one of {', '.join(setting.choices)}" if setting.choices else setting.range
    default = "" if setting.default is None else f"; {setting.default} by default"
    return f"{setting.help} It is {values}{default}."


def _facts(member: Member) -> Iterator[tuple[str, str]]:
    for name, fact in member.facts.items():
        yield heading(name), fact.text if fact.value is None else f"{word(fact)}: {fact.text}"
        yield "", f"{fact.status}; source: {fact.source}"
        if fact.printed is not None:
            yield "", f"the paper prints: {fact.printed}"
