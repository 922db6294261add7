"""Bias and variance against enumeration, draws and formulas, and the range of the Delta method."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import bias as enumeration
from manymax import ClassTree, HuffmanTree, nce_loss, sampled_softmax_loss, taylor_softmax_loss
from manymax.engine.approximation import TOLERANCE, Parts
from manymax.engine.member import Approximation, Setting, Theory
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.members import FAMILY
from manymax.members.nce.loss import expected_loss
from manymax.members.rg.loss import error_bound
from manymax.members.rg.theory import rg_series
from manymax.members.sampled_softmax.theory import ESTIMATES
from manymax.ops import log_sums
from manymax.table import Table
from manymax.theory import inputs
from manymax.theory.approximations import approximations, tree_log_probs
from manymax.theory.bias_variance import Estimate, deviation, divergences, drawn, estimate, negatives_needed
from tests.exact import labels, normal

SCORES = torch.tensor([[1.0, -0.5, 2.0, 0.0], [0.0, 0.1, -3.0, 1.0]], dtype=torch.float64)
Q = torch.tensor([0.1, 0.25, 0.25, 0.4], dtype=torch.float64)
TARGET = torch.tensor([1, 3])
DRAWN = [*(("sampled_softmax", correction) for correction in ESTIMATES), ("nce", None)]


def log_q(num_classes: int, seed: int = 0) -> Tensor:
    return normal(num_classes, seed=seed).log_softmax(-1)


def corrected(correction: str | None) -> dict[str, Any]:
    """The setting, of a member that has it."""
    return {} if correction is None else {"correction": correction}


def losses(name: str, correction: str | None, scores: Tensor, target: int, ids: Tensor, proposal: Tensor) -> Tensor:
    """The loss on samples ids (n, k), (n,); NCE on normalised scores."""
    row = scores.log_softmax(-1)
    positive, negative = row[target].expand(len(ids)), row[ids]
    if correction == "importance":
        return (negative - proposal[ids]).logsumexp(-1) - math.log(ids.shape[-1]) - positive
    given: dict[str, Any] = {"log_q_positive": proposal[target], "log_q_negative": proposal[ids], "reduction": "none"}
    if correction is None:
        return nce_loss(positive, negative, **given)
    return sampled_softmax_loss(positive, negative, correction=correction, hits=ids == target, **given)


@pytest.mark.parametrize(("name", "correction"), DRAWN)
@pytest.mark.parametrize("k", [1, 2, 6])
def test_exact_moments_by_enumeration(name: str, correction: str | None, k: int) -> None:
    ids, weights = enumeration.all_samples(Q, k)
    result = estimate(name, SCORES, TARGET, log_q=Q.log(), num_negatives=k, **corrected(correction))
    for row, target in enumerate(TARGET.tolist()):
        values = losses(name, correction, SCORES[row], target, ids, Q.log())
        mean = (weights * values).sum()
        full = -SCORES[row].log_softmax(-1)[target]
        torch.testing.assert_close(result.exact_bias[row] + result.offset[row], mean - full)
        torch.testing.assert_close(result.exact_variance[row], (weights * (values - mean) ** 2).sum())
        torch.testing.assert_close(result.deviation, result.exact_bias**2 + result.exact_variance)


@pytest.mark.parametrize(("name", "correction"), DRAWN)
def test_exact_moments_by_draws(name: str, correction: str | None, seed: int) -> None:
    scores, target, proposal = 2 * normal(5, 50), labels(5, num_classes=50), log_q(50)
    options: dict[str, Any] = {"log_q": proposal, "num_negatives": 12, **corrected(correction)}
    exact = estimate(name, scores, target, **options)
    found = drawn(name, scores, target, **options, draws=8000, generator=torch.Generator().manual_seed(seed))
    assert ((found.bias - exact.exact_bias).abs() <= 4 * found.bias_error).all()
    assert ((found.variance - exact.exact_variance).abs() <= 4.5 * found.variance_error).all()


def test_standard_errors_are_right(seed: int) -> None:
    """The spread of many repetitions is what one of them says of itself."""
    generator = torch.Generator().manual_seed(seed)
    scores, target = SCORES[:1], TARGET[:1]
    repeated = [
        drawn("ssm", scores, target, log_q=Q.log(), num_negatives=3, draws=400, generator=generator) for _ in range(200)
    ]
    for name in ("bias", "variance"):
        values = torch.cat([getattr(result, name) for result in repeated])
        claimed = torch.cat([getattr(result, f"{name}_error") for result in repeated])
        assert values.std().item() == pytest.approx(claimed.mean().item(), rel=0.25)


@pytest.mark.parametrize("name", ["sampled_softmax", "nce", "rg", "taylor_softmax", "hierarchical_softmax"])
def test_no_label_is_the_mean_over_labels(name: str) -> None:
    tree = (2 * SCORES).log_softmax(-1)
    options: dict[str, Any] = {"log_q": Q.log(), "num_negatives": 3, "tree": tree}
    mean = estimate(name, SCORES, **options)
    probs = SCORES.softmax(-1)
    by_label = [estimate(name, SCORES, torch.full((2,), y), **options) for y in range(4)]
    for part in ("bias", "variance", "exact_bias", "exact_variance", "deviation", "offset"):
        expected = sum(probs[:, y] * getattr(by_label[y], part) for y in range(4))
        torch.testing.assert_close(getattr(mean, part), expected)
    assert torch.equal(mean.in_range, torch.stack([result.in_range for result in by_label]).all(0))


def test_the_delta_formulas() -> None:
    """As the table of section 3 of the corrected theory has them, one by one."""
    k, probs, q = 40, SCORES.softmax(-1)[0], Q
    ratio, y = probs / q, 1
    chi2 = (q * (ratio - 1) ** 2).sum()
    others = torch.arange(4) != y
    v = (others * probs**2 / q).sum() - (1 - probs[y]) ** 2
    mean = (q * probs).sum()
    total = probs[y] + k * mean
    spread = k * (q * (probs - mean) ** 2).sum() / total**2
    expected = {
        "importance": (0.0, -chi2 / (2 * k), chi2 / k),
        "partition": (0.0, -v / (2 * k), v / k),
        "none": (total.log() - math.log((k + 1) / 4), -spread / 2, spread),
        "logq": (
            ((ratio[y] + k) / (k + 1)).log(),
            -k * chi2 / (2 * (ratio[y] + k) ** 2),
            k * chi2 / (ratio[y] + k) ** 2,
        ),
    }
    for correction, row in expected.items():
        found = estimate("ssm", SCORES[0], torch.tensor(y), log_q=q.log(), num_negatives=k, correction=correction)
        values = [found.asymptotic.item(), found.curvature.item(), found.variance.item()]
        assert values == pytest.approx([float(value) for value in row], rel=1e-9, abs=1e-14)


def test_logq_is_above_and_partition_below() -> None:
    """Over y ~ P "logq" has the bias +chi2/(2k), the estimates of Z itself have a negative one."""
    chi2 = divergences(SCORES, Q.log())["chi_square"]
    k = 4000
    found = {c: estimate("ssm", SCORES, log_q=Q.log(), num_negatives=k, correction=c) for c in ESTIMATES}
    torch.testing.assert_close(found["logq"].exact_bias, chi2 / (2 * k), rtol=0.01, atol=0)
    torch.testing.assert_close(found["importance"].exact_bias, -chi2 / (2 * k), rtol=0.01, atol=0)
    assert (found["partition"].exact_bias < 0).all()
    assert all(result.in_range.all() for result in found.values())


def test_uniform_logq_is_none_up_to_its_offset() -> None:
    one, other = (estimate("ssm", SCORES, TARGET, num_negatives=7, correction=c) for c in ("logq", "none"))
    for part in ("bias", "variance", "exact_bias", "exact_variance", "offset"):
        torch.testing.assert_close(getattr(one, part), getattr(other, part))


def test_importance_at_one_negative_is_a_divergence() -> None:
    found = estimate("ssm", SCORES, TARGET, log_q=Q.log(), num_negatives=1, correction="importance")
    probs = SCORES.softmax(-1)
    torch.testing.assert_close(found.exact_bias, (Q * (probs / Q).log()).sum(-1))


# --- NCE ---


@pytest.mark.parametrize("k", [1, 9, 200])
def test_nce_mean_loss_is_entropy_less_a_divergence(k: int) -> None:
    found = estimate("nce", SCORES, log_q=Q.log(), num_negatives=k)
    probs = SCORES.softmax(-1)
    gap = expected_loss(probs, Q, k) + (probs * probs.log()).sum(-1)
    torch.testing.assert_close(found.exact_bias + found.offset, gap)
    jensen_shannon = divergences(SCORES, Q.log(), k)["jensen_shannon"]
    entropy = math.log(1 + k) - k / (1 + k) * math.log(k)
    torch.testing.assert_close(expected_loss(probs, Q, k), (1 + k) * (entropy - jensen_shannon))


def test_nce_variance_beside_the_printed_one() -> None:
    probs, k = SCORES.softmax(-1), 5
    found = estimate("nce", SCORES, TARGET, log_q=Q.log(), num_negatives=k)
    chi2 = divergences(SCORES, Q.log())["chi_square"]
    torch.testing.assert_close(found.variance, k * chi2 / (1 + k) ** 2)
    logs = (k + probs / Q).log()
    torch.testing.assert_close(found.exact_variance, k * ((Q * logs**2).sum(-1) - (Q * logs).sum(-1) ** 2))
    assert torch.equal(found.in_range, (found.variance / found.exact_variance - 1).abs() <= TOLERANCE)


def test_nce_of_unnormalised_scores_never_gets_there() -> None:
    """As k grows the bias tends to Z - 1 - log Z, which is 0 at Z = 1 alone."""
    scores = SCORES.log_softmax(-1)
    for shift in (-0.5, 0.0, 0.7):
        found = estimate("nce", scores + shift, TARGET, log_q=Q.log(), num_negatives=10**6, log_z=0.0)
        limit = torch.full_like(found.exact_bias, math.exp(shift) - 1 - shift)
        torch.testing.assert_close(found.exact_bias, limit, rtol=0, atol=1e-4)
    normalised = estimate("nce", SCORES + 5, TARGET, log_q=Q.log(), num_negatives=6)
    torch.testing.assert_close(
        normalised.exact_bias, estimate("nce", scores, TARGET, log_q=Q.log(), num_negatives=6, log_z=0.0).exact_bias
    )
    found = drawn("nce", scores + 0.7, TARGET, log_q=Q.log(), num_negatives=9, log_z=0.2, draws=4000)
    exact = estimate("nce", scores + 0.7, TARGET, log_q=Q.log(), num_negatives=9, log_z=0.2)
    assert ((found.bias - exact.exact_bias).abs() <= 4 * found.bias_error).all()


# --- the range of the Delta method ---


def relative_error(result: Estimate) -> Tensor:
    """How far the predictions are off: the bias in terms of the curvature, the variance in its own."""
    bias = (result.bias - result.exact_bias).abs() / (-result.curvature)
    return torch.maximum(bias, (result.variance - result.exact_variance).abs() / result.variance)


STARVED = torch.tensor([[0.5, 0.1, 0.4], [0.4, 0.001, 0.599]], dtype=torch.float64)


@pytest.mark.parametrize("correction", ["importance", "logq", "partition"])
def test_a_class_that_is_hardly_drawn_takes_the_delta_method_out_of_range(correction: str) -> None:
    """The rule chi2/k <= 0.2 with k q_j >= 20 for the likeliest class lets this one pass."""
    probs, q = STARVED
    assert enumeration.delta_holds(probs, q, 50)
    options: dict[str, Any] = {"log_q": q.log(), "correction": correction}
    found = estimate("ssm", probs.log(), torch.tensor(2), num_negatives=50, **options)
    assert relative_error(found) > 0.4  # of the prediction: it is twice the truth
    assert not found.in_range
    assert estimate("ssm", probs.log(), torch.tensor(2), num_negatives=50_000, **options).in_range


def test_one_label_out_of_range_is_enough() -> None:
    """Without its own weight the starved class is fine; for all other labels it counts."""
    probs, q = STARVED
    options: dict[str, Any] = {"log_q": q.log(), "num_negatives": 50, "correction": "partition"}
    in_range = [bool(estimate("ssm", probs.log(), torch.tensor(y), **options).in_range) for y in range(3)]
    assert in_range == [False, True, False]
    assert not estimate("ssm", probs.log(), **options).in_range


def random_cases(seed: int, count: int) -> list[tuple[Tensor, Tensor, int, int]]:
    """(scores, log q, y, k): any spread, proposals near to P and far from it, some with a class starved."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    found = []
    for _ in range(count):
        num_classes = int(2 ** uniform(1, 7))
        scores = uniform(0.3, 4) * torch.randn(num_classes, generator=generator, dtype=torch.float64)
        noise = torch.randn(num_classes, generator=generator, dtype=torch.float64)
        proposal = uniform(0, 1) * scores + uniform(0, 2) * noise
        if uniform(0, 1) < 0.3:
            proposal[int(uniform(0, num_classes))] -= uniform(2, 10)
        target = int(torch.multinomial(scores.softmax(-1), 1, generator=generator))
        found.append((scores, proposal.log_softmax(-1), target, int(10 ** uniform(0, 5))))
    return found


@pytest.mark.parametrize("correction", ESTIMATES)
def test_inside_its_range_the_delta_method_is_within_a_tenth(correction: str, seed: int) -> None:
    inside, near, total = 0, 0, 150
    for scores, proposal, target, k in random_cases(seed, total):
        found = estimate("ssm", scores, torch.tensor(target), log_q=proposal, num_negatives=k, correction=correction)
        if found.variance < 1e-9:  # rounding is as large
            continue
        error = relative_error(found).item()
        assert not found.in_range or error <= 1.2 * TOLERANCE, (scores, proposal, target, k)
        inside += bool(found.in_range)
        near += error <= TOLERANCE
    assert inside >= 0.7 * near  # few are flagged that need not be
    assert near <= 0.9 * total  # and there is something to flag


@given(
    logits=st.lists(st.tuples(st.floats(-8, 8), st.floats(-8, 8)), min_size=2, max_size=4),
    k=st.integers(1, 10**5),
    correction=st.sampled_from(ESTIMATES),
)
def test_no_small_case_deceives_the_range(logits: list[tuple[float, float]], k: int, correction: str) -> None:
    scores, proposal = torch.tensor(logits, dtype=torch.float64).T
    found = estimate(
        "ssm", scores, torch.tensor(0), log_q=proposal.log_softmax(-1), num_negatives=k, correction=correction
    )
    if found.variance > 1e-9 and found.in_range:
        assert relative_error(found) <= 1.2 * TOLERANCE


# --- many classes ---


@pytest.mark.parametrize("correction", ESTIMATES)
def test_bins_of_many_weights_change_nothing(correction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target, proposal = 2.5 * normal(2, 3000), labels(2, num_classes=3000), log_q(3000)
    if correction != "importance":  # which may not draw a masked class
        scores[:, 7] = -torch.inf
    options: dict[str, Any] = {"log_q": proposal, "num_negatives": 20, "correction": correction}
    in_bins = estimate("ssm", scores, target, **options)
    monkeypatch.setattr(log_sums, "BINS", 10**6)
    one_by_one = estimate("ssm", scores, target, **options)
    for part in ("exact_bias", "exact_variance", "bias", "variance"):
        torch.testing.assert_close(getattr(in_bins, part), getattr(one_by_one, part), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "correction"), DRAWN)
@pytest.mark.parametrize("k", [2, 300])
def test_a_few_labels_stand_for_all(name: str, correction: str | None, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, proposal = 2 * normal(1, 600), 0.7 * log_q(600)
    options: dict[str, Any] = {"log_q": proposal.log_softmax(-1), "num_negatives": k, **corrected(correction)}
    few = estimate(name, scores, **options)
    monkeypatch.setattr(inputs, "LABELS_PER_ROW", 600)
    every = estimate(name, scores, **options)
    torch.testing.assert_close(few.deviation, every.deviation, rtol=0.004, atol=0)
    torch.testing.assert_close(few.exact_bias, every.exact_bias, rtol=0.004, atol=1e-4)
    torch.testing.assert_close(few.offset, every.offset)


def test_labels_that_only_the_proposal_tells_apart() -> None:
    """Two classes of one probability, of which one is drawn all the time and the other almost never."""
    probs, q = (torch.full((200,), rest / 198, dtype=torch.float64) for rest in (0.2, 0.499))
    probs[:2], q[0], q[1] = 0.4, 0.5, 0.001
    scores, options = probs.log().unsqueeze(0), {"log_q": q.log(), "num_negatives": 1, "correction": "partition"}
    each = [estimate("ssm", scores, torch.tensor([y]), **options) for y in (0, 1, 2)]
    expected = sum(share * one.exact_bias for share, one in zip((0.4, 0.4, 0.2), each, strict=True))
    torch.testing.assert_close(estimate("ssm", scores, **options).exact_bias, expected)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, target = normal(5, 8), labels(5, num_classes=8)
    whole = estimate("ssm", scores, target, num_negatives=4)
    monkeypatch.setattr(inputs, "SCORES_PER_INPUT", 16)
    for part in ("exact_bias", "exact_variance", "bias", "variance", "deviation", "offset"):
        torch.testing.assert_close(
            getattr(estimate("ssm", scores, target, num_negatives=4), part), getattr(whole, part)
        )
    tables = normal(70, 8).log_softmax(-1)
    alone = torch.cat([deviation("hsm", row, tree=2 * row) for row in tables.split(1)])
    torch.testing.assert_close(deviation("hsm", tables, tree=2 * tables), alone)


@pytest.mark.parametrize("k", [1, 100, 10**6])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 100.0])
def test_extreme_weights_stay_finite_and_within_bounds(k: int, spread: float) -> None:
    scores = spread * normal(3, 20)
    found = estimate("ssm", scores, scores.argmin(-1), num_negatives=k, correction="partition")
    assert found.exact_bias.isfinite().all()
    assert (found.exact_bias <= 1e-12).all()  # Jensen
    assert (found.exact_bias >= scores.min(-1).values - scores.logsumexp(-1) - 1e-9).all()  # Z >= exp(s_y)
    assert (found.exact_variance >= 0).all()
    fewer = estimate("ssm", scores, scores.argmin(-1), num_negatives=max(1, k // 10), correction="partition")
    assert (fewer.exact_bias <= found.exact_bias + 1e-12).all()


def test_tiny_variances_keep_their_digits() -> None:
    """At k = 10^6 and P next to q the Delta method is right to many digits, and so is the integral."""
    scores = 0.01 * normal(1, 30)
    found = estimate("ssm", scores, torch.tensor([3]), num_negatives=10**6, correction="partition")
    assert relative_error(found) < 1e-5
    assert found.variance < 1e-7


@pytest.mark.parametrize("heads", [0.5, 1e-3, 1e-8])
@pytest.mark.parametrize("x", [1e-6, 1.0, 1e9, 1e18])
def test_a_coin(heads: float, x: float) -> None:
    """One draw of 0 or x beside 1: log 1 or log(1 + x)."""
    values, q = torch.tensor([0.0, x], dtype=torch.float64), torch.tensor([1 - heads, heads], dtype=torch.float64)
    mean, variance = log_sums.log_sum_moments(torch.ones(()).double(), values, q, 1)
    assert mean.item() == pytest.approx(heads * math.log1p(x), rel=1e-6, abs=1e-14)
    assert variance.item() == pytest.approx(heads * (1 - heads) * math.log1p(x) ** 2, rel=1e-6, abs=1e-13)


def test_a_sum_that_can_be_empty_has_no_logarithm() -> None:
    values, q = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    mean, variance = log_sums.log_sum_moments(torch.zeros(()).double(), values, q, 1)
    assert mean == -math.inf
    assert variance.isnan()


# --- the others ---


def test_rg_error_and_its_series() -> None:
    scores = 0.2 * normal(6, 40)
    found = estimate("rg", scores, labels(6, num_classes=40))
    truth = math.log(40) + scores.mean(-1) + scores.var(-1, correction=0) / 2 - scores.logsumexp(-1)
    torch.testing.assert_close(found.exact_bias, truth)
    centred = scores - scores.mean(-1, keepdim=True)
    third = -(centred**3).mean(-1) / 6
    fourth = -((centred**4).mean(-1) - 3 * (centred**2).mean(-1) ** 2) / 24
    torch.testing.assert_close(torch.stack(rg_series(scores)), torch.stack([third, fourth]))
    torch.testing.assert_close(found.bias, third + fourth)
    assert ((found.bias - truth).abs() <= 0.02 * third.abs().max()).all()
    assert (truth.abs() <= error_bound(scores)).all()
    masked = torch.cat([scores, torch.full((6, 1), -torch.inf, dtype=torch.float64)], -1)
    torch.testing.assert_close(error_bound(masked), error_bound(scores))
    assert found.in_range.float().mean() > 0.5
    assert estimate("rg", 20 * scores).in_range.float().mean() < 0.5
    assert (found.exact_variance == 0).all()


def test_rg_error_of_symmetric_scores_is_of_fourth_order() -> None:
    third, fourth = rg_series(torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64))
    assert third == 0
    assert fourth != 0


def test_taylor_error_is_the_difference_of_the_losses() -> None:
    scores, target = normal(5, 7), labels(5, num_classes=7)
    for order in (2, 4):
        found = estimate("taylor_softmax", scores, target, order=order)
        taylor = taylor_softmax_loss(scores, target, order=order, reduction="none")
        full = torch.nn.functional.cross_entropy(scores, target, reduction="none")
        torch.testing.assert_close(found.exact_bias, taylor - full)
    assert (found.deviation < estimate("taylor_softmax", scores, target).deviation).float().mean() > 0.5


def test_tree_error_is_a_divergence() -> None:
    """With the sign put right: log P(y) - log P_tree(y), and KL(P || P_tree) over y ~ P."""
    other = normal(2, 4).log_softmax(-1)
    log_probs = SCORES.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - other)).sum(-1)
    torch.testing.assert_close(estimate("hsm", SCORES, tree=other).exact_bias, kl)
    pointwise = (log_probs - other).gather(-1, TARGET[:, None]).squeeze(-1)
    torch.testing.assert_close(estimate("hsm", SCORES, TARGET, tree=other).exact_bias, pointwise)
    assert (deviation("hsm", SCORES, tree=HuffmanTree([1, 1, 2, 5])) == 0).all()


@pytest.mark.parametrize("arity", [2, 3])
def test_node_scores_of_low_rank(arity: int) -> None:
    scores, tree = 2 * normal(12, 10), HuffmanTree(list(range(1, 11)), arity=arity)
    full = tree_log_probs(scores, tree, dim=12)
    torch.testing.assert_close(full, scores.log_softmax(-1))
    gaps = [deviation("hsm", scores, tree=tree_log_probs(scores, tree, dim=d)).mean().item() for d in (1, 3, 6, 12)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.1
    torch.testing.assert_close(tree_log_probs(scores, tree, dim=2).exp().sum(-1), torch.ones(12).double())


def test_softmax_does_not_deviate_and_others_do_not_count() -> None:
    assert (deviation("softmax", SCORES) == 0).all()
    with pytest.raises(ArgumentError, match=r"no approximation of softmax: its entry has no `theory\.approximation`"):
        estimate("sparsemax", SCORES)
    with pytest.raises(ArgumentError, match=r"draws no negatives: its entry has no `theory\.approximation\.draws`"):
        negatives_needed("rg", SCORES, 0.1)
    with pytest.raises(ManymaxError, match="did you mean"):
        estimate("sampled_softmx", SCORES)


def test_every_member_that_states_a_bias_has_one_here() -> None:
    stated = {member.name for member in FAMILY.values() if member.facts.bias is not None}
    assert stated <= set(approximations())


# --- how many negatives ---


@pytest.mark.parametrize(
    ("name", "correction"), [("sampled_softmax", "logq"), ("sampled_softmax", "partition"), ("nce", None)]
)
@pytest.mark.parametrize("goal", [0.3, 0.05])
def test_negatives_needed_by_trying_all(name: str, correction: str | None, goal: float) -> None:
    options: dict[str, Any] = {"log_q": Q.log(), **corrected(correction)}
    sizes = [k for k in range(1, 90) if deviation(name, SCORES, num_negatives=k, **options).mean() <= goal]
    assert negatives_needed(name, SCORES, goal, **options) == sizes[0]
    assert sizes == list(range(sizes[0], 90))


def test_goals_that_cannot_be_reached() -> None:
    assert negatives_needed("ssm", SCORES, 1e-3, log_q=Q.log(), correction="none") is None
    assert negatives_needed("nce", SCORES, 1e-3, log_q=Q.log(), log_z=0.0) is None
    assert negatives_needed("ssm", SCORES, 1e-3, log_q=Q.log(), maximum=10) is None
    with pytest.raises(ArgumentError, match="`goal`"):
        negatives_needed("ssm", SCORES, 0.0)


def test_a_new_member_states_its_own_approximation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is all that is read: formula, setting with a range, and what it leaves out."""
    shift = Setting("shift", float, 0.5, "Added to the loss.", least=0)
    known = Approximation(lambda case: Parts.exact(torch.full_like(case.shares, case.settings["shift"])), (shift,))
    member = replace(FAMILY["rankmax"], name="shifted", theory=Theory(approximation=known))
    monkeypatch.setattr("manymax.theory.approximations.FAMILY", Table("loss", *FAMILY.values(), member))
    torch.testing.assert_close(deviation("shifted", SCORES), torch.full((2,), 0.25).double())
    torch.testing.assert_close(deviation("shifted", SCORES, TARGET, shift=2.0), torch.full((2,), 4.0).double())
    with pytest.raises(ArgumentError, match="`shift` must be a number of at least 0"):
        estimate("shifted", SCORES, shift=-1.0)
    with pytest.raises(ArgumentError, match=r"got 'shifted', which draws no negatives"):
        negatives_needed("shifted", SCORES, 0.1)


# --- arguments ---


def test_masked_classes_are_as_if_they_were_not_there() -> None:
    """Those that the proposal cannot draw; one that it can draw only wastes draws."""
    mask = torch.tensor([[-math.inf]]).double().expand(2, 1)
    masked, proposal = torch.cat([SCORES, mask], -1), torch.cat([Q, Q.new_zeros(1)]).log()
    for name, correction in DRAWN:
        options: dict[str, Any] = {"num_negatives": 3, **corrected(correction)}
        with_mask = estimate(name, masked, log_q=proposal, **options)
        without = estimate(name, SCORES, log_q=Q.log(), **options)
        if correction != "none":  # whose offset counts the classes
            torch.testing.assert_close(with_mask.exact_bias, without.exact_bias)
        torch.testing.assert_close(with_mask.exact_variance, without.exact_variance)
    for name in ("rg", "taylor_softmax"):
        torch.testing.assert_close(estimate(name, masked).exact_bias, estimate(name, SCORES).exact_bias)
    drawn_mask = torch.cat([0.5 * Q, Q.new_tensor([0.5])]).log()
    found = estimate("ssm", masked, TARGET, log_q=drawn_mask, num_negatives=6, correction="partition")
    sampled = drawn(
        "ssm", masked, TARGET, log_q=drawn_mask, num_negatives=6, correction="partition", draws=4000,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert ((sampled.bias - found.exact_bias).abs() <= 4 * sampled.bias_error).all()


def test_shifts_dtypes_and_shapes() -> None:
    base = deviation("ssm", SCORES, num_negatives=5)
    torch.testing.assert_close(deviation("ssm", SCORES + 300, num_negatives=5), base)
    torch.testing.assert_close(deviation("ssm", SCORES.float(), num_negatives=5), base, rtol=1e-5, atol=0)
    torch.testing.assert_close(deviation("ssm", SCORES[0], num_negatives=5), base[:1])
    torch.testing.assert_close(
        deviation("ssm", SCORES, num_negatives=5, log_q=Q.log().expand(2, 4)),
        deviation("ssm", SCORES, num_negatives=5, log_q=Q.log()),
    )
    one = deviation("ssm", torch.zeros(2, 1), num_negatives=3)
    assert one.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scores": torch.zeros(2, 3, 4)}, ArgumentError, "`scores` must be"),
    ({"scores": torch.zeros(0, 4)}, ArgumentError, "`scores` must be"),
    ({"scores": torch.zeros(2, 4).long()}, ArgumentTypeError, "`scores`"),
    ({"scores": torch.full((2, 4), math.nan)}, ArgumentError, "nan"),
    ({"target": torch.tensor([0, 4])}, ArgumentError, "`target` ids"),
    ({"target": torch.tensor([0])}, ArgumentError, "`target` must have"),
    ({"target": torch.tensor([0.0, 1.0])}, ArgumentTypeError, "`target`"),
    ({"log_q": torch.zeros(4)}, ArgumentError, "sums to 4"),
    ({"log_q": torch.zeros(3)}, ArgumentError, "`log_q` must have shape"),
    ({"log_q": [0.5, 0.5]}, ArgumentTypeError, "`log_q`"),
    ({"log_q": torch.tensor([0.5, 0.5, 0.0, 0.0]).log()}, ArgumentError, "never drawn"),
    ({"num_negatives": 0}, ArgumentError, "`num_negatives`"),
    ({"num_negatives": 2.0}, ArgumentError, "`num_negatives`"),
    ({"correction": "log_q"}, ArgumentError, "Did you mean 'logq'"),
    ({"order": 2}, ArgumentError, "`order` is no setting of sampled_softmax as an approximation; it has correction"),
    ({"member": "rg", "order": 2}, ArgumentError, "`order` is no setting of rg as an approximation; it has none"),
    ({"member": "taylor_softmax", "order": 3}, ArgumentError, r"`order` must be .* \(odd orders turn negative\)"),
    ({"member": "hsm"}, ArgumentTypeError, "`tree`"),
    ({"member": "hsm", "tree": torch.zeros(2, 3)}, ArgumentError, "`tree`"),
    ({"member": "hsm", "tree": HuffmanTree([1, 2])}, ArgumentError, "`tree`"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD)
def test_bad_arguments(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        estimate(**{"member": "ssm", "scores": SCORES, "target": TARGET, **wrong})


def test_more_bad_arguments() -> None:
    masked = torch.tensor([[0.0, -math.inf]])
    with pytest.raises(ArgumentError, match="masked"):
        estimate("ssm", masked, torch.tensor([1]))
    with pytest.raises(ArgumentError, match="empty sum"):
        estimate("ssm", masked, torch.tensor([0]), correction="importance")
    with pytest.raises(ArgumentError, match="`draws`"):
        drawn("ssm", SCORES, TARGET, draws=1)
    with pytest.raises(ArgumentError, match=r"`log_q` must be \(C,\)"):
        drawn("ssm", SCORES, TARGET, log_q=Q.log().expand(2, 4))
    with pytest.raises(ArgumentError, match="`dim`"):
        tree_log_probs(SCORES, HuffmanTree([1, 1, 1, 1]), 0)
    with pytest.raises(ArgumentError, match="`tree`"):
        tree_log_probs(SCORES, ClassTree.from_paths([[0], [1]]), 1)


def test_combinations_are_all_there() -> None:
    """Every correction that the loss knows has an estimate, and nothing is drawn twice."""
    assert set(ESTIMATES) == {"none", "logq", "partition", "importance"}
    for name, k in itertools.product(approximations(drawing=True), (1, 2)):
        assert deviation(name, SCORES, num_negatives=k).shape == (2,)
