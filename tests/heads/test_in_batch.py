"""Losses of two towers against slow references on the table of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manymax
from manymax import FAMILY
from manymax.engine import pairs
from manymax.errors import ArgumentError, ArgumentTypeError
from tests.heads.two_towers import agree, leaves, left_out, make_towers, slow_in_batch, slow_siglip

EXACT = [member for member in FAMILY.values() if member.kind == "exact"]
# Which tensors of a batch are given, and with which keywords.
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "pairs alone": ((), {}),
    "hard negatives": (("hard",), {"normalize": True}),
    "duplicates": (("hard", "ids"), {"symmetric": True}),
    "groups and popularity": (("groups", "log_q", "temperature"), {}),
    "everything": (("hard", "ids", "groups", "log_q", "temperature"), {"normalize": True, "symmetric": True}),
}
COUNT, HARD = 9, 6


def batch_of(names: tuple[str, ...], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    batch = make_towers(COUNT, HARD, 3, dtype)
    if "hard" not in names:
        batch["log_q"], batch["ids"] = batch["log_q"][:COUNT], batch["ids"][:COUNT]
    return {name: batch[name] for name in ("queries", "documents", *names)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("member", EXACT, ids=lambda member: member.name)
def test_in_batch_equals_the_loss_on_the_table(member: manymax.engine.member.Member, case: str) -> None:
    names, keywords = CASES[case]
    for backend in ("torch", "auto"):
        mine, theirs = leaves(batch_of(names)), leaves(batch_of(names))
        options = {"backend": backend, "block_rows": 4}
        ours = manymax.in_batch_loss(**mine, member=member.name, options=options, **keywords)
        agree(ours, slow_in_batch(theirs, member.name, **keywords).mean(), mine, theirs, 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_single_precision(case: str) -> None:
    names, keywords = CASES[case]
    mine = leaves(batch_of(names, torch.float32))
    theirs = {name: value.detach() for name, value in mine.items()}
    theirs = leaves({name: value.double() if value.is_floating_point() else value for name, value in theirs.items()})
    agree(
        manymax.in_batch_loss(**mine, **keywords),
        slow_in_batch(theirs, "softmax", **keywords).mean(),
        mine,
        theirs,
        1e-6,
    )


def test_keywords_of_the_head_and_settings_of_the_member() -> None:
    names = ("hard", "groups", "temperature")
    mine, theirs = leaves(batch_of(names)), leaves(batch_of(names))
    weight = torch.arange(COUNT, dtype=torch.float64) % 3
    settings = {"member": "entmax", "alpha": 1.3, "symmetric": True}
    ours = manymax.in_batch_loss(**mine, row_weight=weight, **settings)
    slow = slow_in_batch(theirs, **settings)
    agree(ours, (weight * slow).sum() / weight.sum(), mine, theirs, 1e-8)
    rows = manymax.in_batch_loss(**mine, reduction="none", **settings)
    torch.testing.assert_close(rows, slow, rtol=1e-8, atol=1e-8)
    assert manymax.in_batch_loss(**mine, stats=("correct",)).correct.shape == (COUNT,)


def test_hard_negatives_of_each_pair_are_candidates_of_all() -> None:
    batch = batch_of(("hard", "log_q"))
    stacked = batch | {"hard": make_towers(3, 6, 0)["hard"].reshape(3, 2, -1)}
    for name in ("queries", "documents"):
        stacked[name] = stacked[name][:3]
    stacked["log_q"] = stacked["log_q"][:9]
    flat = stacked | {"hard": stacked["hard"].reshape(6, -1)}
    assert torch.equal(manymax.in_batch_loss(**stacked), manymax.in_batch_loss(**flat))


@pytest.mark.parametrize("names", [(), ("hard", "ids", "groups")], ids=["pairs alone", "with masks"])
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_siglip_equals_its_formula(names: tuple[str, ...], backend: str) -> None:
    given = (*names, "temperature", "bias")
    for normalize in (False, True):
        mine, theirs = leaves(batch_of(given)), leaves(batch_of(given))
        options = {"backend": backend, "block_rows": 4}
        ours = manymax.siglip_loss(**mine, normalize=normalize, options=options)
        agree(ours, slow_siglip(theirs, normalize).mean(), mine, theirs, 1e-10)


def test_siglip_keeps_the_digits_of_a_small_loss() -> None:
    loss = manymax.siglip_loss(40 * torch.eye(3), torch.eye(3), temperature=1.0, bias=-20.0)
    assert loss.item() == pytest.approx(3 * 2.0611536e-9, rel=1e-5)


def test_the_modules_learn_temperature_and_bias() -> None:
    batch = {name: value.float() for name, value in batch_of(()).items()}
    clip = manymax.InBatchLoss(0.5, learnable=True, normalize=True, symmetric=True)
    assert torch.allclose(
        clip(**batch), manymax.in_batch_loss(**batch, temperature=0.5, normalize=True, symmetric=True)
    )
    siglip = manymax.SiglipLoss(0.5, -3.0, normalize=True)
    assert torch.allclose(siglip(**batch), manymax.siglip_loss(**batch, temperature=0.5, bias=-3.0, normalize=True))
    for module, names in ((clip, {"log_temperature"}), (siglip, {"log_temperature", "bias"})):
        module(**batch).backward()
        assert {name for name, p in module.named_parameters() if p.grad is not None and p.grad != 0} == names
    assert not list(manymax.InBatchLoss(0.5).parameters()) + list(manymax.SiglipLoss(learnable=False).parameters())


def test_masked_pairs_are_found_without_a_table(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    count, columns = 40, 55
    ids = torch.randint(-102, -80, (columns,), generator=random)
    groups = torch.randint(0, 30, (count,), generator=random)
    batch = pairs.BatchCandidates(torch.zeros(columns, 1), count, 0, ids, groups, None)
    for only_pairs in (False, True):
        listed = batch.alike(count, only_pairs).listed(slice(None))
        width = count if only_pairs else columns
        found = torch.zeros(count, width + 1, dtype=torch.bool)
        found.scatter_(1, torch.where(listed < 0, width, listed), True)
        assert torch.equal(found[:, :width], left_out(ids[:width], groups, count, width))
        assert listed.shape[1] <= max(ids.unique(return_counts=True)[1]) + max(groups.bincount())
    alone = pairs.BatchCandidates(torch.zeros(3, 1), 3, 0, torch.tensor([4, 5, 6]), None, None)
    assert alone.alike(3).listed(slice(None)) is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_long_lists_are_made_in_parts(reduction: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of two large groups is computed some queries at a time, with the result of one call."""
    count, given = 150, {"symmetric": True, "temperature": 0.5, "reduction": reduction}
    if weighted:
        given["row_weight"] = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batch = make_towers(count, 0, 0)
    results = []
    for limit in (pairs.LISTED, 1):
        monkeypatch.setattr(pairs, "LISTED", limit)
        towers = [batch[name].clone().requires_grad_() for name in ("queries", "documents")]
        loss = manymax.in_batch_loss(*towers, groups=torch.arange(count) % 2, **given)
        loss.sum().backward()
        results.append([loss.detach(), *(tower.grad for tower in towers)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


def test_refusals_name_the_argument() -> None:
    batch = make_towers(COUNT, HARD, 3)
    vectors = {name: batch[name] for name in ("queries", "documents")}
    wrong: list[tuple[str, type[Exception], dict[str, Any]]] = [
        ("`documents`", ArgumentTypeError, {"documents": batch["ids"]}),
        ("row i of each", ArgumentError, {"documents": batch["documents"][:-1]}),
        ("`hard` must be", ArgumentError, {"hard": batch["hard"][:, :-1]}),
        ("`hard` must be", ArgumentError, {"hard": batch["hard"][:0]}),
        (r"`ids` must have shape \(9,\) or \(15,\)", ArgumentError, {"hard": batch["hard"], "ids": batch["ids"][:7]}),
        ("`groups`", ArgumentTypeError, {"groups": batch["log_q"][:COUNT]}),
        ("`log_q` must be a float tensor", ArgumentError, {"hard": batch["hard"], "log_q": batch["log_q"][:COUNT]}),
        ("`log_q` must be finite", ArgumentError, {"log_q": torch.full((COUNT,), -torch.inf)}),
        ("`exclude` is no keyword", ArgumentError, {"exclude": batch["ids"]}),
        ("`stats` has no meaning with `symmetric`", ArgumentError, {"symmetric": True, "stats": ("nll",)}),
        ("nce is sampled", ArgumentError, {"member": "nce"}),
        ("`temperature`", ArgumentError, {"temperature": 0.0}),
    ]
    for message, error, changes in wrong:
        with pytest.raises(error, match=message):
            manymax.in_batch_loss(**(vectors | changes))
    with pytest.raises(ArgumentError, match="`bias` must be a number"):
        manymax.siglip_loss(**vectors, bias=torch.zeros(2))
