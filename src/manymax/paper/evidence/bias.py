"""Checks of the claims on bias and variance."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from manymax.members import FAMILY
from manymax.members.hierarchical_softmax.loss import hierarchical_softmax_log_prob
from manymax.members.nce.loss import expected_loss, nce_loss
from manymax.members.nce.loss import variance as nce_variance
from manymax.members.rg.loss import error_bound, rg_log_partition
from manymax.members.softmax.loss import softmax, softmax_loss
from manymax.ops.divergences import chi_square, jensen_shannon, kl
from manymax.ops.tree import HuffmanTree
from manymax.paper.evidence.check_result import CheckResult, double, normal, row
from manymax.theory.bias_variance import estimate
from manymax.theory.risk import all_samples, conditional_risk

SCORES = (1.2, 0.3, -0.4, -1.1)  # their third central moment is not 0, so that RG's error shows
NOISE = (0.3, 0.1, 0.4, 0.2)  # the proposal q for negatives of these scores


def _sampled(correction: str, num_negatives: int, target: int | None = None) -> dict[str, float]:
    """Exact bias and variance of sampled softmax on `SCORES` with the proposal `NOISE`.

    They are those of the label `target`; without one they are the mean over labels y ~ P, P the softmax of the scores.
    """
    label = None if target is None else torch.tensor([target])
    result = estimate(
        "sampled_softmax",
        double(SCORES)[None],
        label,
        log_q=double(NOISE).log(),
        num_negatives=num_negatives,
        correction=correction,
    )
    return {"bias": float(result.exact_bias + result.offset), "variance": float(result.exact_variance)}


def _chi2() -> float:
    """chi2(P || q) of the softmax P of `SCORES` and the proposal q = `NOISE`."""
    return float(chi_square(softmax(double(SCORES)), double(NOISE)))


@cache
def importance_bias_vanishes() -> CheckResult:
    """E[log Z-hat] tends to log Z as k grows, for the estimate that the paper analyses and for "partition"."""
    values = {name: [_sampled(name, k, 0)["bias"] for k in (10, 1000, 100_000)] for name in ("importance", "partition")}
    holds = all(abs(v[2]) < 1e-4 and abs(v[2]) < abs(v[1]) < abs(v[0]) for v in values.values())
    listed = ", ".join(f"{value:.1e}" for value in values["importance"])
    return CheckResult(holds, f"k = 10, 1000, 100,000: {listed}")


@cache
def sampled_curvature_bias() -> CheckResult:
    """The bias is -chi2/(2k) for importance sampling only, -v/(2k) for "partition" and +chi2/(2k) for "logq".

    For "logq" it is the mean over labels y ~ P; v = sum_{j != y} p_j^2 / q_j - (1 - p_y)^2 is the variance of one draw.
    """
    k, probs, q = 10_000, softmax(double(SCORES)), double(NOISE)
    others = torch.arange(len(probs)) != 0
    v = float((probs[others].square() / q[others]).sum() - (1 - probs[0]).square())
    # "logq" adds the constant log((k + 1) q_y), which has no gradient. Its mean over y is subtracted.
    offset = float((probs * ((k + 1) * q).log()).sum())
    measured = {
        "importance": _sampled("importance", k)["bias"] / (-_chi2() / (2 * k)),
        "partition": _sampled("partition", k, 0)["bias"] / (-v / (2 * k)),
        "logq": (_sampled("logq", k)["bias"] - offset) / (_chi2() / (2 * k)),
    }
    listed = ", ".join(f"{name} {value:.3f}" for name, value in measured.items())
    return CheckResult(
        all(abs(value - 1) < 0.02 for value in measured.values()), f"exact / predicted at k = 10,000: {listed}"
    )


@cache
def sampled_variance() -> CheckResult:
    """The variance is chi2/k to leading order, for importance sampling and for "logq"."""
    k = 10_000
    ratios = [_sampled(name, k, 0)["variance"] / (_chi2() / k) for name in ("importance", "logq")]
    return CheckResult(
        all(abs(r - 1) < 0.02 for r in ratios), f"exact / chi2/k at k = 10,000: {ratios[0]:.4f}, {ratios[1]:.4f}"
    )


def _simple() -> tuple[float, float, int]:
    """(log(Z~/Z), k Var_q(e^s)/Z~^2, k) of the uncorrected loss at k = 1000, label 0; Z~ = e^(s_y) + k E_q[e^s]."""
    k, scores, q = 1000, double(SCORES), double(NOISE)
    mean = (q * scores.exp()).sum()
    total = scores[0].exp() + k * mean
    spread = (q * (scores.exp() - mean).square()).sum()
    return float((total / scores.exp().sum()).log()), float(k * spread / total.square()), k


@cache
def simple_bias() -> CheckResult:
    """The bias of the uncorrected loss is log(Z~/Z) + O(1/k), Z~ = e^(s_y) + k E_q[e^s], which grows like log k."""
    asymptotic, _, k = _simple()
    exact = _sampled("none", k, 0)["bias"]
    return CheckResult(abs(exact - asymptotic) < 1e-3, f"k = 1000: {asymptotic:.4f} predicted, {exact:.4f} exact")


@cache
def simple_curvature() -> CheckResult:
    """The bias of the uncorrected loss beyond log(Z~/Z) is -k Var_q(e^s)/(2 Z~^2) to leading order."""
    asymptotic, variance, k = _simple()
    ratio = (_sampled("none", k, 0)["bias"] - asymptotic) / (-variance / 2)
    return CheckResult(abs(ratio - 1) < 0.02, f"exact / predicted at k = 1000: {ratio:.4f}")


@cache
def simple_variance() -> CheckResult:
    """The variance of the uncorrected loss is k Var_q(e^s)/Z~^2 to leading order."""
    _, variance, k = _simple()
    ratio = _sampled("none", k, 0)["variance"] / variance
    return CheckResult(abs(ratio - 1) < 0.02, f"exact / predicted at k = 1000: {ratio:.4f}")


@cache
def nce_bias() -> CheckResult:
    """E[loss] = (1 + k)(H_b - JS), by enumeration of all samples; its gap to the softmax risk is not (1 + k) JS."""
    probs, q, k = softmax(double(SCORES)), double(NOISE), 3
    mean = float(conditional_risk(FAMILY["nce"], probs.log(), probs, log_q=q.log(), num_negatives=k))
    right = float(expected_loss(probs, q, k))
    entropy = float(-(probs * probs.log()).sum())
    printed = float((1 + k) * jensen_shannon(probs, q, 1 / (1 + k)))
    return CheckResult(
        abs(mean - right) < 1e-12 and abs(mean - entropy - printed) > 0.1,
        f"k = 3: E[loss] - H(P) = {mean - entropy:.4f}, printed {printed:.4f}",
    )


def _nce_terms(num_negatives: int) -> tuple[Tensor, Tensor]:
    """NCE's loss of label 0 on each of the n possible samples, (n,), and the probabilities of the samples, (n,)."""
    scores, log_q = softmax(double(SCORES)).log(), double(NOISE).log()
    ids, chances = all_samples(log_q, num_negatives)
    loss = nce_loss(
        scores[0].expand(len(ids)),
        scores[ids],
        log_q_positive=log_q[0].expand(len(ids)),
        log_q_negative=log_q[ids],
        reduction="none",
    )
    return loss, chances


@cache
def nce_has_no_curvature() -> CheckResult:
    """NCE is a sum over draws: its mean is the positive's term plus k times the mean of one draw, exactly."""
    k, scores, q = 5, softmax(double(SCORES)).log(), double(NOISE)
    loss, chances = _nce_terms(k)
    logits = scores - (k * q).log()
    linear = torch.nn.functional.softplus(-logits[0]) + k * (q * torch.nn.functional.softplus(logits)).sum()
    error = float((loss @ chances - linear).abs())
    return CheckResult(error < 1e-12, f"difference {error:.0e}")


@cache
def nce_exact_variance() -> CheckResult:
    """The variance is k Var_q(log(k + P/q)), by enumeration of all samples; the printed k chi2/(1 + k)^2 is larger."""
    k, probs, q = 5, softmax(double(SCORES)), double(NOISE)
    loss, chances = _nce_terms(k)
    measured = float(chances @ (loss - loss @ chances).square())
    right, printed = float(nce_variance(probs, q, k)), k * _chi2() / (1 + k) ** 2
    return CheckResult(
        abs(measured - right) < 1e-12 and printed > 1.05 * measured, f"k = 5: {measured:.4f}, printed {printed:.4f}"
    )


def _tree_case() -> tuple[Tensor, Tensor, Tensor, HuffmanTree]:
    """The softmax of `SCORES`, log P of a tree with random node scores, these node scores, and the tree."""
    tree, nodes = HuffmanTree([5, 1, 2, 9]), normal(3)
    log_tree = hierarchical_softmax_log_prob(nodes, torch.eye(3, dtype=torch.float64), tree)
    return softmax(double(SCORES)), log_tree, nodes, tree


@cache
def tree_bias() -> CheckResult:
    """The mean of log P_s - log P_tree over y ~ P_s is the KL divergence; the printed sign gives another number."""
    probs, log_tree, *_ = _tree_case()
    right = float((probs * (probs.log() - log_tree)).sum())
    printed = float((probs * (-probs.log() - log_tree)).sum())
    divergence = float(kl(probs, log_tree.exp()))
    return CheckResult(
        abs(right - divergence) < 1e-12 and abs(printed - divergence) > 0.1,
        f"KL = {divergence:.4f}, mean {right:.4f}; with the sign of section B.5: {printed:.4f}",
    )


@cache
def deterministic(name: str) -> CheckResult:
    """The loss draws nothing: two evaluations are equal, so that it has no variance and no bias from curvature."""
    if name == "hierarchical_softmax":
        values = [_tree_case()[1] for _ in range(2)]
    else:
        values = [FAMILY[name].loss(double(SCORES), torch.tensor(0)) for _ in range(2)]
    return CheckResult(bool((values[0] == values[1]).all()), "two evaluations are equal")


@cache
def softmax_is_exact() -> CheckResult:
    """The softmax loss has the exact log partition."""
    scores = normal(10, 6)
    error = float((softmax_loss(scores, torch.arange(10) % 6, reduction="none") - _plain_loss(scores)).abs().max())
    return CheckResult(error < 1e-12, f"largest difference {error:.0e}")


def _plain_loss(scores: Tensor) -> Tensor:
    """log Z - s_y as it is written, without regard to overflow, for the labels 0, 1, ... modulo 6."""
    return scores.exp().sum(-1).log() - scores[torch.arange(10), torch.arange(10) % 6]


@cache
def rg_bias() -> CheckResult:
    """RG's error is of third order in the centred scores and within the stated bound, but large at RG's own optimum."""
    scores = 2 * normal(200, 5)
    error = (rg_log_partition(scores) - scores.logsumexp(-1)).abs()
    small = 1e-3 * (double(SCORES) - double(SCORES).mean())
    third = (rg_log_partition(small) - small.logsumexp(-1)) / (-(small**3).mean() / 6)
    zipf = 1 / torch.arange(1, 1001, dtype=torch.float64)
    optimum = 1000 * zipf / zipf.sum()
    error_at_optimum = float(rg_log_partition(optimum) - optimum.logsumexp(-1))
    return CheckResult(
        bool((error <= error_bound(scores) + 1e-12).all()) and abs(float(third) - 1) < 0.02 and error_at_optimum < -100,
        f"small scores: error / (-mu3/6) = {float(third):.4f}; at its optimum for Zipf's law, C = 1000:"
        f" {error_at_optimum:.0f}",
    )


@cache
def sampled_gradient() -> CheckResult:
    """The gradient of "logq" is biased: even with q = P its mean is k/(k + 1) of softmax's gradient."""
    probs, k = softmax(double(SCORES)), 3
    scores = double(SCORES).requires_grad_()
    label = torch.eye(len(probs), dtype=torch.float64)[0]
    risk = conditional_risk(FAMILY["sampled_softmax"], scores, label, log_q=probs.log(), num_negatives=k)
    (gradient,) = torch.autograd.grad(risk, scores)
    ratio = gradient / (probs - label)
    return CheckResult(
        bool((ratio - k / (k + 1)).abs().max() < 1e-12), f"q = P, k = 3: {row(ratio)} of softmax's gradient"
    )
