"""The rules of the findings, on generated records with known effects and on the paper's own tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manymax.paper.findings import FINDINGS, Judgement, judge, points
from manymax.study.report.runs import read_study
from manymax.study.report.significance import PairedComparison
from manymax.study.report.trials import Trial, trials
from tests.study.report.generated import write_run

Runs = list[dict[str, Any]]


def judged(folder: Path, runs: Runs, number: int) -> Judgement:
    for run in runs:
        write_run(folder, **run)
    return next(j for j in judge(trials(read_study(folder).done)) if j.finding.number == number)


def rates(softmax: float, sparsemax: float, entmax: float) -> Runs:
    """Three losses, each best at one of three rates."""
    best = {"softmax": softmax, "sparsemax": sparsemax, "entmax": entmax}
    return [
        {"loss": loss, "lr": lr, "quality": 0.3 if lr == top else 0.2}
        for loss, top in best.items()
        for lr in (1e-2, 1e-3, 1e-4)
    ]


def runs_of(**qualities: float) -> Runs:
    return [{"loss": loss, "quality": quality} for loss, quality in qualities.items()]


def under(backbone: str, runs: Runs, **more: Any) -> Runs:
    return [run | {"backbone": backbone} | more for run in runs]


def negatives(loss: str, *qualities: float) -> Runs:
    counts = (5, 10, 50, 100)
    return [{"loss": loss, "num_negatives": k, "quality": q} for k, q in zip(counts, qualities, strict=False)]


SUPPORT: dict[int, Runs] = {
    1: rates(1e-2, 1e-3, 1e-4),
    2: runs_of(rankmax=0.33, softmax=0.30, entmax=0.31),
    3: runs_of(sampled_softmax=0.30, nce=0.25),
    4: runs_of(softmax=0.30, sparsemax=0.29, entmax=0.31)
    + under("sasrec", runs_of(softmax=0.30, sparsemax=0.2, entmax=0.2)),
    5: runs_of(softmax=0.30, hierarchical_softmax=0.2, rg=0.31),
    6: negatives("sampled_softmax", 0.25, 0.27, 0.29, 0.30) + negatives("nce", 0.26, 0.26, 0.261, 0.262),
    7: [
        run | {"sampler": sampler, "quality": run["quality"] + (0.05 if sampler == "dns" else 0)}
        for run in runs_of(sampled_softmax=0.28, nce=0.26)
        for sampler in ("uniform", "dns")
    ],
    8: [
        run | {"speed": 1.0 if (run["loss"] == "softmax") == (run["backbone"] == "sasrec") else 4.0, "epochs": 20}
        for backbone in ("mf", "sasrec")
        for run in under(backbone, runs_of(softmax=0.3, sparsemax=0.3, entmax=0.3))
    ],
    9: [
        {"loss": loss, "quality": 0.3, "seconds_per_epoch": seconds}
        for loss, seconds in {"softmax": 2, "sparsemax": 5, "entmax": 4, "nce": 0.5}.items()
    ],
}

OPPOSE: dict[int, Runs] = {
    1: rates(1e-4, 1e-3, 1e-3),
    2: runs_of(rankmax=0.30, softmax=0.33),
    3: runs_of(sampled_softmax=0.25, nce=0.30),
    4: runs_of(softmax=0.30, sparsemax=0.2) + under("lightgcn", runs_of(softmax=0.30, sparsemax=0.27)),
    5: runs_of(softmax=0.30, rg=0.2),
    6: negatives("nce", 0.1, 0.2, 0.3),
    7: [{"loss": "nce", "sampler": s, "quality": q} for s, q in (("uniform", 0.3), ("dns", 0.2))],
    8: [{"loss": loss, "speed": speed, "epochs": 20} for loss, speed in (("softmax", 1.0), ("entmax", 4.0))],
    9: [{"loss": loss, "seconds_per_epoch": 2.0} for loss in ("softmax", "sparsemax")],
}

# Enough losses, but nothing that decides; or half of what is needed.
OPEN: dict[int, list[Runs]] = {
    1: [rates(1e-2, 1e-2, 1e-2), runs_of(softmax=0.3, sparsemax=0.2), rates(1e-2, 1e-3, 1e-3)[:6]],
    2: [runs_of(rankmax=0.3, entmax=0.2), runs_of(rankmax=0.3, softmax=0.3)],
    3: [runs_of(sampled_softmax=0.3), runs_of(sampled_softmax=0.3, nce=0.3)],
    4: [under("sasrec", runs_of(softmax=0.3, sparsemax=0.2)), runs_of(softmax=0.3, sparsemax=0.2)],
    5: [runs_of(softmax=0.3, hierarchical_softmax=0.2), runs_of(softmax=0.3, rg=0.3)],
    6: [negatives("nce", 0.26, 0.26, 0.26), negatives("sampled_softmax", 0.2, 0.3)],
    7: [[{"loss": "nce", "sampler": "dns"}], [{"loss": "nce"}, {"loss": "nce", "sampler": "dns", "num_negatives": 9}]],
    8: [[{"loss": loss, "curve": False} for loss in ("softmax", "entmax")], SUPPORT[8][:3]],
    9: [[{"loss": loss, "curve": False} for loss in ("softmax", "nce")], runs_of(sparsemax=0.3, nce=0.3)],
}

NUMBERS = [finding.number for finding in FINDINGS]


def test_there_are_nine() -> None:
    assert list(range(1, 10)) == NUMBERS
    assert set(SUPPORT) == set(OPPOSE) == set(OPEN) == set(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_runs_that_support(tmp_path: Path, number: int) -> None:
    found = judged(tmp_path, SUPPORT[number], number)
    assert found.verdict == "confirmed", found.cases
    assert all(case.why for case in found.cases)


@pytest.mark.parametrize("number", NUMBERS)
def test_runs_that_oppose(tmp_path: Path, number: int) -> None:
    assert judged(tmp_path, OPPOSE[number], number).verdict == "contradicted"


@pytest.mark.parametrize("number", NUMBERS)
def test_one_opposing_case_is_enough(tmp_path: Path, number: int) -> None:
    elsewhere = [run | {"data": "elsewhere"} for run in OPPOSE[number]]
    found = judged(tmp_path, SUPPORT[number] + elsewhere, number)
    assert found.verdict == "contradicted"
    assert any(case.supports for case in found.cases)


@pytest.mark.parametrize(("number", "runs"), [(n, runs) for n, each in OPEN.items() for runs in each])
def test_runs_that_leave_it_open(tmp_path: Path, number: int, runs: Runs) -> None:
    found = judged(tmp_path, runs, number)
    assert found.verdict == "not enough runs", found.cases


def test_no_runs() -> None:
    assert {found.verdict for found in judge([])} == {"not enough runs"}
    for found in judge([]):
        assert len(found.missing) == len(found.finding.parts)
        assert all(text.startswith("no runs of ") for text in found.missing)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    found = judged(tmp_path, runs_of(softmax=0.3, hierarchical_softmax=0.2), 5)
    assert found.missing == ["no runs of softmax and rg on the same data and backbone"]


def test_what_is_open_is_not_missing(tmp_path: Path) -> None:
    found = judged(tmp_path, negatives("nce", 0.26, 0.26, 0.26) + negatives("sampled_softmax", 0.26, 0.26, 0.26), 6)
    assert found.missing == ["the case is open for sampled_softmax: no difference beyond chance"]
    assert judged(tmp_path / "more", SUPPORT[3], 3).missing == []


def test_rates_that_only_one_was_run_at_are_left_out(tmp_path: Path) -> None:
    """Sparsemax was never tried at 0.01: that softmax is best there says nothing."""
    runs = [run for run in rates(1e-2, 1e-3, 1e-3) if run["loss"] == "softmax" or run["lr"] < 1e-2]
    runs = [run | ({"quality": 0.25} if run["loss"] == "softmax" and run["lr"] == 1e-3 else {}) for run in runs]
    assert [case.supports for case in judged(tmp_path, runs, 1).cases] == [None, None]


def test_the_same_best_rate_needs_no_test(tmp_path: Path) -> None:
    found = judged(tmp_path, rates(1e-3, 1e-3, 1e-4), 1)
    assert {case.part: bool(case.runs) for case in found.cases} == {"sparsemax": False, "entmax": True}


def test_best_rates_that_are_best_by_chance_decide_nothing(tmp_path: Path) -> None:
    runs = [run | {"quality": 0.3 if run["quality"] == 0.2 else 0.3001} for run in rates(1e-2, 1e-3, 1e-4)]
    assert [case.supports for case in judged(tmp_path, runs, 1).cases] == [None, None]


def test_each_loss_is_taken_at_its_own_best_rate(tmp_path: Path) -> None:
    """Sampled softmax is below NCE at the one rate and above it at the other, where both are best."""
    qualities = {("sampled_softmax", 1e-3): 0.30, ("sampled_softmax", 1e-4): 0.10}
    qualities |= {("nce", 1e-3): 0.25, ("nce", 1e-4): 0.20}
    runs = [{"loss": loss, "lr": lr, "quality": quality} for (loss, lr), quality in qualities.items()]
    found = judged(tmp_path, runs, 3)
    assert found.verdict == "confirmed"
    assert [case.name for case in found.cases] == ["planted, mf, k=100, uniform"]


FAR_BETTER: dict[str, Any] = {"lr": 1e-5, "quality": 0.4}
MORE_RATES: dict[int, Runs] = {  # what should be below was run at another rate too, where it is far better
    3: [*runs_of(sampled_softmax=0.30, nce=0.25), {"loss": "nce", **FAR_BETTER}],
    6: [
        *negatives("sampled_softmax", 0.20, 0.25, 0.30),
        {"loss": "sampled_softmax", "num_negatives": 5, **FAR_BETTER},
    ],
    7: [*SUPPORT[7][2:], {"loss": "nce", **FAR_BETTER}],
}


@pytest.mark.parametrize("number", MORE_RATES)
def test_more_rates_are_no_merit(tmp_path: Path, number: int) -> None:
    assert [case.supports for case in judged(tmp_path, MORE_RATES[number], number).cases] == [True]


USERS = {"batches": "users"}
BY_BATCHES: dict[int, Runs] = {
    1: [run | USERS for run in SUPPORT[1]] + [{"loss": "softmax", "lr": 1e-4, "quality": 0.9}],
    2: [*runs_of(rankmax=0.33, softmax=0.3), {"loss": "softmax", "quality": 0.9} | USERS],
    3: [*runs_of(sampled_softmax=0.3, nce=0.25), *(run | USERS for run in runs_of(sampled_softmax=0.8, nce=0.9))],
    4: SUPPORT[4] + [{"loss": "softmax", "quality": 0.9} | USERS],
    5: SUPPORT[5] + [{"loss": "rg", "quality": 0.9} | USERS, {"loss": "hierarchical_softmax", "quality": 0.9} | USERS],
    6: SUPPORT[6] + [{"loss": "nce", "num_negatives": 5, "quality": 0.9} | USERS],
    7: SUPPORT[7] + [run | USERS | {"quality": 0.9} for run in SUPPORT[7] if run["sampler"] == "uniform"],
}


@pytest.mark.parametrize("number", BY_BATCHES)
def test_like_batches_are_compared_and_the_nearest_to_the_paper_s(tmp_path: Path, number: int) -> None:
    """Runs with other batches, however good, change nothing."""
    assert judged(tmp_path, BY_BATCHES[number], number).verdict == "confirmed"


def test_what_has_no_rate_in_common_is_compared_at_its_best(tmp_path: Path) -> None:
    runs = [{"loss": "nce", "lr": lr, "quality": q} for lr, q in ((1e-3, 0.25), (1e-4, 0.2))]
    (case,) = judged(tmp_path, [*runs, {"loss": "sampled_softmax", "lr": 1e-2, "quality": 0.22}], 3).cases
    assert case.supports is False


def test_what_the_paper_does_not_have_decides_nothing(tmp_path: Path) -> None:
    debiased = {"loss": "sampled_softmax", "correction": "partition", "debias": "jackknife", "quality": 0.40}
    assert judged(tmp_path, [*runs_of(sampled_softmax=0.25, nce=0.30), debiased], 3).verdict == "contradicted"


def test_what_is_above_rankmax_is_named_with_its_settings(tmp_path: Path) -> None:
    hard = [{"loss": "nce", "sampler": sampler, "quality": q} for sampler, q in (("uniform", 0.29), ("dns", 0.38))]
    (case,) = judged(tmp_path, [*runs_of(rankmax=0.33, softmax=0.30), *hard], 2).cases
    assert "nce (sampler=dns)" in case.why


@pytest.mark.parametrize(("others", "supports"), [(2, False), (8, True)])
def test_a_chance_find_among_many_does_not_count(tmp_path: Path, monkeypatch, others: int, supports: bool) -> None:
    """A loss that is above rankmax with p = 0.02: enough beside one other loss, not beside seven."""
    names = ("softmax", "nce", "entmax", "sparsemax", "rg", "bpr", "bce", "taylor_softmax")[:others]

    def drawn(first: Trial, second: Trial, metric: str) -> PairedComparison:
        quality = {"nce": 0.4, "rankmax": 0.3}
        return PairedComparison(quality.get(first.loss, 0.2) - quality.get(second.loss, 0.2), 200, 0.02, 0.02)

    monkeypatch.setattr(points, "compare", drawn)
    (case,) = judged(tmp_path, runs_of(rankmax=0.3, **dict.fromkeys(names, 0.3)), 2).cases
    assert case.supports is supports


def test_scores_of_nothing(tmp_path: Path) -> None:
    runs = runs_of(softmax=0.3, sparsemax=0.2) + under("sasrec", runs_of(softmax=0.3, sparsemax=0.2))
    for run in runs:
        write_run(tmp_path, **run)
    made = trials(read_study(tmp_path).done)
    for trial in made:
        for run in trial.runs:
            run.record.test["ndcg@20"] = 0.0
    assert judge(made)[3].cases == ()


def test_the_papers_own_tables() -> None:
    """What the tables say of the text: each contradiction is one that reading them by eye has found."""
    found = {j.finding.number: j for j in judge([])}
    assert {n: j.printed_verdict for n, j in found.items()} == {
        1: "contradicted",
        2: "contradicted",
        3: "contradicted",
        4: "confirmed",
        5: "contradicted",
        6: "contradicted",
        7: "confirmed",
        8: "not enough runs",  # curves are printed as pictures
        9: "not enough runs",
    }
    opposing = {n: [case.name for case in j.printed if case.supports is False] for n, j in found.items()}
    assert "electronics, mf" in opposing[2]
    assert {"ml-1m, mf, k=100, dns", "electronics, mf, k=100, dns"} <= set(opposing[3])
    assert opposing[5] == ["gowalla, mf, RG not below softmax"]
    assert "ml-1m, sasrec, nce" in opposing[6]


def test_a_difference_within_noise_decides_nothing(tmp_path: Path) -> None:
    found = judged(tmp_path, runs_of(sampled_softmax=0.2500, nce=0.2501), 3)
    assert [case.supports for case in found.cases] == [None]


def test_more_negatives_may_not_fall_on_the_way(tmp_path: Path) -> None:
    found = judged(tmp_path, negatives("sampled_softmax", 0.2, 0.3, 0.25, 0.31), 6)
    assert found.verdict == "contradicted"
