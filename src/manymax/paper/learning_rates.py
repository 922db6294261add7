"""The paper's ordering of the members' rates of convergence, checked with the curvatures of `manymax.theory.rates`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manymax.members import FAMILY
from manymax.theory.rates import curvature_of, rates


@dataclass(frozen=True)
class Link:
    """One relation of the paper's chain of rates.

    left, relation, right: two members and "<", "=" or "<=" between their rates.
    left_rho, right_rho: the rates; a step of gradient descent shrinks the error by the factor rho.
    holds: whether the relation is true of them.
    """

    left: str
    relation: str
    right: str
    left_rho: float
    right_rho: float
    holds: bool


# The display at the end of the paper's section 3.2: rho_NCE < rho_SSM = rho_SM = rho_HSM < rho_entmax <= rho_sparsemax.
CHAIN = (
    ("nce", "<", "sampled_softmax"),
    ("sampled_softmax", "=", "softmax"),
    ("softmax", "=", "hierarchical_softmax"),
    ("hierarchical_softmax", "<", "entmax"),
    ("entmax", "<=", "sparsemax"),
)


def rate_ordering(
    num_classes: int = 1000,
    *,
    num_negatives: int = 100,
    alpha: float = 1.5,
    feature_norm: float = 1.0,
    ridge: float = 0.01,
) -> list[Link]:
    """Check every link of the paper's ordering of rates, with the worst-case curvatures that the members' facts state.

    Two links fail. NCE's curvature is 1/4 only if no class is drawn twice, and up to (k + 1)/4 otherwise; a tree of
    sigmoids has 1/4, not softmax's 1/2. The other links hold for these worst cases, but not at all scores: at (1, 0)
    sparsemax has curvature 0 and softmax 0.393.

    Args:
        num_classes: C.
        num_negatives: k of NCE.
        alpha: of entmax.
        feature_norm: the norm of the features of a linear head.
        ridge: the weight of its ridge penalty, which bounds the curvature from below.

    Example:
        >>> for link in rate_ordering():
        ...     print(link.left, link.relation, link.right, link.holds)
        nce < sampled_softmax False
        sampled_softmax = softmax True
        softmax = hierarchical_softmax False
        hierarchical_softmax < entmax True
        entmax <= sparsemax True
    """
    settings: dict[str, dict[str, Any]] = {"nce": {"num_negatives": num_negatives}, "entmax": {"alpha": alpha}}

    def rho(name: str) -> float:
        return rates(curvature_of(FAMILY[name], num_classes, **settings.get(name, {})), feature_norm, ridge).rho

    holds = {"<": lambda a, b: a < b, "=": lambda a, b: a == b, "<=": lambda a, b: a <= b}
    return [Link(a, sign, b, rho(a), rho(b), holds[sign](rho(a), rho(b))) for a, sign, b in CHAIN]
