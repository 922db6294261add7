"""Every cell of the paper's four theory tables, and the statements of its text, each with what is right and a check.

    confirmed      the paper is right, and the check re-runs what it prints
    corrected      what is printed is replaced by `value`; the check shows that `value` is right where it is not
    contradicted   what is printed is false; the check is the counter-example

A check that does not hold is a fault, of the code or of this table, whatever the status.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from manymax.engine.member import Fact
from manymax.members import FAMILY
from manymax.paper import evidence
from manymax.paper.evidence import Check, CheckResult

TABLES = {
    "Table 1": "exact members",
    "Table 2": "approximations",
    "Table 3": "bias and variance against the softmax loss",
    "Table 4": "cost of an epoch",
    "Text": "statements outside of the tables",
}
STATUSES = ("confirmed", "corrected", "contradicted")


@dataclass(frozen=True)
class Claim:
    """One cell: where it is, what the paper prints, what is right, its source and status, and a check."""

    table: str
    member: str
    property: str
    printed: str
    value: str
    source: str
    status: str
    check: Check

    def run(self) -> ClaimResult:
        """The claim and what its check finds now; a check that breaks does not hold."""
        try:
            return ClaimResult(self, self.check())
        except Exception as fault:
            return ClaimResult(self, CheckResult(False, f"the check broke: {type(fault).__name__}: {fault}"))


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what was found when it was run."""

    claim: Claim
    finding: CheckResult


def run_claims(tables: Iterable[str] = tuple(TABLES)) -> Iterator[ClaimResult]:
    """Run the checks of the given tables, in order, one result at a time.

    Example:
        >>> results = list(run_claims(["Table 3"]))
        >>> len(results), all(result.finding.holds for result in results)
        (18, True)
    """
    wanted = set(tables)
    return (claim.run() for claim in CLAIMS if claim.table in wanted)


def _fact(member: str, name: str) -> Fact:
    fact = getattr(FAMILY[member].facts, name)
    assert isinstance(fact, Fact)
    return fact


def _cell(table: str, member: str, name: str, property: str, printed: str, status: str, check: Check) -> Claim:
    """A cell whose right value and source are a fact of the member."""
    fact = _fact(member, name)
    return Claim(table, member, property, printed, fact.text, fact.source, status, check)


def _table_1() -> Iterator[Claim]:
    cell = partial(_cell, "Table 1")
    for name in ("softmax", "sparsemax", "entmax"):
        yield cell(
            name, "calibrated", "consistency", "yes", "confirmed", partial(evidence.order_preservation.consistent, name)
        )
    yield cell("rankmax", "calibrated", "consistency", "yes", "contradicted", evidence.order_preservation.rankmax_ties)
    printed = {"softmax": "SOP", "sparsemax": "WOP", "entmax": "WOP", "rankmax": "WOP"}
    for name, order in printed.items():
        yield cell(
            name,
            "order_preservation",
            "order",
            order,
            "confirmed",
            partial(evidence.order_preservation.keeps_order, name),
        )
    for name, bound, status in (
        ("softmax", "1/2", "confirmed"),
        ("sparsemax", "1", "confirmed"),
        ("entmax", "1", "corrected"),
    ):
        yield cell(name, "smoothness", "smoothness", bound, status, partial(evidence.curvature.entmax_supremum, name))
    yield cell("rankmax", "smoothness", "smoothness", "m/S", "contradicted", evidence.curvature.rankmax_is_not_smooth)
    for name, (cost, status) in EXACT_COSTS.items():
        yield cell(name, "cost", "cost of an epoch", cost, status, partial(evidence.cost.linear_cost, name))


EXACT_COSTS = {
    "softmax": ("N C", "confirmed"),
    "sparsemax": ("N C log C", "corrected"),
    "entmax": ("N C log C + N |P|", "corrected"),
    "rankmax": ("N C", "confirmed"),
}


def _table_2() -> Iterator[Claim]:
    cell, table = partial(_cell, "Table 2"), "Table 2"
    for name in ("sampled_softmax", "nce"):
        check = partial(evidence.order_preservation.log_p_for_every_k, name)
        yield cell(name, "calibrated", "consistency", "asymptotic", "corrected", check)
    yield cell(
        "hierarchical_softmax",
        "calibrated",
        "consistency",
        "no",
        "contradicted",
        evidence.order_preservation.tree_is_consistent,
    )
    yield cell(
        "rg", "calibrated", "consistency", "yes", "confirmed", partial(evidence.order_preservation.consistent, "rg")
    )
    yield cell("sampled_softmax", "smoothness", "smoothness", "1/2", "confirmed", evidence.curvature.sampled_supremum)
    yield cell("nce", "smoothness", "smoothness", "1/4", "corrected", evidence.curvature.nce_supremum)
    yield cell("hierarchical_softmax", "smoothness", "smoothness", "1/2", "corrected", evidence.curvature.tree_supremum)
    yield cell("rg", "smoothness", "smoothness", "--", "corrected", evidence.curvature.rg_supremum)
    yield from _approximate_costs(table)
    yield from _deviations(table)


def _approximate_costs(table: str) -> Iterator[Claim]:
    """The cells on cost that Tables 2 and 4 share."""
    cell = partial(_cell, table)
    for name in ("sampled_softmax", "nce"):
        yield cell(name, "cost", "cost of an epoch", "N k", "confirmed", partial(evidence.cost.sampled_cost, name))
    yield cell("hierarchical_softmax", "cost", "cost of an epoch", "N log C", "confirmed", evidence.cost.tree_cost)
    yield cell("rg", "cost", "cost of an epoch", "--", "corrected", evidence.cost.rg_needs_no_table)


def _deviations(table: str) -> Iterator[Claim]:
    """The cells on bias and variance that Tables 2 and 3 share."""
    asymptotic, curvature, variance = "bias (asymptotic)", "bias (curvature)", "variance"
    tree, cell = "hierarchical_softmax", partial(_cell, table)
    yield Claim(
        table,
        "sampled_softmax",
        asymptotic,
        "0",
        '0 for the estimate that the paper analyses, the mean of exp(s)/q, and for "partition"; the loss that it prints'
        " has the constant log((k + 1) q_y) on top, which no gradient sees",
        "section B.5",
        "confirmed",
        evidence.bias.importance_bias_vanishes,
    )
    yield cell("nce", "bias", asymptotic, "(1 + k) JS(P || q)", "contradicted", evidence.bias.nce_bias)
    yield cell(tree, "bias", asymptotic, "KL(P_s || P_HSM)", "corrected", evidence.bias.tree_bias)
    yield cell("rg", "bias", asymptotic, "O(||s||^3)", "corrected", evidence.bias.rg_bias)
    yield cell("sampled_softmax", "bias", curvature, "-chi2/(2k)", "corrected", evidence.bias.sampled_curvature_bias)
    yield Claim(
        table,
        "nce",
        curvature,
        "0",
        "0: the draws are added up",
        "section B.5",
        "confirmed",
        evidence.bias.nce_has_no_curvature,
    )
    for name in (tree, "rg"):
        check = partial(evidence.bias.deterministic, name)
        yield Claim(table, name, curvature, "0", "0: nothing is drawn", "section B.5", "confirmed", check)
    yield cell("sampled_softmax", "variance", variance, "chi2/k", "confirmed", evidence.bias.sampled_variance)
    yield cell("nce", "variance", variance, "k chi2/(1 + k)^2", "corrected", evidence.bias.nce_exact_variance)
    for name in (tree, "rg"):
        yield cell(name, "variance", variance, "0", "confirmed", partial(evidence.bias.deterministic, name))


def _table_3() -> Iterator[Claim]:
    table, source = "Table 3", "section B.5"
    for property in ("bias (asymptotic)", "bias (curvature)", "variance"):
        value = "0: it is the reference"
        yield Claim(table, "softmax", property, "0", value, source, "confirmed", evidence.bias.softmax_is_exact)
    simple = 'sampled_softmax, "none"'
    total = "Z~ = exp(s_y) + k E_q[exp(s)]"
    cells = (
        (
            "bias (asymptotic)",
            f"log(Z~/Z), {total}; it grows like log k",
            "log(Z~/Z)",
            evidence.bias.simple_bias,
        ),
        (
            "bias (curvature)",
            f"-k Var_q(exp(s))/(2 Z~^2), {total}",
            "-k Var_q(e^s)/(2 Z~^2)",
            evidence.bias.simple_curvature,
        ),
        ("variance", f"k Var_q(exp(s))/Z~^2, {total}", "k Var_q(e^s)/Z~^2", evidence.bias.simple_variance),
    )
    for property, value, printed, check in cells:
        yield Claim(table, simple, property, printed, value, source, "confirmed", check)
    yield from _deviations(table)


def _table_4() -> Iterator[Claim]:
    table, source = "Table 4", "derived"
    for name, (cost, status) in EXACT_COSTS.items():
        yield _cell(table, name, "cost", "cost of an epoch", cost, status, partial(evidence.cost.linear_cost, name))
    yield from _approximate_costs(table)
    notes: tuple[tuple[str, str, str, str, Check], ...] = (
        (
            "softmax",
            "dense exp/log/div",
            "a pass over all scores",
            "confirmed",
            partial(evidence.cost.linear_cost, "softmax"),
        ),
        (
            "sparsemax",
            "threshold via sorting",
            "no sort is needed: Newton steps, or selection",
            "corrected",
            partial(evidence.cost.linear_cost, "sparsemax"),
        ),
        (
            "entmax",
            "threshold sort + support-wise backprop",
            "no sort is needed; the support's N |P| is within N C",
            "corrected",
            partial(evidence.cost.linear_cost, "entmax"),
        ),
        (
            "rankmax",
            "when setting to standard simplex",
            "for the map on the simplex, one positive at a time",
            "confirmed",
            partial(evidence.cost.linear_cost, "rankmax"),
        ),
        (
            "sampled_softmax",
            "(k + 1) classes an update; sampling O(1)",
            "O(1) for a draw from an alias table, which takes O(C) to build",
            "confirmed",
            partial(evidence.cost.sampled_cost, "sampled_softmax"),
        ),
        (
            "nce",
            "one positive + k negative logistic terms; sampling O(1)",
            "O(1) for a draw from an alias table, which takes O(C) to build",
            "confirmed",
            partial(evidence.cost.sampled_cost, "nce"),
        ),
        (
            "hierarchical_softmax",
            "depth about ceil(log C)",
            "the mean path is within 1 bit of the entropy of the counts; the depth can be C - 1",
            "corrected",
            evidence.cost.tree_depth,
        ),
        (
            "rg",
            "dominated by solving closed-form solutions",
            "from moments: (N + C) d^2, no table of scores",
            "confirmed",
            evidence.cost.rg_needs_no_table,
        ),
    )
    for name, printed, value, status, check in notes:
        yield Claim(table, name, "note", printed, value, source, status, check)


def _text() -> Iterator[Claim]:
    rows: tuple[tuple[str, str, str, str, str, str, Check], ...] = (
        (
            "softmax",
            "multi-label metrics",
            "consistent with DCG, NDCG, P@k and R@k",
            "the sum over positives follows E[y]: DCG and P@k; the normalized form E[y/|y|]: R@k; neither NDCG",
            "section 2.3, appendix A.1",
            "contradicted",
            evidence.order_preservation.multilabel_metrics,
        ),
        (
            "softmax",
            "Schur-isotone",
            "strictly Schur-isotone",
            "not for three classes or more; the order of the scores is kept all the same",
            "section 3.1.3",
            "contradicted",
            evidence.order_preservation.schur,
        ),
        (
            "softmax",
            "loss and Bregman divergence",
            "equal, because Omega is Legendre",
            "equal: Omega is Legendre on the simplex, if not in all of R^C",
            "proposition 3.1",
            "confirmed",
            evidence.order_preservation.loss_is_bregman,
        ),
        (
            "sparsemax",
            "loss and Bregman divergence",
            "the loss is an upper bound",
            "larger by the target's mass off the support times its distance below the threshold",
            "section 3.1.2",
            "confirmed",
            evidence.order_preservation.loss_bounds_bregman,
        ),
        (
            "softmax",
            "gradient",
            "map minus target, for every Fenchel-Young loss",
            "for softmax, sparsemax, entmax and RG",
            "appendix A.2",
            "confirmed",
            evidence.order_preservation.gradient_is_residual,
        ),
        (
            "rankmax",
            "Fenchel-Young",
            "a sparse Fenchel-Young loss",
            _fact("rankmax", "fenchel_young").text,
            "section 3.1.4",
            "contradicted",
            evidence.order_preservation.rankmax_has_no_potential,
        ),
        (
            "entmax",
            "calibration from weak order",
            "weakly ordered maps are calibrated (theorem 3.6)",
            "if Omega is strictly convex: a tie then costs Omega(p) - Omega(p with both at their mean) > 0",
            "theorem 3.6",
            "corrected",
            evidence.order_preservation.weak_order_needs_strict_convexity,
        ),
        (
            "sparsemax",
            "DCG lost by ties",
            "at least sum_{i <= r} w_{z+i} - (r/m) sum_{i <= m} w_{z+i} (theorem B.2)",
            "exactly that, for ties in what one ranks by; sparse maps tie in p, not in s: rank by scores",
            "theorem B.2",
            "corrected",
            evidence.order_preservation.ties_cost_exactly,
        ),
        (
            "sparsemax",
            "alignment with the direction of DCG",
            "<grad, d> <= <grad+, d> - sum alpha p~, d the direction of improvement (proposition B.3)",
            "an equality with d as its formula has it, which is a gradient; with -d the inequality is reversed",
            "proposition B.3",
            "corrected",
            evidence.order_preservation.alignment_is_an_equality,
        ),
        (
            "softmax",
            "rank of the Jacobian",
            "C - 1, null space of shifts; support - 1 for sparse maps",
            "C - 1, null space of shifts; support - 1 for sparse maps",
            "section 3.1.3",
            "confirmed",
            evidence.curvature.ranks,
        ),
        (
            "softmax",
            "conditioning",
            "well-conditioned curvature on the tangent space",
            "the nonzero spectrum has no lower bound; sparsemax has condition number 1 on its support",
            "section 3.1.3",
            "contradicted",
            evidence.curvature.condition,
        ),
        (
            "softmax",
            "rates of a linear head",
            "kappa, eta_max = 2/L, eta* = 2/(L + mu), rho = (kappa - 1)/(kappa + 1)",
            "the same, for scores that are linear in the parameters",
            "section B.4",
            "confirmed",
            evidence.curvature.descent_contracts,
        ),
        (
            "nce",
            "rate",
            "rho_NCE < rho_SSM",
            "only if no class is in a sample twice: the curvature is max multiplicity / 4",
            "section 3.2",
            "contradicted",
            partial(evidence.denied, partial(evidence.curvature.rate_link, "nce", "sampled_softmax")),
        ),
        (
            "sampled_softmax",
            "rate",
            "rho_SSM = rho_SM",
            "for the suprema",
            "section 3.2",
            "confirmed",
            partial(evidence.curvature.rate_link, "sampled_softmax", "softmax"),
        ),
        (
            "hierarchical_softmax",
            "rate",
            "rho_SM = rho_HSM",
            "rho_HSM is smaller: 1/4 for sigmoids; 1/2 with a softmax at each node",
            "section 3.2",
            "contradicted",
            partial(evidence.denied, partial(evidence.curvature.rate_link, "softmax", "hierarchical_softmax")),
        ),
        (
            "entmax",
            "rate",
            "rho_SM = rho_HSM < rho_entmax",
            "for the suprema, strictly",
            "section 3.2",
            "confirmed",
            partial(evidence.curvature.rate_link, "hierarchical_softmax", "entmax"),
        ),
        (
            "sparsemax",
            "rate",
            "rho_entmax <= rho_sparsemax",
            "for the suprema, strictly for alpha < 2",
            "section 3.2",
            "confirmed",
            partial(evidence.curvature.rate_link, "entmax", "sparsemax"),
        ),
        (
            "softmax",
            "rate",
            "faster convergence than sparse maps",
            "suprema do not order the curvatures at given scores",
            "section B.4",
            "contradicted",
            evidence.curvature.rates_are_not_pointwise,
        ),
        (
            "rankmax",
            "rate",
            "rho about m/S",
            "there is none: the loss is neither convex nor smooth",
            "section B.4",
            "contradicted",
            evidence.curvature.rankmax_is_not_smooth,
        ),
        (
            "sampled_softmax",
            "gradient",
            "unbiased for the full softmax gradient",
            'a ratio estimate: "logq" has k/(k + 1) of it even with q = P',
            "appendix A.5",
            "contradicted",
            evidence.bias.sampled_gradient,
        ),
    )
    return (Claim("Text", *row) for row in rows)


CLAIMS: tuple[Claim, ...] = (*_table_1(), *_table_2(), *_table_3(), *_table_4(), *_text())
