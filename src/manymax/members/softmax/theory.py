"""Closed forms of softmax: those of entmax at alpha = 1; and what it is as an approximation of itself, exact."""

from __future__ import annotations

from dataclasses import replace

import torch

from manymax.engine.approximation import ApproximationInput, Parts
from manymax.engine.member import Approximation
from manymax.members.entmax.theory import closed_forms
from manymax.members.softmax.loss import softmax


def _nothing_lost(case: ApproximationInput) -> Parts:
    return Parts.exact(torch.zeros_like(case.shares))


THEORY = replace(closed_forms(softmax, alpha=1.0), approximation=Approximation(_nothing_lost))
