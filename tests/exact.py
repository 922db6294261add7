"""The members that see all scores, each with every setting its row of the table lists, under one way of calling."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manymax import FAMILY
from manymax.engine.member import Member

EXACT = [member for member in FAMILY.values() if member.kind == "exact"]
INF = float("inf")


@dataclass(frozen=True)
class Case:
    """A member with one of its settings."""

    member: Member
    setting: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_label(self) -> bool:
        """Whether the map is defined given a label."""
        assert self.member.map is not None
        return "target" in inspect.signature(self.member.map).parameters

    def probs(self, scores: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
        """The map; `target` (...) is used only where it needs a label, and is class 0 unless given."""
        assert self.member.map is not None
        if not self.needs_label:
            return self.member.map(scores, **self.setting, **options)
        if target is None:
            target = torch.zeros_like(scores.select(options.get("dim", -1), 0), dtype=torch.long)
        return self.member.map(scores, target, **self.setting, **options)

    def loss(self, scores: Tensor, target: Tensor, **options: Any) -> Tensor:
        return self.member.loss(scores, target, **self.setting, **options)

    def module(self, **options: Any) -> nn.Module:
        return self.member.module(**self.setting, **options)

    def singles(self, scores: Tensor) -> Tensor:
        """l(i, s) for every class i, (..., C); 0 for masked classes, which cannot be a label."""
        *batch, num_classes = scores.shape
        ids = torch.arange(num_classes).expand(*batch, num_classes)
        ids = torch.where(scores > -INF, ids, -100)
        return self.loss(scores.unsqueeze(-2).expand(*batch, num_classes, num_classes), ids, reduction="none")


def cases(
    *, smoothing: bool = False, distributions: bool = False, foundation: bool = False, first: bool = False
) -> list[Any]:
    """Parameters for pytest: all cases, or those whose member takes smoothing or float rows, or is Fenchel-Young.

    `first` takes the first setting of each member only.
    """
    return [
        pytest.param(Case(member, setting), id="-".join([member.name, *map(str, setting.values())]))
        for member in EXACT
        for setting in member.examples[: 1 if first else None]
        if (member.takes.smoothing or not smoothing)
        and (member.takes.float_rows or not distributions)
        and (member.foundation is not None or not foundation)
    ]


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores drawn from a normal distribution, the same ones for the same seed."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def labels(*shape: int, num_classes: int, seed: int = 0) -> Tensor:
    """Ids drawn uniformly, the same ones for the same seed."""
    return torch.randint(num_classes, shape, generator=torch.Generator().manual_seed(seed))
