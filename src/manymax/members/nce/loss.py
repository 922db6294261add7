"""Noise contrastive estimation: a logistic loss that tells the positive from k draws of a known noise distribution q.

    logits    d = s - log Z0 - log(k q)
    loss      l = softplus(-d_y) + sum_j softplus(d_j), over the k negatives j
    gradient  -sigma(-d_y) on the positive, sigma(d_j) on each negative

The scores stand for log-probabilities: if hits (negatives that are the positive) are kept, s = log p + log Z0 minimises
the expected loss, for every k. So NCE is not shift invariant, and with log Z0 = 0 scores must be able to reach about
-log C. The paper prints the noise term with the wrong sign, with which the loss has no minimum.

Citation: Gutmann and Hyvarinen, AISTATS 2010.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from manymax.engine.member import Fact, Facts, Formulas, Learned, Setting
from manymax.engine.sampled_scores import HIT_POLICIES, DrawnKernel, SampledScores, read_number, read_sample
from manymax.errors import ArgumentError, check_choice
from manymax.ops.arguments import checked
from manymax.ops.divergences import jensen_shannon
from manymax.ops.reduction import REDUCTIONS, reduce


@checked
def nce_loss(
    positive: Tensor,
    negative: Tensor,
    *,
    log_q_positive: Tensor | float,
    log_q_negative: Tensor | float,
    hits: Tensor | None = None,
    hit_policy: str = "keep",
    log_z: float | Tensor = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Logistic loss of the positive against k negatives, softplus(-d_y) + sum_j softplus(d_j).

    The logits are d = s - log Z0 - log(k q).

    Args:
        positive: (...) score of the positive; one row per positive.
        negative: (..., k) scores of the negatives, or (k,) if all rows share them; -inf masks a negative.
        log_q_positive: (...) or a number, log-probability with which the proposal draws the positive.
        log_q_negative: (..., k), (k,) or a number, the same for the negatives.
        hits: (..., k) bool, True where a negative is the positive; needed for `hit_policy="mask"`.
        hit_policy: "keep" leaves hits among the negatives, without which log p is not the minimiser; "mask" drops them.
        log_z: log Z0, subtracted from every score: a number, or a tensor () or (...), which may require a gradient.
        reduction: "none", "mean" or "sum".

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example:
        >>> import torch, manymax
        >>> scores = torch.tensor([0.0]), torch.tensor([[50.0, 100.0]])
        >>> log_q = -torch.tensor(3.0).log()
        >>> manymax.nce_loss(*scores, log_q_positive=log_q, log_q_negative=log_q)
        tensor(151.3217)
    """
    check_choice("reduction", reduction, REDUCTIONS)
    for name, log_q in (("log_q_positive", log_q_positive), ("log_q_negative", log_q_negative)):
        if log_q is None:
            raise ArgumentError(f"`{name}` must be given: NCE needs to know its noise. Pass -log(C) if it is uniform.")
    sample, dtype = read_sample(positive, negative, log_q_positive, log_q_negative, hits, hit_policy)
    rows = nce_kernel(hit_policy, log_z).rows(sample)
    return reduce(rows, torch.ones_like(rows), reduction).to(dtype)


def nce_kernel(hit_policy: str = "keep", log_z: float | Tensor = 0.0) -> DrawnKernel:
    """Make the kernel of NCE for a head: softplus(-d_y) + sum_j softplus(d_j), d = s - log Z0 - log(k q).

    A head uses log Z0 = log C if `log_z` is left out. That is the log partition of scores 0, at which training starts;
    with another value the scores first have to move by a constant, which may take longer than the training lasts.

    Args:
        hit_policy: "keep" or "mask", as in `nce_loss`.
        log_z: log Z0, a number or a learned scalar.

    Returns:
        The kernel, from sampled scores to the losses of the positives.

    Example: with all scores 0 the positive cannot be told from its nine negatives.
        >>> import torch, manymax
        >>> sampler = manymax.samplers.UniformSampler(1000)
        >>> input, vectors = torch.zeros(4, 8), torch.zeros(1000, 8)
        >>> manymax.linear_nce_loss(input, vectors, torch.arange(4), sampler, 9)
        tensor(3.2508)
    """

    def rows(sample: SampledScores) -> Tensor:
        ranks = sample.ranks
        # log Z0 + log k, (...). k counts all draws, masked ones and those of other ranks included: it is the number of
        # draws, not of terms left, that the minimiser log p rests on.
        shift = read_number("log_z", log_z, sample.positive, tuple(sample.positive.shape))
        shift = shift + math.log(sample.num_negatives)
        # Positives are shared: every rank has all their scores and computes the same terms. Negatives are local: a rank
        # has those that it holds. log Z0 enters the negatives of every rank, so that its gradient, if it is learned,
        # must be added up over the ranks: `spread`.
        positive_logits = sample.positive - sample.log_q_positive - shift
        noise_logits = sample.negative - sample.log_q_negative - ranks.spread(shift).unsqueeze(-1)
        # Masked negatives, and columns that only fill up the rows of a rank, are at -inf: their softplus is exactly 0,
        # and so is its derivative. The sum over the ranks is one number per positive.
        return _softplus(-positive_logits) + ranks.total(_softplus(noise_logits).sum(-1))

    setting = log_z if isinstance(log_z, Tensor) and log_z.requires_grad else None
    return DrawnKernel(rows, masks_hits=hit_policy == "mask", setting=setting)


def _softplus(values: Tensor) -> Tensor:
    """log(1 + exp(x)) with all digits; value and derivatives are 0 at x = -inf, where a class is masked.

    torch.nn.functional.softplus returns x itself for x > 20, which is up to 2e-9 off. `logsigmoid` has no such bound,
    and overflows for no x.
    """
    return -logsigmoid(-values)


class NCELoss(nn.Module):
    """Module form of `nce_loss`.

    Args:
        log_z: log Z0, or its first value if it is learned.
        learnable: whether log Z0 is a parameter.
        hit_policy, reduction: as in `nce_loss`.
    """

    @checked
    def __init__(
        self, *, log_z: float = 0.0, learnable: bool = False, hit_policy: str = "keep", reduction: str = "mean"
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        check_choice("hit_policy", hit_policy, HIT_POLICIES)
        if not isinstance(log_z, (int, float)) or not math.isfinite(log_z):
            raise ArgumentError(f"`log_z` must be a finite number; got {log_z!r}. A tensor goes to `nce_loss`.")
        self.hit_policy, self.reduction = hit_policy, reduction
        self.log_z = nn.Parameter(torch.tensor(float(log_z))) if learnable else float(log_z)

    def forward(self, positive: Tensor, negative: Tensor, **sample: Any) -> Tensor:
        """The loss of the scores; `log_q_positive`, `log_q_negative` and `hits` are passed as keyword arguments."""
        return nce_loss(
            positive, negative, log_z=self.log_z, hit_policy=self.hit_policy, reduction=self.reduction, **sample
        )


def expected_loss(probs: Tensor, q: Tensor, num_negatives: int) -> Tensor:
    """Expected loss over labels y ~ P and k draws from q, at s = log P: (1 + k)(H_b(1/(1+k)) - JS(P || q)).

    H_b is the entropy of a coin, JS the Jensen-Shannon divergence with weight 1/(1+k) on P.

    Args:
        probs, q: (..., C) distributions.
        num_negatives: k.

    Returns:
        (...).
    """
    k = num_negatives
    weight = 1 / (1 + k)
    entropy = -weight * math.log(weight) - (1 - weight) * math.log(1 - weight)
    return (1 + k) * (entropy - jensen_shannon(probs, q, weight))


def variance(probs: Tensor, q: Tensor, num_negatives: int) -> Tensor:
    """Exact variance of the loss over k draws from q, at s = log P: k Var_q(log(k + P/q)).

    The paper replaces the logarithm by its tangent.

    Args:
        probs, q: (..., C) distributions.
        num_negatives: k.

    Returns:
        (...).
    """
    # A class with q = 0 is never drawn: it must contribute 0, not nan.
    values = torch.where(q > 0, (num_negatives + probs / torch.where(q > 0, q, 1)).log(), 0)
    mean = (q * values).sum(-1, keepdim=True)
    return num_negatives * (q * (values - mean).square()).sum(-1)


FORMULAS = Formulas(
    map=None,
    loss="softplus(-d_y) + sum_j softplus(d_j), d = s - log Z0 - log(k q)",
    gradient="-sigma(-d_y) on the positive, sigma(d_j) on each negative",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(False, "it is a sum of logistic losses of unnormalised scores", "derived", "derived"),
    convex=Fact(
        True,
        "it is a sum of logistic losses",
        "derived; the printed sign of the noise term makes it unbounded below",
        "contradicted",
        printed="log sigma(s_y - log(k q_y)) - sum_j log sigma(-s_j + log(k q_j)), negated",
    ),
    calibrated=Fact(
        True,
        "the minimiser is log p + log Z0 exactly for every k, hits kept",
        "derived",
        "contradicted",
        printed="asymptotic, with an irreducible bias",
    ),
    shift_invariant=Fact(
        False,
        "the scores stand for log-probabilities: adding a constant to all of them changes the loss",
        "derived",
        "derived",
    ),
    smoothness=Fact(
        None,
        "max multiplicity of a class in the sample / 4: 1/4 if all are distinct, (k + 1)/4 at worst",
        "section B.4",
        "contradicted",
        printed="1/4",
        fn=lambda num_classes, num_negatives=100: (num_negatives + 1) / 4,
        sizes=("num_negatives",),
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
        "with y ~ P: E[loss] = (1 + k)(H_b(1/(1+k)) - JS(P || q)), to be compared with H(P); curvature bias 0",
        "section B.5",
        "contradicted",
        printed="(1 + k) JS(P || q)",
        fn=lambda probs, q, num_negatives: float(
            expected_loss(probs, q, num_negatives) + (probs * probs.log()).nansum()
        ),
    ),
    variance=Fact(
        None,
        "k Var_q(log(k + P/q)), exactly",
        "section B.5",
        "contradicted",
        printed="k chi2/(1 + k)^2",
        fn=lambda probs, q, num_negatives: float(variance(probs, q, num_negatives)),
    ),
)

SETTINGS = (
    Setting("hit_policy", str, "keep", "Keep or mask negatives that equal the positive.", choices=HIT_POLICIES),
    Setting(
        "log_z",
        float,
        None,
        "Assumed log partition of NCE; log C, which is that of scores 0, if left out.",
        start=math.log,
        learned=Learned(raw=float, value=lambda raw: raw, key="log_z"),
    ),
)
