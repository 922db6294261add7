"""Cost of ties by enumeration, gradients by formulas, and which classes get no gradient."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.members import FAMILY
from manymax.theory import gradients as theory
from manymax.theory.bias_variance import divergences
from manymax.theory.gradients import sampled_gradient, undrawn_probability
from manymax.theory.jacobian import jacobian
from manymax.theory.order_preservation import member_map
from manymax.theory.risk import conditional_risk, minimisers
from tests.exact import Case, cases, labels, normal

ROWS = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=5)


def dcg(ranking: tuple[int, ...], relevant: list[bool], cutoff: int) -> float:
    """DCG of one ranking, by definition."""
    return sum(1 / math.log2(i + 2) for i, j in enumerate(ranking[:cutoff]) if relevant[j])


def rankings(values: list[int]) -> list[tuple[int, ...]]:
    """Every ranking of the classes along which the values do not increase."""
    candidates = itertools.permutations(range(len(values)))
    return [each for each in candidates if all(values[a] >= values[b] for a, b in itertools.pairwise(each))]


@given(row=ROWS, cutoff=st.integers(1, 5))
def test_expected_and_best_dcg_over_all_ways_to_break_ties(row: list[tuple[int, bool]], cutoff: int) -> None:
    values, relevant = [value for value, _ in row], [flag for _, flag in row]
    results = [dcg(ranking, relevant, cutoff) for ranking in rankings(values)]
    tensors = torch.tensor(values).double(), torch.tensor(relevant)
    assert theory.expected_dcg(*tensors, cutoff).item() == pytest.approx(sum(results) / len(results))
    assert theory.best_dcg(*tensors, cutoff).item() == pytest.approx(max(results))
    assert theory.tie_loss(*tensors, cutoff).item() == pytest.approx(max(results) - sum(results) / len(results))


def test_rows_are_independent() -> None:
    values, relevant = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0]]), torch.tensor([[True, False, True]] * 2)
    together = theory.tie_loss(values, relevant)
    alone = torch.stack([theory.tie_loss(v, r) for v, r in zip(values, relevant, strict=True)])
    torch.testing.assert_close(together, alone)
    assert (together > 0).all()


def test_sparse_maps_tie_probabilities_and_not_scores(seed: int) -> None:
    scores = 2 * torch.randn(20, 30).double()
    relevant = torch.rand(20, 30) < 0.2
    assert theory.tie_loss(scores, relevant).abs().max() < 1e-12
    assert theory.tie_loss(manymax.softmax(scores), relevant).abs().max() < 1e-12
    assert theory.tie_loss(manymax.sparsemax(scores), relevant).mean() > 0.1


def plain_direction(scores: Tensor, relevant: Tensor) -> Tensor:
    """The double sum as the paper prints it, with positions where the paper writes items for positions."""
    order = scores.argsort(descending=True).tolist()
    total = torch.zeros(len(scores)).double()
    for i, j in itertools.product(range(len(order)), repeat=2):
        if relevant[order[i]] and not relevant[order[j]]:
            total[order[j]] += 1 / math.log2(i + 2)
            total[order[i]] -= 1 / math.log2(i + 2)
    return total


def test_direction_and_alignment_equal_the_printed_sums(seed: int) -> None:
    for _ in range(20):
        scores, relevant = 2 * torch.randn(7).double(), torch.rand(7) < 0.4
        direction = theory.dcg_direction(scores, relevant)
        torch.testing.assert_close(direction, plain_direction(scores, relevant))
        assert direction.sum().abs() < 1e-12
        probs, fill = manymax.sparsemax(scores), manymax.softmax(scores)
        result = theory.alignment(probs, scores, relevant, fill)
        zeroed = [j for j in range(7) if probs[j] == 0 and not relevant[j]]
        filled = (probs - relevant.double()).index_fill(0, torch.tensor(zeroed, dtype=torch.long), 0)
        filled[zeroed] = fill[zeroed]
        torch.testing.assert_close(result.filled, (filled * direction).sum())
        torch.testing.assert_close(result.sparse, ((probs - relevant.double()) * direction).sum())
        torch.testing.assert_close(result.sparse, result.filled - result.lost)  # not a bound, as printed
        weights = sum(1 / math.log2(i + 2) for i, j in enumerate(scores.argsort(descending=True)) if relevant[j])
        assert result.lost.item() == pytest.approx(sum(fill[j].item() * weights for j in zeroed))


def test_the_direction_of_improvement_would_reverse_the_inequality() -> None:
    """With d = -gradient, as the paper's text says, the sparse gradient would be the better aligned one."""
    scores, relevant = torch.tensor([1.0, 3.0, 0.0, -1.0]).double(), torch.tensor([True, False, False, False])
    result = theory.alignment(manymax.sparsemax(scores), scores, relevant, manymax.softmax(scores))
    assert result.lost > 0
    assert result.sparse < result.filled
    assert -result.sparse > -result.filled - result.lost


def test_a_step_against_the_direction_raises_the_dcg() -> None:
    scores, relevant = torch.tensor([3.0, 2.0, 1.0, 0.0]).double(), torch.tensor([False, False, True, True])
    moved = scores - theory.dcg_direction(scores, relevant)
    assert theory.expected_dcg(moved, relevant) > theory.expected_dcg(scores, relevant)


# --- gradients ---


@pytest.mark.parametrize("case", cases(foundation=True))
def test_gradient_is_map_minus_target(case: Case) -> None:
    scores, target = normal(6, 9), labels(6, num_classes=9)
    expected = case.probs(scores) - torch.nn.functional.one_hot(target, 9)
    torch.testing.assert_close(theory.gradient(case.member, scores, target, **case.setting), expected)


def test_gradient_of_rankmax_by_formula() -> None:
    scores, target = normal(6, 9), labels(6, num_classes=9)
    support = scores - scores.gather(-1, target[:, None]) > -1
    total = torch.relu(scores - scores.gather(-1, target[:, None]) + 1).sum(-1, keepdim=True)
    expected = support.int() - torch.nn.functional.one_hot(target, 9) * support.sum(-1, keepdim=True)
    torch.testing.assert_close(theory.gradient(FAMILY["rankmax"], scores, target), expected / total)


def test_negatives_without_signal_are_those_off_the_support() -> None:
    scores, target = 3 * normal(8, 12), labels(8, num_classes=12)
    probs = manymax.sparsemax(scores)
    relevant = torch.nn.functional.one_hot(target, 12).bool()
    silent = theory.without_signal(theory.gradient(FAMILY["sparsemax"], scores, target), target)
    assert torch.equal(silent, theory.zeroed_negatives(probs, relevant))
    assert silent.any()
    assert not silent[relevant].any()
    assert not theory.without_signal(theory.gradient(FAMILY["softmax"], scores, target), target).any()


def test_a_label_with_gradient_0_is_not_counted_as_without_signal() -> None:
    """Where all margins are met, rankmax's gradient is 0 everywhere; only the negatives are counted."""
    silent = theory.without_signal(
        theory.gradient(FAMILY["rankmax"], torch.tensor([[5.0, 1.0, 0.0]]), torch.tensor([0])), torch.tensor([0])
    )
    assert silent.tolist() == [[False, True, True]]


def test_sampled_gradients_with_the_proposal_q_equal_to_p(seed: int) -> None:
    """With q = P the mean gradient is k / (k + 1) times the full one."""
    k, draws = 4, 4000
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    scores, target = probs.log().expand(5, 4).contiguous(), torch.zeros(5, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"log_q": probs.log(), "num_negatives": k, "draws": draws, "generator": generator}
    found = theory.sampled_gradient(FAMILY["ssm"], scores, target, **options)
    full = torch.tensor([-0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    error = found.std(0) / math.sqrt(5) + 0.05 / math.sqrt(5 * draws)
    assert ((found.mean(0) - k / (k + 1) * full).abs() <= 5 * error).all()


@pytest.mark.parametrize("name", ["sampled_softmax", "nce"])
def test_classes_that_are_not_drawn_get_no_gradient(name: str, seed: int) -> None:
    scores, target = normal(400, 6), torch.zeros(400, dtype=torch.long)
    log_q = torch.tensor([0.4, 0.3, 0.1, 0.1, 0.05, 0.05]).double().log()
    generator = torch.Generator().manual_seed(seed)
    found = theory.sampled_gradient(FAMILY[name], scores, target, log_q=log_q, num_negatives=5, generator=generator)
    silent = theory.without_signal(found, target).double()[:, 1:]
    expected = theory.undrawn_probability(log_q, 5)[1:]
    torch.testing.assert_close(expected, (1 - log_q.exp()[1:]) ** 5)
    error = (expected * (1 - expected) / 400).sqrt()
    assert ((silent.mean(0) - expected).abs() <= 4 * error).all()


def test_a_matrix_is_sorted_by_score() -> None:
    scores = torch.tensor([0.0, 2.0, 1.0])
    matrix = torch.arange(9.0).view(3, 3)
    assert theory.by_score(matrix, scores).tolist() == [[4.0, 5.0, 3.0], [7.0, 8.0, 6.0], [1.0, 2.0, 0.0]]
    rows = torch.stack([scores, -scores])
    assert theory.by_score(rows, rows).tolist() == [[2.0, 1.0, 0.0], [0.0, -1.0, -2.0]]


@pytest.mark.parametrize("case", [case for case in cases() if case.values[0].member.map is not None])
def test_the_jacobian_of_the_highest_scores_is_a_part_of_the_whole(case: Case) -> None:
    scores, label = normal(9), torch.tensor(4)
    whole = theory.by_score(jacobian(case.member, scores, label, method="autograd", **case.setting), scores)
    block = theory.top_jacobian(member_map(case.member, label, **case.setting), scores, 5)
    torch.testing.assert_close(block, whole[:5, :5])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: theory.tie_loss(torch.zeros(3), torch.zeros(3)), ArgumentTypeError, "`relevant` must be a bool"),
        (lambda: theory.tie_loss(torch.zeros(3), torch.zeros(2).bool()), ArgumentError, "`relevant` must have"),
        (lambda: theory.gradient(FAMILY["nce"], torch.zeros(1, 3), labels(1, num_classes=3)), ArgumentError, "member"),
        (
            lambda: theory.sampled_gradient(
                FAMILY["rg"], torch.zeros(1, 3), labels(1, num_classes=3), log_q=torch.zeros(3), num_negatives=1
            ),
            ArgumentError,
            "`member` must draw",
        ),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.5])
def test_a_log_q_that_is_no_logarithm_of_a_probability_is_refused(bad: float) -> None:
    log_q, sampled = torch.tensor([math.log(0.5), bad, math.log(0.5)]), FAMILY["sampled_softmax"]
    scores, weights = torch.zeros(1, 3), torch.full((3,), 1 / 3)
    for call in (
        lambda: undrawn_probability(log_q, 3),
        lambda: sampled_gradient(sampled, scores, torch.tensor([0]), log_q=log_q, num_negatives=2),
        lambda: conditional_risk(sampled, scores, weights, log_q=log_q),
        lambda: minimisers(sampled, weights, log_q=log_q, correction="none"),
        lambda: divergences(scores, log_q),
    ):
        with pytest.raises(ArgumentError, match="`log_q` must be the log of probabilities"):
            call()
