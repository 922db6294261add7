"""The advisor: which member comes first and why, predicted deviations against drawn ones, and wrong arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax import advisor
from manymax.advisor import Advice, Choice, advise
from manymax.errors import ArgumentTypeError, ManymaxError
from manymax.members import FAMILY
from manymax.theory.cost import Machine, Shape, predict_seconds

# Seconds per unit of work, in the orders of magnitude of a desktop processor.
MACHINE = Machine(
    flops=1e-11,
    streamed=5e-10,
    exponentials=1e-9,
    passes=2e-10,
    fresh=2e-9,
    near=4e-10,
    far=1e-9,
    sorted=2e-8,
    calls=1e-6,
)
SAMPLED = ("sampled_softmax", "nce")


def gaussian(rows: int, classes: int, spread: float) -> Tensor:
    """Gaussian scores (rows, classes), the same at every call."""
    return spread * torch.randn(rows, classes, generator=torch.Generator().manual_seed(1))


def advise_small(**situation: Any) -> Advice:
    """Advice for 1000 classes from one row of scores; `situation` replaces arguments of `advise`."""
    given: dict[str, Any] = {"machine": MACHINE, "scores": gaussian(1, 1000, 1.5)}
    return advise(1000, **(given | situation))


FEW_ROWS = "too few rows of `scores` to tell how popular classes are: no draws by popularity"


def plain(choices: Iterable[Choice]) -> list[Choice]:
    """One choice of each member: that with uniform draws, if it draws."""
    return [choice for choice in choices if choice.proposal in (None, "uniform")]


def choice_of(advice: Advice, member: str, proposal: str | None = None) -> Choice:
    """The one choice of a member, ranked or rejected; that with uniform draws, if it draws."""
    every = (*advice.ranked, *advice.rejected)
    found = [c for c in every if c.member == member and c.proposal in (None, proposal or "uniform")]
    assert len(found) == 1
    return found[0]


def test_for_moderate_c_softmax_comes_first() -> None:
    advice = advise_small()
    first = advice.ranked[0]
    assert (first.member, first.deviation, first.gives_up) == ("softmax", 0.0, ())
    assert first.why == "the softmax loss itself"
    for name in SAMPLED:  # draws that take no longer than softmax do not reach the target
        assert choice_of(advice, name).deviation > advice.situation.target
        assert choice_of(advice, name).needed_negatives > choice_of(advice, name).settings["num_negatives"]


def test_for_huge_c_a_sampled_member_that_reaches_the_target_comes_first() -> None:
    advice = advise(100_000, machine=MACHINE, scores=gaussian(2, 100_000, 0.7))
    assert advice.ranked[0].member in SAMPLED
    for name in SAMPLED:
        choice = choice_of(advice, name)
        assert choice.settings["num_negatives"] == choice.needed_negatives < 1000
        assert choice.deviation <= 0.1
        assert choice.step_seconds < choice_of(advice, "softmax").step_seconds


def test_under_a_time_limit_the_smallest_deviation_comes_first() -> None:
    shape = Shape(batch=1024, num_classes=1000, dim=64, num_negatives=5)
    limit = 1.1 * predict_seconds("nce", shape, MACHINE)
    advice = advise_small(max_step_seconds=limit)
    deviations = [c.deviation for c in advice.ranked if c.deviation is not None]
    assert deviations == sorted(deviations)
    assert {c.member for c in advice.ranked[:2]} == set(SAMPLED)
    rejected = choice_of(advice, "softmax").rejected
    assert rejected is not None
    assert rejected.endswith(f"the limit is {limit:.3g} s")


def test_k_is_the_largest_that_fits() -> None:
    shape = Shape(batch=1024, num_classes=1000, dim=64, num_negatives=7)
    limit = predict_seconds("sampled_softmax", shape, MACHINE)
    assert choice_of(advise_small(max_step_seconds=1.0001 * limit), "sampled_softmax").settings["num_negatives"] == 7
    assert choice_of(advise_small(max_step_seconds=0.9999 * limit), "sampled_softmax").settings["num_negatives"] == 6
    memory = choice_of(advise_small(num_negatives=7), "sampled_softmax").memory
    assert choice_of(advise_small(max_memory=memory), "sampled_softmax").settings["num_negatives"] == 7
    assert choice_of(advise_small(max_memory=0.9999 * memory), "sampled_softmax").settings["num_negatives"] == 6


def test_a_limit_per_epoch_is_one_per_step() -> None:
    by_epoch = advise_small(examples=10_000, max_epoch_seconds=0.2, batch=1000)
    by_step = advise_small(examples=10_000, max_step_seconds=0.02, batch=1000)
    assert (by_epoch.ranked, by_epoch.rejected) == (by_step.ranked, by_step.rejected)
    for choice in by_step.ranked:
        assert choice.epoch_seconds == pytest.approx(10 * choice.step_seconds)


def test_a_better_proposal_needs_fewer_draws() -> None:
    popular = gaussian(1, 1000, 1.5)
    scores = popular + 0.3 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(3))
    advice = advise_small(scores=scores, log_q=popular[0], num_negatives=50, target=0.02)
    for name in SAMPLED:
        uniform, given = choice_of(advice, name, "uniform"), choice_of(advice, name, "given")
        assert given.deviation < uniform.deviation
        assert given.needed_negatives < uniform.needed_negatives
        assert advice.ranked.index(given) < advice.ranked.index(uniform)


def test_a_smaller_target_needs_more_draws_and_a_larger_k_deviates_less() -> None:
    needed = [choice_of(advise_small(target=target), "nce").needed_negatives for target in (1.0, 0.5, 0.2)]
    assert needed == sorted(set(needed))
    deviations = [choice_of(advise_small(num_negatives=k), "nce").deviation for k in (1, 10, 100)]
    assert deviations == sorted(set(deviations), reverse=True)


@pytest.mark.parametrize("limit", [None, 2e6])
def test_every_member_is_ranked_or_rejected_and_the_ranking_is_sorted(limit: float | None) -> None:
    advice = advise_small(max_memory=limit)
    assert sorted(c.member for c in plain((*advice.ranked, *advice.rejected))) == sorted(FAMILY)
    assert advice.ranked
    assert bool(advice.rejected) == (limit is not None)
    keys = [
        (not c.consistent, math.inf if c.deviation is None else max(c.deviation, 0.1), c.step_seconds)
        for c in advice.ranked
    ]
    assert keys == sorted(keys)
    assert all(c.rejected is None for c in advice.ranked)


@pytest.mark.parametrize("name", SAMPLED)
def test_predicted_deviations_match_draws(name: str) -> None:
    """The prediction is within 4 standard errors of the drawn mean of (loss - softmax loss - offset)^2."""
    classes, k, draws = 20, 8, 200_000
    scores, log_q = gaussian(1, classes, 1.0), gaussian(1, classes, 0.5)[0].log_softmax(0)
    log_probs = scores[0].double().log_softmax(0)
    advice = advise(classes, machine=MACHINE, scores=scores, log_q=log_q, num_negatives=k)
    predicted = choice_of(advice, name, "given").deviation
    generator = torch.Generator().manual_seed(2)
    labels = torch.multinomial(log_probs.exp(), draws, replacement=True, generator=generator)
    ids = torch.multinomial(log_q.exp(), draws * k, replacement=True, generator=generator).view(draws, k)
    arguments = {"log_q_positive": log_q[labels].double(), "log_q_negative": log_q[ids].double(), "reduction": "none"}
    if name == "nce":
        values = manymax.nce_loss(log_probs[labels], log_probs[ids], **arguments)
        offset = math.log(k) + log_q[labels] + 1
    else:
        values = manymax.sampled_softmax_loss(log_probs[labels], log_probs[ids], **arguments)
        offset = math.log(k + 1) + log_q[labels]
    squares = (values + log_probs[labels] - offset).square()
    error = float(squares.std()) / math.sqrt(draws)
    assert abs(float(squares.mean()) - predicted) < 4 * error


def test_deviations_of_members_that_draw_nothing() -> None:
    scores = gaussian(2, 1000, 1.5).double()
    advice, probs = advise_small(scores=scores), scores.softmax(1)
    minimiser = 1000 * probs  # of the RG loss
    on_sample, at_minimiser = (
        (manymax.rg_log_partition(s) - s.logsumexp(1)).square().mean() for s in (scores, minimiser)
    )
    assert on_sample < 0.1 < at_minimiser  # Gaussian scores flatter RG, and training would not stay at them
    assert choice_of(advice, "rg").deviation == pytest.approx(float(at_minimiser))
    sparse = max((FAMILY["sparsemax"].conjugate(s) - s.logsumexp(1)).square().mean() for s in (scores, probs))
    assert choice_of(advice, "sparsemax").deviation == pytest.approx(float(sparse))
    labels = torch.tensor([0, 1])
    ranking = advisor.Ranking(advice.situation, MACHINE, advisor.ScoreSample(scores, labels, {}))
    rankmax = ranking.squared_distance(FAMILY["rankmax"])
    losses = [f(scores, labels, reduction="none") for f in (manymax.rankmax_loss, manymax.softmax_loss)]
    assert rankmax == pytest.approx(float((losses[0] - losses[1]).square().mean()))
    assert choice_of(advice, "hierarchical_softmax").deviation is None


def test_labels_are_drawn_from_softmax() -> None:
    probs = torch.tensor([0.6, 0.3, 0.1])
    rows = 30_000
    situation = replace(advise_small().situation, num_classes=3)
    sample, _ = advisor.read_sample(situation, probs.log().expand(rows, 3), 1.0, None)
    found = torch.bincount(sample.labels, minlength=3) / rows
    error = (probs * (1 - probs) / rows).sqrt()
    assert ((found - probs).abs() < 4 * error).all()


def test_the_cost_of_a_sparse_map_follows_the_support_of_the_scores() -> None:
    times = [
        choice_of(advise_small(scores=gaussian(2, 1000, spread)), "sparsemax").step_seconds for spread in (0.0001, 20.0)
    ]
    shapes = [Shape(1024, 1000, 64, support=support) for support in (1000.0, 1.0)]
    assert times[0] == predict_seconds("sparsemax", shapes[0], MACHINE)
    assert times[1] == pytest.approx(predict_seconds("sparsemax", shapes[1], MACHINE), rel=0.1)


def test_assumed_supports_are_those_of_a_model_trained_with_a_sparse_loss() -> None:
    """A factorisation of Gowalla has supports of 20 and 1,808 of 40,981 classes, and all within 1 of the largest."""
    situation = replace(advise_small().situation, num_classes=40_981)
    sample, _ = advisor.read_sample(situation, None, advisor.ASSUMED_SPREAD, None)
    scores = sample.sparse_scale * sample.scores[:4]
    supports = [
        float((probs > 0).sum(1).float().mean()) for probs in (manymax.sparsemax(scores), manymax.entmax(scores))
    ]
    assert supports == [pytest.approx(20, rel=0.5), pytest.approx(1808, rel=0.5)]
    assert (manymax.rankmax(scores, sample.labels[:4]) > 0).float().mean() > 0.95
    given, _ = advisor.read_sample(situation, sample.scores[:2], 1.0, None)
    assert given.sparse_scale == 1  # scores of the caller's model are taken as they are


def test_a_machine_with_the_native_back_end_is_advised_for_it() -> None:
    plain, native = (
        choice_of(advise_small(machine=replace(MACHINE, native=there)), "entmax").step_seconds
        for there in (False, True)
    )
    assert native < plain


def test_the_metric_decides_what_counts() -> None:
    assert not any("multilabel" in c.settings for c in advise_small().ranked)
    forms = {
        m: advise_small(metric=m, positives=3.0).ranked[0].settings["multilabel"] for m in advisor.MULTILABEL_BY_METRIC
    }
    assert forms == {
        "precision": "sum",
        "dcg": "sum",
        "recall": "normalized",
        "ndcg": "sum",
        "probabilities": "sum",
    }
    assert any("NDCG" in text for text in advise_small(positives=3.0).assumptions)
    assert not any("NDCG" in text for text in advise_small().assumptions)
    inconsistent = {name for name, member in FAMILY.items() if not member.facts.calibrated.value}
    assert {"rankmax", "taylor_softmax"} <= inconsistent
    assert {c.member for c in plain(advise_small(metric="dcg").ranked) if not c.consistent} == inconsistent
    wanted = {c.member for c in plain(advise_small(metric="probabilities").ranked) if not c.consistent}
    # RG gives negative probabilities to the lowest scores, and those of PSL and BSL need the label.
    assert wanted == inconsistent | {"rg", "psl", "bsl"}


def test_properties_that_a_choice_gives_up_are_named() -> None:
    advice = advise_small(shared=True)
    given_up = {c.member: {text.partition(":")[0] for text in c.gives_up} for c in plain(advice.ranked)}
    assert given_up["softmax"] == given_up["hierarchical_softmax"] == set()
    assert given_up["sparsemax"] == given_up["entmax"] == {"order preservation", "conditioning"}
    assert given_up["rg"] == {"calibrated probabilities"}
    assert given_up["sampled_softmax"] == {"independent noise"}
    assert given_up["nce"] == {"independent noise", "conditioning"}
    assert {"consistency", "convexity"} <= given_up["rankmax"] & given_up["taylor_softmax"]


def test_an_impossible_memory_limit_leaves_an_empty_list_with_reasons() -> None:
    advice = advise_small(max_memory=1000)
    assert advice.ranked == ()
    assert len(plain(advice.rejected)) == len(FAMILY)
    assert all("GB of memory; the limit is 1e-06 GB" in str(c.rejected) for c in advice.rejected)


def test_scores_are_assumed_where_none_are_given() -> None:
    advice = advise(50, machine=MACHINE, spread=0.5)
    assert "standard deviation of 0.5" in advice.assumptions[0]
    assert advise_small().assumptions == (FEW_ROWS,)
    sample = advisor.assumed_scores(2000, 1.2, torch.Generator().manual_seed(0))
    assert float(sample.std()) == pytest.approx(1.2, rel=0.05)
    assert float(((sample / 1.2) ** 3).mean()) == pytest.approx(2 * 0.4**1.5, rel=0.2)
    assert advisor.assumed_scores(advisor.SAMPLE_SIZE, 1.0).shape == (1, advisor.SAMPLE_SIZE)


def test_a_machine_is_measured_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_dims = []

    def measured(dim: int) -> Machine:
        measured_dims.append(dim)
        return MACHINE

    monkeypatch.setattr(advisor, "measure_machine", measured)
    assert advise_small(machine=None, dim=16).machine == MACHINE
    assert measured_dims == [16]


def test_the_largest_allowed_scores_give_finite_predictions() -> None:
    advice = advise_small(scores=1e6 * gaussian(2, 1000, 1.0).sign())
    json.dumps(advice.as_dict(), allow_nan=False)


def test_a_single_class_gets_advice() -> None:
    advice = advise(1, machine=MACHINE, scores=torch.zeros(2, 1))
    assert len(plain(advice.ranked)) == len(FAMILY)


def test_the_same_question_has_the_same_answer() -> None:
    assert advise(40, machine=MACHINE) == advise(40, machine=MACHINE)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_classes": -3}, "`num_classes` must be an integer of at least 1; got -3"),
        ({"batch": 0}, "`batch` must be an integer of at least 1; got 0"),
        ({"dim": 1.5}, r"`dim` must be an integer; got 1\.5"),
        ({"examples": 0}, "`examples` must be an integer of at least 1; got 0"),
        ({"positives": 0.0}, "`positives` must be above 0 and at most 1000; got 0"),
        ({"positives": 1001.0}, "`positives` must be above 0 and at most 1000; got 1001"),
        ({"metric": "ndgc"}, "`metric` must be one of .* Did you mean 'ndcg'"),
        ({"max_memory": -1.0}, "`max_memory` must be a finite number above 0; got -1"),
        ({"max_step_seconds": math.nan}, "`max_step_seconds` must be a number; got nan"),
        ({"max_epoch_seconds": 3.0}, "`max_epoch_seconds` needs `examples`"),
        ({"num_negatives": 0}, "`num_negatives` must be an integer of at least 1; got 0"),
        ({"num_negatives": 1001}, "`num_negatives` must be at most the number of classes, 1000; got 1001"),
        ({"target": 0.0}, "`target` must be a finite number above 0; got 0"),
        ({"scores": None, "spread": -1.0}, "`spread` must be a finite number of at least 0; got -1"),
        ({"scores": torch.zeros(4, 999)}, r"`scores` must have shape \(rows, 1000\); got \(4, 999\)"),
        ({"scores": torch.zeros(0, 1000)}, r"`scores` must have shape \(rows, 1000\); got \(0, 1000\)"),
        ({"scores": torch.full((2, 1000), math.nan)}, "`scores` must be numbers between -1e.06 and 1e.06, without nan"),
        ({"log_q": torch.zeros(4, 1000)}, r"`log_q` must have shape \(1000\); got \(4, 1000\)"),
    ],
)
def test_wrong_situations_are_refused(wrong: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"num_classes": 1000, "machine": MACHINE, "scores": gaussian(1, 1000, 1.0)} | wrong
    with pytest.raises(ManymaxError, match=message):
        advise(**given)


@pytest.mark.parametrize("scores", [[[0.0] * 1000], torch.zeros(2, 1000, dtype=torch.long)])
def test_scores_of_another_type_are_refused(scores: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"`scores` must be a (float )?tensor.*; got"):
        advise_small(scores=scores)


def test_it_says_what_it_ranks_by() -> None:
    text = advise_small(target=0.25).ranked_by
    assert text.startswith("Ranked by closeness to the softmax loss")
    assert "up to 0.25 are equal" in text


def test_an_exact_loss_that_would_take_hours_is_warned_of() -> None:
    assert advise_small(examples=100_000).warnings == ()
    slow = replace(MACHINE, flops=1e-7)
    for examples, what in ((1024 * 3000, "an epoch would take "), (None, "1,000 steps would take ")):
        warnings = advise_small(machine=slow, examples=examples).warnings
        (softmax,) = (text for text in warnings if text.startswith("softmax: "))
        seconds = predict_seconds("softmax", Shape(1024, 1000, 64), slow) * (3000 if examples else 1000)
        assert f"{what}{seconds / 3600:.2g} h here; " in softmax
        assert not any(text.startswith(SAMPLED) for text in warnings)


def test_many_rows_of_scores_are_sampled_and_it_says_so() -> None:
    rows, situation = 4056, advise_small().situation
    sample, assumptions = advisor.read_sample(situation, gaussian(rows, 1000, 1.0), 1.0, None)
    assert len(sample.scores) == len(sample.labels) == 262
    assert assumptions == ["262 of the 4,056 rows of `scores`, drawn at random, stand for all of them"]
    again, _ = advisor.read_sample(situation, gaussian(rows, 1000, 1.0), 1.0, None)
    assert torch.equal(sample.scores, again.scores)
    few, assumptions = advisor.read_sample(situation, gaussian(262, 1000, 1.0), 1.0, None)
    assert torch.equal(few.scores, gaussian(262, 1000, 1.0))
    assert assumptions == [FEW_ROWS]
    assert {*sample.proposals} - {*few.proposals} == {"popularity", "mixed", "in_batch"}


def test_draws_by_popularity_need_fewer_negatives_where_classes_differ_in_it() -> None:
    popular = torch.empty(1, 1000).exponential_(generator=torch.Generator().manual_seed(2))
    # On real scores and on assumed ones, which are skewed like popularity; 262 rows are the sample.
    for scores in (popular + gaussian(400, 1000, 0.3), None):
        advice = advise(1000, machine=MACHINE, scores=scores, batch=64)
        for name in SAMPLED:
            needed = {way: choice_of(advice, name, way).needed_negatives for way in ("uniform", "popularity", "mixed")}
            assert needed["popularity"] < needed["mixed"] < needed["uniform"]
            batch, hard = choice_of(advice, name, "in_batch"), choice_of(advice, name, "dns")
            assert (batch.settings["num_negatives"], batch.settings["shared"]) == (63, True)
            assert batch.deviation == pytest.approx(
                choice_of(advise(1000, machine=MACHINE, scores=scores, num_negatives=63), name, "popularity").deviation
            )
            assert (hard.deviation, hard.consistent, hard.settings["pool"]) == (None, False, 500)
            assert hard.step_seconds > choice_of(advise_small(num_negatives=100, batch=64), name).step_seconds
