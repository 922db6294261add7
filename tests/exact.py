"""What tests of exact members share: one way to call each of them, and scores and targets to call them with."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from manymax import FAMILY, softmax
from manymax.engine.member import Member

EXACT = [member for member in FAMILY.values() if member.kind == "exact"]
INF = float("inf")
HALVES = [torch.bfloat16, torch.float16]

# Targets of four rows over five classes, with several positives, one and none; as padded ids and as bool rows.
POSITIVES = torch.tensor([[0, 3, -100], [2, -100, -100], [4, 1, 0], [-100, -100, -100]])
MANY_HOT = torch.tensor([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.25, 3.0], dtype=torch.float64)  # of the five classes


@dataclass(frozen=True)
class Case:
    """A member with one choice of its settings."""

    member: Member
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_label(self) -> bool:
        """Whether the map depends on a label."""
        return self.member.map is not None and "target" in inspect.signature(self.member.map).parameters

    def probs(self, scores: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        """The map; `target` (...) is used only if the map needs a label, and is class 0 unless given.

        A member without a map has that of softmax, so that tests of map and loss test its loss alone.
        """
        if self.member.map is None:
            return softmax(scores, **options)
        if not self.needs_label:
            return self.member.map(scores, **self.setting, **options)
        if target is None:
            target = torch.zeros_like(scores.select(options.get("dim", -1), 0), dtype=torch.long)
        return self.member.map(scores, target, **self.setting, **options)

    def loss(self, scores: Tensor, target: Tensor, **options: Any) -> Tensor:
        """The loss as a function."""
        return self.member.loss(scores, target, **self.setting, **options)

    def module(self, **options: Any) -> nn.Module:
        """The loss as a module."""
        return self.member.module(**self.setting, **options)

    def singles(self, scores: Tensor) -> Tensor:
        """l(i, s) for every class i, (..., C); 0 for masked classes, which cannot be a label."""
        *batch, num_classes = scores.shape
        ids = torch.arange(num_classes).expand(*batch, num_classes)
        ids = torch.where(scores > -INF, ids, -100)
        return self.loss(scores.unsqueeze(-2).expand(*batch, num_classes, num_classes), ids, reduction="none")


def cases(
    *,
    smoothing: bool = False,
    distributions: bool = False,
    foundation: bool = False,
    first: bool = False,
    derivatives: bool = False,
    mapped: bool = False,
    each: bool = False,
) -> list[Any]:
    """Parameters for pytest: all cases, or some of them.

    Args:
        smoothing: only members that take label smoothing.
        distributions: only members that take float rows as targets.
        foundation: only members with a Fenchel-Young pair.
        first: only the first choice of settings of each member.
        derivatives: only members whose gradient is the derivative of the loss, and holds nothing constant.
        mapped: only members with a map.
        each: only members whose loss of several positives is the sum of one loss for each.
    """
    return [
        pytest.param(Case(member, setting), id="-".join([member.name, *map(str, setting.values())]))
        for member in EXACT
        for setting in member.examples[: 1 if first else None]
        if (member.takes.smoothing or not smoothing)
        and (member.takes.float_rows or not distributions)
        and (member.foundation is not None or not foundation)
        and (member.held is None or not derivatives)
        and (member.map is not None or not mapped)
        and not (member.joint and each)
    ]


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores drawn from a normal distribution, the same ones for the same seed."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def labels(*shape: int, num_classes: int, seed: int = 0) -> Tensor:
    """Ids drawn uniformly, the same ones for the same seed."""
    return torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    """Fail unless two tensors agree, relative or absolute to the tolerance."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


EXTREME = st.floats(-30, 30) | st.integers(-6, 6).map(lambda n: n / 2) | st.sampled_from([1e4, -1e4, 0.0, 1e9, -1e9])


@st.composite
def score_rows(draw: st.DrawFn, max_classes: int = 7) -> tuple[Tensor, Tensor]:
    """Scores (..., C) with ties, extremes and masks, and one live label for each row."""
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    num_classes = draw(st.integers(1, max_classes))
    size = math.prod(batch) * num_classes
    values = draw(st.lists(EXTREME | st.just(-INF), min_size=size, max_size=size))
    scores = torch.tensor(values, dtype=torch.float64).reshape(*batch, num_classes)
    target = torch.tensor(
        draw(st.lists(st.integers(0, num_classes - 1), min_size=math.prod(batch), max_size=math.prod(batch)))
    ).reshape(batch)
    alive = torch.where(scores.gather(-1, target[..., None]) > -INF, scores.gather(-1, target[..., None]), 0.5)
    return scores.scatter(-1, target[..., None], alive), target
