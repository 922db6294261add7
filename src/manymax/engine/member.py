"""What a member of the family states about itself: formulas, and facts that tests run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor, nn

from manymax.engine.fenchel_young import FenchelYoung
from manymax.errors import ManymaxError

Status = Literal["printed", "derived", "confirmed", "contradicted"]
Kind = Literal["exact", "sampled", "tree", "quadratic"]


@dataclass(frozen=True)
class Fact:
    """One claim about a member.

    `value` is the claim for machines, `text` the claim for people, `fn` computes it where it
    depends on sizes or settings (called with keyword arguments such as `num_classes`, `alpha`).
    `status`: "printed" in the paper and taken over; "derived" by us, the paper is silent;
    "confirmed": printed, and a test re-runs it; "contradicted": the paper is wrong, `value` holds
    what is right, `printed` what the paper says, and a test shows the difference.
    """

    value: Any
    text: str
    source: str
    status: Status
    printed: str | None = None
    fn: Callable[..., float] | None = None


@dataclass(frozen=True)
class Facts:
    """The facts of one member; None where a question does not apply to it.

    order            does the map keep the order of the scores: "strict", "weak" or "none"
    fenchel_young    is the loss Fenchel-Young, with gradient map minus target
    convex           is the loss convex in the scores
    calibrated       does the risk minimiser rank like p (Top-k calibration, DCG consistency)
    shift_invariant  does adding a constant to all scores change nothing
    smoothness       supremum of the spectral norm of the loss Hessian in the scores
    cost             scores touched per step, as a function of batch, num_classes, ...
    bias, variance   of the estimated log partition, for approximations
    """

    order: Fact | None
    fenchel_young: Fact
    convex: Fact
    calibrated: Fact
    shift_invariant: Fact
    smoothness: Fact
    cost: Fact
    bias: Fact | None = None
    variance: Fact | None = None

    def items(self) -> list[tuple[str, Fact]]:
        """(name, fact) for every fact that applies."""
        pairs = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, fact) for name, fact in pairs if fact is not None]


@dataclass(frozen=True)
class Formulas:
    """The member in plain text; None where it has no such thing."""

    map: str | None
    loss: str
    gradient: str
    omega: str | None = None


@dataclass(frozen=True)
class Member:
    """One row of `FAMILY`: everything else in the project reads members, not files.

    `settings` are the keyword arguments worth testing and reporting. `smoothing` and
    `distributions` say whether the loss takes label smoothing and float target rows.
    """

    name: str
    title: str
    kind: Kind
    loss: Callable[..., Tensor]
    module: type[nn.Module]
    formulas: Formulas
    facts: Facts
    reference: str
    map: Callable[..., Tensor] | None = None
    foundation: Callable[..., FenchelYoung] | None = None
    aliases: tuple[str, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = field(default=({},))
    smoothing: bool = True
    distributions: bool = True

    def fenchel_young(self, **settings: Any) -> FenchelYoung:
        """The member's (map, Omega) pair; an error if it has none."""
        if self.foundation is None:
            raise ManymaxError(f"{self.name} is not a Fenchel-Young loss: {self.facts.fenchel_young.text}")
        return self.foundation(**settings)

    def omega(self, probs: Tensor, **settings: Any) -> Tensor:
        """The regulariser Omega(p), one value per row."""
        return self.fenchel_young(**settings).omega(probs)

    def conjugate(self, scores: Tensor, **settings: Any) -> Tensor:
        """Omega*(s), one value per row; its gradient is the map."""
        return self.fenchel_young(**settings).conjugate(scores)

    def bregman(self, probs: Tensor, other: Tensor, **settings: Any) -> Tensor:
        """The Bregman divergence D(probs, other) of Omega, one value per row."""
        return self.fenchel_young(**settings).bregman(probs, other)
