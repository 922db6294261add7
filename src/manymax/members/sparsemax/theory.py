"""Closed forms of sparsemax: those of entmax at alpha = 2."""

from __future__ import annotations

from manymax.members.entmax.theory import closed_forms
from manymax.members.sparsemax.loss import sparsemax

THEORY = closed_forms(sparsemax, alpha=2.0)
