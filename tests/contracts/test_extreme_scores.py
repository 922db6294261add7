"""Scores near the ends of their dtype: the right number and gradient, or an error; never inf or nan without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import manymax
from manymax import FAMILY, ArgumentError
from manymax.engine.member import Member
from manymax.heads import head_class, head_function
from manymax.members import REFERENCE_LOSSES

# Differences and sums of these exceed the largest float32, 3.4e38.
ROWS = [
    [1e38, -1e38, 0.0, 5.0],
    [1e38, 1e38, -1e38, -1e38],
    [3e38, -3e38, 0.0, 1.0],
    [-3e38, -3e38, -3e38, -1.0],
    [0.0, -3e38, -torch.inf, -3e38],
    [1e30, -1e20, 2.0, 1.0],
]
EVERY = [*FAMILY.values(), *REFERENCE_LOSSES.values()]


def outcome(call: Callable[[Tensor], Tensor], scores: Tensor) -> list[Tensor] | None:
    """The value and the gradient of a loss, or None if it was refused."""
    leaf = scores.clone().requires_grad_()
    try:
        value = call(leaf)
    except ArgumentError:
        return None
    return [value.detach(), torch.autograd.grad(value.sum(), leaf)[0]]


def check(call: Callable[[Tensor], Tensor], row: list[float], what: str) -> None:
    """Fail unless a loss at float32 scores is that at float64 scores, or refused."""
    scores = torch.tensor([row], dtype=torch.float64)
    found, expected = outcome(call, scores.float()), outcome(call, scores.float().double())
    if found is not None:
        assert expected is not None, what
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.isfinite().all(), (what, found)
            scale = max(1.0, float(theirs.abs().max()))
            assert float((ours.double() - theirs).abs().max()) <= 1e-5 * scale, (what, found, expected)
    largest = outcome(call, scores * 5e269)  # up to 1.5e308, of which differences exceed float64
    assert largest is None or all(part.isfinite().all() for part in largest), (what, largest)


def smoothings(member: Member) -> list[float]:
    return [0.0, 0.1] if member.takes.smoothing else [0.0]


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("member", [m for m in EVERY if m.kind in ("exact", "quadratic")], ids=lambda m: m.name)
def test_losses(member: Member, row: list[float]) -> None:
    for settings in member.examples:
        for y in (y for y in range(4) if row[y] > -torch.inf):
            for target, multilabel in ((torch.tensor([y]), "sum"), (torch.tensor([[y, 3 - y, -100]]), "normalized")):
                for label_smoothing in smoothings(member) if multilabel == "sum" else [0.0]:
                    given = {"label_smoothing": label_smoothing, "multilabel": multilabel, **settings}

                    def call(scores: Tensor, target: Tensor = target, given: dict[str, Any] = given) -> Tensor:
                        return member.loss(scores, target, **given)

                    check(call, row, f"{target.tolist()}, {given}")
        if member.map is not None and not member.needs_label:
            check(lambda scores, settings=settings: member.map(scores, **settings), row, "map")  # type: ignore


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("member", [m for m in EVERY if m.kind != "tree"], ids=lambda m: m.name)
def test_heads(member: Member, row: list[float]) -> None:
    backends = (("torch", "none"), ("auto", "mean")) if "backend" in head_class(member).honours else ((None, "none"),)
    bias = torch.tensor([0.0 if s > -torch.inf else s for s in row])
    row = [s if s > -torch.inf else 0.0 for s in row]
    for y in (y for y in range(4) if bias[y] == 0):
        for backend, reduction in backends:
            for label_smoothing in smoothings(member):
                given: dict[str, Any] = {"reduction": reduction, **member.examples[0]}
                given |= {"options": {"backend": backend}} if backend else {}
                given |= {"label_smoothing": label_smoothing} if label_smoothing else {}

                def call(input: Tensor, y: int = y, given: dict[str, Any] = given) -> Tensor:
                    drawn: tuple[Any, ...] = ()
                    if member.kind == "sampled":
                        drawn = manymax.samplers.UniformSampler(4), 5
                        given = given | {"generator": torch.Generator().manual_seed(1)}
                    vectors, masked = torch.eye(4, dtype=input.dtype), bias.to(input.dtype)
                    head = head_function(member)
                    return head(input, vectors, torch.tensor([y]), *drawn, linear_bias=masked, **given)

                check(call, row, f"{y}, {given}")
