"""Sampled softmax: cross entropy over the positive and k sampled negatives.

With logits c for the positive and the negatives,

    loss      l = log(exp(c_y) + sum_j exp(c_j)) - c_y
    gradient  softmax(c) on the sampled scores, minus 1 on the positive

    correction   c_y              c_j                     population minimiser
    "none"       s_y              s_j                     log(p / q), every k (hits kept)
    "logq"       s_y - log q_y    s_j - log q_j           log p exactly, every k (hits kept)
    "partition"  s_y              s_j - log(k q_j)        log p as k grows; hits masked, k counts the drawn

"logq" is what the paper prints; under a uniform proposal it equals "none". "partition" estimates the
full loss: its partition function is unbiased, and its logarithm is too small by about
v / (2 k), which `debias` can take back. None of the gradients is unbiased, whatever the paper says:
all of them are ratios of averages.

References: Jean et al., ACL 2015; Bengio and Senecal 2008; consistency of "logq" for every k:
Ma and Collins, EMNLP 2018; jackknife: Quenouille 1956.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from manymax.engine.member import Fact, Facts, Formulas, Setting
from manymax.engine.ranks import Ranks
from manymax.engine.sampled_scores import HIT_POLICIES, DrawnKernel, SampledScores, read_sample
from manymax.errors import ArgumentError, check_choice
from manymax.ops.checks import visible
from manymax.ops.divergences import chi_square
from manymax.ops.reduction import REDUCTIONS, reduce

CORRECTIONS = ("none", "logq", "partition")
DEBIAS = (None, "delta", "jackknife")


def _logits(sample: SampledScores, correction: str) -> tuple[Tensor, Tensor]:
    """(c_y (...), c_j (..., K)) up to a constant; masked negatives are at -inf."""
    positive, negative, ranks = sample.positive, sample.negative, sample.ranks
    # an offset of the scores goes first: it would cost the digits of log q
    offset = torch.maximum(positive, negative.amax(-1)) if ranks.alone else positive
    offset = offset.detach()
    positive, negative = positive - offset, negative - offset.unsqueeze(-1)
    if correction == "logq":
        positive, negative = positive - sample.log_q_positive, negative - sample.log_q_negative
    elif correction == "partition":
        negative = negative - sample.log_q_negative - math.log(sample.num_negatives)
    return positive, negative


def _log_sum(positive: Tensor, negative: Tensor, ranks: Ranks) -> Tensor:
    """log(exp(c_y) + sum_j exp(c_j)) over all ranks, (...)."""
    if ranks.alone:
        return torch.cat([positive.unsqueeze(-1), negative], -1).logsumexp(-1)
    top = ranks.maximum(torch.maximum(positive.detach(), negative.detach().amax(-1)))
    if visible(top) and not top.isfinite().all():
        raise ArgumentError(
            f"`negative` must hold finite scores, or -inf to mask one; got {top[~top.isfinite()][0].item()}."
        )
    total = ranks.total((negative - top.unsqueeze(-1)).exp().sum(-1))
    return ((positive - top).exp() + total).log() + top


def _delta(positive: Tensor, negative: Tensor, sample: SampledScores) -> Tensor:
    """Var(X) / (2 k Z^2), the curvature bias estimated from the k terms X_j / Z = k softmax(c)_j."""
    k, ranks = sample.num_negatives, sample.ranks
    log_sum = _log_sum(positive, negative, ranks)
    ratios = k * (negative - ranks.spread(log_sum).unsqueeze(-1)).exp()
    mean = ranks.total(ratios.sum(-1)) / k
    difference = _of_own(ratios - ranks.spread(mean).unsqueeze(-1), sample)
    return ranks.total(difference.square().sum(-1)) / (k - 1) / (2 * k)


def _jackknife(positive: Tensor, negative: Tensor, sample: SampledScores) -> Tensor:
    """(k - 1) / k sum_j (log Z - log Z without j): what the jackknife adds to log Z.

    The sum without j is the sum of all minus term j, at least half of it, unless j is the largest:
    subtracting a dominant term would leave nothing, so that sum is taken anew.
    """
    k, ranks = sample.num_negatives, sample.ranks
    without = negative + math.log(k / (k - 1))  # weight 1 / (k - 1) each
    largest = _largest(negative, ranks)
    full, everything = _log_sum(positive, negative, ranks), _log_sum(positive, without, ranks)
    others = _log_sum(positive, torch.where(largest, -torch.inf, without), ranks)
    everything_here = ranks.spread(everything).unsqueeze(-1)
    shares = torch.where(largest, 0, (without - everything_here).exp())
    left = torch.where(largest, ranks.spread(others).unsqueeze(-1), everything_here + torch.log1p(-shares))
    differences = _of_own(ranks.spread(full).unsqueeze(-1) - left, sample)
    return (k - 1) / k * ranks.total(differences.sum(-1))


def _largest(negative: Tensor, ranks: Ranks) -> Tensor:
    """(..., K) where the largest negative of a row stands: one place, on one rank alone."""
    best, column = negative.detach().max(-1, keepdim=True)
    largest = torch.arange(negative.shape[-1], device=negative.device) == column
    if ranks.alone:
        return largest
    # among equals the first rank has it
    owner = -ranks.maximum(torch.where(best == ranks.maximum(best), -float(ranks.rank), -float(ranks.size)))
    return largest & (owner == ranks.rank)


def _of_own(values: Tensor, sample: SampledScores) -> Tensor:
    """The values of the negatives that this rank holds, 0 for what only fills up its rows."""
    return values if sample.own is None else torch.where(sample.own, values, 0)


def sampled_softmax_kernel(
    correction: str = "logq", hit_policy: str | None = None, debias: str | None = None
) -> DrawnKernel:
    """The kernel of sampled softmax: log(exp(c_y) + sum_j exp(c_j)) - c_y.

    Every positive draws its own negatives. Where the sampler knows no log q (dns) a uniform one stands in, which
    cancels for `correction="logq"`.

    Example:
        >>> import torch, manymax
        >>> sampler = manymax.samplers.UniformSampler(1000)
        >>> input, vectors = torch.zeros(4, 8), torch.zeros(1000, 8)
        >>> manymax.linear_sampled_softmax_loss(input, vectors, torch.arange(4), sampler, 9)
        tensor(2.3026)
    """

    def rows(sample: SampledScores) -> Tensor:
        positive, negative = _logits(sample, correction)
        if sample.ranks.alone:
            losses = -log_softmax(torch.cat([positive.unsqueeze(-1), negative], -1), -1)[..., 0]
        else:
            losses = _log_sum(positive, negative, sample.ranks) - positive
        if debias is None:
            return losses
        added = _delta if debias == "delta" else _jackknife
        return losses + added(positive.double(), negative.double(), sample).to(losses.dtype)  # differences of sums

    policy = hit_policy or ("mask" if correction == "partition" else "keep")
    needs_log_q = "correction='partition'" if correction == "partition" else None
    return DrawnKernel(rows, masks_hits=policy == "mask", needs_log_q=needs_log_q)


def check_settings(correction: str, hit_policy: str | None, debias: str | None, num_negatives: int | None) -> None:
    """Raise where settings do not go together, whatever the scores are."""
    _check_debias(debias, correction)
    if debias is not None and num_negatives is not None and num_negatives < 2:
        raise ArgumentError(f"`num_negatives` must be at least 2 for `debias={debias!r}`; got {num_negatives}.")


def sampled_softmax_loss(
    positive: Tensor,
    negative: Tensor,
    *,
    log_q_positive: Tensor | float | None = None,
    log_q_negative: Tensor | float | None = None,
    hits: Tensor | None = None,
    correction: str = "logq",
    hit_policy: str | None = None,
    debias: str | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy over a positive and k sampled negatives, from their scores alone.

    Args:
        positive: (...) score of the positive; one row per positive.
        negative: (..., k) scores of the negatives, or (k,) if all rows share them.
        log_q_positive: (...) log-probability with which the proposal draws the positive.
        log_q_negative: (..., k) or (k,), likewise for the negatives. A number serves a uniform proposal.
        hits: (..., k) bool, True where a negative is the positive.
        correction: "logq" (needs both log q), "partition" (needs that of the negatives) or "none".
        hit_policy: "keep" or "mask" accidental hits. None means "mask" for "partition" and "keep" otherwise:
            there the minimiser is exact only if hits are kept.
        debias: None, "delta" (adds the estimated curvature bias) or "jackknife", for "partition" only.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> positive, negative = torch.tensor([2.0]), torch.tensor([[1.0, -1.0]])
        >>> manymax.sampled_softmax_loss(positive, negative, correction="none")
        tensor(0.3490)
        >>> log_q = torch.tensor([0.1, 0.7]).log()
        >>> manymax.sampled_softmax_loss(positive, negative, log_q_positive=-1.0, log_q_negative=log_q)
        tensor(0.8669)
    """
    check_choice("correction", correction, CORRECTIONS)
    check_choice("reduction", reduction, REDUCTIONS)
    _check_debias(debias, correction)
    if correction == "logq" and (log_q_positive is None or log_q_negative is None):
        raise ArgumentError(
            "`correction='logq'` needs `log_q_positive` and `log_q_negative`; pass -log(C) for a uniform proposal, or"
            " `correction='none'`."
        )
    if correction == "partition" and log_q_negative is None:
        raise ArgumentError("`correction='partition'` needs `log_q_negative`; pass -log(C) for a uniform proposal.")
    policy = ("mask" if correction == "partition" else "keep") if hit_policy is None else hit_policy
    sample, dtype = read_sample(positive, negative, log_q_positive, log_q_negative, hits, policy)
    if debias is not None and sample.num_negatives < 2:
        raise ArgumentError(f"`negative` must hold at least 2 negatives for `debias={debias!r}`; got 1.")
    rows = sampled_softmax_kernel(correction, hit_policy, debias).rows(sample)
    return reduce(rows, torch.ones_like(rows), reduction).to(dtype)


def _check_debias(debias: str | None, correction: str) -> None:
    if debias is None:
        return
    check_choice("debias", debias, [d for d in DEBIAS if d])
    if correction != "partition":
        raise ArgumentError(
            f"`debias` is for `correction='partition'`, the one that estimates the full loss; got {correction!r}."
        )


class SampledSoftmaxLoss(nn.Module):
    """Module form of `sampled_softmax_loss`."""

    def __init__(
        self,
        *,
        correction: str = "logq",
        hit_policy: str | None = None,
        debias: str | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_choice("correction", correction, CORRECTIONS)
        check_choice("reduction", reduction, REDUCTIONS)
        _check_debias(debias, correction)
        if hit_policy is not None:
            check_choice("hit_policy", hit_policy, HIT_POLICIES)
        self.correction, self.hit_policy, self.debias, self.reduction = correction, hit_policy, debias, reduction

    def forward(self, positive: Tensor, negative: Tensor, **sample: Any) -> Tensor:
        """The loss of the scores; `log_q_positive`, `log_q_negative` and `hits` as keyword arguments."""
        return sampled_softmax_loss(
            positive,
            negative,
            correction=self.correction,
            hit_policy=self.hit_policy,
            debias=self.debias,
            reduction=self.reduction,
            **sample,
        )


FORMULAS = Formulas(
    map=None,
    loss="log(exp(c_y) + sum_j exp(c_j)) - c_y, c = s - log q",
    gradient="softmax(c) on the sample, minus 1 on the positive",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(
        False,
        "a ratio estimate: its gradient is not softmax(s) - e_y in expectation",
        "derived",
        "contradicted",
        printed="an unbiased estimator of the full softmax gradient",
    ),
    convex=Fact(True, "a softmax loss on the sampled scores", "section B.4", "confirmed"),
    calibrated=Fact(
        True,
        'the minimiser is log p + c exactly for every k with "logq" and hits kept; "partition" has its order if q'
        ' is uniform, else only as k grows; "none" gives log(p / q)',
        "derived",
        "contradicted",
        printed="asymptotic",
    ),
    shift_invariant=Fact(True, "a constant added to all scores changes nothing", "derived", "derived"),
    smoothness=Fact(
        0.5,
        "softmax on the sample; duplicates merge",
        "section B.4",
        "confirmed",
        fn=lambda num_classes: 0.5 if num_classes > 1 else 0.0,
    ),
    cost=Fact(
        "constant",
        "batch x (k + 1), whatever the number of classes",
        "Table 4",
        "confirmed",
        fn=lambda batch, num_classes, num_negatives=100: float(batch * (num_negatives + 1)),
    ),
    bias=Fact(
        None,
        '"partition": -v/(2k) with v = sum_{j != y} P_j^2/q_j - (1 - P_y)^2; "logq" minus log((k+1) q_y):'
        ' +chi2/(2k) on average over y ~ P; "none" is log(C sum_j q_j P_j) off as k grows',
        "Table 3 has the estimate without the positive",
        "contradicted",
        printed="0 asymptotically, -chi2/(2k) by curvature",
        fn=lambda probs, q, num_negatives: float(chi_square(probs, q)) / (2 * num_negatives),
    ),
    variance=Fact(
        None,
        'chi2/k to leading order ("partition": v/k; "none": Var_q(P_j) / E_q[P_j]^2 / k)',
        "Table 3",
        "confirmed",
        fn=lambda probs, q, num_negatives: float(chi_square(probs, q)) / num_negatives,
    ),
)

SETTINGS = (
    Setting("correction", str, "logq", "How sampled softmax uses log q.", choices=CORRECTIONS),
    Setting("hit_policy", str, None, "Negatives that hit the positive.", choices=HIT_POLICIES),
    Setting("debias", str, None, "Takes the 1/k bias out of log Z.", choices=("delta", "jackknife")),
)
