"""Metrics against trec_eval's own code, and against hand-worked lists."""

from __future__ import annotations

import math

import ir_measures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manymax.study.metrics import METRICS, coverage, regret

ORACLE = {
    "ndcg": "nDCG",
    "precision": "P",
    "recall": "R",
    "hit_rate": "Success",
    "mrr": "RR",
    "map": "AP",
}


def oracle(measure: str, lists: list[list[int]], relevant: list[set[int]], cutoff: int) -> list[float]:
    qrels = [ir_measures.Qrel(str(user), str(item), 1) for user, items in enumerate(relevant) for item in items]
    run = [
        ir_measures.ScoredDoc(str(user), str(item), -float(rank))
        for user, items in enumerate(lists)
        for rank, item in enumerate(items)
    ]
    found = ir_measures.iter_calc([ir_measures.parse_measure(f"{measure}@{cutoff}")], qrels, run)
    return [value for _, value in sorted((int(each.query_id), each.value) for each in found)]


def read(lists: list[list[int]], relevant: list[set[int]], cutoff: int) -> tuple[Tensor, Tensor]:
    hits = [[item in wanted for item in items[:cutoff]] for items, wanted in zip(lists, relevant, strict=True)]
    padded = [row + [False] * (cutoff - len(row)) for row in hits]
    return torch.tensor(padded), torch.tensor([len(wanted) for wanted in relevant])


@st.composite
def rankings(draw: st.DrawFn) -> tuple[list[list[int]], list[set[int]], int]:
    users, items = draw(st.integers(1, 4)), draw(st.integers(2, 30))
    lists = [draw(st.permutations(range(items))) for _ in range(users)]
    relevant = [draw(st.sets(st.integers(0, items - 1), min_size=1)) for _ in range(users)]
    return lists, relevant, draw(st.integers(1, 35))


@pytest.mark.parametrize("name", ORACLE)
@settings(max_examples=30)
@given(case=rankings())
def test_definitions_are_those_of_trec_eval(name: str, case: tuple[list[list[int]], list[set[int]], int]) -> None:
    lists, relevant, cutoff = case
    values = METRICS[name].function(*read(lists, relevant, cutoff))
    assert values.dtype == torch.float64
    assert values.tolist() == pytest.approx(oracle(ORACLE[name], lists, relevant, cutoff), abs=1e-9)


@settings(max_examples=30)
@given(case=rankings())
def test_dcg_and_topk_error_by_their_formulas(case: tuple[list[list[int]], list[set[int]], int]) -> None:
    lists, relevant, cutoff = case
    hits, sizes = read(lists, relevant, cutoff)
    for user, (items, wanted) in enumerate(zip(lists, relevant, strict=True)):
        found = [rank for rank, item in enumerate(items[:cutoff], start=1) if item in wanted]
        expected = sum(1 / math.log2(rank + 1) for rank in found)
        assert METRICS["dcg"].function(hits, sizes)[user] == pytest.approx(expected)
        missed = len(wanted - set(items[:cutoff])) / len(wanted)
        assert METRICS["topk_error"].function(hits, sizes)[user] == pytest.approx(missed)


def test_a_case_by_hand() -> None:
    """Hits at ranks 2 and 3 of a list of 4, five relevant items."""
    hits, relevant = torch.tensor([[False, True, True, False]]), torch.tensor([5])
    discounted = 1 / math.log2(3) + 1 / 2
    ideal = 1 + 1 / math.log2(3) + 1 / 2 + 1 / math.log2(5)
    expected = {
        "dcg": discounted,
        "ndcg": discounted / ideal,
        "precision": 2 / 4,
        "recall": 2 / 5,
        "hit_rate": 1,
        "mrr": 1 / 2,
        "map": (1 / 2 + 2 / 3) / 5,
        "topk_error": 3 / 5,
    }
    assert set(expected) == {metric.name for metric in METRICS.values() if metric.of == "hits"}
    for name, value in expected.items():
        assert METRICS[name].function(hits, relevant).item() == pytest.approx(value)


def test_coverage_counts_every_item_once() -> None:
    assert coverage(torch.tensor([[3, 1], [1, -100]]), 8) == 2 / 8
    assert coverage(torch.tensor([[-100]]), 8) == 0


def test_regret_is_the_lost_share_of_expected_dcg() -> None:
    probs = torch.tensor([0.5, 0.3, 0.2])
    lists = torch.tensor([[0, 1, 2], [2, 1, 0], [0, 2, 1]])
    values = regret(probs[lists], probs.expand(3, 3))
    weights = [1, 1 / math.log2(3), 1 / 2]
    best = sum(p * w for p, w in zip((0.5, 0.3, 0.2), weights, strict=True))
    for row, order in enumerate(lists.tolist()):
        ours = sum(float(probs[item]) * w for item, w in zip(order, weights, strict=True))
        assert values[row].item() == pytest.approx(1 - ours / best, abs=1e-7)
    assert values[0] == 0


def test_the_table_says_what_is_better() -> None:
    hits, relevant = torch.tensor([[True, True], [False, True]]), torch.tensor([2, 2])
    for metric in METRICS.values():
        if metric.of == "hits":
            better, worse = metric.function(hits, relevant)
            assert (better > worse) == metric.higher_is_better or better == worse, metric.name
    assert METRICS["hr"] is METRICS["hit_rate"]
