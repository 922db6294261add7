"""The words of an advice: why a member has its place, what it gives up, and what holds for all members."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from manymax.advisor.advice import Choice
from manymax.advisor.situation import Situation
from manymax.engine.cost import Shape
from manymax.engine.member import Member
from manymax.members import BASELINE, FAMILY

LONG_SECONDS = 3600.0  # a training time from which on an exact loss is warned of
LONG_STEPS = 1000  # steps that stand for a training whose number of examples is not known


def caveats(situation: Situation) -> list[str]:
    """Sentences on the metric that hold whatever member is chosen."""
    if situation.positives == 1 or situation.metric != "ndcg":
        return []
    return [
        "no member is consistent for NDCG where the number of labels varies: the form that sums over labels is"
        " consistent for DCG and precision, the normalized form for recall"
    ]


def ranked_by(situation: Situation) -> str:
    """What the ranking is by."""
    return (
        f"Ranked by closeness to the {BASELINE.name} loss: consistent losses first, then the smaller deviation (all up"
        f" to {situation.target:g} are equal), then the shorter step. How good a model of your data becomes is not"
        f" known here: a loss that is far from {BASELINE.name} may train a better one."
    )


def long_times(ranked: Sequence[Choice], situation: Situation) -> Iterator[str]:
    """A sentence for each exact loss whose training would take hours.

    Without the number of examples, the time of `LONG_STEPS` steps stands for that of a training.
    """
    for choice in ranked:
        if FAMILY[choice.member].kind == "sampled":
            continue
        if choice.epoch_seconds is not None:
            seconds, what = choice.epoch_seconds, "an epoch"
        else:
            seconds, what = LONG_STEPS * choice.step_seconds, f"{LONG_STEPS:,} steps"
        if seconds >= LONG_SECONDS:
            faster = min((c for c in ranked if c.step_seconds < choice.step_seconds / 2), key=_by_time, default=None)
            instead = ""
            if faster is not None:
                hours = seconds / 3600 * faster.step_seconds / choice.step_seconds
                drawn = faster.settings.get("num_negatives")
                with_negatives = "" if drawn is None else f" with {drawn:,} negatives"
                instead = f"; {faster.member}{with_negatives} takes {hours:.2g} h"
            yield f"{choice.member}: {what} would take {seconds / 3600:.2g} h here{instead}"


def _by_time(choice: Choice) -> float:
    return choice.step_seconds


def given_up(member: Member, shape: Shape, has_probabilities: bool) -> Iterator[str]:
    """The properties that the baseline has and a member gives up, as "property: what the member's facts say of it".

    Args:
        member: a row of `FAMILY`.
        shape: sizes of a step, on which smoothness constants depend.
        has_probabilities: whether the scores alone give probabilities that are never negative.
    """
    facts, baseline = member.facts, BASELINE.facts
    if not facts.calibrated.value:
        yield f"consistency: {facts.calibrated.text}"
    if not facts.convex.value:
        yield f"convexity: {facts.convex.text}"
    if not has_probabilities:
        yield "calibrated probabilities: those of its map need the label, or can be negative"
    if (
        facts.order_preservation is not None
        and baseline.order_preservation is not None
        and facts.order_preservation.value != baseline.order_preservation.value
    ):
        yield f"order preservation: {facts.order_preservation.text}"
    if _smoothness(member, shape) > _smoothness(BASELINE, shape):
        yield f"conditioning: {facts.smoothness.text}"
    if shape.num_candidates:
        yield "consistency: the hardest of a pool are no draws with known probabilities, which a correction could use"
    if member.kind == "sampled" and shape.shared:
        yield "independent noise: all rows of a batch have the same negatives"


def reason(
    member: Member,
    shape: Shape,
    *,
    time_ratio: float,
    deviation: float | None,
    target: float,
    proposal: str | None,
    needed_negatives: int | None,
) -> str:
    """One sentence on the place of a choice.

    Args:
        member: a row of `FAMILY`.
        shape: sizes of a step of the choice.
        time_ratio: seconds of a step over those of a step of the baseline.
        deviation, proposal, needed_negatives: as in `Choice`.
        target: the deviation that counts as none.
    """
    time = f"{time_ratio:.2g} times {BASELINE.name}'s time"
    if shape.num_candidates:
        return (
            f"the hardest {shape.num_negatives:,} of {shape.num_candidates:,} uniform draws, {time}: a loss of its own"
        )
    if deviation is None:
        length = member.needed("path_length")(shape.num_classes)
        return f"{length:.3g} decisions per label, {time}; scores do not tell how well vectors of its own would fit"
    if member is BASELINE:
        return f"the {BASELINE.name} loss itself"
    if deviation == 0:
        return f"the {BASELINE.name} loss where rows have one positive, {time}"
    if member.kind != "sampled":
        return (
            f"a loss of its own, with a squared distance of {deviation:.2g} from the {BASELINE.name} loss on these"
            f" scores or at its own minimum, {time}"
        )
    drawn = f"{shape.num_negatives:,} draws from the {proposal} proposal"
    if deviation <= target or (not needed_negatives and shape.shared and shape.num_negatives == shape.batch - 1):
        return f"{drawn} bring the deviation to {deviation:.2g}, {time}"
    more = f"{needed_negatives:,} would reach" if needed_negatives else "more draws than classes would be needed for"
    return f"{drawn} leave a deviation of {deviation:.2g}, {time}; {more} {target:g}"


def _smoothness(member: Member, shape: Shape) -> float:
    """The smoothness constant that a member's facts state for a shape; inf where they state none."""
    fact = member.facts.smoothness
    if fact.fn is None:
        return math.inf if fact.value is None else float(fact.value)
    return fact.fn(num_classes=shape.num_classes, **{name: getattr(shape, name) for name in fact.sizes})
