"""Measurements behind the claims: each function re-runs one statement and says what it found.

All of them are deterministic, need few classes and take at most a few seconds; together they are `manymax theory`.
"""

from manymax.paper.evidence import bias, cost, curvature, order_preservation
from manymax.paper.evidence.check_result import Check, CheckResult, denied

__all__ = ["Check", "CheckResult", "bias", "cost", "curvature", "denied", "order_preservation"]
