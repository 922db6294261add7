"""From a situation to a ranking of the family: what each member costs there, and how far it is from exact softmax.

One criterion at a time, in this order:

    1. a member that does not fit the memory or the time is rejected, with the reason;
    2. members that are consistent for the metric come before the others;
    3. then counts the total deviation from the softmax loss, bias^2 + variance of a row's loss, as far as it is above
       the target: below that it is as good as none;
    4. and among equals the predicted time of a step.

The sampled members choose their k: the smallest that reaches the target, or the largest that fits and takes no longer
than softmax. So for moderate C, where the target takes more draws than all classes are worth, softmax comes out first;
for huge C a sampled member that reaches the target sooner, or, where time is short, the one of smallest deviation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from manymax.engine.cost import FLOAT, Machine, Shape
from manymax.engine.member import Member
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.members import BASELINE, FAMILY
from manymax.theory.bias_variance import deviation, negatives_needed
from manymax.theory.cost import cost, measure_machine
from manymax.theory.order_preservation import member_map

# What a metric asks for: the multi-label form whose minimiser ranks by what the metric rewards.
MULTILABEL_BY_METRIC = {
    "precision": "sum",
    "dcg": "sum",
    "recall": "normalized",
    "ndcg": "sum",
    "probabilities": "sum",
}
OPTIMIZER_COPIES = 2  # of the class vectors, as Adam keeps them
SAMPLE = 1 << 22  # scores in the sample that stands in where none is given
ROWS = 32  # in that sample, at most
# Their spread, and the share of their variance that an exponential law has: at C = 3706 chi2 and the error of the
# quadratic member are then about what matrix factorisation with softmax has on MovieLens-1M, 16 and 0.4.
SPREAD, SKEWED = 1.2, 0.4
TARGET = 0.1
LARGEST = 1e6  # score


@dataclass(frozen=True)
class Situation:
    """What is asked; see `advise`."""

    num_classes: int
    dim: int
    batch: int
    examples: int | None
    positives: float
    metric: str
    max_memory: float | None
    max_step_seconds: float | None
    max_epoch_seconds: float | None
    num_negatives: int | None
    shared: bool
    target: float

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, MULTILABEL_BY_METRIC)
        for name in ("max_memory", "max_step_seconds", "max_epoch_seconds", "target"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not 0 < value < math.inf):
                raise ArgumentError(f"`{name}` must be a finite number above 0; got {value!r}.")
        if self.examples is not None and (not isinstance(self.examples, int) or self.examples < 1):
            raise ArgumentError(f"`examples` must be an integer of at least 1; got {self.examples!r}.")
        if self.max_epoch_seconds is not None and self.examples is None:
            raise ArgumentError("`max_epoch_seconds` needs `examples`, the number of examples of an epoch.")
        shape = self.shape()  # checks the sizes
        if not 0 < self.positives <= self.num_classes:
            raise ArgumentError(f"`positives` must be above 0 and at most {self.num_classes}; got {self.positives!r}.")
        if self.num_negatives is not None and shape.num_negatives > self.num_classes:
            raise ArgumentError(
                f"`num_negatives` must be at most the number of classes, {self.num_classes}; got {self.num_negatives}."
                " To look at all classes is cheaper than to draw more of them than there are."
            )

    def shape(self, **sizes: Any) -> Shape:
        """The sizes of a step."""
        own = {} if self.num_negatives is None else {"num_negatives": self.num_negatives}
        return Shape(
            self.batch, self.num_classes, self.dim, positives=self.positives, shared=self.shared, **(own | sizes)
        )

    @property
    def steps(self) -> int | None:
        """Steps of an epoch."""
        return None if self.examples is None else -(-self.examples // self.batch)

    @property
    def seconds_limit(self) -> float:
        """Seconds that a step may take."""
        per_epoch = math.inf if self.max_epoch_seconds is None else self.max_epoch_seconds / (self.steps or 1)
        return min(math.inf if self.max_step_seconds is None else self.max_step_seconds, per_epoch)


@dataclass(frozen=True)
class Choice:
    """One way to train, with what is predicted of it.

    settings: keyword arguments of the member's loss or head.
    proposal: what a sampled member draws from.
    step_seconds, epoch_seconds: of loss and gradients, without the optimizer.
    memory: bytes of class vectors, Adam's two copies of them, gradients and buffers.
    deviation: bias^2 + variance against the softmax loss, the mean over rows; None where scores do not tell.
    needed_negatives: the k at which the deviation falls below the target; None where none is drawn or none is enough.
    consistent: for the metric; for NDCG with several labels, for which no member is, that of its form (see the notes).
    gives_up: what softmax has and this has not.
    why: in a sentence.
    rejected: the reason, if it does not fit.
    """

    member: str
    settings: dict[str, Any]
    proposal: str | None
    step_seconds: float
    epoch_seconds: float | None
    memory: float
    deviation: float | None
    needed_negatives: int | None
    consistent: bool
    gives_up: tuple[str, ...]
    why: str
    rejected: str | None


@dataclass(frozen=True)
class Advice:
    """Members ranked for a situation, the best first, and the rejected ones."""

    situation: Situation
    machine: Machine
    assumptions: tuple[str, ...]
    ranked: tuple[Choice, ...]
    rejected: tuple[Choice, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it in types that JSON knows."""
        return asdict(self)


@dataclass(frozen=True)
class _ScoreSample:
    """Scores (R, C) to predict deviations from, a label y ~ P for each row, and the proposals' log q by name."""

    scores: Tensor
    labels: Tensor
    proposals: dict[str, Tensor]


def advise(
    num_classes: int,
    *,
    dim: int = 64,
    batch: int = 1024,
    examples: int | None = None,
    positives: float = 1.0,
    metric: str = "ndcg",
    max_memory: float | None = None,
    max_step_seconds: float | None = None,
    max_epoch_seconds: float | None = None,
    num_negatives: int | None = None,
    shared: bool = False,
    target: float = TARGET,
    machine: Machine | None = None,
    scores: Tensor | None = None,
    spread: float = SPREAD,
    log_q: Tensor | None = None,
) -> Advice:
    """Rank the members of the family for a situation.

    Args:
        num_classes: C.
        dim: d, of queries and class vectors.
        batch: N, rows of a step.
        examples: of an epoch.
        positives: labels of an example, on average.
        metric: what matters: "precision", "recall", "dcg", "ndcg" or "probabilities", calibrated ones.
        max_memory: bytes for class vectors, Adam's two copies of them, gradients and buffers.
        max_step_seconds, max_epoch_seconds: limits of time, for loss and gradients.
        num_negatives: k of the sampled members; if None, what the target takes and the limits allow.
        shared: sampled members draw once for all rows.
        target: the total deviation, in nats^2, that counts as none: one tenth adds little to the noise of a batch.
        machine: its speed, from `measure_machine`; if None it is measured now, in about three seconds.
        scores: (R, C), a sample of a model's scores; if None, made-up ones stand in.
        spread: the standard deviation of these.
        log_q: (C,) log-probabilities of a proposal, to be compared with the uniform one.

    Returns:
        the ranking, the rejected members with reasons, and what was assumed.

    Example:
        >>> from manymax.theory.cost import Machine
        >>> machine = Machine(flops=1e-11, near=1e-9, far=1e-9, sorted=1e-8)
        >>> scores = torch.linspace(-4, 4, 500).unsqueeze(0)
        >>> for choice in advise(500, machine=machine, scores=scores).ranked[:2]:
        ...     print(choice.member, "-", choice.why)
        softmax - the softmax loss itself
        nce - 8 draws from the uniform proposal leave a deviation of 0.3, 0.94 times softmax's time; 28 would reach 0.1
    """
    situation = Situation(
        num_classes=num_classes,
        dim=dim,
        batch=batch,
        examples=examples,
        positives=positives,
        metric=metric,
        max_memory=max_memory,
        max_step_seconds=max_step_seconds,
        max_epoch_seconds=max_epoch_seconds,
        num_negatives=num_negatives,
        shared=shared,
        target=target,
    )
    sample, assumed = _sample(situation, scores, spread, log_q)
    speed = measure_machine(dim=dim) if machine is None else machine
    case = _Ranking(situation, speed, sample)
    choices = sorted((choice for member in FAMILY.values() for choice in case.choices(member)), key=case.key)
    return Advice(
        situation,
        speed,
        assumptions=(*assumed, *_notes(situation)),
        ranked=tuple(choice for choice in choices if choice.rejected is None),
        rejected=tuple(choice for choice in choices if choice.rejected is not None),
    )


def _sample(
    situation: Situation, scores: Tensor | None, spread: float, log_q: Tensor | None
) -> tuple[_ScoreSample, list[str]]:
    """The sample, and what had to be assumed for it."""
    generator = torch.Generator().manual_seed(0)
    if log_q is not None:
        log_q = _check("log_q", log_q, (situation.num_classes,)).double().log_softmax(0)
    assumed = []
    if scores is None:
        scores = assumed_scores(min(situation.num_classes, SAMPLE), spread, generator)
        assumed.append(
            f"scores with a standard deviation of {spread:g}, skewed like popularity; pass `scores` of your model"
        )
        if log_q is not None and scores.shape[1] < situation.num_classes:
            log_q = log_q[torch.randperm(len(log_q), generator=generator)[: scores.shape[1]]].log_softmax(0)
    else:
        scores = _check("scores", scores, (None, situation.num_classes)).float()
    proposals = {"uniform": scores.new_full(scores.shape[1:], -math.log(scores.shape[1]))}
    if log_q is not None:
        proposals["given"] = log_q
    labels = (scores - torch.empty_like(scores).exponential_(generator=generator).log()).argmax(1)  # y ~ P
    return _ScoreSample(scores, labels, proposals), assumed


def assumed_scores(num_classes: int, spread: float, generator: torch.Generator | None = None) -> Tensor:
    """Scores as a trained model may have them, (R, C), with a standard deviation of `spread`.

    Taste is Gaussian; popularity, whose logarithm falls like that of the rank, makes scores exponential. Gaussian
    scores alone would flatter the quadratic member, whose error is of third order.
    """
    if not 0 <= spread < math.inf:
        raise ArgumentError(f"`spread` must be a finite number of at least 0; got {spread!r}.")
    shape = max(1, min(ROWS, SAMPLE // num_classes)), num_classes
    taste = torch.randn(shape, generator=generator)
    popularity = torch.empty(shape).exponential_(generator=generator) - 1
    return spread * (math.sqrt(1 - SKEWED) * taste + math.sqrt(SKEWED) * popularity)


def _check(name: str, value: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentTypeError(f"`{name}` must be a float tensor; got {kind}.")
    fits = value.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, value.shape, strict=True))
    if not fits or not value.numel():
        expected = ", ".join("rows" if want is None else str(want) for want in shape)
        raise ArgumentError(f"`{name}` must have shape ({expected}); got {tuple(value.shape)}.")
    if not (value.abs() <= LARGEST).all():  # nan fails too
        raise ArgumentError(f"`{name}` must be numbers of at most {LARGEST:g}, without nan; got others.")
    return value.detach()


def _notes(situation: Situation) -> list[str]:
    if situation.positives == 1 or situation.metric != "ndcg":
        return []
    return [
        "no member is consistent for NDCG where the number of labels varies: the sum over labels follows DCG and P, the"
        " normalized form R"
    ]


@dataclass(frozen=True)
class _Ranking:
    """A situation on a machine, with a sample of scores."""

    situation: Situation
    machine: Machine
    sample: _ScoreSample

    def choices(self, member: Member) -> Iterator[Choice]:
        """The ways to train with a member: one, or one for each proposal."""
        if member.kind == "sampled":
            for proposal, log_q in self.sample.proposals.items():
                yield self._sampled(member, proposal, log_q)
        elif member.sparse:
            support = float((self._probs(member) > 0).sum(1).float().mean())
            yield self._choice(member, self.situation.shape(support=support), self._off(member))
        else:
            yield self._choice(member, self.situation.shape(), self._off(member))

    def key(self, choice: Choice) -> tuple[bool, float, float]:
        """What a ranking sorts by: consistent, then close to softmax, then fast."""
        off = math.inf if choice.deviation is None else max(choice.deviation, self.situation.target)
        return not choice.consistent, off, choice.step_seconds

    def too_much(self, member: Member, shape: Shape) -> str | None:
        """Why a step does not fit, or None."""
        limit, most = self.situation.seconds_limit, self.situation.max_memory
        memory, seconds = self._memory(member, shape), self._seconds(member, shape)
        if most is not None and memory > most:
            return f"needs {memory / 1e9:.3g} GB of memory; the limit is {most / 1e9:.3g} GB"
        if seconds > limit:
            return f"a step takes {seconds:.3g} s; the limit is {limit:.3g} s"
        return None

    def _seconds(self, member: Member, shape: Shape) -> float:
        return cost(member.name, shape).work.seconds(self.machine)

    def _memory(self, member: Member, shape: Shape) -> float:
        return cost(member.name, shape).memory + FLOAT * (1 + OPTIMIZER_COPIES) * shape.vectors

    def _sampled(self, member: Member, proposal: str, log_q: Tensor) -> Choice:
        """At the k that was asked for, or at what the target takes as far as it fits."""
        scores, classes = self.sample.scores, self.situation.num_classes
        needed = negatives_needed(member.name, scores, self.situation.target, log_q=log_q, maximum=classes)
        k = self.situation.num_negatives or self._affordable(member, needed or classes)
        off = float(deviation(member.name, scores, log_q=log_q, num_negatives=k).mean())
        return self._choice(member, self.situation.shape(num_negatives=k), off, proposal, needed)

    def _affordable(self, member: Member, most: int) -> int:
        """The largest k up to `most` that fits and takes no longer than softmax would, by bisection; 1 if none does."""
        whole = self._seconds(BASELINE, self.situation.shape())
        if self._seconds(member, self.situation.shape(num_negatives=1)) > whole:
            whole = math.inf  # a step this small is all calls: no k is faster

        def fits(k: int) -> bool:
            shape = self.situation.shape(num_negatives=k)
            return self._seconds(member, shape) <= whole and self.too_much(member, shape) is None

        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _choice(
        self, member: Member, shape: Shape, off: float | None, proposal: str | None = None, needed: int | None = None
    ) -> Choice:
        seconds, steps = self._seconds(member, shape), self.situation.steps
        settings: dict[str, Any] = (
            {"multilabel": MULTILABEL_BY_METRIC[self.situation.metric]} if shape.positives != 1 else {}
        )
        if member.kind == "sampled":
            settings |= {"num_negatives": shape.num_negatives, "shared": shape.shared}
        return Choice(
            member=member.name,
            settings=settings,
            proposal=proposal,
            step_seconds=seconds,
            epoch_seconds=None if steps is None else steps * seconds,
            memory=self._memory(member, shape),
            deviation=off,
            needed_negatives=needed,
            consistent=bool(member.facts.calibrated.value)
            and (self.situation.metric != "probabilities" or self._distribution(member)),
            gives_up=tuple(self._given_up(member, shape)),
            why=self._why(member, shape, seconds, off, proposal, needed),
            rejected=self.too_much(member, shape),
        )

    def _off(self, member: Member) -> float | None:
        """E[(loss - softmax loss)^2] of a member that draws nothing; None for one with scores of its own.

        On the sample and, for a Fenchel-Young loss, at its own minimiser for the same P, grad Omega(P), to which a
        training would lead; the larger one.
        """
        if member.kind == "tree":
            return None
        scores = self.sample.scores.double()
        places = [scores]
        if member.foundation is not None:
            places.append(member.fenchel_young().slope(scores.softmax(1)))
        return max(self._square(member, place) for place in places)

    def _square(self, member: Member, scores: Tensor) -> float:
        losses = [loss(scores, self.sample.labels, reduction="none") for loss in (member.loss, BASELINE.loss)]
        return float((losses[0] - losses[1]).square().mean())

    def _probs(self, member: Member) -> Tensor:
        """What the member's map makes of the sample; some maps are told the label."""
        return member_map(member, self.sample.labels)(self.sample.scores)

    def _distribution(self, member: Member) -> bool:
        """Whether the scores alone give probabilities. Those of a sampled member are softmax's, or exp(s) of NCE."""
        if member.map is None or member.kind == "tree":
            return True
        return not member.needs_label and bool((self._probs(member) >= 0).all())

    def _given_up(self, member: Member, shape: Shape) -> Iterator[str]:
        facts, whole = member.facts, BASELINE.facts
        if not facts.calibrated.value:
            yield f"consistency: {facts.calibrated.text}"
        if not facts.convex.value:
            yield f"convexity: {facts.convex.text}"
        if not self._distribution(member):
            yield "calibrated probabilities: those of its map need the label, or can be negative"
        if (
            facts.order_preservation is not None
            and whole.order_preservation is not None
            and facts.order_preservation.value != whole.order_preservation.value
        ):
            yield f"order: {facts.order_preservation.text}"
        if _smoothness(member, shape) > _smoothness(BASELINE, shape):
            yield f"conditioning: {facts.smoothness.text}"
        if member.kind == "sampled" and shape.shared:
            yield "independent noise: all rows of a batch have the same negatives"

    def _why(
        self, member: Member, shape: Shape, seconds: float, off: float | None, proposal: str | None, needed: int | None
    ) -> str:
        share = seconds / self._seconds(BASELINE, shape)
        time, target = f"{share:.2g} times {BASELINE.name}'s time", self.situation.target
        if off is None:
            length = member.needed("path_length")(shape.num_classes)
            return f"{length:.3g} decisions a label, {time}; how well its own vectors fit, scores do not tell"
        if off == 0:
            return f"the {BASELINE.name} loss itself"
        if member.kind != "sampled":
            return f"another loss, {off:.2g} from {BASELINE.name}'s here or at its own minimum, {time}"
        drawn = f"{shape.num_negatives:,} draws from the {proposal} proposal"
        if off <= target:
            return f"{drawn} bring the deviation to {off:.2g}, {time}"
        more = f"{needed:,} would reach" if needed else "more than there are classes would be needed for"
        return f"{drawn} leave a deviation of {off:.2g}, {time}; {more} {target:g}"


def _smoothness(member: Member, shape: Shape) -> float:
    """The member's smoothness constant at a shape."""
    fact = member.facts.smoothness
    if fact.fn is None:
        return math.inf if fact.value is None else float(fact.value)
    return fact.fn(num_classes=shape.num_classes, **{name: getattr(shape, name) for name in fact.sizes})
