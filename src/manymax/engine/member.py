"""`Member`, what a loss of the family states about itself: formulas, facts, settings, kernel and costs.

All other code reads these fields and knows nothing else about a member. A field that a member leaves out raises an
error that names the field, where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from manymax.engine.approximation import ApproximationInput, DrawTheory, GradientEstimator, Parts, Variant
from manymax.engine.cost import CostOf, TrafficOf
from manymax.engine.fenchel_young import FenchelYoung
from manymax.engine.target import SoftTarget
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

# How a fact is known; see `Fact`.
Status = Literal["printed", "derived", "confirmed", "contradicted"]
# How a member's head computes; see `Member`. Heads, costs and tests are chosen by it.
Kind = Literal["exact", "sampled", "tree", "quadratic"]


@dataclass(frozen=True)
class Fact:
    """One claim about a member.

    value: the claim as code reads it.
    text: the claim in words.
    source: where it comes from, a place in the paper or "derived".
    status: "printed": it is in the paper and is taken over from there. "derived": it was derived here, the paper says
        nothing about it. "confirmed": it is in the paper, and a test checks it. "contradicted": the paper is wrong;
        `value` holds what is right, `printed` what the paper says, and a test shows the difference.
    printed: what the paper says, where that is wrong.
    fn: computes the value where it depends on sizes or settings; called with keyword arguments such as `num_classes`
        and `alpha`.
    sizes: sizes of a step, beside `num_classes`, on which a smoothness depends and which its `fn` takes.
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

    order_preservation  whether the map keeps the order of the scores: "strict", "weak" (it may make ties) or "none"
    fenchel_young       whether the loss is Fenchel-Young, with the gradient map minus target
    convex              whether the loss is convex in the scores
    calibrated          whether the minimiser of the risk ranks like p (top-k calibration, DCG consistency)
    shift_invariant     whether adding a constant to all scores changes nothing
    smoothness          supremum of the spectral norm of the Hessian of the loss in the scores
    cost                scores touched per step, as a function of batch, num_classes, ...
    bias, variance      of the estimated log partition, for approximations
    bound               the ranking metric that a small loss of a row guarantees, if its authors state one; `fn` gives
                        the least value of the metric from the loss, the number of hits and the settings
    """

    # Without default values: a new member must answer every question, if only by None.
    order_preservation: Fact | None
    fenchel_young: Fact
    convex: Fact
    calibrated: Fact
    shift_invariant: Fact
    smoothness: Fact
    cost: Fact
    bias: Fact | None = None
    variance: Fact | None = None
    bound: Fact | None = None

    def items(self) -> list[tuple[str, Fact]]:
        """(name, fact) for every fact that applies, in the order of the fields."""
        pairs = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return [(name, fact) for name, fact in pairs if fact is not None]


@dataclass(frozen=True)
class Formulas:
    """The formulas of a member in plain text; None where it has no map, or no regulariser."""

    map: str | None
    loss: str
    gradient: str
    omega: str | None = None


@dataclass(frozen=True)
class Solver:
    """A way to minimise the objective of a member on user and item vectors that does not use gradients.

    make: from (num_users, num_items, dim, **settings) to an object that holds `user_vectors` and `item_vectors`. It is
        told the data by `observe(users, items)`; then `update_users()` and `update_items()` alternate, each of which
        lowers `objective()`.
    settings: of the solver.
    """

    make: Callable[..., Any]
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class Takes:
    """Which targets a loss takes.

    smoothing: whether it takes label smoothing.
    float_rows: whether it takes float rows, distributions over the classes.
    why: a sentence for the error that says why it does not take them.
    """

    smoothing: bool = True
    float_rows: bool = True
    why: str = ""

    def check(self, name: str, target: object, label_smoothing: float = 0.0) -> None:
        """Raise if the loss `name` does not take this target or this label smoothing."""
        # By the dtype alone, before the target is read; `target` is None where a module is built and only smoothing
        # known.
        soft = isinstance(target, SoftTarget)
        if not self.float_rows and (soft or (isinstance(target, Tensor) and target.is_floating_point())):
            kind = "a SoftTarget" if soft else "float rows"
            raise ArgumentTypeError(f"`target` of {name} must be ids or bool rows; got {kind}. {self.why}")
        if not self.smoothing and label_smoothing:
            raise ArgumentError(f"`label_smoothing` must be 0 for {name}; got {label_smoothing}. {self.why}")


# What losses on drawn scores take. A distribution or smoothing gives every class a weight as a positive, and each
# positive draws negatives of its own: a step would draw for all C classes.
ONE_DRAW_EACH = Takes(smoothing=False, float_rows=False, why="It needs one draw per positive.")


@dataclass(frozen=True)
class Approximation:
    """What a member states about itself as an approximation of the baseline loss, softmax.

    parts: from scores and labels to bias and variance for each label, predicted and exact.
    settings: what bias and variance depend on; a choice may have more values here than in the loss.
    draws: how one that draws negatives is analysed; None where it draws none.
    needs_tree: whether it needs a tree, or the log-probabilities (N, C) of one.
    by_probability: from settings to whether labels of equal probability P have equal bias, whatever their log q. Where
        there are many classes, labels are then grouped by log P, and otherwise by log(P/q).
    variants: the settings that a diagnosis shows.
    """

    parts: Callable[[ApproximationInput], Parts]
    settings: tuple[Setting, ...] = ()
    draws: DrawTheory | None = None
    needs_tree: bool = False
    by_probability: Callable[[Mapping[str, Any]], bool] = lambda settings: False
    variants: tuple[Variant, ...] = (Variant(),)


@dataclass(frozen=True)
class Theory:
    """Closed forms that the measurements of `manymax.theory` use; None where a member has none.

    jacobian: from (scores, target, **settings) to the Jacobian of the map, (..., C, C). Where it is None, autograd
        computes it.
    norm_bounds: from (scores, target, **settings) to a lower and an upper bound of its spectral norm, (...) each.
    supremum: from (num_classes, **settings) to the largest such norm over all scores. None where it is unknown, or
        where it is the smoothness of a Fenchel-Young loss, which the facts state.
    sharpest: from (num_classes, **settings) to scores (C,), float64, at which the supremum is reached or approached.
    minimisers: from (probs, log_q, **settings) to scores (M, C) that minimise the risk, or to None where no formula is
        known for these; log_q is None for a uniform proposal. A Fenchel-Young member needs none.
    approximation: its bias and variance as an approximation of the baseline loss.
    gradients: its gradients as estimates of that of the baseline loss, see `manymax.theory.gradient_deviation`.
    """

    jacobian: Callable[..., Tensor] | None = None
    norm_bounds: Callable[..., tuple[Tensor, Tensor]] | None = None
    supremum: Callable[..., float] | None = None
    sharpest: Callable[..., Tensor] | None = None
    minimisers: Callable[..., Tensor | None] | None = None
    approximation: Approximation | None = None
    gradients: tuple[GradientEstimator, ...] = ()


@dataclass(frozen=True)
class Member:
    """One loss of the family: its entry in `FAMILY`.

    name, title, aliases: how it is called in code, in text, and otherwise.
    citation: where it was published.
    class_name: the part of class names that stands for it, as in `LinearTaylorSoftmaxLoss`; made from `name`, without
        a last word "loss", if it is left out.
    kind: how its head computes: "exact" (sees all scores, in blocks), "sampled" (a positive and drawn negatives),
        "tree" (decisions on the path to a class), "quadratic" (moments of the class vectors).
    map, loss, module, foundation: its functions on given scores: probabilities, loss, the loss as a module, and the
        Fenchel-Young pair; None where it has none.
    formulas, facts: what it states about itself.
    settings: its settings. examples: values of them that are worth testing and reporting.
    needs_label: whether the map depends on a label: `map(scores, target)`.
    sparse: whether the map gives exact zeros, so that a gradient can have few entries.
    statistics: names of statistics of a row (see `LossResult`) that its kernel computes; `argmax` and `correct` are
        those of every exact member.
    log_partition: whether the loss is a function of log Z, the log of a sum of exponentials, as that of softmax is.
    per_pair: the name of the setting with which its head keeps a number for each training pair from one step to the
        next; None where it has no such setting.
    held: what its gradient holds constant although it follows from the scores, in words: the gradient is then not the
        derivative of the loss. None where nothing is.
    bounded: whether it compares the scores of a row with a bound, the K-th largest of them, and takes another one as
        the keyword `bound`. Its setting `k` is K.
    joint: whether a row with several positives has one loss of all of them together, and not the sum of one loss for
        each. Positives of a row are then no classes that its other positives are compared with.
    takes: which targets it takes.
    kernel: a function from its settings, as keyword arguments, to what its head computes. For an exact member that is a
        `manymax.engine.blocks.Kernel`, which turns blocks of scores into losses and gradients; for a quadratic one a
        function from a call to the losses of its rows; for a sampled one a
        `manymax.engine.sampled_scores.DrawnKernel`, from scores and draws to the losses of the positives. A tree has
        none and brings a `head`.
    native: whether it has a native kernel, kernel.cpp; others of an exact kind share the native products.
    check: a function that raises if its settings, given as keyword arguments with `num_negatives`, do not go together.
    head, head_function: its head as a module and as a function, where they are not built from its kernel.
    ranking_key: from its settings to a function from scores to the numbers that classes are ranked by; None where
        those are the scores.
    unsharded: why its class vectors cannot be split over ranks; None where they can.
    cost, traffic: what a step costs, and what ranks exchange.
    path_length: for a tree, from the number of classes to the mean number of decisions that lead to one.
    theory: closed forms.
    solvers: by name, ways to train it that do not use gradients.
    """

    # Every member states these.
    name: str
    title: str
    kind: Kind
    loss: Callable[..., Tensor]
    module: type[nn.Module] | None
    formulas: Formulas
    facts: Facts
    citation: str
    # On given scores.
    map: Callable[..., Tensor] | None = None
    foundation: Callable[..., FenchelYoung] | None = None
    # Names and settings.
    aliases: tuple[str, ...] = ()
    class_name: str = ""
    settings: tuple[Setting, ...] = ()
    examples: tuple[Mapping[str, Any], ...] = field(default=({},))  # defaults alone, for a member without settings
    needs_label: bool = False
    sparse: bool = False
    statistics: tuple[str, ...] = ()
    log_partition: bool = False
    per_pair: str | None = None
    held: str | None = None
    bounded: bool = False
    joint: bool = False
    takes: Takes = field(default=Takes())
    # In its head: one kernel, for one rank and for several.
    kernel: Callable[..., Any] | None = None
    native: bool = False
    check: Callable[..., None] | None = None
    head: type[nn.Module] | None = None
    head_function: Callable[..., Tensor] | None = None
    ranking_key: Callable[..., Callable[[Tensor], Tensor]] | None = None
    unsharded: str | None = None
    # For the advisor and the planner.
    cost: CostOf | None = None
    traffic: TrafficOf | None = None
    path_length: Callable[[int], float] | None = None
    # For analysis, and for training without gradients.
    theory: Theory = field(default=Theory())
    solvers: Mapping[str, Solver] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.class_name:  # the dataclass is frozen, and would refuse an assignment
            words = self.name.removesuffix("_loss").split("_")
            object.__setattr__(self, "class_name", "".join(word.capitalize() for word in words))

    @property
    def loss_name(self) -> str:
        """The name of the loss as a function, `softmax_loss` for example; no name says "loss" twice."""
        return f"{self.name.removesuffix('_loss')}_loss"

    def needed(self, name: str) -> Any:
        """The value of a field, such as "cost" or "theory.sharpest"; an error that names the field if it is None."""
        # No default and no guess: code that met a missing cost with that of another member would be silently wrong.
        value = attrgetter(name)(self)
        if value is None:
            raise ManymaxError(f"{self.name} has no `{name}`: its entry must give this field.")
        return value

    def setting(self, name: str) -> Setting:
        """The setting of this name; an error if there is none."""
        for setting in self.settings:
            if setting.name == name:
                return setting
        raise ManymaxError(f"{self.name} has no setting `{name}`.")

    def keeps_pairs(self, settings: Mapping[str, Any]) -> bool:
        """Whether its head with these settings keeps a number for each training pair."""
        return self.per_pair is not None and settings.get(self.per_pair) is not None

    def fenchel_young(self, **settings: Any) -> FenchelYoung:
        """The member's pair of map and Omega, for these settings; an error if it is no Fenchel-Young loss."""
        if self.foundation is None:
            raise ManymaxError(f"{self.name} is not a Fenchel-Young loss: {self.facts.fenchel_young.text}")
        return self.foundation(**settings)

    def omega(self, probs: Tensor, **settings: Any) -> Tensor:
        """The regulariser Omega(p) of probs (..., C), (...)."""
        return self.fenchel_young(**settings).omega(probs)

    def conjugate(self, scores: Tensor, **settings: Any) -> Tensor:
        """The conjugate Omega*(s) of scores (..., C), (...); its gradient is the map."""
        return self.fenchel_young(**settings).conjugate(scores)

    def bregman(self, probs: Tensor, other: Tensor, **settings: Any) -> Tensor:
        """The Bregman divergence D(probs, other) of Omega, (...), of rows (..., C) on the simplex."""
        return self.fenchel_young(**settings).bregman(probs, other)
