"""The paper's claims: every cell of its tables is there, agrees with the facts and holds; a false one is noticed."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace

import pytest
import torch

from manymax.members import FAMILY
from manymax.ops import simplex
from manymax.ops.divergences import chi_square, jensen_shannon
from manymax.paper import evidence
from manymax.paper.claims import CLAIMS, STATUSES, TABLES, Claim, run_claims
from manymax.paper.evidence import CheckResult, denied

CELLS = {"Table 1": 4 * 4, "Table 2": 4 * 6, "Table 3": 6 * 3, "Table 4": 8 * 2}
# {property of a claim: the field of `Facts` that states it}.
FACT_OF_PROPERTY = {
    "consistency": "calibrated",
    "order": "order_preservation",
    "smoothness": "smoothness",
    "cost of an epoch": "cost",
}


def test_every_cell_of_the_tables_is_there_once() -> None:
    counts = Counter(claim.table for claim in CLAIMS)
    assert {table: counts[table] for table in CELLS} == CELLS
    assert set(counts) == set(TABLES)
    places = [(claim.table, claim.member, claim.property, claim.printed) for claim in CLAIMS]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.table}-{claim.member}-{claim.property}")
def test_a_claim_has_a_status_texts_and_a_known_member(claim: Claim) -> None:
    assert claim.status in STATUSES
    assert all((claim.printed, claim.value, claim.source))
    assert claim.member.partition(",")[0] in FAMILY


def test_claims_and_facts_agree() -> None:
    """A claim has the text of its fact, and is confirmed exactly if its fact is."""
    assert set(FACT_OF_PROPERTY) <= {claim.property for claim in CLAIMS}
    for claim in CLAIMS:
        if claim.property in FACT_OF_PROPERTY and claim.table != "Text":
            fact = getattr(FAMILY[claim.member].facts, FACT_OF_PROPERTY[claim.property])
            assert claim.value == fact.text
            assert (claim.status == "confirmed") == (fact.status == "confirmed"), claim


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.table}-{claim.member}-{claim.property}")
def test_a_claim_holds_when_run_again(claim: Claim) -> None:
    found = claim.run().finding
    assert found.holds, found.measured
    assert found.measured


def test_a_check_that_raises_an_error_does_not_hold() -> None:
    claim = replace(CLAIMS[0], check=lambda: CheckResult(bool(1 / 0), ""))
    found = claim.run().finding
    assert not found.holds
    assert "ZeroDivisionError" in found.measured


def test_only_the_wanted_tables_run() -> None:
    assert {result.claim.table for result in run_claims(["Table 3"])} == {"Table 3"}


def test_denied_turns_a_check_that_fails_into_one_that_holds() -> None:
    assert denied(lambda: CheckResult(False, "why")) == CheckResult(True, "why")


# A false claim is noticed: each check is run with a part of the library replaced by a wrong one ------


def broken(monkeypatch: pytest.MonkeyPatch, name: str, wrong: object, check: object, *arguments: str) -> bool:
    """Whether `check` holds, and no longer holds when `name` in its module is replaced by `wrong`."""
    assert check(*arguments).holds  # type: ignore[operator]
    monkeypatch.setattr(inspect.getmodule(check), name, wrong)
    return not check.__wrapped__(*arguments).holds  # type: ignore[attr-defined]


def test_a_wrong_nce_variance_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = lambda probs, q, k: k * chi_square(probs, q) / (1 + k) ** 2  # noqa: E731
    assert broken(monkeypatch, "nce_variance", paper, evidence.bias.nce_exact_variance)


def test_a_wrong_nce_mean_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = lambda probs, q, k: (1 + k) * jensen_shannon(probs, q, 1 / (1 + k))  # noqa: E731
    assert broken(monkeypatch, "expected_loss", paper, evidence.bias.nce_bias)


def test_a_wrong_divergence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = lambda probs, q: (q * (q / probs).log()).sum(-1)  # noqa: E731
    assert broken(monkeypatch, "kl", swapped, evidence.bias.tree_bias)


def test_a_wrong_bound_of_rg_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken(monkeypatch, "error_bound", lambda s: torch.zeros_like(s[..., 0]), evidence.bias.rg_bias)


@pytest.mark.parametrize("check", [evidence.bias.sampled_curvature_bias, evidence.bias.sampled_variance])
def test_a_wrong_chi_square_is_noticed(monkeypatch: pytest.MonkeyPatch, check: object) -> None:
    assert broken(monkeypatch, "chi_square", lambda probs, q: (probs - q).square().sum(), check)


def family_with(name: str, **facts: object) -> dict[str, object]:
    """The family with some fields of the facts of one member replaced."""
    member = FAMILY[name]
    changed = {key: replace(getattr(member.facts, key), **values) for key, values in facts.items()}  # type: ignore[arg-type]
    return dict(FAMILY) | {name: replace(member, facts=replace(member.facts, **changed))}


@pytest.mark.parametrize(
    ("name", "facts", "check"),
    [
        ("sparsemax", {"order_preservation": {"value": "strict"}}, evidence.order_preservation.keeps_order),
        ("softmax", {"order_preservation": {"value": "weak"}}, evidence.order_preservation.keeps_order),
        ("softmax", {"smoothness": {"fn": lambda num_classes: 0.49}}, evidence.curvature.entmax_supremum),
        ("sparsemax", {"smoothness": {"fn": lambda num_classes: 1.1}}, evidence.curvature.entmax_supremum),
        ("entmax", {"smoothness": {"fn": lambda num_classes, alpha: 1.0}}, evidence.curvature.entmax_supremum),
    ],
)
def test_a_false_fact_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, facts: dict, check: object) -> None:
    assert broken(monkeypatch, "FAMILY", family_with(name, **facts), check, name)


@pytest.mark.parametrize("name", ["softmax", "rg"])
def test_an_inconsistent_member_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert broken(
        monkeypatch, "FAMILY", dict(FAMILY) | {name: FAMILY["rankmax"]}, evidence.order_preservation.consistent, name
    )


def test_a_cost_of_sorting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simplex.solve

    class Sorting:
        apply = staticmethod(simplex.apply)

        @staticmethod
        def solve(scores: torch.Tensor, alpha: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for _ in range(20):
                scores.sort(-1)
            return plain(scores, alpha)

    assert broken(monkeypatch, "simplex", Sorting, evidence.cost.linear_cost, "sparsemax")


def test_a_cost_in_the_number_of_classes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(keep: torch.Tensor, alias: torch.Tensor, shape: tuple[int, ...], **_: object) -> torch.Tensor:
        return torch.multinomial(keep.softmax(-1), shape[0] * shape[1], replacement=True).view(shape)

    assert broken(monkeypatch, "draw_from_alias_table", slow, evidence.cost.sampled_cost, "nce")
