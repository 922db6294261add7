"""Hierarchical softmax compared with softmax: the minimiser of its expected loss, and its bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from manymax.engine.approximation import ApproximationInput, Parts
from manymax.engine.member import Approximation, Theory


def _minimisers(probs: Tensor, _: Tensor | None, **settings: Any) -> Tensor:
    """log p, (1, C): with a free score at every node the tree can represent any p, and classes are ranked by log P."""
    return probs.log().unsqueeze(0)


def _parts(case: ApproximationInput) -> Parts:
    """Bias log P(y) - log P_tree(y) of every label y; its mean over y ~ P is KL(P || P_tree). The variance is 0."""
    assert case.tree_log_probs is not None
    return Parts.exact(case.at_labels(case.log_probs - case.tree_log_probs))


THEORY = Theory(minimisers=_minimisers, approximation=Approximation(_parts, needs_tree=True))
