"""Metrics against trec_eval's own code, napkinXC, the losses of entmax, and slow loops that follow the definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import entmax
import ir_measures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import manymax
from manymax import metrics
from manymax.errors import ManymaxError


class Case(NamedTuple):
    """Whole rankings and the positives of each row, which may be none."""

    lists: list[list[int]]
    positives: list[set[int]]
    classes: int
    cutoff: int

    def rankings(self) -> list[Tensor]:
        """The same ranking in every form: ids, the ids of the first places with padding, scores."""
        ids = torch.tensor(self.lists)
        padding = torch.full((len(ids), 2), -100)
        places = torch.arange(self.classes, 0, -1).expand_as(ids)
        scores = torch.zeros(ids.shape).scatter(1, ids, places.float())
        return [ids, torch.cat([ids[:, : self.cutoff], padding], 1), scores]

    def targets(self) -> list[Tensor]:
        """The same positives as padded ids, with one of them listed twice, and as bool rows."""
        width = max(map(len, self.positives)) + 2
        ids = [[*row, *list(row)[:1]] for row in self.positives]
        padded = torch.tensor([row + [-100] * (width - len(row)) for row in ids])
        rows = torch.zeros(len(self.lists), self.classes, dtype=torch.bool)
        for row, classes in zip(rows, self.positives, strict=True):
            row[list(classes)] = True
        return [padded, rows]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows, classes = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    lists = [draw(st.permutations(range(classes))) for _ in range(rows)]
    positives = [draw(st.sets(st.integers(0, classes - 1), max_size=5)) for _ in range(rows)]
    positives[0] = positives[0] or {draw(st.integers(0, classes - 1))}
    return Case(lists, positives, classes, draw(st.integers(1, classes)))


def trec_eval(measure: str, case: Case) -> float:
    """The mean over the rows that have a positive; trec_eval leaves out the others too."""
    qrels = [ir_measures.Qrel(str(q), str(i), 1) for q, items in enumerate(case.positives) for i in items]
    run = [
        ir_measures.ScoredDoc(str(q), str(item), -float(rank))
        for q, items in enumerate(case.lists)
        for rank, item in enumerate(items)
    ]
    parsed = ir_measures.parse_measure(measure)
    return float(ir_measures.calc_aggregate([parsed], qrels, run)[parsed])


@settings(max_examples=40)
@given(case=cases())
def test_precision_and_mrr_are_those_of_trec_eval_for_every_form_of_ranking_and_target(case: Case) -> None:
    expected = {name: trec_eval(f"{name}@{case.cutoff}", case) for name in ("P", "RR")}
    for ranking in case.rankings():
        for target in case.targets():
            assert metrics.precision_at_k(ranking, target, case.cutoff).item() == pytest.approx(expected["P"])
            assert metrics.mrr(ranking, target, case.cutoff).item() == pytest.approx(expected["RR"])
    assert metrics.mrr(case.rankings()[2], case.targets()[1]).item() == pytest.approx(trec_eval("RR", case))


def slow_psp(case: Case, worth: list[float]) -> tuple[float, float]:
    """PSP@k by its definition, normalised and as a mean over the rows that have a positive."""
    found = best = 0.0
    for ids, positives in zip(case.lists, case.positives, strict=True):
        found += sum(worth[item] for item in ids[: case.cutoff] if item in positives) / case.cutoff
        best += sum(sorted((worth[item] for item in positives), reverse=True)[: case.cutoff]) / case.cutoff
    return found / best, found / sum(1 for positives in case.positives if positives)


@settings(max_examples=40)
@given(case=cases(), data=st.data())
def test_psp_by_its_definition_for_every_form_of_ranking_and_target(case: Case, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 50), min_size=case.classes, max_size=case.classes))
    a, b = data.draw(st.sampled_from([(0.55, 1.5), (0.5, 0.4), (0.6, 2.6)]))
    scale = (math.log(60) - 1) * (b + 1) ** a
    worth = [1 + scale * math.exp(-a * math.log(count + b)) for count in counts]
    propensity = metrics.propensities(torch.tensor(counts), 60, a, b)
    assert (1 / propensity).tolist() == pytest.approx(worth)
    normalized, mean = slow_psp(case, worth)
    for ranking in case.rankings():
        for target in case.targets():
            assert metrics.psp_at_k(ranking, target, propensity, case.cutoff).item() == pytest.approx(normalized)
            plain = metrics.psp_at_k(ranking, target, propensity, case.cutoff, normalize=False)
            assert plain.item() == pytest.approx(mean)


def test_gains_of_batches_add_up_to_psp(seed: int) -> None:
    scores, target, propensity = torch.randn(30, 8), torch.rand(30, 8) < 0.3, torch.rand(8) * 0.9 + 0.1
    batches = [slice(0, 7), slice(7, 30)]
    found, best = (
        sum(sums)
        for sums in zip(
            *(
                (part.sum() for part in metrics.psp_gains_at_k(scores[rows], target[rows], propensity, 3))
                for rows in batches
            ),
            strict=True,
        )
    )
    assert torch.allclose(metrics.psp_at_k(scores, target, propensity, 3), found / best)


@pytest.mark.extras
def test_precision_and_psp_are_those_of_napkinxc(seed: int) -> None:
    peer = pytest.importorskip("napkinxc.metrics", reason="napkinXC is not installed: `pip install --no-deps napkinxc`")
    train, target, scores = torch.rand(200, 40) < 0.1, torch.rand(50, 40) < 0.1, torch.randn(50, 40)
    target[:, 0] |= ~target.any(1)  # napkinXC counts rows without a positive in its means
    for a, b in ((0.55, 1.5), (0.5, 0.4), (0.6, 2.6)):
        propensity = metrics.propensities(train.sum(0), len(train), a, b)
        inverse = peer.Jain_et_al_inverse_propensity(train.int().numpy(), a, b)
        assert (1 / propensity).tolist() == pytest.approx(list(inverse))
        expected = peer.psprecision_at_k(target.int().numpy(), scores.numpy(), inverse, k=5)
        plain = peer.psprecision_at_k(target.int().numpy(), scores.numpy(), inverse, k=5, normalize=False)
        for k in range(1, 6):
            assert metrics.psp_at_k(scores, target, propensity, k).item() == pytest.approx(expected[k - 1])
            ours = metrics.psp_at_k(scores, target, propensity, k, normalize=False)
            assert ours.item() == pytest.approx(plain[k - 1])
    expected = peer.precision_at_k(target.int().numpy(), scores.numpy(), k=5)
    for k in range(1, 6):
        assert metrics.precision_at_k(scores, target, k).item() == pytest.approx(expected[k - 1])


MAPS: list[Callable[[Tensor], Tensor]] = [manymax.softmax, manymax.entmax, manymax.sparsemax]


@pytest.mark.parametrize("map", MAPS)
def test_metrics_of_probabilities_by_their_definitions(map: Callable[[Tensor], Tensor], seed: int) -> None:
    """The whole table is smoothed and the squared distance taken, in float64, row by row."""
    probs, target, eps = map(2 * torch.randn(40, 7, dtype=torch.float64)), torch.randint(7, (40,)), 1e-4
    smoothed = (probs + eps) / (probs + eps).sum(1, keepdim=True)
    perplexity = torch.nn.functional.nll_loss(smoothed.log(), target).exp()
    distance = (torch.nn.functional.one_hot(target, 7) - probs).square().sum(1)
    stats = metrics.probability_stats(probs, target)
    assert stats.target_prob.tolist() == [row[y].item() for row, y in zip(probs, target, strict=True)]
    assert stats.support_size.tolist() == [sum(p > 0 for p in row) for row in probs.tolist()]
    assert torch.allclose(metrics.eps_perplexity(stats.target_prob, 7, eps), perplexity)
    assert torch.allclose(metrics.sparsemax_score(stats.target_prob, stats.square_sum), 1 - distance.mean() / 2)


def test_the_sparsemax_score_is_1_minus_the_smallest_sparsemax_loss_of_entmax(seed: int) -> None:
    """Sparsemax maps probabilities to themselves, and of all scores that it maps there they have the smallest loss."""
    probs, target = manymax.entmax(torch.randn(20, 5, dtype=torch.float64)), torch.randint(5, (20,))
    stats = metrics.probability_stats(probs, target)
    score = metrics.sparsemax_score(stats.target_prob, stats.square_sum, reduction="none")
    assert torch.allclose(score, 1 - entmax.sparsemax_loss(probs, target))
    other = probs - torch.where(probs > 0, 0, torch.rand_like(probs))  # the same map of other scores
    assert torch.allclose(manymax.sparsemax(other), probs)
    assert (1 - entmax.sparsemax_loss(other, target) <= score + 1e-12).all()


def test_perplexity_of_a_part_of_the_classes_counts_these() -> None:
    """Two rows that choose among 2 and among 4 classes, each with equal chances."""
    found = metrics.eps_perplexity(torch.tensor([1 / 2, 1 / 4]), torch.tensor([2, 4]), eps=0.1)
    assert found.item() == pytest.approx(math.sqrt(2 * 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_of_blocks_are_those_of_the_table(dtype: torch.dtype, seed: int) -> None:
    queries, vectors, bias = torch.randn(2, 5, 3), torch.randn(9, 3), torch.randn(9)
    queries, vectors, bias = queries.to(dtype), vectors.to(dtype), bias.to(dtype)
    probs = manymax.entmax(queries.double() @ vectors.double().T + bias.double())
    ids, padded = torch.randint(9, (2, 5)), torch.randint(9, (2, 5, 3))
    ids[1, 2], padded[0, 3] = -100, -100
    for target in (ids, padded, torch.rand(2, 5, 9) < 0.3):
        table = metrics.probability_stats(probs, target)
        for block in (1, 4, 100):
            stats = metrics.linear_probability_stats(
                manymax.entmax, queries, vectors, target, bias, options={"block_rows": block}
            )
            assert stats.target_prob.dtype == torch.float32
            for ours, expected in zip(stats, table, strict=True):
                assert torch.allclose(ours.double(), expected.double(), atol=1e-5, equal_nan=True)


def test_rows_without_a_positive_are_nan_and_left_out() -> None:
    target, ranking = torch.tensor([1, -100]), torch.tensor([[1, 0], [0, 1]])
    values = [
        metrics.precision_at_k(ranking, target, 1, reduction="none"),
        metrics.mrr(ranking, target, reduction="none"),
        metrics.target_probability(torch.tensor([[0.0, 1.0], [0.5, 0.5]]), target),
    ]
    assert all(value[0] == 1 and value[1].isnan() for value in values)
    assert metrics.mrr(ranking, target) == metrics.mrr(ranking, target, reduction="sum") == 1
    assert metrics.eps_perplexity(values[2], 2) == metrics.eps_perplexity(values[2][:1], 2)
    assert metrics.sparsemax_score(values[2], torch.tensor([1.0, 0.5])) == 1
    propensity = torch.tensor([0.5, 0.5])
    assert metrics.psp_at_k(ranking, target, propensity, 1) == 1
    assert metrics.psp_at_k(ranking, target, propensity, 1, normalize=False) == 2
    assert metrics.mrr(ranking, torch.tensor([-100, -100])).isnan()


def test_masked_classes_are_not_listed_and_half_precision_is_widened() -> None:
    scores = torch.tensor([[1.0, -torch.inf, -torch.inf]])
    assert metrics.mrr(scores, torch.tensor([2])) == 0
    target_prob = torch.tensor([0.0, 1.0], dtype=torch.bfloat16)
    assert metrics.eps_perplexity(target_prob, 50_000, 1e-6).item() == pytest.approx(1.05e3, rel=1e-4)
    probs, target = torch.full((1, 300), 1 / 300, dtype=torch.bfloat16), torch.arange(300).unsqueeze(0) < 77
    assert metrics.target_probability(probs, target).item() == pytest.approx(probs.double()[target].sum().item(), 1e-6)


IDS, SCORES, PROBS = torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 3), torch.full((2, 4), 0.25)
TARGET = torch.tensor([0, 1])
WRONG = {
    "`ranking` must not hold nan": lambda: metrics.mrr(SCORES * torch.nan, TARGET),
    "`ranking` lists a class twice": lambda: metrics.mrr(torch.tensor([[0, 0], [1, 0]]), TARGET),
    "`ranking` ids must be at least 0, or -100": lambda: metrics.mrr(IDS - 1, TARGET),
    r"`ranking` ids must be in \[0, 3\)": lambda: metrics.mrr(IDS + 2, torch.ones(2, 3, dtype=torch.bool)),
    "`ranking` must hold float scores or integer ids": lambda: metrics.mrr(IDS.bool(), TARGET),
    "`cutoff` must be an integer from 1 to 2": lambda: metrics.precision_at_k(IDS, TARGET, 3),
    "`target` must hold ids, padded ids or bool rows": lambda: metrics.mrr(IDS, SCORES),
    "`target` as bool rows must have shape": lambda: metrics.mrr(SCORES, torch.ones(2, 4, dtype=torch.bool)),
    r"`target` ids must be in \[0, 3\)": lambda: metrics.mrr(SCORES, TARGET + 2),
    "`target` of dtype torch.int64 must have": lambda: metrics.mrr(SCORES, torch.tensor([1])),
    "a many-hot row must be bool": lambda: metrics.mrr(SCORES, torch.ones(2, 3, dtype=torch.long)),
    "`reduction` must be one of": lambda: metrics.mrr(IDS, TARGET, reduction="average"),
    "Pass p_l, not its inverse": lambda: metrics.psp_at_k(IDS, TARGET, torch.tensor([1.0, 3.0]), 1),
    "`propensity` must be a float tensor": lambda: metrics.psp_at_k(IDS, TARGET, TARGET, 1),
    "a score for each of the 2 classes": lambda: metrics.psp_at_k(SCORES, TARGET, torch.ones(2), 1),
    "`num_rows` must be an integer of at least 3": lambda: metrics.propensities(TARGET, 2),
    "`counts` must be from 0 to `num_rows`": lambda: metrics.propensities(TARGET + 3, 3),
    "not scores or log-probabilities": lambda: metrics.target_probability(PROBS.log(), TARGET),
    "`probs` must be at least 0 and sum to 1": lambda: metrics.target_probability(PROBS * torch.nan, TARGET),
    "`target_prob` must be from 0 to 1": lambda: metrics.eps_perplexity(torch.tensor([-1.0]), 5),
    "`eps` must be a finite number": lambda: metrics.eps_perplexity(torch.tensor([1.0]), 5, -1.0),
    "`num_classes` must be an integer of at least 1": lambda: metrics.eps_perplexity(torch.tensor([1.0]), 0),
    "`num_classes` must hold integers": lambda: metrics.eps_perplexity(torch.ones(2), torch.ones(2)),
    "`square_sum` must have the shape": lambda: metrics.sparsemax_score(torch.ones(2), torch.ones(3)),
    "`target` must be a tensor that begins with": lambda: metrics.linear_probability_stats(
        manymax.softmax, torch.ones(3, 2), torch.ones(4, 2), TARGET
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument_and_the_way_out(message: str) -> None:
    with pytest.raises(ManymaxError, match=message):
        WRONG[message]()
