"""How a member states its bias and variance as an approximation of the baseline loss, on given scores, per label.

`manymax.theory.bias_variance` defines bias, variance and offset, reads the arguments, and takes means over labels and
draws. What differs between members is stated by these classes, in `Theory.approximation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Predictions are the first terms of an expansion. They count as in range while their relative error, known or expected,
# is at most this.
TOLERANCE = 0.1


@dataclass(frozen=True)
class ApproximationInput:
    """What an approximation is analysed on: a block of rows of scores with labels, read and checked.

    scores, log_probs, probs, log_q: (N, C), where probs is the softmax of the scores and q the proposal.
    labels: (N, L) classes. Where there are many classes, one label stands for several that are alike.
    shares: (N, L) the weights of the labels in a mean over classes.
    label_log_q: (N, L) the mean of log q over the classes that a label stands for.
    tree_log_probs: (N, C) of an approximation by a tree; None for others.
    num_negatives: k.
    settings: of the approximation, all of them.
    """

    scores: Tensor
    log_probs: Tensor  # kept beside probs: a probability that underflows still has a logarithm
    probs: Tensor
    log_q: Tensor
    labels: Tensor
    shares: Tensor
    label_log_q: Tensor
    tree_log_probs: Tensor | None
    num_negatives: int
    settings: Mapping[str, Any]  # defaults filled in, so that formulas need not know them

    @property
    def weights(self) -> Tensor:
        """The importance weights P / q, (N, C); 0 for a masked class, which may have q = 0."""
        # As a difference of logarithms, because P and q alone may underflow.
        return torch.where(self.log_probs > -torch.inf, (self.log_probs - self.log_q).exp(), 0)

    def at_labels(self, values: Tensor) -> Tensor:
        """The values (N, C) at the labels, (N, L)."""
        return values.gather(-1, self.labels)

    def sample(self, ids: Tensor) -> dict[str, Any]:
        """The arguments of a sampled loss for D draws of k negatives, `ids` (D, k), and one label per row.

        Scores and log q of the positives are (N, D), those of the negatives (N, D, k), and `hits` is (N, D, k).
        """
        # The same draws for every row: that is all right for means over draws, and (D, k) ids are enough.
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
    """Bias and variance for each label, (N, L) each; numbers where all labels have the same.

    asymptotic, curvature: the two parts of the predicted bias. The loss is log S of an estimate S that depends on the
        draws: the first part is log E[S], the second comes from the curvature of the logarithm.
    variance: the predicted variance.
    exact_bias, exact_variance: what bias and variance truly are.
    in_range: (N, L) bool, where the predictions are expected to be right to about a tenth (`TOLERANCE`).
    offset: the part of the difference from the baseline loss that does not depend on the scores, and so on which no
        gradient depends; it is not in the bias.
    """

    asymptotic: Tensor
    exact_bias: Tensor
    in_range: Tensor
    # Numbers where nothing depends on the label, or where there is nothing: 0 of an approximation that draws nothing.
    curvature: Tensor | float = 0.0
    variance: Tensor | float = 0.0
    exact_variance: Tensor | float = 0.0
    offset: Tensor | float = 0.0

    @staticmethod
    def exact(bias: Tensor) -> Parts:
        """The parts of an approximation that draws nothing and whose bias (N, L) is known: there is no variance."""
        # The known bias is its own prediction, and in range everywhere.
        return Parts(bias, bias, torch.ones_like(bias, dtype=torch.bool))


@dataclass(frozen=True)
class DrawTheory:
    """How an approximation that draws negatives is analysed: exactly for one k after the other, and by drawing.

    prepare: from (case, largest k) to whatever `exact` needs for every k up to that, so that it is computed once.
    exact: from (case, what was prepared) to the exact bias and variance, (N, L) or (N, 1) each.
    deviations: from (case with one label per row, ids (D, k)) to loss - baseline loss - offset on these draws, (N, D).
    """

    prepare: Callable[[ApproximationInput, int], Any]
    exact: Callable[[ApproximationInput, Any], tuple[Tensor, Tensor]]
    deviations: Callable[[ApproximationInput, Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """One choice of an approximation's settings that a diagnosis shows.

    settings: the choice.
    trained: whether a loss can be trained with it; otherwise it is an estimate that can only be analysed.
    masked: whether it is defined where a proposal draws masked classes.
    uniform: whether it differs from the other variants under a uniform proposal, and is worth a row of its own there.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = True
    masked: bool = True
    uniform: bool = True


@dataclass(frozen=True)
class GradientCase:
    """One row on which the gradient of a sampled loss is compared with that of the softmax loss, P - e_y.

    scores, log_q: (C,) float64. label: y. num_negatives: k.
    """

    scores: Tensor
    log_q: Tensor
    label: int
    num_negatives: int

    @property
    def probs(self) -> Tensor:
        """P, the softmax of the scores, (C,)."""
        return self.scores.softmax(-1)

    @property
    def exact(self) -> Tensor:
        """P - e_y, (C,)."""
        gradient = self.probs
        gradient[self.label] -= 1
        return gradient


@dataclass(frozen=True)
class RatioOfSums:
    """A gradient for the Delta method: at j != y the draws of j over (a + all draws), at y minus the sum of these.

    first: a, the weight of the positive.
    weights: (C,) what a draw of a class adds.
    q: (C,) the distribution of a draw.
    draws: their number, or its mean.
    gamma: share of a step in the sum below the line, which is a moving average; 1 for the step's own sum.
    drift: by how much the score of the positive rises from step to step, beside all others. Relative to the positive,
        the sums of earlier steps were larger by exp(drift) for each step.
    """

    first: float
    weights: Tensor
    q: Tensor
    draws: float
    gamma: float = 1.0
    drift: float = 0.0

    def past(self, steps: int) -> Tensor:
        """(steps,) what a draw of each step counts below the line: its share in the average, grown; the last first."""
        back = torch.arange(steps, dtype=torch.float64)
        shares = self.gamma * (1 - self.gamma) ** back
        shares[-1] /= self.gamma  # an average begins as the first sum
        return shares * (self.drift * back).exp()


@dataclass(frozen=True)
class GradientEstimator:
    """A sampled estimate of the gradient of the softmax loss in the scores, as one row of a table.

    name: in the table.
    gradients: from a case and what was drawn, ids (D, steps, k), to D estimates (D, C).
    ratio: from a case to the form in which the Delta method predicts it.
    mixture: from a case to ratios of which it is one, with the chance of each, where the number of draws in the ratio
        is random; None where it is always `ratio`. What the chances leave to 1 is a gradient of 0.
    steps: how many steps of k draws one estimate is made from: all but the last one feed an average.
    """

    name: str
    gradients: Callable[[GradientCase, Tensor], Tensor]
    ratio: Callable[[GradientCase], RatioOfSums]
    mixture: Callable[[GradientCase], list[tuple[float, RatioOfSums]]] | None = None
    steps: int = 1
