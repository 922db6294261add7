"""Measurements behind the claims: each function re-runs one statement and says what it found.

All of them are deterministic, need few classes and take at most a few seconds; together they are `manymax theory`.
"""

from manymax.paper.evidence import bias, cost, curvature, order
from manymax.paper.evidence.finding import Check, Finding, denied

__all__ = ["Check", "Finding", "bias", "cost", "curvature", "denied", "order"]
