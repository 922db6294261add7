"""Table 4 of the paper, the cost of an epoch, and the cells of Tables 1 and 2 that repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from manymax.paper.claims.claim import Claim, fact_claim
from manymax.paper.evidence import Check, cost

COST_TABLE = "Table 4"
EPOCH_COST = "cost of an epoch"
EXACT_COSTS = {
    "softmax": ("N C", "confirmed"),
    "sparsemax": ("N C log C", "corrected"),
    "entmax": ("N C log C + N |P|", "corrected"),
    "rankmax": ("N C", "confirmed"),
}


def exact_costs(table: str) -> Iterator[Claim]:
    """The cells on the cost of exact members, which Tables 1 and 4 share."""
    for name, (printed, status) in EXACT_COSTS.items():
        yield fact_claim(table, name, "cost", EPOCH_COST, printed, status, partial(cost.linear_cost, name))


def approximate_costs(table: str) -> Iterator[Claim]:
    """The cells on the cost of approximations, which Tables 2 and 4 share."""
    cell = partial(fact_claim, table)
    for name in ("sampled_softmax", "nce"):
        yield cell(name, "cost", EPOCH_COST, "N k", "confirmed", partial(cost.sampled_cost, name))
    yield cell("hierarchical_softmax", "cost", EPOCH_COST, "N log C", "confirmed", cost.tree_cost)
    yield cell("rg", "cost", EPOCH_COST, "--", "corrected", cost.rg_needs_no_table)


def _note(member: str, printed: str, value: str, status: str, check: Check) -> Claim:
    return Claim(COST_TABLE, member, "note", printed, value, "derived", status, check)


COST_NOTES = (
    _note(
        "softmax",
        printed="dense exp/log/div",
        value="a pass over all scores",
        status="confirmed",
        check=partial(cost.linear_cost, "softmax"),
    ),
    _note(
        "sparsemax",
        printed="threshold via sorting",
        value="no sort is needed: Newton steps, or selection",
        status="corrected",
        check=partial(cost.linear_cost, "sparsemax"),
    ),
    _note(
        "entmax",
        printed="threshold sort + support-wise backprop",
        value="no sort is needed; the support's N |P| is within N C",
        status="corrected",
        check=partial(cost.linear_cost, "entmax"),
    ),
    _note(
        "rankmax",
        printed="when setting to standard simplex",
        value="for the map on the simplex, one positive at a time",
        status="confirmed",
        check=partial(cost.linear_cost, "rankmax"),
    ),
    _note(
        "sampled_softmax",
        printed="(k + 1) classes an update; sampling O(1)",
        value="O(1) for a draw from an alias table, which takes O(C) to build",
        status="confirmed",
        check=partial(cost.sampled_cost, "sampled_softmax"),
    ),
    _note(
        "nce",
        printed="one positive + k negative logistic terms; sampling O(1)",
        value="O(1) for a draw from an alias table, which takes O(C) to build",
        status="confirmed",
        check=partial(cost.sampled_cost, "nce"),
    ),
    _note(
        "hierarchical_softmax",
        printed="depth about ceil(log C)",
        value="the mean path is within 1 bit of the entropy of the counts; the depth can be C - 1",
        status="corrected",
        check=cost.tree_depth,
    ),
    _note(
        "rg",
        printed="dominated by solving closed-form solutions",
        value="from moments: (N + C) d^2, no table of scores",
        status="confirmed",
        check=cost.rg_needs_no_table,
    ),
)
"""The last column of Table 4: what a row's cost is due to."""


def table_4() -> Iterator[Claim]:
    """Costs, then the notes on them."""
    yield from exact_costs(COST_TABLE)
    yield from approximate_costs(COST_TABLE)
    yield from COST_NOTES
