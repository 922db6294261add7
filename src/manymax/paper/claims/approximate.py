"""Tables 2 and 3 of the paper: the approximations, and their bias and variance against the softmax loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from manymax.paper.claims.claim import Claim, fact_claim
from manymax.paper.claims.cost import approximate_costs
from manymax.paper.evidence import bias, curvature, order_preservation

TREE = "hierarchical_softmax"
ASYMPTOTIC_BIAS, CURVATURE_BIAS, VARIANCE = "bias (asymptotic)", "bias (curvature)", "variance"
BIAS_SOURCE = "section B.5"


def table_2() -> Iterator[Claim]:
    """Consistency, smoothness, cost, bias and variance."""
    table = "Table 2"
    cell = partial(fact_claim, table)
    for name in ("sampled_softmax", "nce"):
        check = partial(order_preservation.log_p_for_every_k, name)
        yield cell(name, "calibrated", "consistency", "asymptotic", "corrected", check)
    yield cell(TREE, "calibrated", "consistency", "no", "contradicted", order_preservation.tree_is_consistent)
    yield cell("rg", "calibrated", "consistency", "yes", "confirmed", partial(order_preservation.consistent, "rg"))
    yield cell("sampled_softmax", "smoothness", "smoothness", "1/2", "confirmed", curvature.sampled_supremum)
    yield cell("nce", "smoothness", "smoothness", "1/4", "corrected", curvature.nce_supremum)
    yield cell(TREE, "smoothness", "smoothness", "1/2", "corrected", curvature.tree_supremum)
    yield cell("rg", "smoothness", "smoothness", "--", "corrected", curvature.rg_supremum)
    yield from approximate_costs(table)
    yield from _deviations(table)


def table_3() -> Iterator[Claim]:
    """Bias and variance: of softmax itself, of simple sampling, then the cells that Table 2 has too."""
    table, simple = "Table 3", 'sampled_softmax, "none"'
    for property in (ASYMPTOTIC_BIAS, CURVATURE_BIAS, VARIANCE):
        value = "0: it is the reference"
        yield Claim(table, "softmax", property, "0", value, BIAS_SOURCE, "confirmed", bias.softmax_is_exact)
    total = "Z~ = exp(s_y) + k E_q[exp(s)]"
    value = f"log(Z~/Z), {total}; it grows like log k"
    yield Claim(table, simple, ASYMPTOTIC_BIAS, "log(Z~/Z)", value, BIAS_SOURCE, "confirmed", bias.simple_bias)
    printed, value = "-k Var_q(e^s)/(2 Z~^2)", f"-k Var_q(exp(s))/(2 Z~^2), {total}"
    yield Claim(table, simple, CURVATURE_BIAS, printed, value, BIAS_SOURCE, "confirmed", bias.simple_curvature)
    printed, value = "k Var_q(e^s)/Z~^2", f"k Var_q(exp(s))/Z~^2, {total}"
    yield Claim(table, simple, VARIANCE, printed, value, BIAS_SOURCE, "confirmed", bias.simple_variance)
    yield from _deviations(table)


def _deviations(table: str) -> Iterator[Claim]:
    """The cells on bias and variance that Tables 2 and 3 share."""
    cell = partial(fact_claim, table)
    yield Claim(
        table,
        "sampled_softmax",
        ASYMPTOTIC_BIAS,
        printed="0",
        value='0 for the estimate that the paper analyses, the mean of exp(s)/q, and for "partition"; the loss that it'
        " prints has the constant log((k + 1) q_y) on top, which no gradient sees",
        source=BIAS_SOURCE,
        status="confirmed",
        check=bias.importance_bias_vanishes,
    )
    yield cell("nce", "bias", ASYMPTOTIC_BIAS, "(1 + k) JS(P || q)", "contradicted", bias.nce_bias)
    yield cell(TREE, "bias", ASYMPTOTIC_BIAS, "KL(P_s || P_HSM)", "corrected", bias.tree_bias)
    yield cell("rg", "bias", ASYMPTOTIC_BIAS, "O(||s||^3)", "corrected", bias.rg_bias)
    yield cell("sampled_softmax", "bias", CURVATURE_BIAS, "-chi2/(2k)", "corrected", bias.sampled_curvature_bias)
    value = "0: the draws are added up"
    yield Claim(table, "nce", CURVATURE_BIAS, "0", value, BIAS_SOURCE, "confirmed", bias.nce_has_no_curvature)
    for name in (TREE, "rg"):
        check = partial(bias.deterministic, name)
        yield Claim(table, name, CURVATURE_BIAS, "0", "0: nothing is drawn", BIAS_SOURCE, "confirmed", check)
    yield cell("sampled_softmax", "variance", VARIANCE, "chi2/k", "confirmed", bias.sampled_variance)
    yield cell("nce", "variance", VARIANCE, "k chi2/(1 + k)^2", "corrected", bias.nce_exact_variance)
    for name in (TREE, "rg"):
        yield cell(name, "variance", VARIANCE, "0", "confirmed", partial(bias.deterministic, name))
