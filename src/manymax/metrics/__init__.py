"""Metrics of probabilities, also of those that are 0, and of the top of a ranking.

All functions take tensors and need no gradients. A row without a positive has no value: it is nan where a function
returns one value per row, and left out of means and sums. docs/metrics.md has examples.
"""

from manymax.metrics.probabilities import (
    ProbabilityStats,
    eps_perplexity,
    linear_probability_stats,
    probability_stats,
    sparsemax_score,
    target_probability,
)
from manymax.metrics.ranking import PropensityGains, mrr, precision_at_k, propensities, psp_at_k, psp_gains_at_k

__all__ = [
    "ProbabilityStats",
    "PropensityGains",
    "eps_perplexity",
    "linear_probability_stats",
    "mrr",
    "precision_at_k",
    "probability_stats",
    "propensities",
    "psp_at_k",
    "psp_gains_at_k",
    "sparsemax_score",
    "target_probability",
]
