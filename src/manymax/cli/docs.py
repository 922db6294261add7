"""`manymax docs`: write what the documentation says of the family from `FAMILY` itself, and from records of runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from manymax.cli.member_text import calls, cell, columns, heading, settings_text, word
from manymax.engine.member import Fact, Facts, Member
from manymax.errors import ArgumentError
from manymax.heads.stub import stub
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.study.backbones import BACKBONES
from manymax.study.groups import GRADIENT
from manymax.study.records import RECORD, Record, read_record
from manymax.study.run_options import flat

BEGIN, END = "<!-- family: begin, written by `make docs` -->", "<!-- family: end -->"
PAGE = Path("docs/family.md")
STUB = Path("src/manymax/heads/__init__.pyi")
PLANTED, PLANTED_RUNS = Path("docs/planted.md"), Path("results/planted")


def docs(root: Annotated[Path, typer.Option(help="The top folder of a checkout.")] = Path()) -> None:
    """Write the family table of README.md, docs/family.md, docs/planted.md, and the types of the heads."""
    readme = root / "README.md"
    if not readme.is_file():
        raise ArgumentError(f"`--root` must be the top folder of a checkout, with a README.md; got {str(root)!r}.")
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (root / PAGE).write_text(family_page(), encoding="utf-8")
    (root / STUB).write_text(head_types(), encoding="utf-8")
    written = ["README.md", str(PAGE), str(STUB)]
    if runs := planted_runs(root):
        (root / PLANTED).write_text(planted_page(runs), encoding="utf-8")
        written.append(str(PLANTED))
    typer.echo(f"wrote {', '.join(written)}")


def with_table(readme: str) -> str:
    """`readme` with the family table, as it is now, between its two markers."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ArgumentError(f"README.md must hold the markers {BEGIN} and {END}, one after the other.")
    return f"{before}{begin}\n{family_table()}\n{end}{after}"


def head_types() -> str:
    """The types of the heads of all members and references."""
    return stub([*FAMILY.values(), *REFERENCE_LOSSES.values()])


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
    settings = "; ".join(f"`{settings_text(settings)}`" for settings in member.examples)
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

Tested with {settings}. Reference: {member.citation}"""


def planted_runs(root: Path) -> list[Record]:
    """The kept records of configs/planted.toml."""
    return [read_record(path.parent) for path in sorted((root / PLANTED_RUNS).rglob(RECORD))]


def planted_page(runs: Sequence[Record]) -> str:
    """The page docs/planted.md, from runs of configs/planted.toml."""
    sections = "\n\n".join(
        f"## {entry.title}\n\n{_learned(here)}"
        for entry in BACKBONES.values()
        if (here := [run for run in runs if flat(run.settings)["backbone"] == entry.name])
    )
    sizes, popular = runs[0].sizes, runs[0].popularity
    return f"""# Every member on every backbone

Written by `make docs` from the records in `{PLANTED_RUNS}`, which `manymax study configs/planted.toml` made: the
paper's settings (64 dimensions, learning rate 0.001, batches of 2048, early stopping with patience 10), one seed,
on `planted` data: {sizes["users"]:,} users, {sizes["items"]:,} items, {sizes["train"]:,} interactions to learn from.

The popularity ranking has N@20 {popular["ndcg@20"]:.4f} and regret {popular["regret@20"]:.4f}. The regret is the share
of the best possible expected DCG@20 that a ranking misses; the best one, by the true p(item | user), has none.

{sections}
"""


def _learned(runs: Sequence[Record]) -> str:
    """What each member learned, in the order of the family."""
    names = [*FAMILY, *REFERENCE_LOSSES]
    trained = sorted(
        ((flat(run.settings), run) for run in runs),
        key=lambda pair: (names.index(pair[0]["loss"]), pair[0]["solver"] != GRADIENT),
    )
    rows = [
        [
            settings["loss"] + ("" if settings["solver"] == GRADIENT else f" ({settings['solver']})"),
            *(f"{run.test[name]:.4f}" for name in ("ndcg@20", "precision@20", "recall@20")),
            f"{(run.test['ndcg@20'] or 0) / (run.popularity['ndcg@20'] or 1):.2f}",
            f"{run.test['regret@20']:.4f}",
            f"{run.best_epoch} of {run.epochs}",
        ]
        for settings, run in trained
    ]
    return _table(["member", "N@20", "P@20", "R@20", "N@20 / popularity's", "regret@20", "best epoch"], rows)


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = [[text.replace("|", "\\|") for text in row] for row in rows]
    head = list(headings)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *body])
