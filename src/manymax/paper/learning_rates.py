"""What is left of the paper's ordering of rates, with the constants of `manymax.theory.rates`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from manymax.members import FAMILY
from manymax.theory.rates import curvature_of, rates


@dataclass(frozen=True)
class Link:
    """One relation of the paper's chain of rates, with the rates and whether it holds."""

    left: str
    relation: str
    right: str
    left_rho: float
    right_rho: float
    holds: bool


# rho_NCE < rho_SSM = rho_SM = rho_HSM < rho_entmax <= rho_sparsemax, the display at the end of section 3.2
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
    """The paper's ordering of rates with the worst-case curvatures that the facts state.

    Two links fail: NCE's curvature is 1/4 only if no class is drawn twice, and up to (k + 1)/4 otherwise; a tree of
    sigmoids has 1/4, not softmax's 1/2. The others hold for these suprema, not at given scores: at (1, 0)
    sparsemax has curvature 0 and softmax 0.393.

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
