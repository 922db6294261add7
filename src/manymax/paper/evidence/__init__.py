"""Checks behind the paper's claims: each function measures one statement again and says what it found.

The first line of a function's docstring is what it checks. All of them are deterministic, need few classes and take at
most a few seconds. `manymax theory` runs them all.
"""

from manymax.paper.evidence import bias, cost, curvature, order_preservation
from manymax.paper.evidence.check_result import Check, CheckResult, denied

__all__ = ["Check", "CheckResult", "bias", "cost", "curvature", "denied", "order_preservation"]
