"""Advice on which member of the family to train with: predicted cost, and distance from exact softmax.

`advise` takes a situation (number of classes, batch, metric, limits) and ranks the members by one criterion at a time:

    1. a member that does not fit the memory or the time is rejected, with the reason;
    2. members that are consistent for the metric come before the others;
    3. a smaller deviation from the softmax loss comes first, bias^2 + variance of a row's loss; all deviations below
       the target count as equal;
    4. among equals the shorter predicted time of a step comes first.

A sampled member is there once for each way to draw negatives, and is given the smallest number of negatives k that
reaches the target, or, if that does not fit, the largest k that fits and takes no longer than softmax. With uniform
draws softmax comes first for moderate C, where reaching the target costs more than scoring all classes. For huge C a
sampled member comes first that reaches the target sooner, or, where time is short, the one with the smallest deviation.

The files: `situation` (the question), `score_sample` (scores to predict deviations from), `proposals` (ways to draw
negatives), `ranking` (predictions and their comparison), `explanation` (the words), `advice` (the answer).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from manymax.advisor.advice import Advice, Choice
from manymax.advisor.explanation import caveats, long_times, ranked_by
from manymax.advisor.ranking import Ranking
from manymax.advisor.score_sample import ASSUMED_SPREAD, SAMPLE_SIZE, ScoreSample, assumed_scores, read_sample
from manymax.advisor.situation import MULTILABEL_BY_METRIC, Situation
from manymax.engine.cost import Machine
from manymax.engine.member import Member
from manymax.members import FAMILY
from manymax.ops.arguments import checked
from manymax.theory.cost import measure_machine

__all__ = [
    "ASSUMED_SPREAD",
    "MULTILABEL_BY_METRIC",
    "SAMPLE_SIZE",
    "TARGET",
    "Advice",
    "Choice",
    "Ranking",
    "ScoreSample",
    "Situation",
    "advise",
    "assumed_scores",
    "read_sample",
]

TARGET = 0.1  # nats^2


@checked
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
    spread: float = ASSUMED_SPREAD,
    log_q: Tensor | None = None,
    members: Iterable[Member] | None = None,
) -> Advice:
    """Rank the members of the family for a situation.

    Args:
        num_classes: C, the number of classes.
        dim: d, the size of queries and class vectors.
        batch: N, rows of a training step.
        examples: rows of an epoch; needed for predictions and limits per epoch.
        positives: labels of an example, on average.
        metric: what matters: "precision", "recall", "dcg", "ndcg", or "probabilities" if calibrated ones are wanted.
        max_memory: limit, in bytes, of class vectors, Adam's two copies of them, gradients and buffers together.
        max_step_seconds, max_epoch_seconds: limits of the time of loss and gradients.
        num_negatives: k of the sampled members; if None, the k that the target needs, as far as the limits allow.
        shared: sampled members draw their negatives once for all rows of a step.
        target: the deviation, in nats^2, that counts as none. A tenth adds little to the noise of a batch.
        machine: speeds, from `manymax.theory.cost.measure_machine`; if None they are measured now, in about 3 seconds.
        scores: (R, C) of your model; of many rows some are drawn, which the assumptions say. If None, assumed scores
            stand in.
        spread: standard deviation of the assumed scores.
        log_q: (C,) log-probabilities of a proposal, to be compared with uniform draws, draws by popularity, half of
            each, the other positives of the batch, and the hardest of a pool.
        members: those to consider; the whole family if None.

    Returns:
        The ranking, the rejected members with reasons, and what was assumed.

    Example:
        >>> import torch
        >>> from manymax.theory.cost import Machine
        >>> machine = Machine(flops=1e-11, near=1e-9, far=1e-9, sorted=1e-8)
        >>> scores = torch.linspace(-4, 4, 500).unsqueeze(0)
        >>> for choice in advise(500, machine=machine, scores=scores).ranked[:3]:
        ...     print(f"{choice.member}: {choice.why}")
        softmax: the softmax loss itself
        bsl: the softmax loss where rows have one positive, 1 times softmax's time
        nce: 12 draws from the uniform proposal leave a deviation of 0.21, 0.96 times softmax's time; 28 would reach 0.1
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
    sample, assumptions = read_sample(situation, scores, spread, log_q)
    machine = measure_machine(dim=dim) if machine is None else machine
    ranking, considered = Ranking(situation, machine, sample), FAMILY.values() if members is None else members
    choices = sorted((choice for member in considered for choice in ranking.choices(member)), key=ranking.sort_key)
    ranked = tuple(choice for choice in choices if choice.rejected is None)
    return Advice(
        situation,
        machine,
        assumptions=(*assumptions, *caveats(situation)),
        ranked=ranked,
        rejected=tuple(choice for choice in choices if choice.rejected is not None),
        warnings=tuple(long_times(ranked, situation)),
        ranked_by=ranked_by(situation),
    )
