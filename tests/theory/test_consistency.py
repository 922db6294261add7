"""Metrics, risks and their minimisers against definitions; which members are consistent with which metrics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax import HuffmanTree
from manymax.engine.member import Member
from manymax.errors import ArgumentError
from manymax.members import FAMILY
from manymax.members.rankmax.theory import rankmax_levels
from manymax.members.taylor_softmax.theory import taylor_branches
from manymax.theory.consistency import consistency
from manymax.theory.label_laws import (
    CONSISTENCY_METRICS,
    LabelLaw,
    expected_metric,
    position_weights,
    random_law,
    regret,
)
from manymax.theory.risk import (
    all_samples,
    closed_form,
    conditional_risk,
    descend_risk,
    minimisers,
    search_minimisers,
)

# (member, setting) of every member with each of its example settings.
CASES = [
    pytest.param(member, setting, id=f"{member.name}-{setting}")
    for member in FAMILY.values()
    for setting in member.examples
]
ALL_SCORES = [case for case in CASES if case.values[0].kind in ("exact", "quadratic")]
LAW = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
LOG_Q = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def laws(count: int, num_classes: int, **kind: Any) -> list[LabelLaw]:
    """Random laws, the same at every call; `kind` are arguments of `random_law`."""
    generator = torch.Generator().manual_seed(num_classes)
    return [random_law(num_classes, generator, **kind) for _ in range(count)]


# Metrics ------------------------------------------------------------------------------------------


def metric_by_hand(ranking: tuple[int, ...], positives: set[int], metric: str, cutoff: int) -> float:
    """The metric of one ranking for one label set, by definition."""
    hits = [item in positives for item in ranking[:cutoff]]
    if not positives:
        return 0.0
    if metric == "precision":
        return sum(hits) / cutoff
    if metric == "recall":
        return sum(hits) / len(positives)
    dcg = sum(hit / math.log2(place + 2) for place, hit in enumerate(hits))
    ideal = sum(1 / math.log2(place + 2) for place in range(min(cutoff, len(positives))))
    return dcg if metric == "dcg" else dcg / ideal


def worst_by_hand(scores: Tensor, law: LabelLaw, metric: str, cutoff: int) -> float:
    """The smallest expected metric of all rankings that sort by the scores."""
    values = []
    for ranking in itertools.permutations(range(len(scores))):
        if any(scores[b] > scores[a] for a, b in itertools.pairwise(ranking)):
            continue
        sets = [set(row.nonzero().flatten().tolist()) for row in law.labels]
        each = [metric_by_hand(ranking, positives, metric, cutoff) for positives in sets]
        values.append(sum(p * value for p, value in zip(law.probs.tolist(), each, strict=True)))
    return min(values)


@pytest.mark.parametrize("metric", CONSISTENCY_METRICS)
@pytest.mark.parametrize("cutoff", [1, 2, 4])
def test_expected_metrics_equal_their_definitions(metric: str, cutoff: int) -> None:
    for law in [*laws(4, 4, labels="multi", ties=True, zeros=True), *laws(2, 4)]:
        for scores in (normal(4), torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.zeros(4)):
            expected = worst_by_hand(scores, law, metric, cutoff)
            assert expected_metric(scores, law, metric, cutoff) == pytest.approx(expected, abs=1e-12)
            best = max(worst_by_hand(normal(4, seed=s), law, metric, cutoff) for s in range(60))
            assert regret(scores, law, metric, cutoff) == pytest.approx(best - expected, abs=1e-12)


def test_an_empty_set_gains_nothing() -> None:
    law = LabelLaw(torch.tensor([[False, False], [True, False]]), torch.tensor([0.5, 0.5]))
    assert [law.gains(metric).tolist() for metric in CONSISTENCY_METRICS] == [[0.5, 0.0]] * 4


def test_scores_of_minus_infinity_are_tied() -> None:
    law = LabelLaw.single(torch.tensor([1.0, 0.0, 0.0]))
    assert regret(torch.tensor([0.0, -torch.inf, -torch.inf]), law, "dcg") == 0
    assert regret(torch.tensor([-torch.inf, 0.0, -torch.inf]), law, "recall", 1) == 1


# Risk ---------------------------------------------------------------------------------------------


# The loss of a row is the sum of those of its positives, unless it takes all of them together.
@pytest.mark.parametrize(("member", "setting"), [case for case in ALL_SCORES if not case.values[0].joint])
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
def test_the_risk_of_label_sets_is_linear_in_single_labels(member: Member, setting: dict, multilabel: str) -> None:
    """Mean loss over the label sets minus risk of the class weights does not depend on the scores."""
    for law in laws(3, 4, labels="multi"):
        scores = normal(6, 4, seed=5)
        mean = torch.zeros(6, dtype=torch.float64)
        for labels, prob in zip(law.labels, law.probs, strict=True):
            target = labels.expand(6, 4)
            mean += prob * member.loss(scores, target, multilabel=multilabel, reduction="none", **setting)
        difference = mean - conditional_risk(member, scores, law.class_weights(multilabel), **setting)
        torch.testing.assert_close(difference, difference[:1].expand(6), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("member", "setting"), [c for c in CASES if c.values[0].kind == "sampled"])
def test_the_risk_of_a_sampled_member_is_the_mean_over_all_ordered_samples(member: Member, setting: dict) -> None:
    scores, k = normal(3), 3
    expected = 0.0
    for label, *ids in itertools.product(range(3), repeat=k + 1):
        chance = float(LAW[label] * LOG_Q[ids].sum().exp())
        hits = torch.tensor(ids) == label
        loss = member.loss(
            scores[label], scores[ids], log_q_positive=LOG_Q[label], log_q_negative=LOG_Q[ids], hits=hits, **setting
        )
        expected += chance * float(loss)
    found = conditional_risk(member, scores, LAW, log_q=LOG_Q, num_negatives=k, **setting)
    assert float(found) == pytest.approx(expected, rel=1e-12)
    rows = conditional_risk(member, scores.expand(2, 5, 3), LAW, log_q=LOG_Q, num_negatives=k, **setting)
    torch.testing.assert_close(rows, found.expand(2, 5))


def test_samples_have_multinomial_probabilities() -> None:
    ids, chances = all_samples(LOG_Q, 4)
    assert len(ids) == math.comb(6, 4)
    assert float(chances.sum()) == pytest.approx(1, abs=1e-12)
    mean_count = chances @ torch.nn.functional.one_hot(ids, 3).sum(1).double()
    torch.testing.assert_close(mean_count, 4 * LOG_Q.exp())
    impossible = all_samples(torch.tensor([0.0, -torch.inf]), 2)[1]
    assert impossible.tolist() == [1, 0, 0]


def test_the_risk_of_a_tree() -> None:
    tree, nodes = HuffmanTree([1, 1, 2]), torch.tensor([[0.3, -1.0]], dtype=torch.float64)
    sigma = torch.sigmoid(nodes[0])
    probs = [torch.ones(()).double() for _ in range(3)]
    for label in range(3):  # by the definition: the sum of the decisions along the path of the label
        for edge in tree.paths(torch.tensor(label)).tolist():
            if edge < tree.num_edges:
                node = int(tree.edge_node[edge])
                probs[label] = probs[label] * (sigma[node] if edge - int(tree.first_edge[node]) else 1 - sigma[node])
    expected = -sum(p * torch.log(q) for p, q in zip(LAW, probs, strict=True))
    found = conditional_risk(FAMILY["hierarchical_softmax"], nodes, LAW, tree=tree)
    torch.testing.assert_close(found, expected[None])
    with pytest.raises(ArgumentError, match="`tree` must be given"):
        conditional_risk(FAMILY["hierarchical_softmax"], nodes, LAW)


# Minimisers ---------------------------------------------------------------------------------------


def risk_at(member: Member, scores: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """The conditional risk, with the proposal LOG_Q for a sampled member."""
    if member.kind == "sampled":
        options |= {"log_q": LOG_Q, "num_negatives": 2}
    return conditional_risk(member, scores, weights, **options)


@pytest.mark.parametrize(
    ("member", "setting"), [c for c in CASES if c.values[0].kind != "tree" and c.values[0].held is None]
)
def test_no_other_scores_have_a_lower_risk(member: Member, setting: dict) -> None:
    found = minimisers(member, LAW, log_q=LOG_Q, **setting)
    lowest = risk_at(member, found.scores, LAW, **setting)
    assert (lowest - lowest[0]).abs().max() < 1e-9
    for scale in (1e-3, 0.1, 1.0, 5.0):
        others = found.scores[0] + scale * normal(200, 3, seed=7)
        assert (risk_at(member, others, LAW, **setting) > lowest.min() - 1e-10).all()


@pytest.mark.parametrize(
    ("member", "setting"),
    [c for c in CASES if c.values[0].name not in ("rankmax", "taylor_softmax") and c.values[0].held is None],
)
def test_closed_forms_are_what_a_search_finds(member: Member, setting: dict) -> None:
    known = closed_form(member, LAW, log_q=LOG_Q, **setting)
    if member.kind == "tree":
        assert known is not None
        return
    searched = search_minimisers(member, LAW, log_q=LOG_Q, num_negatives=3, **setting)
    assert searched.how == "search"
    found = minimisers(member, LAW, log_q=LOG_Q, num_negatives=3, **setting)
    assert found.how == ("search" if known is None else "closed form")
    torch.testing.assert_close(searched.scores, found.scores, atol=1e-5, rtol=0)


def test_the_closed_form_of_nce_with_an_assumed_log_partition() -> None:
    options: dict[str, Any] = {"log_q": LOG_Q, "num_negatives": 3, "log_z": 2.0}
    found, searched = (find(FAMILY["nce"], LAW, **options) for find in (minimisers, search_minimisers))
    assert (found.how, searched.how) == ("closed form", "search")
    torch.testing.assert_close(searched.scores, found.scores, atol=1e-5, rtol=0)


def test_masked_hits_move_the_minimiser_of_sampled_softmax_away_from_log_p() -> None:
    p, log_q = torch.tensor([0.4, 0.32, 0.28]).double(), torch.tensor([0.1, 0.2, 0.7]).double().log()
    for k, exact in ((1, True), (2, False)):
        found = minimisers(FAMILY["sampled_softmax"], p, log_q=log_q, num_negatives=k, hit_policy="mask")
        assert found.how == "search"
        assert ((found.scores[0] - p.log() + p.log().max()).abs().max() < 1e-4) == exact


@pytest.mark.parametrize("order", [2, 4])
def test_both_branches_of_taylor_softmax_are_minimisers(order: int) -> None:
    member = FAMILY["taylor_softmax"]
    branches = taylor_branches(LAW, order)
    assert member.map is not None
    torch.testing.assert_close(member.map(branches, order=order), LAW.expand(2, 3))
    assert (branches[0].diff() < 0).all()
    assert (branches[1].diff() > 0).all()
    searched = search_minimisers(member, LAW, starts=3, order=order)
    lowest = conditional_risk(member, searched.scores[0], LAW, order=order)
    torch.testing.assert_close(
        conditional_risk(member, branches, LAW, order=order), lowest.expand(2), atol=1e-8, rtol=0
    )


def test_a_search_refuses_impossible_classes() -> None:
    weights = torch.tensor([0.5, 0.5, 0.0])
    with pytest.raises(ArgumentError, match="`weights` must be positive for a search"):
        minimisers(FAMILY["taylor_softmax"], weights)
    assert minimisers(FAMILY["softmax"], weights).scores[0, 2] == -torch.inf


# Losses that hold a bound constant in their gradient ----------------------------------------------


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("talos", {"k": k, "tau": tau}) for k in (1, 2, 3, 9) for tau in (0.5, 1.0)),
        ("sl_at_k", {"k": 1, "gate_temperature": 0.5}),
    ],
)
def test_no_scores_have_a_lower_risk_than_the_minimisers_of_a_loss_with_a_bound(name: str, setting: dict) -> None:
    tries = torch.cat([scale * normal(400, 4, seed=int(10 * scale)) for scale in (0.3, 1, 3, 10, 30)])
    for law in [*laws(6, 4), *laws(2, 4, ties=True)]:
        found = minimisers(FAMILY[name], law.probs, **setting)
        lowest = conditional_risk(FAMILY[name], found.scores, law.probs, **setting)
        assert found.how == "closed form"
        assert (lowest - lowest[0]).abs().max() < 1e-12
        near = found.scores[0] + torch.cat([scale * normal(400, 4, seed=9) for scale in (1e-3, 0.1, 1)])
        risks = conditional_risk(FAMILY[name], torch.cat([tries, near]), law.probs, **setting)
        assert (risks >= lowest[0] - 1e-9).all()


def test_the_ties_of_talos_begin_at_a_list_of_three() -> None:
    """The bounds of its facts: consistent with a list of one or two, and its K most probable classes are on top."""
    member = FAMILY["talos"]
    assert [consistency(member, "recall", k=k, trials=30).holds for k in (1, 2, 3, 4)] == [True, True, False, False]
    for law in laws(30, 5, zeros=True):
        scores = minimisers(member, law.probs, k=3).scores[0]
        rising = law.probs.argsort()
        assert scores[rising[2:]].min() > scores[rising[:2]].max()


def test_a_search_refuses_a_gradient_that_is_no_derivative() -> None:
    with pytest.raises(ArgumentError, match=r"`member`: .* sl_at_k .* holds the K-th largest score"):
        minimisers(FAMILY["sl_at_k"], LAW, k=2)


# Rankmax ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [1, 2, 3, 4, 5])
def test_rankmax_levels_are_the_best_whole_numbers(num_classes: int) -> None:
    grid = torch.tensor(list(itertools.product(range(num_classes), repeat=num_classes))).double()
    for law in [*laws(6, num_classes), *laws(4, num_classes, ties=True, zeros=True)]:
        risks = conditional_risk(FAMILY["rankmax"], grid, law.probs)
        found = conditional_risk(FAMILY["rankmax"], rankmax_levels(law.probs), law.probs)
        assert float(found) == pytest.approx(float(risks.min()), abs=1e-12)


def test_no_scores_between_whole_numbers_have_a_lower_rankmax_risk() -> None:
    for law in laws(5, 4):
        lowest = conditional_risk(FAMILY["rankmax"], rankmax_levels(law.probs), law.probs)
        ends = torch.stack([descend_risk(FAMILY["rankmax"], start, law.probs, {}) for start in 2 * normal(2, 4)])
        near = rankmax_levels(law.probs) + 0.3 * normal(200, 4)
        assert (conditional_risk(FAMILY["rankmax"], torch.cat([ends, near]), law.probs) >= lowest - 1e-12).all()


def test_rankmax_ties_the_top_from_34_classes_on() -> None:
    def classes_per_level(num_classes: int) -> Tensor:
        even = torch.linspace(1 + 1e-6, 1, num_classes, dtype=torch.float64)
        return (-rankmax_levels(even / even.sum())).long().bincount()

    assert all(int(classes_per_level(C)[0]) == 1 for C in range(2, 34))
    assert classes_per_level(34).tolist() == [2, 12, 20]
    ahead = torch.linspace(1 + 1e-6, 1, 60, dtype=torch.float64)
    ahead[0] = 1.2
    assert int((rankmax_levels(ahead / ahead.sum()) == 0).sum()) > 1


def test_rankmax_never_inverts_classes_and_often_ties_them() -> None:
    tied = 0
    for law in laws(200, 4):
        by_probability = law.probs.argsort(descending=True)
        steps = rankmax_levels(law.probs)[by_probability].diff()
        assert (steps <= 0).all()
        tied += bool((steps == 0).any())
    assert abs(tied / 200 - 0.73) < 4 * math.sqrt(0.73 * 0.27 / 200)


# Consistency --------------------------------------------------------------------------------------

CONSISTENT = ("softmax", "sparsemax", "entmax", "sampled_softmax", "nce", "hierarchical_softmax", "rg", "psl")
# K of a list that is shorter than four classes, where the default is longer.
SHORT: dict[str, dict[str, Any]] = {"sl_at_k": {"k": 1}}
# (multi-label form, metric) that are consistent with several labels.
MULTI_LABEL = {("sum", "precision"), ("sum", "dcg"), ("normalized", "recall")}


# A gradient that holds ranks constant is no way to a minimiser, and no formula of one is known.
@pytest.mark.parametrize("name", [name for name, member in FAMILY.items() if not member.joint])
@pytest.mark.parametrize("metric", CONSISTENCY_METRICS)
def test_consistency_with_one_label_is_what_the_facts_state(name: str, metric: str) -> None:
    member = FAMILY[name]
    found = consistency(member, metric, trials=30, **SHORT.get(name, {}))
    assert found.holds == member.facts.calibrated.value == (name in CONSISTENT)


@pytest.mark.parametrize("name", CONSISTENT)
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
@pytest.mark.parametrize("metric", CONSISTENCY_METRICS)
def test_consistency_with_several_labels(name: str, multilabel: str, metric: str) -> None:
    found = consistency(FAMILY[name], metric, labels="multi", multilabel=multilabel, trials=25)
    assert found.holds == ((multilabel, metric) in MULTI_LABEL)


@pytest.mark.parametrize("correction", ["logq", "none", "partition"])
def test_sampled_softmax_is_consistent_under_a_uniform_proposal_whatever_its_correction(correction: str) -> None:
    member = FAMILY["sampled_softmax"]
    assert consistency(member, "dcg", num_classes=3, trials=6, uniform=True, correction=correction).holds
    skewed = consistency(member, "dcg", num_classes=3, trials=6, correction=correction)
    assert skewed.holds == (correction == "logq")


def test_the_counter_example_has_the_stated_regret() -> None:
    found = consistency(FAMILY["rankmax"], "recall")
    assert not found.holds
    assert found.regret == pytest.approx(regret(found.scores, found.law, "recall", found.cutoff))
    again = minimisers(FAMILY["rankmax"], found.law.class_weights()).scores[0]
    torch.testing.assert_close(again, found.scores)


def test_random_laws_have_ties_and_zeros_only_where_asked() -> None:
    tied = laws(60, 4, ties=True, zeros=True)
    assert any((law.probs == 0).any() for law in tied)
    assert any(len(law.probs.unique()) < 4 for law in tied)
    assert all((law.probs > 0).all() for law in laws(60, 4, ties=True))
    for law in laws(60, 4, labels="multi"):
        assert law.labels.any(-1).all()
        assert (law.class_weights() > 0).all()
        assert float(law.probs.sum()) == pytest.approx(1)


def test_wrong_arguments() -> None:
    law = LabelLaw.single(LAW)
    with pytest.raises(ArgumentError, match="`metric` must be one of"):
        law.gains("map")
    with pytest.raises(ArgumentError, match="`multilabel` must be one of"):
        law.class_weights("mean")
    with pytest.raises(ArgumentError, match="`cutoff` must be between 1 and the number of classes, 3; got 4"):
        position_weights("dcg", 3, 4)
    with pytest.raises(ArgumentError, match="`labels` must be one of"):
        consistency(FAMILY["softmax"], labels="several")
