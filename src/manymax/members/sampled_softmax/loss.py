"""Sampled softmax: cross entropy over the positive and k negatives that are drawn from a proposal q.

With logits c for the positive y and the negatives j,

    loss      l = log(exp(c_y) + sum_j exp(c_j)) - c_y
    gradient  softmax(c) on the sampled scores, minus 1 on the positive

    correction   c_y              c_j                     minimiser of the expected loss
    "none"       s_y              s_j                     log(p / q), for every k, if hits are kept
    "logq"       s_y - log q_y    s_j - log q_j           log p exactly, for every k, if hits are kept
    "partition"  s_y              s_j - log(k q_j)        log p as k grows, if hits are masked; k counts them too

A hit is a negative that equals the positive. "logq" is the loss that the paper prints; under a uniform proposal it
equals "none". "partition" estimates the loss over all classes: its estimate of the partition function Z is unbiased,
and the logarithm of the estimate is too small by about v / (2 k), which `debias` can correct. No correction makes the
gradient unbiased, although the paper says so: every one is a ratio of averages.

Citations: Jean et al., ACL 2015; Bengio and Senecal 2008; consistency of "logq" for every k: Ma and Collins, EMNLP
2018; jackknife: Quenouille 1956.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from manymax.engine.member import Fact, Facts, Formulas, Setting
from manymax.engine.ranks import Ranks
from manymax.engine.sampled_scores import HIT_POLICIES, DrawnKernel, SampledScores, read_sample
from manymax.errors import ArgumentError, check_choice
from manymax.members.sampled_softmax.kernel import block_gradient
from manymax.ops.checks import visible
from manymax.ops.divergences import chi_square
from manymax.ops.reduction import REDUCTIONS, reduce

CORRECTIONS = ("none", "logq", "partition")
DEBIAS = (None, "delta", "jackknife")


def _logits(sample: SampledScores, correction: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits c_y (...) of positives and c_j (..., K) of negatives (-inf if masked), less an offset (...) of the row."""
    positive, negative, ranks = sample.positive, sample.negative, sample.ranks
    # The loss depends on differences of scores only. A common offset goes first: float32 numbers near 1000 are 6e-5
    # apart, and adding log q to such a score would round it to that. The offset needs no gradient. The largest score
    # would take an exchange on several ranks; the positive's, which every rank knows, serves as well.
    offset = torch.maximum(positive, negative.amax(-1)) if ranks.alone else positive
    offset = offset.detach()
    positive, negative = positive - offset, negative - offset.unsqueeze(-1)
    if correction == "logq":
        positive, negative = positive - sample.log_q_positive, negative - sample.log_q_negative
    elif correction == "partition":
        negative = negative - sample.log_q_negative - math.log(sample.num_negatives)
    return positive, negative, offset


def _log_sum(positive: Tensor, negative: Tensor, ranks: Ranks, with_positive: bool = True) -> Tensor:
    """log(exp(c_y) + sum_j exp(c_j)) over the negatives of all ranks, (...), a shared value; c_y may be left out."""
    if ranks.alone:
        every = torch.cat([positive.unsqueeze(-1), negative], -1) if with_positive else negative
        return every.logsumexp(-1)
    # Relative to the maximum over all ranks no exponential exceeds 1, and the largest is 1: nothing overflows, and the
    # sum cannot vanish. The positive is finite, so the maximum is finite although all negatives may be masked; nan or
    # +inf on one rank reaches all of them, which then raise the same error.
    top = ranks.maximum(torch.maximum(positive.detach(), negative.detach().amax(-1)))
    if visible(top) and not top.isfinite().all():
        raise ArgumentError(
            f"`negative` must hold finite scores, or -inf to mask one; got {top[~top.isfinite()][0].item()}."
        )
    # Every rank has the positive: inside of the sum over the ranks it would be counted once per rank.
    total = ranks.total((negative - top.unsqueeze(-1)).exp().sum(-1))
    return (((positive - top).exp() + total) if with_positive else total).log() + top


def _delta(positive: Tensor, negative: Tensor, sample: SampledScores) -> Tensor:
    """Var(X) / (2 k Z^2), (...): the bias of log Z that comes from the curvature of the logarithm, estimated.

    The estimate of Z is exp(c_y) + mean_j X_j over k draws X_j, with X_j / Z = k softmax(c)_j. A masked hit is a draw
    with X_j = 0.
    """
    k, ranks = sample.num_negatives, sample.ranks
    log_sum = _log_sum(positive, negative, ranks)
    # Ratios instead of X and Z themselves, which overflow for large scores. `log_sum` and `mean` are shared values in
    # formulas about the negatives of this rank: `spread` adds their gradients up over the ranks.
    ratios = k * (negative - ranks.spread(log_sum).unsqueeze(-1)).exp()
    mean = ranks.total(ratios.sum(-1)) / k
    # Two passes, mean first: mean(X^2) - mean(X)^2 would cancel where the terms are nearly equal. Columns that only
    # fill up a row of this rank would add mean^2 each.
    difference = _zero_padding(ratios - ranks.spread(mean).unsqueeze(-1), sample)
    return ranks.total(difference.square().sum(-1)) / (k - 1) / (2 * k)


def _jackknife(positive: Tensor, negative: Tensor, sample: SampledScores) -> Tensor:
    """(k - 1) / k sum_j (log Z - log Z_j), (...): what the jackknife adds to log Z.

    Z_j is the estimate of Z from the k - 1 draws other than j, each of which then has the weight 1 / (k - 1).
    """
    k, ranks = sample.num_negatives, sample.ranks
    reweighted = negative + math.log(k / (k - 1))  # logits with weight 1 / (k - 1) instead of 1 / k
    largest = _largest(negative, ranks)
    log_z, log_all = _log_sum(positive, negative, ranks), _log_sum(positive, reweighted, ranks)
    # Z_j is the sum over all draws minus term j, log Z_j = log_all + log(1 - share_j): k sums at the price of one. For
    # any j but the largest the share is at most 1/2, and nothing cancels. The largest term can be nearly all of the
    # sum, and the difference would have no digits left: the sum without it is taken anew.
    log_without_largest = _log_sum(positive, torch.where(largest, -torch.inf, reweighted), ranks)
    local_log_all = ranks.spread(log_all).unsqueeze(-1)
    # The share of the largest is set to 0 before the logarithm: both branches of `where` are differentiated, and
    # log(1 - 1) in the one that is not used would make the gradient nan.
    shares = torch.where(largest, 0, (reweighted - local_log_all).exp())
    log_z_without = torch.where(
        largest, ranks.spread(log_without_largest).unsqueeze(-1), local_log_all + torch.log1p(-shares)
    )
    differences = _zero_padding(ranks.spread(log_z).unsqueeze(-1) - log_z_without, sample)
    return (k - 1) / k * ranks.total(differences.sum(-1))


def _largest(negative: Tensor, ranks: Ranks) -> Tensor:
    """(..., K) bool, True at the largest negative of each row: at one place, on one of the ranks."""
    best, column = negative.detach().max(-1, keepdim=True)
    largest = torch.arange(negative.shape[-1], device=negative.device) == column
    if ranks.alone:
        return largest
    # A rank whose best is the best of all ranks bids minus its number, the others bid less than any rank can: the
    # highest bid is that of the first such rank. Two exchanges of one number per row (and its mark).
    owner = -ranks.maximum(torch.where(best == ranks.maximum(best), -float(ranks.rank), -float(ranks.size)))
    return largest & (owner == ranks.rank)


def _zero_padding(values: Tensor, sample: SampledScores) -> Tensor:
    """The values (..., K), with 0 in the columns that are no draws: on several ranks rows are padded to one length.

    Draws that are masked stay: they count as draws with weight 0.
    """
    return values if sample.own is None else torch.where(sample.own, values, 0)


def sampled_softmax_kernel(
    correction: str = "logq", hit_policy: str | None = None, debias: str | None = None
) -> DrawnKernel:
    """Make the kernel of sampled softmax for a head: log(exp(c_y) + sum_j exp(c_j)) - c_y.

    If the sampler does not know log q (dns), the log q of a uniform proposal takes its place, which cancels for
    `correction="logq"`.

    Args:
        correction, hit_policy, debias: as in `sampled_softmax_loss`.

    Returns:
        The kernel, from sampled scores to the losses of the positives.

    Example: with all scores 0 the loss is the logarithm of the ten classes in the sample.
        >>> import torch, manymax
        >>> sampler = manymax.samplers.UniformSampler(1000)
        >>> input, vectors = torch.zeros(4, 8), torch.zeros(1000, 8)
        >>> manymax.linear_sampled_softmax_loss(input, vectors, torch.arange(4), sampler, 9)
        tensor(2.3026)
    """

    def rows(sample: SampledScores) -> Tensor:
        positive, negative, offset = _logits(sample, correction)
        if sample.decoupled or sample.z_loss > 0:
            log_sum = _log_sum(positive, negative, sample.ranks, not sample.decoupled)
            return log_sum - positive + sample.z_loss * (log_sum + offset).square()
        # One fused call on one rank; on several the sum over the negatives must first be completed by the others.
        if sample.ranks.alone:
            losses = -log_softmax(torch.cat([positive.unsqueeze(-1), negative], -1), -1)[..., 0]
        else:
            losses = _log_sum(positive, negative, sample.ranks) - positive
        if debias is None:
            return losses
        # What is added is of order 1/k and made of small differences of log sums: in float32 rounding could exceed it.
        bias = (_delta if debias == "delta" else _jackknife)(positive.double(), negative.double(), sample)
        return losses + bias.to(losses.dtype)

    policy = hit_policy or ("mask" if correction == "partition" else "keep")
    needs_log_q = "correction='partition'" if correction == "partition" else None
    block = partial(block_gradient, correction=correction) if debias is None else None
    return DrawnKernel(rows, masks_hits=policy == "mask", needs_log_q=needs_log_q, block=block)


def check_settings(correction: str, hit_policy: str | None, debias: str | None, num_negatives: int | None) -> None:
    """Raise where settings of a head contradict each other."""
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
    """Cross entropy over a positive and k sampled negatives, log(exp(c_y) + sum_j exp(c_j)) - c_y, from their scores.

    The logits c are the scores, corrected for the proposal q as `correction` says; see the table at the top of this
    module.

    Args:
        positive: (...) score of the positive; one row per positive.
        negative: (..., k) scores of the negatives, or (k,) if all rows share them; -inf masks a negative.
        log_q_positive: (...) log-probability with which the proposal draws the positive.
        log_q_negative: (..., k) or (k,), the same for the negatives. For a uniform proposal both can be a number.
        hits: (..., k) bool, True where a negative is the positive; needed to mask them.
        correction: "logq" (needs both log q), "partition" (needs that of the negatives) or "none".
        hit_policy: "keep" or "mask" negatives that are the positive. None means "mask" for "partition", and "keep" for
            the others, whose minimiser is exact only if hits are kept.
        debias: None, "delta" (adds an estimate of the bias of log Z) or "jackknife"; for "partition" only.
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
    """Raise unless `debias` is known and `correction` is one that it can be used with."""
    if debias is None:
        return
    check_choice("debias", debias, [d for d in DEBIAS if d])
    if correction != "partition":
        raise ArgumentError(
            f"`debias` is for `correction='partition'`, the one that estimates the full loss; got {correction!r}."
        )


class SampledSoftmaxLoss(nn.Module):
    """Module form of `sampled_softmax_loss`, whose arguments it takes.

    Args:
        correction, hit_policy, debias, reduction: as in `sampled_softmax_loss`.
    """

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
        """The loss of the scores; `log_q_positive`, `log_q_negative` and `hits` are passed as keyword arguments."""
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
    loss="log(exp(c_y) + sum_j exp(c_j)) - c_y over the negatives j, c = s - log q",
    gradient="softmax(c) on the sampled scores, minus 1 on the positive",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(
        False,
        "its gradient is a ratio of averages, whose expectation is not softmax(s) - e_y",
        "derived",
        "contradicted",
        printed="an unbiased estimator of the full softmax gradient",
    ),
    convex=Fact(True, "it is a softmax loss of the sampled scores", "section B.4", "confirmed"),
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
    Setting(
        "correction", str, "logq", "How sampled softmax corrects its scores for the proposal q.", choices=CORRECTIONS
    ),
    Setting("hit_policy", str, None, "Keep or mask negatives that equal the positive.", choices=HIT_POLICIES),
    Setting(
        "debias",
        str,
        None,
        "Correct the bias of order 1/k of the estimated log partition.",
        choices=("delta", "jackknife"),
    ),
)
