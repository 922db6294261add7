"""Noise contrastive estimation: tell the positive from k draws of a known noise distribution.

    d = s - log Z0 - log(k q)
    loss      l = softplus(-d_y) + sum_j softplus(d_j)
    gradient  -sigma(-d_y) on the positive, sigma(d_j) on each negative

The scores stand for log-probabilities: the population minimiser is s = log p + log Z0 for every k, hits kept.
So NCE is not shift invariant, and scores need an offset that can reach about -log C. The paper prints the
noise term with the wrong sign, which has no minimum.

Reference: Gutmann and Hyvarinen, AISTATS 2010.
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
from manymax.ops.divergences import jensen_shannon
from manymax.ops.reduction import REDUCTIONS, reduce


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

    Args:
        positive: (...) score of the positive; one row per positive.
        negative: (..., k) scores of the negatives, or (k,) if all rows share them.
        log_q_positive, log_q_negative: log-probabilities of the proposal, as in `sampled_softmax_loss`.
        hits: (..., k) bool, True where a negative is the positive.
        hit_policy: "keep" (needed for the minimiser log p) or "mask".
        log_z: log Z0, subtracted from every score: a number, or a tensor () or (...) that can be learned.
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
    """The kernel of NCE: softplus(-d_y) + sum_j softplus(d_j), d = s - log Z0 - log(k q).

    A head takes log Z0 = log C where `log_z` is left out: that of scores 0, where training begins. From another value a
    model first has to find it, which it may not do within any patience.

    Example: at scores 0 the positive and its nine negatives are told apart as badly as can be.
        >>> import torch, manymax
        >>> sampler = manymax.samplers.UniformSampler(1000)
        >>> input, vectors = torch.zeros(4, 8), torch.zeros(1000, 8)
        >>> manymax.linear_nce_loss(input, vectors, torch.arange(4), sampler, 9)
        tensor(3.2508)
    """

    def rows(sample: SampledScores) -> Tensor:
        ranks = sample.ranks
        shift = read_number("log_z", log_z, sample.positive, tuple(sample.positive.shape))
        shift = shift + math.log(sample.num_negatives)
        positive_logits = sample.positive - sample.log_q_positive - shift
        noise_logits = sample.negative - sample.log_q_negative - ranks.spread(shift).unsqueeze(-1)
        return _softplus(-positive_logits) + ranks.total(_softplus(noise_logits).sum(-1))

    return DrawnKernel(rows, masks_hits=hit_policy == "mask")


def _softplus(values: Tensor) -> Tensor:
    """log(1 + exp(x)) to full precision, and 0 with derivatives 0 at x = -inf, a masked class.

    torch's own softplus is x beyond 20, which is 2e-9 off.
    """
    return -logsigmoid(-values)


class NCELoss(nn.Module):
    """Module form of `nce_loss`.

    Args:
        log_z: log Z0, the start value if it is learned.
        learnable: make log Z0 a parameter.
        hit_policy, reduction: as in `nce_loss`.
    """

    def __init__(
        self, *, log_z: float = 0.0, learnable: bool = False, hit_policy: str = "keep", reduction: str = "mean"
    ) -> None:
        super().__init__()
        check_choice("reduction", reduction, REDUCTIONS)
        check_choice("hit_policy", hit_policy, HIT_POLICIES)
        self.hit_policy, self.reduction = hit_policy, reduction
        self.log_z = nn.Parameter(torch.tensor(float(log_z))) if learnable else float(log_z)

    def forward(self, positive: Tensor, negative: Tensor, **sample: Any) -> Tensor:
        """The loss of the scores; `log_q_positive`, `log_q_negative` and `hits` as keyword arguments."""
        return nce_loss(
            positive, negative, log_z=self.log_z, hit_policy=self.hit_policy, reduction=self.reduction, **sample
        )


def expected_loss(probs: Tensor, q: Tensor, num_negatives: int) -> Tensor:
    """E[loss] with y ~ P and normalised scores: (1 + k)(H_b(1/(1+k)) - JS(P || q)), (...)."""
    k = num_negatives
    weight = 1 / (1 + k)
    entropy = -weight * math.log(weight) - (1 - weight) * math.log(1 - weight)
    return (1 + k) * (entropy - jensen_shannon(probs, q, weight))


def variance(probs: Tensor, q: Tensor, num_negatives: int) -> Tensor:
    """k Var_q(log(k + P/q)), (...): exact, where the paper linearises."""
    values = torch.where(q > 0, (num_negatives + probs / torch.where(q > 0, q, 1)).log(), 0)
    mean = (q * values).sum(-1, keepdim=True)
    return num_negatives * (q * (values - mean).square()).sum(-1)


FORMULAS = Formulas(
    map=None,
    loss="softplus(-d_y) + sum_j softplus(d_j), d = s - log Z0 - log(k q)",
    gradient="-sigma(-d_y) on the positive, sigma(d_j) on the negatives",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(False, "logistic losses on unnormalised scores", "derived", "derived"),
    convex=Fact(
        True,
        "a sum of logistic losses",
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
    shift_invariant=Fact(False, "scores are log-probabilities: a shift is paid for", "derived", "derived"),
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
    Setting("hit_policy", str, "keep", "Negatives that hit the positive.", choices=HIT_POLICIES),
    Setting(
        "log_z",
        float,
        None,
        "Of NCE: assumed log partition, else that of scores 0: log C.",
        start=math.log,
        learned=Learned(raw=float, value=lambda raw: raw, key="log_z"),
    ),
)
