"""Statements of the paper's text, outside of its tables."""

from __future__ import annotations

from functools import partial

from manymax.paper.claims.claim import Claim, member_fact
from manymax.paper.evidence import bias, curvature, denied, order_preservation

_statement = partial(Claim, "Text")

RANKING_STATEMENTS = (
    _statement(
        "softmax",
        "multi-label metrics",
        printed="consistent with DCG, NDCG, P@k and R@k",
        value="the sum over positives follows E[y]: DCG and P@k; the normalized form E[y/|y|]: R@k; neither NDCG",
        source="section 2.3, appendix A.1",
        status="contradicted",
        check=order_preservation.multilabel_metrics,
    ),
    _statement(
        "softmax",
        "Schur-isotone",
        printed="strictly Schur-isotone",
        value="not for three classes or more; the order of the scores is kept all the same",
        source="section 3.1.3",
        status="contradicted",
        check=order_preservation.schur,
    ),
    _statement(
        "softmax",
        "loss and Bregman divergence",
        printed="equal, because Omega is Legendre",
        value="equal: Omega is Legendre on the simplex, if not in all of R^C",
        source="proposition 3.1",
        status="confirmed",
        check=order_preservation.loss_is_bregman,
    ),
    _statement(
        "sparsemax",
        "loss and Bregman divergence",
        printed="the loss is an upper bound",
        value="larger by the target's mass off the support times its distance below the threshold",
        source="section 3.1.2",
        status="confirmed",
        check=order_preservation.loss_bounds_bregman,
    ),
    _statement(
        "softmax",
        "gradient",
        printed="map minus target, for every Fenchel-Young loss",
        value="for softmax, sparsemax, entmax and RG",
        source="appendix A.2",
        status="confirmed",
        check=order_preservation.gradient_is_residual,
    ),
    _statement(
        "rankmax",
        "Fenchel-Young",
        printed="a sparse Fenchel-Young loss",
        value=member_fact("rankmax", "fenchel_young").text,
        source="section 3.1.4",
        status="contradicted",
        check=order_preservation.rankmax_has_no_potential,
    ),
    _statement(
        "entmax",
        "calibration from weak order",
        printed="weakly ordered maps are calibrated (theorem 3.6)",
        value="if Omega is strictly convex: a tie then costs Omega(p) - Omega(p with both at their mean) > 0",
        source="theorem 3.6",
        status="corrected",
        check=order_preservation.weak_order_needs_strict_convexity,
    ),
    _statement(
        "sparsemax",
        "DCG lost by ties",
        printed="at least sum_{i <= r} w_{z+i} - (r/m) sum_{i <= m} w_{z+i} (theorem B.2)",
        value="exactly that, for ties in what one ranks by; sparse maps tie in p, not in s: rank by scores",
        source="theorem B.2",
        status="corrected",
        check=order_preservation.ties_cost_exactly,
    ),
    _statement(
        "sparsemax",
        "alignment with the direction of DCG",
        printed="<grad, d> <= <grad+, d> - sum alpha p~, d the direction of improvement (proposition B.3)",
        value="an equality with d as its formula has it, which is a gradient; with -d the inequality is reversed",
        source="proposition B.3",
        status="corrected",
        check=order_preservation.alignment_is_an_equality,
    ),
)
"""What the maps do to the order of the scores, which metrics the losses follow, and Fenchel-Young losses."""

CURVATURE_STATEMENTS = (
    _statement(
        "softmax",
        "rank of the Jacobian",
        printed="C - 1, null space of shifts; support - 1 for sparse maps",
        value="C - 1, null space of shifts; support - 1 for sparse maps",
        source="section 3.1.3",
        status="confirmed",
        check=curvature.ranks,
    ),
    _statement(
        "softmax",
        "conditioning",
        printed="well-conditioned curvature on the tangent space",
        value="the nonzero spectrum has no lower bound; sparsemax has condition number 1 on its support",
        source="section 3.1.3",
        status="contradicted",
        check=curvature.condition,
    ),
    _statement(
        "softmax",
        "rates of a linear head",
        printed="kappa, eta_max = 2/L, eta* = 2/(L + mu), rho = (kappa - 1)/(kappa + 1)",
        value="the same, for scores that are linear in the parameters",
        source="section B.4",
        status="confirmed",
        check=curvature.descent_contracts,
    ),
)
"""Jacobians of the maps, and what they mean for gradient descent on a linear head."""

RATE_STATEMENTS = (
    _statement(
        "nce",
        "rate",
        printed="rho_NCE < rho_SSM",
        value="only if no class is in a sample twice: the curvature is max multiplicity / 4",
        source="section 3.2",
        status="contradicted",
        check=partial(denied, partial(curvature.rate_link, "nce", "sampled_softmax")),
    ),
    _statement(
        "sampled_softmax",
        "rate",
        printed="rho_SSM = rho_SM",
        value="for the suprema",
        source="section 3.2",
        status="confirmed",
        check=partial(curvature.rate_link, "sampled_softmax", "softmax"),
    ),
    _statement(
        "hierarchical_softmax",
        "rate",
        printed="rho_SM = rho_HSM",
        value="rho_HSM is smaller: 1/4 for sigmoids; 1/2 with a softmax at each node",
        source="section 3.2",
        status="contradicted",
        check=partial(denied, partial(curvature.rate_link, "softmax", "hierarchical_softmax")),
    ),
    _statement(
        "entmax",
        "rate",
        printed="rho_SM = rho_HSM < rho_entmax",
        value="for the suprema, strictly",
        source="section 3.2",
        status="confirmed",
        check=partial(curvature.rate_link, "hierarchical_softmax", "entmax"),
    ),
    _statement(
        "sparsemax",
        "rate",
        printed="rho_entmax <= rho_sparsemax",
        value="for the suprema, strictly for alpha < 2",
        source="section 3.2",
        status="confirmed",
        check=partial(curvature.rate_link, "entmax", "sparsemax"),
    ),
    _statement(
        "softmax",
        "rate",
        printed="faster convergence than sparse maps",
        value="suprema do not order the curvatures at given scores",
        source="section B.4",
        status="contradicted",
        check=curvature.rates_are_not_pointwise,
    ),
    _statement(
        "rankmax",
        "rate",
        printed="rho about m/S",
        value="there is none: the loss is neither convex nor smooth",
        source="section B.4",
        status="contradicted",
        check=curvature.rankmax_is_not_smooth,
    ),
)
"""The paper's ordering of rates of convergence, link by link."""

GRADIENT_STATEMENTS = (
    _statement(
        "sampled_softmax",
        "gradient",
        printed="unbiased for the full softmax gradient",
        value='a ratio estimate: "logq" has k/(k + 1) of it even with q = P',
        source="appendix A.5",
        status="contradicted",
        check=bias.sampled_gradient,
    ),
)
"""Estimates of the softmax gradient."""

STATEMENTS: tuple[Claim, ...] = (*RANKING_STATEMENTS, *CURVATURE_STATEMENTS, *RATE_STATEMENTS, *GRADIENT_STATEMENTS)
"""In the order in which `manymax theory` prints them."""
