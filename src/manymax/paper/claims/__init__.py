"""Every cell of the paper's four theory tables and the statements of its text, each with what is right and a check.

The status of a claim says what became of what the paper prints:

    confirmed      the paper is right, and the check runs again what it prints
    corrected      `value` is right instead; the check shows that `value` is right where the printed one is not
    contradicted   what is printed is false; the check is a counter-example

A check that does not hold is a fault of the code or of this table, whatever the status.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from manymax.paper.claims.approximate import table_2, table_3
from manymax.paper.claims.claim import Claim, ClaimResult
from manymax.paper.claims.cost import table_4
from manymax.paper.claims.exact import table_1
from manymax.paper.claims.text import STATEMENTS

__all__ = ["CLAIMS", "STATUSES", "TABLES", "Claim", "ClaimResult", "run_claims"]

TABLES = {
    "Table 1": "exact members",
    "Table 2": "approximations",
    "Table 3": "bias and variance against the softmax loss",
    "Table 4": "cost of an epoch",
    "Text": "statements outside of the tables",
}
STATUSES = ("confirmed", "corrected", "contradicted")

CLAIMS: tuple[Claim, ...] = (*table_1(), *table_2(), *table_3(), *table_4(), *STATEMENTS)


def run_claims(tables: Iterable[str] = tuple(TABLES)) -> Iterator[ClaimResult]:
    """Run the checks of the given tables, in their order, one result at a time.

    Example:
        >>> results = list(run_claims(["Table 3"]))
        >>> len(results), all(result.finding.holds for result in results)
        (18, True)
    """
    wanted = set(tables)
    return (claim.run() for claim in CLAIMS if claim.table in wanted)
