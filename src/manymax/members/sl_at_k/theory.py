"""The scores that minimise the risk of SL@K, where they are known: at K = 1.

A class far below the K-th largest score b has the gate e^((s - b) / tau) and a softmax loss near b - s: their product
goes to 0, so that a class that is given up costs nothing, however probable it is. At K = 1 a single class that is far
above all others has no loss, whichever it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.member import Theory

# Stands for a score of minus infinity, in units of the gate's temperature: exp(-300) times it is 0 beside any loss.
GIVEN_UP = -300.0


def _minimisers(probs: Tensor, _: Tensor | None, k: int = 20, gate_temperature: float = 10.0) -> Tensor | None:
    """(C, C) at K = 1, each class alone at the top; None for other K."""
    # The softmax loss of the class at the top must be 0 as well, at a small temperature of the gate too.
    below = GIVEN_UP * max(gate_temperature, 1.0)
    return below * (1 - torch.eye(len(probs), dtype=probs.dtype)) if k == 1 else None


THEORY = Theory(minimisers=_minimisers)
