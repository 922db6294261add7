"""Closed forms of softmax, which are those of entmax at alpha = 1, and its error against itself as the baseline: 0."""

from __future__ import annotations

from dataclasses import replace

import torch

from manymax.engine.approximation import ApproximationInput, Parts
from manymax.engine.member import Approximation
from manymax.members.entmax.theory import closed_forms
from manymax.members.softmax.loss import softmax


def _no_error(case: ApproximationInput) -> Parts:
    """Bias and variance 0 for every label: softmax is the loss that approximations are measured against."""
    return Parts.exact(torch.zeros_like(case.shares))


THEORY = replace(closed_forms(softmax, alpha=1.0), approximation=Approximation(_no_error))
