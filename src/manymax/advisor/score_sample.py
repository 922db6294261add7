"""The sample of scores from which deviations are predicted: that of the caller's model, or assumed scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from manymax.advisor.proposals import LEAST_ROWS, POPULARITY_SCORES, Proposal, popularity, proposals
from manymax.advisor.situation import Situation
from manymax.errors import ArgumentError, ArgumentTypeError

SAMPLE_SIZE = 1 << 22  # scores in an assumed sample, at most; more classes than that are represented by a part of them
SAMPLE_ROWS = 32  # rows in an assumed sample, at most
GIVEN_SCORES = 1 << 18  # scores of the caller that are looked at, or `SAMPLE_ROWS` rows; more would take minutes
# The standard deviation of assumed scores, and the share of their variance that has an exponential distribution. At
# C = 3706 these two give chi2(P || uniform) = 16 and an error of the quadratic member of 0.4, about the values that
# matrix factorisation trained with softmax has on MovieLens-1M.
ASSUMED_SPREAD, SKEWED_SHARE = 1.2, 0.4
# What assumed scores are multiplied by before the supports of sparse maps are counted. A model that is trained with a
# sparse loss has much smaller scores, because a lead of 1 makes a class certain: in a factorisation of Gowalla trained
# with such a loss the largest score is .46, and of 40,981 classes 20 and 1,808 are in the supports of the two sparse
# maps that need no label. Assumed scores of this scale reach .4, with supports of 27 and 1,400.
SPARSE_SCALE = 0.05
LARGEST_SCORE = 1e6  # up to this size every prediction is a finite number


@dataclass(frozen=True)
class ScoreSample:
    """A sample of scores to predict deviations from.

    scores: (R, C).
    labels: (R,), drawn from softmax(scores).
    proposals: {name of a sampler, or "given": how it draws}.
    sparse_scale: what the scores are multiplied by to count the support of a sparse map; 1 for those of a model.
    """

    scores: Tensor
    labels: Tensor
    proposals: dict[str, Proposal]
    sparse_scale: float = 1.0


def read_sample(
    situation: Situation, scores: Tensor | None, spread: float, log_q: Tensor | None
) -> tuple[ScoreSample, list[str]]:
    """The sample that predictions are made from.

    Args:
        situation: gives the number of classes.
        scores: (R, C) of the caller's model; None for assumed ones.
        spread: standard deviation of assumed scores.
        log_q: (C,) a proposal of the caller's, not necessarily normalised; None if there is none.

    Returns:
        The sample, and one sentence for each assumption that was made.
    """
    generator = torch.Generator().manual_seed(0)  # the same question gets the same answer
    if log_q is not None:
        log_q = _checked("log_q", log_q, (situation.num_classes,)).double().log_softmax(0)
    assumed, sparse_scale, by_popularity = [], 1.0, None
    if scores is None:
        sparse_scale = SPARSE_SCALE
        scores, by_popularity = _assumed(min(situation.num_classes, SAMPLE_SIZE), spread, generator)
        assumed.append(
            f"scores with a standard deviation of {spread:g}, skewed like popularity, and {sparse_scale * spread:g} for"
            " the supports of sparse losses, which train smaller scores; pass `scores` of your model"
        )
        if log_q is not None and scores.shape[1] < situation.num_classes:
            # fewer classes are sampled than there are: the proposal is restricted to as many, chosen at random
            log_q = log_q[torch.randperm(len(log_q), generator=generator)[: scores.shape[1]]].log_softmax(0)
    else:
        scores = _checked("scores", scores, (None, situation.num_classes)).float()
        classes = situation.num_classes
        rows = max(1, min(SAMPLE_ROWS, SAMPLE_SIZE // classes), GIVEN_SCORES // classes)
        others = scores[:0]
        if len(scores) > rows:
            assumed.append(f"{rows:,} of the {len(scores):,} rows of `scores`, drawn at random, stand for all of them")
            order = torch.randperm(len(scores), generator=generator)
            others = scores[order[rows : rows + max(LEAST_ROWS, POPULARITY_SCORES // classes)]]
            scores = scores[order[:rows]]
        if (by_popularity := popularity(others)) is None:
            assumed.append("too few rows of `scores` to tell how popular classes are: no draws by popularity")
    # The Gumbel trick: the arg max of s - log(Exponential(1)) is a draw from softmax(s), without a (R, C) cumsum.
    labels = (scores - torch.empty_like(scores).exponential_(generator=generator).log()).argmax(1)
    return ScoreSample(scores, labels, dict(proposals(scores.shape[1], by_popularity, log_q)), sparse_scale), assumed


def assumed_scores(num_classes: int, spread: float, generator: torch.Generator | None = None) -> Tensor:
    """Random scores that resemble those of a trained recommender, with a standard deviation of `spread`.

    Each score is the sum of a Gaussian part, the taste of a row, and a centred exponential part, the popularity of a
    class, which is the same in all rows: the logarithm of popularity falls like the logarithm of the popularity rank,
    which is exponential. Gaussian scores alone would flatter the quadratic member, whose error is of third order.

    Args:
        num_classes: C.
        spread: the standard deviation.
        generator: of the random numbers; torch's default if None.

    Returns:
        (R, C), with at most `SAMPLE_ROWS` rows and about `SAMPLE_SIZE` scores.
    """
    return _assumed(num_classes, spread, generator)[0]


def _assumed(num_classes: int, spread: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Assumed scores (R, C), and the log-probabilities (C,) of classes as positives, which taste changes alike."""
    if not 0 <= spread < math.inf:
        raise ArgumentError(f"`spread` must be a finite number of at least 0; got {spread!r}.")
    shape = max(1, min(SAMPLE_ROWS, SAMPLE_SIZE // num_classes)), num_classes
    taste = torch.randn(shape, generator=generator)
    # Quantiles and no draws: a few very popular classes decide what draws cost, and are not to be left to chance.
    quantiles = -((torch.arange(num_classes, dtype=torch.float64) + 0.5) / num_classes).log()
    skewed = (spread * math.sqrt(SKEWED_SHARE) * (quantiles - 1)).float()
    return spread * math.sqrt(1 - SKEWED_SHARE) * taste + skewed, skewed.double().log_softmax(0)


def _checked(name: str, value: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    """The tensor, detached; an error unless it is a float tensor of that shape (None: any size) without huge values."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentTypeError(f"`{name}` must be a float tensor; got {kind}.")
    fits = value.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
    if not fits or not value.numel():
        expected = ", ".join("rows" if want is None else str(want) for want in shape)
        raise ArgumentError(f"`{name}` must have shape ({expected}); got {tuple(value.shape)}.")
    if not (value.abs() <= LARGEST_SCORE).all():  # nan compares as False, so it is refused too
        raise ArgumentError(
            f"`{name}` must be numbers between -{LARGEST_SCORE:g} and {LARGEST_SCORE:g}, without nan; got others."
        )
    return value.detach()
