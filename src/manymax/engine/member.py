"""What a member of the family states about itself: formulas, facts that tests run, settings, kernel and costs.

Every other room reads these fields and nothing else about a member. What a member leaves out is an error that names
the field, where somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from manymax.engine.approximation import ApproximationInput, DrawTheory, Parts, Variant
from manymax.engine.cost import CostOf, TrafficOf
from manymax.engine.fenchel_young import FenchelYoung
from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.settings import Learned, Setting

__all__ = [
    "ONE_DRAW_EACH",
    "Approximation",
    "Fact",
    "Facts",
    "Formulas",
    "Kind",
    "Learned",
    "Member",
    "Setting",
    "Solver",
    "Status",
    "Takes",
    "Theory",
]

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
    `sizes`: the sizes of a step, beside `num_classes`, on which a smoothness depends and which its `fn` takes.
    """

    value: Any
    text: str
    source: str
    status: Status
    printed: str | None = None
    fn: Callable[..., float] | None = None
    sizes: tuple[str, ...] = ()


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

    order_preservation: Fact | None
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
class Solver:
    """A way of its own to minimise the objective of a member on two tables of vectors, beside gradients.

    make: (num_users, num_items, dim, **settings) to an object with the vectors of both sides, `user_vectors` and
        `item_vectors`, which learns from `observe(users, items)` and alternates between `update_users()` and
        `update_items()`; `objective()` is the value that both of them lower.
    settings: what it can be set to.
    """

    make: Callable[..., Any]
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Takes:
    """Which targets a loss takes: label smoothing, float rows (distributions over the classes); and why not."""

    smoothing: bool = True
    float_rows: bool = True
    why: str = ""

    def check(self, name: str, target: object, label_smoothing: float = 0.0) -> None:
        """Refuse what the loss of this name does not take."""
        if not self.float_rows and isinstance(target, Tensor) and target.is_floating_point():
            raise ArgumentTypeError(f"`target` of {name} must be ids or bool rows; got float rows. {self.why}")
        if not self.smoothing and label_smoothing:
            raise ArgumentError(f"`label_smoothing` must be 0 for {name}; got {label_smoothing}. {self.why}")


# Of losses on drawn scores.
ONE_DRAW_EACH = Takes(smoothing=False, float_rows=False, why="It needs one draw per positive.")


@dataclass(frozen=True)
class Approximation:
    """A member as an approximation of the baseline loss.

    parts: a case to bias and variance for each label, predicted and exact.
    settings: what changes them; a choice may have more values here than in the loss.
    draws: of one that draws negatives; None where it draws none.
    needs_tree: whether it is told the log-probabilities of a tree, (N, C), or the tree.
    by_probability: (settings) to whether labels of the same probability have the same bias, whatever their log q.
        Labels of many classes are then put together by log P, otherwise by log(P/q).
    variants: settings that a diagnosis shows.
    """

    parts: Callable[[ApproximationInput], Parts]
    settings: tuple[Setting, ...] = ()
    draws: DrawTheory | None = None
    needs_tree: bool = False
    by_probability: Callable[[Mapping[str, Any]], bool] = lambda settings: False
    variants: tuple[Variant, ...] = (Variant(),)


@dataclass(frozen=True)
class Theory:
    """Closed forms that the measurements of `manymax.theory` use where a member has them; None where it has none.

    jacobian: (scores, target, **settings) to the Jacobian of the map, (..., C, C); by autograd where it is None.
    norm_bounds: (scores, target, **settings) to bounds of its spectral norm, (...) each.
    supremum: (num_classes, **settings) to the largest such norm over all scores; None where it is the smoothness of a
        Fenchel-Young loss, which the facts state, or unknown.
    sharpest: (num_classes, **settings) to scores (C,), float64, at which it is reached or approached.
    minimisers: (probs, log_q, **settings) to scores (M, C) that minimise the risk, or None where no formula is known
        for these; log_q is None of a uniform proposal. A Fenchel-Young member needs none.
    approximation: its bias and variance as an approximation of the baseline loss.
    """

    jacobian: Callable[..., Tensor] | None = None
    norm_bounds: Callable[..., tuple[Tensor, Tensor]] | None = None
    supremum: Callable[..., float] | None = None
    sharpest: Callable[..., Tensor] | None = None
    minimisers: Callable[..., Tensor | None] | None = None
    approximation: Approximation | None = None


@dataclass(frozen=True)
class Member:
    """One row of `FAMILY`: everything else in the project reads members, not files.

    name, title, aliases, citation: how people call it, and where it comes from.
    class_name: its name in those of classes, `LinearTaylorSoftmaxLoss`; made from `name` if it is left out.
    kind: "exact" (sees all scores in blocks), "sampled" (a positive and drawn negatives), "tree", "quadratic" (moments
        of the class vectors).
    map, loss, module, foundation: its functions on given scores.
    formulas, facts: what it states about itself.
    settings: what it can be set to. examples: values of its settings worth testing and reporting.
    needs_label: whether the map is defined given a label, `map(scores, target)`.
    sparse: whether the map gives exact zeros, so that a gradient can have few entries.
    takes: which targets it takes.
    kernel: what its head computes, given its settings as keyword arguments. Of an exact member a
        `manymax.engine.blocks.Kernel`, which turns blocks of scores into losses and gradients; of a quadratic one a
        function from a call to the losses of its rows; of a sampled one a
        `manymax.engine.sampled_scores.DrawnKernel`, from scores and draws to the losses of the positives. A tree has
        none and brings a `head`.
    check: raises where its settings, given as keyword arguments with `num_negatives`, do not go together.
    head, head_function: its head as a module and as a function, where they are not built from its kernel.
    native: whether the native back end has its kernel.
    ranking_key: given its settings, a function from scores to what classes are ranked by; None where that is the
        scores.
    unsharded: why its class vectors cannot be split over ranks; None where they can.
    cost, traffic: what a step costs, and what its shards exchange.
    path_length: of a tree, from the number of classes to the mean number of decisions that lead to one.
    theory: closed forms.
    solvers: by name, other ways to train it than gradients.
    """

    name: str
    title: str
    kind: Kind
    loss: Callable[..., Tensor]
    module: type[nn.Module] | None
    formulas: Formulas
    facts: Facts
    citation: str
    map: Callable[..., Tensor] | None = None
    foundation: Callable[..., FenchelYoung] | None = None
    aliases: tuple[str, ...] = ()
    class_name: str = ""
    settings: tuple[Setting, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = field(default=({},))
    needs_label: bool = False
    sparse: bool = False
    takes: Takes = field(default=Takes())
    kernel: Callable[..., Any] | None = None
    native: bool = False
    check: Callable[..., None] | None = None
    head: type[nn.Module] | None = None
    head_function: Callable[..., Tensor] | None = None
    ranking_key: Callable[..., Callable[[Tensor], Tensor]] | None = None
    unsharded: str | None = None
    cost: CostOf | None = None
    traffic: TrafficOf | None = None
    path_length: Callable[[int], float] | None = None
    theory: Theory = field(default=Theory())
    solvers: Mapping[str, Solver] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.class_name:
            object.__setattr__(self, "class_name", "".join(part.capitalize() for part in self.name.split("_")))

    def needed(self, name: str) -> Any:
        """A field that somebody needs, such as "cost" or "theory.sharpest"; an error names it where it is left out."""
        value = attrgetter(name)(self)
        if value is None:
            raise ManymaxError(f"{self.name} has no `{name}`: its record must give this field.")
        return value

    def setting(self, name: str) -> Setting:
        """The setting of this name."""
        for setting in self.settings:
            if setting.name == name:
                return setting
        raise ManymaxError(f"{self.name} has no setting `{name}`.")

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
