"""`manymax docs`: write the generated parts of the documentation.

docs/family.md and the type stub of the heads come from `FAMILY`, the tables of docs/study_files.md from the settings of
a run, and docs/planted.md from the records of runs. `make docs` runs this command, and a test compares the files with a
fresh computation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from manymax.cli.console import say
from manymax.cli.member_text import calls, fact_cell, fact_title, fact_word, settings_text, stated_facts
from manymax.cli.study_docs import STUDY_PAGE, with_settings
from manymax.engine.member import Fact, Facts, Member
from manymax.errors import ArgumentError
from manymax.heads.stub import stub
from manymax.members import FAMILY, REFERENCE_LOSSES
from manymax.study.backbones import BACKBONES
from manymax.study.groups import GRADIENT
from manymax.study.record_files import read_all_runs
from manymax.study.records import RECORD, Record, read_record
from manymax.study.run_options import flat

FAMILY_PAGE = Path("docs/family.md")
TYPE_STUB = Path("src/manymax/heads/__init__.pyi")
PLANTED_PAGE, PLANTED_RUNS = Path("docs/planted.md"), Path("results/planted.jsonl")


def docs(root: Annotated[Path, typer.Option(help="The top folder of a checkout.")] = Path()) -> None:
    """Write the generated files and tables of the documentation, and the types of the heads.

    For contributors: run it, or `make docs`, after a change to a member's facts, settings or signature.

    \b
    Examples:
      manymax docs
      manymax docs --root ../another-checkout
    """
    if not (root / "README.md").is_file():
        raise ArgumentError(f"`--root` must be the top folder of a checkout, with a README.md; got {str(root)!r}.")
    (root / FAMILY_PAGE).write_text(family_page(), encoding="utf-8")
    (root / TYPE_STUB).write_text(head_types(), encoding="utf-8")
    written = [str(FAMILY_PAGE), str(TYPE_STUB)]
    study_page = root / STUDY_PAGE
    if study_page.is_file():
        study_page.write_text(with_settings(study_page.read_text(encoding="utf-8")), encoding="utf-8")
        written.append(str(STUDY_PAGE))
    if runs := planted_runs(root):
        (root / PLANTED_PAGE).write_text(planted_page(runs), encoding="utf-8")
        written.append(str(PLANTED_PAGE))
    say(f"wrote {', '.join(written)}")


def head_types() -> str:
    """The text of the type stub: the heads of all members and of the reference losses."""
    return stub([*FAMILY.values(), *REFERENCE_LOSSES.values()])


def family_table() -> str:
    """The family as a Markdown table, one row per member, each linked to its section of the page."""
    names = stated_facts(FAMILY.values())
    rows = [
        [f"[{member.name}](#{member.name})", *(fact_cell(getattr(member.facts, name)) for name in names)]
        for member in FAMILY.values()
    ]
    return _table(["member", *map(fact_title, names)], rows)


def family_page() -> str:
    """The text of docs/family.md."""
    sections = "\n\n".join(map(_section, FAMILY.values()))
    return f"""# The family

This page has a section for every loss of the family: its formulas, how to call it in Python, and the facts that are
known about it, each with its source and with what the paper prints where that differs. It is written by `make docs`
from `manymax.FAMILY`; `manymax show NAME` prints the same facts. A \\* marks what differs from the paper that compares
these losses, whose experiments are [run again](reproduction.md).

{family_table()}

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
    """The section of a member in docs/family.md."""
    formulas = [(part, getattr(member.formulas, part)) for part in ("map", "loss", "gradient", "omega")]
    lines = "\n".join(f"{part + ':':<10}{text}" for part, text in formulas if text is not None)
    facts = [
        [fact_title(name), fact_word(fact), fact.text, fact.status, fact.source, fact.printed or ""]
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

Tested with {settings}. Citation: {member.citation}"""


def planted_runs(root: Path) -> list[Record]:
    """The records of configs/planted.toml that are kept in the repository; empty where there are none."""
    file = root / PLANTED_RUNS
    if file.is_file():
        return [run.record for run in read_all_runs(file)]
    # A folder of that name holds run folders: those of a study that has not been kept in a file yet.
    return [read_record(path.parent) for path in sorted(file.with_suffix("").rglob(RECORD))]


def planted_page(runs: Sequence[Record]) -> str:
    """The text of docs/planted.md, from runs of configs/planted.toml."""
    sections = "\n\n".join(
        f"## {backbone.title}\n\n{_results_table(own)}"
        for backbone in BACKBONES.values()
        if (own := [run for run in runs if flat(run.settings)["backbone"] == backbone.name])
    )
    sizes, popular = runs[0].sizes, runs[0].popularity
    return f"""# Every member on every backbone

This page compares the losses on `planted` data: interactions that are drawn from a known p(item | user), so that the
best possible ranking is known too. There are {sizes["users"]:,} users, {sizes["items"]:,} items and {sizes["train"]:,}
interactions to learn from. All runs have the paper's settings (64 dimensions, learning rate 0.001, batches of 2048,
early stopping with patience 10) and one seed. The page is written by `make docs` from the records in
`{PLANTED_RUNS}`, which `manymax study configs/planted.toml` made.

A ranking by popularity alone has N@20 {popular["ndcg@20"]:.4f} and regret {popular["regret@20"]:.4f}. The regret is the
share of the best possible expected DCG@20 that a ranking misses; the ranking by the true p(item | user) has regret 0.
N@20, P@20 and R@20 are NDCG, precision and recall of the first 20 items of a ranking, the more the better.

{sections}
"""


def _results_table(runs: Sequence[Record]) -> str:
    """Test metrics of each member, in the order of the family; a run by another solver comes after the gradient's."""
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


def _table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a bar inside of a cell is escaped, because it would end the cell."""
    first = list(headers)
    body = [[text.replace("|", "\\|") for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [first, ["---"] * len(first), *body])
