"""What an approximation of the baseline loss states of itself: bias and variance on given scores, for every label.

Definitions of bias, variance and offset are in `manymax.theory.bias_variance`, which reads the arguments, takes means
over labels and draws. A member states the rest by these records, in `Theory.approximation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 0.1  # the expected relative error beyond which a prediction is out of range


@dataclass(frozen=True)
class ApproximationInput:
    """Arguments that have been read, a block of rows.

    scores, log_probs, probs, log_q: (N, C). labels: (N, L) classes; shares: (N, L) their weights in the mean;
    label_log_q: (N, L) the mean of log q over the classes that a label stands for.
    tree_log_probs: (N, C), of an approximation by a tree; None of others.
    settings: the approximation's own, all of them.
    """

    scores: Tensor
    log_probs: Tensor
    probs: Tensor
    log_q: Tensor
    labels: Tensor
    shares: Tensor
    label_log_q: Tensor
    tree_log_probs: Tensor | None
    num_negatives: int
    settings: Mapping[str, Any]

    @property
    def weights(self) -> Tensor:
        """P / q, (N, C); 0 for a masked class, which may have q = 0."""
        return torch.where(self.log_probs > -torch.inf, (self.log_probs - self.log_q).exp(), 0)

    def at_labels(self, values: Tensor) -> Tensor:
        """values (N, C) at the labels, (N, L)."""
        return values.gather(-1, self.labels)

    def sample(self, ids: Tensor) -> dict[str, Any]:
        """What a sampled loss is told of the negatives `ids` (D, k) and of the one label of each row.

        Scores and log q of the positive are (N, D), those of the negatives (N, D, k), `hits` is (N, D, k).
        """
        positive, log_q_positive = (self.at_labels(table).expand(-1, len(ids)) for table in (self.scores, self.log_q))
        return {
            "positive": positive,
            "negative": self.scores[:, ids],
            "log_q_positive": log_q_positive,
            "log_q_negative": self.log_q[:, ids],
            "hits": ids == self.labels.unsqueeze(-1),
        }


@dataclass(frozen=True)
class Parts:
    """Bias and variance for each label, (N, L); numbers where all labels have the same.

    asymptotic, curvature, variance: as predicted. exact_bias, exact_variance: what they truly are.
    in_range: where the predictions hold to about a tenth. offset: what no gradient sees.
    """

    asymptotic: Tensor
    exact_bias: Tensor
    in_range: Tensor
    curvature: Tensor | float = 0.0
    variance: Tensor | float = 0.0
    exact_variance: Tensor | float = 0.0
    offset: Tensor | float = 0.0

    @staticmethod
    def exact(bias: Tensor) -> Parts:
        """Of an approximation that draws nothing and whose bias (N, L) is known: nothing is predicted."""
        return Parts(bias, bias, torch.ones_like(bias, dtype=torch.bool))


@dataclass(frozen=True)
class DrawTheory:
    """How an approximation that draws negatives is followed from one k to the next, and drawn.

    prepare: (case, largest k) to what serves every k up to that.
    exact: (case, what was prepared) to exact bias and variance, (N, L) or (N, 1) each.
    deviations: (case with one label a row, ids (D, k)) to loss minus baseline loss and offset on these draws, (N, D).
    """

    prepare: Callable[[ApproximationInput, int], Any]
    exact: Callable[[ApproximationInput, Any], tuple[Tensor, Tensor]]
    deviations: Callable[[ApproximationInput, Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """One choice of an approximation's settings that is worth showing.

    settings: the choice.
    trained: whether a loss can be trained with it; otherwise it is an estimate to analyse.
    masked: whether it is defined where a proposal draws masked classes.
    uniform: whether it differs from the other variants under a uniform proposal.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True
    masked: bool = True
    uniform: bool = True
