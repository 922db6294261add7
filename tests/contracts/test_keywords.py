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


def reference(call: Call) -> Tensor:
    """The mean loss, by the formulas of the keywords, one positive after the other."""
    (input, vectors, bias), given, problem = call.tensors, call.given, call.problem
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
            loss = call.member.loss(s, torch.tensor(place), reduction="none", **call.settings)
            if given.get("decoupled"):
                loss = summed.logsumexp(0) - s[place]
            if "z_loss" in given:
                loss = loss + given["z_loss"] * summed.logsumexp(0) ** 2
            losses.append(row_weight[n] * problem.weight[y] * loss)
            weights.append(row_weight[n] * problem.weight[y])
    return torch.stack(losses).sum() / given.get("num_items", torch.stack(weights).sum())


class Call:
    """One head with the keywords of a case, on one back end."""

    def __init__(self, member: Member, settings: Mapping[str, Any], given: Mapping[str, Any], backend: str) -> None:
        self.problem = Problem()
        self.member, self.settings, self.backend = member, settings, backend
        self.given = self.problem.keywords(given)
        self.tensors = [
            t.clone().requires_grad_() for t in (self.problem.input, self.problem.vectors, self.problem.bias)
        ]
        self.wanted = list(self.tensors)
        if isinstance(self.given.get("temperature"), Tensor):
            self.given["temperature"] = self.given["temperature"].clone().requires_grad_()
            self.wanted.append(self.given["temperature"])

    def loss(self, reduction: str = "mean") -> Tensor:
        """By the head."""
        input, vectors, bias = self.tensors
        options = {"backend": self.backend, "block_rows": 3}
        keywords = {**self.given, **self.settings, "reduction": reduction, "weight": self.problem.weight}
        head = head_function(self.member)
        return head(input, vectors, self.problem.target, linear_bias=bias, options=options, **keywords)

    def check(self, loss: Tensor, expected: Tensor) -> None:
        """Value and every gradient."""
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
        found, theirs = torch.autograd.grad(loss, self.wanted), torch.autograd.grad(expected, self.wanted)
        for ours, other in zip(found, theirs, strict=True):
            # The reference multiplies 0 by the -inf of a masked class.
            torch.testing.assert_close(ours, torch.nan_to_num(other), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
@members(EXACT)
def test_every_keyword(member: Member, case: str, backend: str) -> None:
    given, needs_partition = CASES[case]
    for settings in member.examples:
        call = Call(member, settings, given, backend)
        if needs_partition and not member.log_partition:
            with pytest.raises(ArgumentError, match=r"no meaning|pass one row for each positive"):
                call.loss()
            continue
        call.check(call.loss(), reference(call))
        if "num_items" not in call.given:  # one loss per row: the same sum
            rows = call.loss("none")
            assert rows.shape == (ROWS,)
            call.check(rows.sum(), call.loss("sum"))
