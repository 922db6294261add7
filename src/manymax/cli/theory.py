"""`manymax theory`: the paper's theory tables, every cell run again."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from manymax.cli import console as look
from manymax.paper.claims import CLAIMS, STATUSES, TABLES, ClaimResult, run_claims

HEADINGS = ("member", "property", "the paper prints", "what is right", "status", "source", "run again")


def theory(
    table: Annotated[
        int | None, typer.Option("--table", min=1, max=4, metavar="1-4", help="Run one of the paper's tables alone.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the cells and what was found, as JSON.")] = False,
) -> None:
    """Run every cell of the paper's four theory tables again, and the statements of its text.

    A cell is confirmed, corrected (what is right stands beside what is printed) or contradicted (with a
    counter-example). Ends with exit code 1 if a check does not hold.

    \b
    Examples:
      manymax theory
      manymax theory --table 3
      manymax theory --table 1 --json
    """
    tables = [name for name in TABLES if table is None or name == f"Table {table}"]
    results = _run(tables)
    failed = [result for result in results if not result.finding.holds]
    if json:
        look.put_json([_record(result) for result in results])
    else:
        _print(look.open_console(), tables, results)
    for result in failed:
        claim = result.claim
        typer.echo(
            f"manymax: {claim.table}, {claim.member}, {claim.property}: marked {claim.status}, but the check does not"
            f" hold: {result.finding.measured}",
            err=True,
        )
    if failed:
        raise typer.Exit(1)


def _run(tables: list[str]) -> list[ClaimResult]:
    """All results; a terminal shows how far it is."""
    total = sum(claim.table in tables for claim in CLAIMS)
    screen = Console(stderr=True)
    if not sys.stderr.isatty():
        return list(run_claims(tables))
    results = []
    with screen.status("checking") as status:
        for result in run_claims(tables):
            results.append(result)
            status.update(f"checking: {len(results)} of {total} cells")
    return results


def _record(result: ClaimResult) -> dict[str, Any]:
    claim = {
        name: getattr(result.claim, name) for name in ("table", "member", "property", "printed", "value", "source")
    }
    return claim | {"status": result.claim.status} | asdict(result.finding)


def _print(console: Console, tables: list[str], results: list[ClaimResult]) -> None:
    for name in tables:
        mine = [result for result in results if result.claim.table == name]
        console.print(f"{name}: {TABLES[name]}", style="bold")
        look.put(console, _table(console, mine))
        console.print()
    counts = Counter(result.claim.status for result in results)
    held = sum(result.finding.holds for result in results)
    listed = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    look.put(console, f"{len(results)} cells: {listed}; {held} checks of {len(results)} hold.")


def _cells(result: ClaimResult) -> tuple[str, ...]:
    claim, finding = result.claim, result.finding
    again = finding.measured if finding.holds else f"DOES NOT HOLD: {finding.measured}"
    return claim.member, claim.property, claim.printed, claim.value, claim.status, claim.source, again


def _table(console: Console, results: list[ClaimResult]) -> Table:
    """Cells in columns where there is room, otherwise one below the other."""
    table = look.table(HEADINGS, map(_cells, results))
    if not console.is_terminal or console.width >= 180:
        return table
    return look.pairs(row for result in results for row in _entry(result))


def _entry(result: ClaimResult) -> list[tuple[str, str]]:
    member, property, *rest = _cells(result)
    printed, value, status, source, again = rest
    return [
        (member, f"{property}: {status}"),
        ("", f"printed: {printed} ({source})"),
        ("", f"right: {value}"),
        ("", f"run again: {again}"),
    ]
