"""`manymax theory`: check every cell of the paper's theory tables again."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from manymax.cli import console as display

if TYPE_CHECKING:
    from manymax.paper.claims import ClaimResult

HEADERS = ("member", "property", "the paper prints", "what is right", "status", "source", "run again")
WIDE = 180  # characters from which all columns fit side by side


def theory(
    table: Annotated[
        int | None, typer.Option("--table", min=1, max=4, metavar="1-4", help="Check only one of the paper's tables.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the cells and what was measured as JSON.")] = False,
) -> None:
    """Check every cell of the paper's four theory tables again, and the statements of its text.

    A cell is confirmed, corrected (what is right stands beside what is printed) or contradicted (with a
    counter-example). Ends with exit code 1 if a check does not hold.

    \b
    Examples:
      manymax theory
      manymax theory --table 3
      manymax theory --table 1 --json
    """
    from manymax.paper import claims  # takes a moment to import, which other commands need not wait for

    tables = {name: title for name, title in claims.TABLES.items() if table is None or name == f"Table {table}"}
    results = _run(list(tables))
    failed = [result for result in results if not result.finding.holds]
    if json:
        display.put_json([_as_json(result) for result in results])
    else:
        _print(display.open_console(), tables, claims.STATUSES, results)
    for result in failed:
        claim = result.claim
        display.say(
            f"manymax: {claim.table}, {claim.member}, {claim.property}: marked {claim.status}, but the check does not"
            f" hold: {result.finding.measured}",
            err=True,
        )
    if failed:
        raise typer.Exit(1)


def _run(tables: list[str]) -> list[ClaimResult]:
    """The results of all checks of these tables; a terminal shows how many are done."""
    from manymax.paper import claims

    total = sum(claim.table in tables for claim in claims.CLAIMS)
    if not sys.stderr.isatty():
        return list(claims.run_claims(tables))
    results = []
    with display.open_console(stderr=True).status("checking") as status:
        for result in claims.run_claims(tables):
            results.append(result)
            status.update(f"checking: {len(results)} of {total} cells")
    return results


def _as_json(result: ClaimResult) -> dict[str, Any]:
    claim = {
        name: getattr(result.claim, name) for name in ("table", "member", "property", "printed", "value", "source")
    }
    return claim | {"status": result.claim.status} | asdict(result.finding)


def _print(console: Console, tables: dict[str, str], statuses: Sequence[str], results: Sequence[ClaimResult]) -> None:
    for name, title in tables.items():
        console.print(f"{name}: {title}", style="bold")
        display.put(console, _table(console, [result for result in results if result.claim.table == name]))
        console.print()
    counts = Counter(result.claim.status for result in results)
    held = sum(result.finding.holds for result in results)
    listed = ", ".join(f"{counts[status]} {status}" for status in statuses)
    display.put(console, f"{len(results)} cells: {listed}; {held} checks of {len(results)} hold.")


def _cells(result: ClaimResult) -> tuple[str, ...]:
    """What stands under `HEADERS`."""
    claim, finding = result.claim, result.finding
    measured = finding.measured if finding.holds else f"DOES NOT HOLD: {finding.measured}"
    return claim.member, claim.property, claim.printed, claim.value, claim.status, claim.source, measured


def _table(console: Console, results: Sequence[ClaimResult]) -> Table:
    """The cells in columns where there is room, otherwise one below the other; files always get columns."""
    if not console.is_terminal or console.width >= WIDE:
        return display.table(HEADERS, map(_cells, results))
    return display.pairs(line for result in results for line in _lines(result))


def _lines(result: ClaimResult) -> list[tuple[str, str]]:
    """The cells of a result for a narrow terminal: (label, text) of each line."""
    member, property, printed, value, status, source, measured = _cells(result)
    return [
        (member, f"{property}: {status}"),
        ("", f"printed: {printed} ({source})"),
        ("", f"right: {value}"),
        ("", f"run again: {measured}"),
    ]
