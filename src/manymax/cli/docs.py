"""`manymax docs`: write what the documentation says of the family from `FAMILY` itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from manymax.cli.record import calls, cell, columns, heading, settings_text, word
from manymax.errors import ArgumentError
from manymax.losses import FAMILY
from manymax.losses.facts import Fact, Facts, Member

BEGIN, END = "<!-- family: begin, written by `make docs` -->", "<!-- family: end -->"
PAGE = Path("docs/family.md")


def docs(root: Annotated[Path, typer.Option(help="The top folder of a checkout.")] = Path()) -> None:
    """Write the family table of README.md and the page docs/family.md."""
    readme = root / "README.md"
    if not readme.is_file():
        raise ArgumentError(f"`--root` must be the top folder of a checkout, with a README.md; got {str(root)!r}.")
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (root / PAGE).write_text(family_page(), encoding="utf-8")
    typer.echo(f"wrote README.md and {PAGE}")


def with_table(readme: str) -> str:
    """`readme` with the family table, as it is now, between its two markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArgumentError(f"README.md must hold the markers {BEGIN} and {END}, one after the other.")
    return f"{before}{begin}\n{family_table()}\n{end}{after}"


def family_table() -> str:
    """The family in Markdown, one row a member, each linked to its section of the page."""
    names = columns(FAMILY.values())
    rows = [
        [f"[{member.name}]({PAGE}#{member.name})", *(cell(getattr(member.facts, name)) for name in names)]
        for member in FAMILY.values()
    ]
    return _table(["member", *map(heading, names)], rows)


def family_page() -> str:
    """The page docs/family.md."""
    sections = "\n\n".join(map(_section, FAMILY.values()))
    return f"""# The family

Written by `make docs` from `manymax.FAMILY`; the same facts are printed by `manymax show NAME`.

{sections}

## How to read the facts

```text
{inspect.getdoc(Facts)}
```

```text
{inspect.getdoc(Fact)}
```
"""


def _section(member: Member) -> str:
    formulas = [(part, getattr(member.formulas, part)) for part in ("map", "loss", "gradient", "omega")]
    lines = "\n".join(f"{part + ':':<10}{text}" for part, text in formulas if text is not None)
    facts = [
        [heading(name), word(fact), fact.text, fact.status, fact.source, fact.printed or ""]
        for name, fact in member.facts.items()
    ]
    settings = "; ".join(f"`{settings_text(settings)}`" for settings in member.settings)
    also = f" Also called {', '.join(f'`{name}`' for name in member.aliases)}." if member.aliases else ""
    return f"""## {member.name}

{member.title} ({member.kind}).{also}

```text
{lines}
```

```python
{chr(10).join(calls(member).values())}
```

{_table(["fact", "value", "in words", "status", "source", "the paper prints"], facts)}

Tested with {settings}. Reference: {member.reference}"""


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = [[text.replace("|", "\\|") for text in row] for row in rows]
    head = list(headings)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
