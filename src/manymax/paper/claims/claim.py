"""One claim of the paper, and what came of running its check."""

from __future__ import annotations

from dataclasses import dataclass

from manymax.engine.member import Fact
from manymax.members import FAMILY
from manymax.paper.evidence import Check, CheckResult


@dataclass(frozen=True)
class Claim:
    """One cell of a table, or one statement of the text.

    table: where it stands, a key of `manymax.paper.claims.TABLES`.
    member, property: the row and the column of the cell.
    printed: what the paper prints.
    value: what is right.
    source: where that is stated or derived.
    status: one of `manymax.paper.claims.STATUSES`.
    check: the measurement behind the status.
    """

    table: str
    member: str
    property: str
    printed: str
    value: str
    source: str
    status: str
    check: Check

    def run(self) -> ClaimResult:
        """The claim with what its check finds now; a check that raises an error does not hold."""
        try:
            return ClaimResult(self, self.check())
        except Exception as fault:
            return ClaimResult(self, CheckResult(False, f"the check broke: {type(fault).__name__}: {fault}"))


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what was found when its check was run."""

    claim: Claim
    finding: CheckResult


def member_fact(member: str, name: str) -> Fact:
    """The fact of a member of the family by its name in `Facts`."""
    fact = getattr(FAMILY[member].facts, name)
    assert isinstance(fact, Fact)
    return fact


def fact_claim(table: str, member: str, fact: str, property: str, printed: str, status: str, check: Check) -> Claim:
    """A cell whose right value and source are those of a fact of the member.

    Args:
        table: of the paper.
        member: of the family.
        fact: its name in `Facts`.
        property: what the column of the paper's table is called in ours.
        printed: what the paper prints in the cell.
        status: one of `manymax.paper.claims.STATUSES`.
        check: the measurement behind the status.
    """
    known = member_fact(member, fact)
    return Claim(table, member, property, printed, known.text, known.source, status, check)
