"""Sampled softmax: cross entropy over the positive and k negatives that are drawn from a proposal q.

With logits c for the positive y and the negatives j,

    loss      l = log(exp(c_y) + sum_j exp(c_j)) - c_y
    gradient  softmax(c) on the sampled scores, minus 1 on the positive

    correction        c_y              c_j                     minimiser of the expected loss
    "none"            s_y              s_j                     log(p / q), for every k, if hits are kept
    "logq"            s_y - log q_y    s_j - log q_j           log p exactly, for every k, if hits are kept
    "partition"       s_y              s_j - log(k q_j)        log p as k grows, if hits are masked; k counts them too
    "corrected_logq"  s_y              s_j - log(n q'_j)       log p as k grows, hits masked; weighted, see below

A hit is a negative that equals the positive. "logq" is the loss that the paper prints; under a uniform proposal it
equals "none". "partition" estimates the loss over all classes: its estimate of the partition function Z is unbiased,
and the logarithm of the estimate is too small by about v / (2 k), which `debias` can correct in one step and
`compositional` over many: each training pair then keeps a moving average of its estimates (engine/pair_averages.py). No
correction makes the gradient unbiased, although the paper says so: every one is a ratio of averages.

"corrected_logq" begins with the exact gradient, in which the positive is not drawn but there for sure:

    sum_j P_j ds_j - ds_y = (1 - P_y) (sum_{j != y} P_j / (1 - P_y) ds_j - ds_y) = (1 - P_y) d(log Z' - s_y)

with Z' = sum_{j != y} exp(s_j). The n draws that are no hits are draws from q'_j = q_j / (1 - q_y), and their mean of
exp(s_j) / q'_j estimates Z'. The loss is (1 - P_y) (log Z' - s_y), where 1 - P_y = Z' / (exp(s_y) + Z') from the same
draws is held constant. So its value is no estimate of the softmax loss: only its gradient is one of the exact gradient.
That gradient is the one of l above, log(exp(s_y) + Z') - s_y: "partition" that knows how many hits to expect. With q =
P it is exact, unless every draw is a hit.

Citations: Jean et al., ACL 2015; Bengio and Senecal 2008; consistency of "logq" for every k: Ma and Collins, EMNLP
2018; "corrected_logq": Khrylchenko et al., RecSys 2025; jackknife: Quenouille 1956.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from manymax.engine.member import Fact, Facts, Formulas, Setting
from manymax.engine.pair_averages import averaged, averages_of, check_averages, check_pair_ids, read_num_pairs
from manymax.engine.sampled_scores import HIT_POLICIES, DrawnKernel, SampledScores, read_sample, shift_of_misses
from manymax.errors import ArgumentError, check_choice
from manymax.members.sampled_softmax.kernel import block_gradient, weighted_by_doubt
from manymax.members.sampled_softmax.sums import delta, jackknife, sampled_log_sum
from manymax.ops.arguments import checked
from manymax.ops.divergences import chi_square
from manymax.ops.reduction import REDUCTIONS, reduce

CORRECTIONS = ("none", "logq", "partition", "corrected_logq")
# Those that estimate sums over all classes: hits are masked, and log q must be known.
ESTIMATED = ("partition", "corrected_logq")
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
    elif correction in ESTIMATED:  # log q and k of "corrected_logq" are those of draws that are no hits, see `misses`
        negative = negative - sample.log_q_negative - math.log(sample.num_negatives)
    return positive, negative, offset


def sampled_softmax_kernel(
    correction: str = "logq",
    hit_policy: str | None = None,
    debias: str | None = None,
    compositional: float | None = None,
) -> DrawnKernel:
    """Make the kernel of sampled softmax for a head: log(exp(c_y) + sum_j exp(c_j)) - c_y.

    If the sampler does not know log q (dns), the log q of a uniform proposal takes its place, which cancels for
    `correction="logq"`.

    Args:
        correction, hit_policy, debias, compositional: as in `sampled_softmax_loss`.

    Returns:
        The kernel, from sampled scores to the losses of the positives.

    Example: with all scores 0 the loss is the logarithm of the ten classes in the sample.
        >>> import torch, manymax
        >>> sampler = manymax.samplers.UniformSampler(1000)
        >>> input, vectors = torch.zeros(4, 8), torch.zeros(1000, 8)
        >>> manymax.linear_sampled_softmax_loss(input, vectors, torch.arange(4), sampler, 9)
        tensor(2.3026)
    """

    def weighted(losses: Tensor) -> Tensor:
        """The value of "corrected_logq" in the place of these losses, which have its gradient; others as they are."""
        return losses + (weighted_by_doubt(losses) - losses).detach() if correction == "corrected_logq" else losses

    def rows(sample: SampledScores) -> Tensor:
        positive, negative, offset = _logits(sample, correction)
        if sample.decoupled or sample.z_loss > 0:
            log_sum = sampled_log_sum(positive, negative, sample.ranks, not sample.decoupled)
            losses = log_sum - positive if sample.decoupled else weighted(log_sum - positive)
            return losses + sample.z_loss * (log_sum + offset).square()
        # One fused call on one rank; on several the sum over the negatives must first be completed by the others.
        if sample.ranks.alone:
            losses = -log_softmax(torch.cat([positive.unsqueeze(-1), negative], -1), -1)[..., 0]
        else:
            losses = sampled_log_sum(positive, negative, sample.ranks) - positive
        if debias is None:
            return weighted(losses)
        # What is added is of order 1/k and made of small differences of log sums: in float32 rounding could exceed it.
        bias = (delta if debias == "delta" else jackknife)(positive.double(), negative.double(), sample)
        return losses + bias.to(losses.dtype)

    _check_compositional(compositional, correction, debias)
    return DrawnKernel(
        rows,
        masks_hits=_policy(hit_policy, correction) == "mask",
        misses=correction == "corrected_logq",
        needs_log_q=f"correction={correction!r}" if correction in ESTIMATED else None,
        block=partial(block_gradient, correction=correction) if debias is None else None,
        gamma=compositional,
    )


def check_settings(
    correction: str, hit_policy: str | None, debias: str | None, compositional: float | None, num_negatives: int | None
) -> None:
    """Raise where settings of a head contradict each other."""
    _check_debias(debias, correction)
    _check_compositional(compositional, correction, debias)
    _policy(hit_policy, correction)
    if debias is not None and num_negatives is not None and num_negatives < 2:
        raise ArgumentError(f"`num_negatives` must be at least 2 for `debias={debias!r}`; got {num_negatives}.")


@checked
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
    compositional: float | None = None,
    pair_ids: Tensor | None = None,
    pair_averages: Tensor | None = None,
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
        correction: "logq" or "corrected_logq" (need both log q), "partition" (needs that of the negatives) or "none".
        hit_policy: "keep" or "mask" negatives that are the positive. None means "mask" for "partition" and
            "corrected_logq" (which cannot keep them), and "keep" for the others, whose minimiser is exact only if hits
            are kept.
        debias: None, "delta" (adds an estimate of the bias of log Z) or "jackknife"; for "partition" only.
        compositional: gamma, the share of this estimate of Z / exp(s_y) in the moving average of its pair. The loss is
            the logarithm of the new average u, and the gradient that of estimate / u. For "partition" only.
        pair_ids: (...) the number of the training pair of each positive, for `compositional`.
        pair_averages: (num_pairs,) log u of each training pair, -inf at first; changed in place.
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
    if correction in ("logq", "corrected_logq") and (log_q_positive is None or log_q_negative is None):
        raise ArgumentError(
            f"`correction={correction!r}` needs `log_q_positive` and `log_q_negative`; pass -log(C) for a uniform"
            " proposal, or `correction='none'`."
        )
    if correction == "partition" and log_q_negative is None:
        raise ArgumentError("`correction='partition'` needs `log_q_negative`; pass -log(C) for a uniform proposal.")
    policy = _policy(hit_policy, correction)
    sample, dtype = read_sample(positive, negative, log_q_positive, log_q_negative, hits, policy)
    if debias is not None and sample.num_negatives < 2:
        raise ArgumentError(f"`negative` must hold at least 2 negatives for `debias={debias!r}`; got 1.")
    check_averages(compositional is not None, pair_ids, pair_averages)
    kernel = sampled_softmax_kernel(correction, hit_policy, debias, compositional)
    if kernel.misses and hits is not None:
        share = 1 - hits.double().mean(-1).expand(sample.positive.shape)
        log_ratio = shift_of_misses(share, sample.log_q_positive).to(sample.positive.dtype)
        sample = replace(sample, log_q_negative=sample.log_q_negative + log_ratio.unsqueeze(-1))
    rows = kernel.rows(sample)
    if compositional is not None and pair_ids is not None and pair_averages is not None:
        check_pair_ids(pair_ids, rows.shape)
        each = averaged(rows.reshape(-1), pair_ids.reshape(-1).long(), pair_averages, compositional)
        rows = each.reshape(rows.shape)
    return reduce(rows, torch.ones_like(rows), reduction).to(dtype)


def _policy(hit_policy: str | None, correction: str) -> str:
    """What is done with hits; raises where "corrected_logq", which counts the draws that are none, should keep them."""
    if hit_policy == "keep" and correction == "corrected_logq":
        raise ArgumentError(
            "`hit_policy='keep'` and `correction='corrected_logq'` contradict each other: its sum is over the classes"
            " other than the positive. Leave `hit_policy` out."
        )
    return hit_policy if hit_policy is not None else "mask" if correction in ESTIMATED else "keep"


def _check_debias(debias: str | None, correction: str) -> None:
    """Raise unless `debias` is known and `correction` is one that it can be used with."""
    if debias is None:
        return
    check_choice("debias", debias, [d for d in DEBIAS if d])
    if correction != "partition":
        raise ArgumentError(
            f"`debias` is for `correction='partition'`, the one that estimates the full loss; got {correction!r}."
        )


def _check_compositional(gamma: float | None, correction: str, debias: str | None) -> None:
    """Raise unless gamma is None, or a share that goes with the other settings."""
    if gamma is None:
        return
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or not 0 < gamma <= 1:
        raise ArgumentError(f"`compositional` must be a number in (0, 1], or None; got {gamma!r}.")
    if correction != "partition":
        raise ArgumentError(
            "`compositional` is for `correction='partition'`, whose estimates are right on average over the steps; got"
            f" {correction!r}."
        )
    if debias is not None:
        raise ArgumentError(
            f"`debias={debias!r}` and `compositional` contradict each other: both correct the bias of log Z. Leave one"
            " out."
        )


class SampledSoftmaxLoss(nn.Module):
    """Module form of `sampled_softmax_loss`, whose arguments it takes.

    Args:
        correction, hit_policy, debias, compositional, reduction: as in `sampled_softmax_loss`.
        num_pairs: how many training pairs there are, for `compositional`. Their averages are a buffer, which a loss in
            evaluation mode leaves as it is.
    """

    pair_averages: Tensor | None

    @checked
    def __init__(
        self,
        *,
        correction: str = "logq",
        hit_policy: str | None = None,
        debias: str | None = None,
        compositional: float | None = None,
        num_pairs: int | None = None,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_choice("correction", correction, CORRECTIONS)
        check_choice("reduction", reduction, REDUCTIONS)
        _check_debias(debias, correction)
        _check_compositional(compositional, correction, debias)
        if hit_policy is not None:
            check_choice("hit_policy", hit_policy, HIT_POLICIES)
            _policy(hit_policy, correction)
        self.correction, self.hit_policy, self.debias, self.reduction = correction, hit_policy, debias, reduction
        self.compositional = compositional
        self.register_buffer("pair_averages", read_num_pairs(num_pairs, compositional is not None))

    def forward(self, positive: Tensor, negative: Tensor, **sample: Any) -> Tensor:
        """The loss of the scores; `log_q_positive`, `log_q_negative`, `hits` and `pair_ids` are keyword arguments."""
        if self.compositional is not None:
            sample.setdefault("pair_averages", averages_of(self, self.pair_averages))
        return sampled_softmax_loss(
            positive,
            negative,
            correction=self.correction,
            hit_policy=self.hit_policy,
            debias=self.debias,
            compositional=self.compositional,
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
    convex=Fact(
        True,
        'it is a softmax loss of the sampled scores; "corrected_logq" has the gradient of one, and another value',
        "section B.4",
        "confirmed",
    ),
    calibrated=Fact(
        True,
        'the minimiser is log p + c exactly for every k with "logq" and hits kept; "partition" has its order if q'
        ' is uniform, else only as k grows, and so does the gradient of "corrected_logq"; "none" gives log(p / q)',
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
        ' +chi2/(2k) on average over y ~ P; "none" is log(C sum_j q_j P_j) off as k grows; "corrected_logq" estimates'
        " the gradient, and not the loss",
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
    Setting(
        "compositional",
        float,
        None,
        "Share of a step in the moving average of the estimates of Z that each training pair then keeps.",
        above=0,
        most=1,
    ),
)
