"""Table 1 of the paper: the exact members."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from manymax.paper.claims.claim import Claim, fact_claim
from manymax.paper.claims.cost import exact_costs
from manymax.paper.evidence import curvature, order_preservation

EXACT_TABLE = "Table 1"
# As printed: SOP for strictly, WOP for weakly order preserving.
PRINTED_ORDER_PRESERVATION = {"softmax": "SOP", "sparsemax": "WOP", "entmax": "WOP", "rankmax": "WOP"}
PRINTED_BOUNDS = {"softmax": ("1/2", "confirmed"), "sparsemax": ("1", "confirmed"), "entmax": ("1", "corrected")}


def table_1() -> Iterator[Claim]:
    """Consistency, order preservation, smoothness and cost."""
    cell = partial(fact_claim, EXACT_TABLE)
    for name in ("softmax", "sparsemax", "entmax"):
        check = partial(order_preservation.consistent, name)
        yield cell(name, "calibrated", "consistency", "yes", "confirmed", check)
    yield cell("rankmax", "calibrated", "consistency", "yes", "contradicted", order_preservation.rankmax_ties)
    for name, printed in PRINTED_ORDER_PRESERVATION.items():
        check = partial(order_preservation.keeps_order, name)
        yield cell(name, "order_preservation", "order", printed, "confirmed", check)
    for name, (bound, status) in PRINTED_BOUNDS.items():
        yield cell(name, "smoothness", "smoothness", bound, status, partial(curvature.entmax_supremum, name))
    yield cell("rankmax", "smoothness", "smoothness", "m/S", "contradicted", curvature.rankmax_is_not_smooth)
    yield from exact_costs(EXACT_TABLE)
