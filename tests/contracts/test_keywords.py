"""The shared keywords of heads: every member x back end x keyword against a slow float64 reference.

The reference makes the whole table of scores, and one loss for each positive of each row by the member's plain loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from manymax import FAMILY, ArgumentError
from manymax.engine import native_library
from manymax.engine.member import Member
from manymax.heads import head_function
from manymax.members import REFERENCE_LOSSES

ROWS, CLASSES, DIM = 7, 83, 5
BACKENDS = ("torch", *(f"native-{level}" for level in native_library.levels_here()))
ALL = [*FAMILY.values(), *REFERENCE_LOSSES.values()]
EXACT = [member for member in ALL if member.kind == "exact"]

# Keywords, and whether only members with a partition function take them.
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "temperature": ({"temperature": 0.7}, False),
    "learned temperature": ({"temperature": torch.tensor(1.7, dtype=torch.float64)}, False),
    "normalize": ({"normalize": True, "temperature": 0.2}, False),
    "softcap": ({"softcap": 1.5}, False),
    "all of the scores": ({"normalize": True, "temperature": 0.1, "softcap": 2.0}, False),
    "exclude": ({"exclude": True}, False),
    "exclude positives": ({"exclude": "positives"}, True),
    "decoupled": ({"decoupled": True}, True),
    "decoupled and exclude": ({"decoupled": True, "exclude": "positives", "softcap": 3.0}, True),
    "z_loss": ({"z_loss": 0.3}, True),
    "z_loss and all": ({"z_loss": 0.3, "decoupled": True, "exclude": True, "normalize": True}, True),
    "row_weight": ({"row_weight": True}, False),
    "num_items": ({"num_items": 11}, False),
    "row_weight and num_items": ({"row_weight": True, "num_items": torch.tensor(3.5)}, False),
}


def members(rows: list[Member]) -> Any:
    """Run a test once for each of these members."""
    return pytest.mark.parametrize("member", rows, ids=lambda member: member.name)


class Problem:
    """Queries, class vectors with a masked class, and rows with several positives, one of them ignored."""

    def __init__(self, single: bool = False) -> None:
        torch.manual_seed(7)
        self.input = torch.randn(ROWS, DIM, dtype=torch.float64)
        self.vectors = torch.randn(CLASSES, DIM, dtype=torch.float64)
        self.vectors[4] = 0.0
        self.bias = torch.randn(CLASSES, dtype=torch.float64)
        self.bias[9] = -torch.inf
        self.target = torch.tensor(
            [[3, 8, 20], [1, -100, -100], [2, 70, -100], [-100] * 3, [5, 6, 7], [82, 0, 4], [4] * 3]
        )
        if single:
            self.target = self.target[:, 0]
        self.weight = torch.rand(CLASSES, dtype=torch.float64) + 0.5
        self.row_weight = torch.tensor([1.0, 0.5, 0.0, 2.0, 3.0, 0.25, 1.0], dtype=torch.float64)
        # Some of no row, some of all kinds: the positive of another row, padding, a masked class.
        self.exclude = torch.randint(CLASSES, (ROWS, 6))
        self.exclude[:, 2], self.exclude[0, 0] = -100, 9

    def keywords(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a case with the tensors that its markers stand for."""
        made = dict(given)
        if made.get("row_weight") is True:
            made["row_weight"] = self.row_weight
        if "exclude" in made:
            own = self.target.reshape(ROWS, -1)
            others = self.exclude.clone()
            if made["exclude"] is True and own.shape[1] > 1:  # no positive of a row with several
                others[(others.unsqueeze(2) == own.unsqueeze(1)).any(2)] = -100
            made["exclude"] = torch.cat([others, own], 1) if made["exclude"] == "positives" else others
        return made


def reference(
    member: Member, settings: Mapping[str, Any], problem: Problem, given: Mapping[str, Any], tensors: Any
) -> Tensor:
    """The mean loss, by the formulas of the keywords, one positive after the other."""
    input, vectors, bias = tensors
    if given.get("normalize"):
        input = input / input.norm(dim=1, keepdim=True)
        norms = vectors.norm(dim=1, keepdim=True)
        vectors = torch.where(norms > 0, vectors / torch.where(norms > 0, norms, 1), 0 * vectors.detach())
    scores = input @ vectors.T / given.get("temperature", 1.0) + bias
    if "softcap" in given:
        cap = given["softcap"]
        scores = torch.where(scores > -torch.inf, cap * torch.tanh(scores / cap), scores)
    losses, weights = [], []
    row_weight = given.get("row_weight", torch.ones(ROWS, dtype=torch.float64))
    for n, row in enumerate(problem.target.reshape(ROWS, -1)):
        for y in row[row >= 0].unique().tolist():
            left_out = set(given["exclude"][n].tolist()) - {y} if "exclude" in given else set()
            kept = [c for c in range(CLASSES) if c not in left_out]
            s, place = scores[n, kept], kept.index(y)
            summed = torch.cat([s[:place], s[place + 1 :]]) if given.get("decoupled") else s
            loss = member.loss(s, torch.tensor(place), reduction="none", **settings)
            if given.get("decoupled"):
                loss = summed.logsumexp(0) - s[place]
            if "z_loss" in given:
                loss = loss + given["z_loss"] * summed.logsumexp(0) ** 2
            losses.append(row_weight[n] * problem.weight[y] * loss)
            weights.append(row_weight[n] * problem.weight[y])
    return torch.stack(losses).sum() / given.get("num_items", torch.stack(weights).sum())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@members(EXACT)
def test_every_keyword(member: Member, case: str, backend: str) -> None:
    given, needs_partition = CASES[case]
    if backend != "torch" and not member.native and backend != BACKENDS[-1]:
        pytest.skip("the member shares the native products alone, which the last level tries")
    head = head_function(member)
    for settings in member.examples:
        problem = Problem()
        made = problem.keywords(given)
        leaves = [t.clone().requires_grad_() for t in (problem.input, problem.vectors, problem.bias)]
        if isinstance(made.get("temperature"), Tensor):
            made["temperature"] = made["temperature"].clone().requires_grad_()
        wanted = [*leaves, *(v for v in made.values() if isinstance(v, Tensor) and v.requires_grad)]

        def call(reduction: str = "mean", **more: Any) -> Any:
            options = {"backend": backend, "block_rows": 3}
            keywords = {**made, **more, "reduction": reduction, "weight": problem.weight, **settings}
            return head(*leaves[:2], problem.target, linear_bias=leaves[2], options=options, **keywords)

        if needs_partition and not member.log_partition and float(settings.get("alpha", 2)) != 1:
            with pytest.raises(ArgumentError, match="no meaning|pass one row for each positive"):
                call()
            continue
        if needs_partition and not member.log_partition:
            continue
        loss = call()
        found = torch.autograd.grad(loss, wanted)
        expected = reference(member, settings, problem, made, leaves)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
        for ours, theirs in zip(found, torch.autograd.grad(expected, wanted), strict=True):
            torch.testing.assert_close(ours, torch.nan_to_num(theirs), rtol=1e-7, atol=1e-9)
        if "num_items" not in made:  # one loss per row: the same sum
            rows = call("none")
            assert rows.shape == (ROWS,)
            torch.testing.assert_close(rows.sum(), call("sum"), rtol=1e-9, atol=1e-10)
            again = torch.autograd.grad(rows.sum(), wanted)
            for ours, theirs in zip(again, torch.autograd.grad(call("sum"), wanted), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
