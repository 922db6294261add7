"""Predictions for every member, its cost and its distance from exact softmax, and the comparison of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from manymax.advisor.advice import Choice
from manymax.advisor.explanation import given_up, reason
from manymax.advisor.proposals import HARD_NEGATIVES, POOL_SIZE
from manymax.advisor.score_sample import ScoreSample
from manymax.advisor.situation import MULTILABEL_BY_METRIC, Situation
from manymax.engine.cost import FLOAT, Machine, Shape
from manymax.engine.member import Member
from manymax.members import BASELINE
from manymax.theory.bias_variance import deviation, negatives_needed
from manymax.theory.cost import cost, predict_seconds
from manymax.theory.order_preservation import member_map

OPTIMIZER_COPIES = 2  # copies of the class vectors that an optimizer keeps; Adam's two moments


@dataclass(frozen=True)
class Ranking:
    """Predictions for a situation on a machine, with a sample of scores.

    `choices` predicts the ways to train with a member, `sort_key` compares them.
    """

    situation: Situation
    machine: Machine
    sample: ScoreSample

    def choices(self, member: Member) -> Iterator[Choice]:
        """The ways to train with a member: one for each way to draw for a sampled member, one for any other."""
        if member.kind == "sampled":
            for name, proposal in self.sample.proposals.items():
                if proposal.log_q is None:
                    yield self._hard_choice(member, name)
                elif not proposal.from_batch:
                    yield self._sampled_choice(member, name, proposal.log_q)
                elif self.situation.num_negatives is None and self.situation.batch > 1:
                    yield self._batch_choice(member, name, proposal.log_q)
        elif member.sparse:
            support = float((self._probs(member, self.sample.sparse_scale) > 0).sum(1).float().mean())
            yield self._choice(member, self.situation.shape(support=support), self.squared_distance(member))
        else:
            yield self._choice(member, self.situation.shape(), self.squared_distance(member))

    def sort_key(self, choice: Choice) -> tuple[bool, float, float]:
        """The key that sorts choices, the best first: consistent, then close to softmax, then fast.

        All deviations up to the target count as equal, so that among them the time decides.
        """
        distance = math.inf if choice.deviation is None else max(choice.deviation, self.situation.target)
        return not choice.consistent, distance, choice.step_seconds

    def squared_distance(self, member: Member) -> float | None:
        """E[(loss - softmax loss)^2] of a member that draws nothing; None for a tree, whose nodes have own scores.

        The loss is compared on the sample. A Fenchel-Young loss is also compared at its own minimiser for the same P,
        grad Omega(P), because training with it leads there and not to the sample; the larger of the two counts.
        """
        if member.kind == "tree":
            return None
        scores = self.sample.scores.double()
        candidates = [scores]
        if member.foundation is not None:
            candidates.append(member.fenchel_young().slope(scores.softmax(1)))
        return max(self._mean_squared_difference(member, candidate) for candidate in candidates)

    def _mean_squared_difference(self, member: Member, scores: Tensor) -> float:
        """Mean over the rows of scores (R, C) of (loss - baseline loss)^2, at the labels of the sample."""
        losses = [loss(scores, self.sample.labels, reduction="none") for loss in (member.loss, BASELINE.loss)]
        return float((losses[0] - losses[1]).square().mean())

    def _sampled_choice(self, member: Member, proposal: str, log_q: Tensor) -> Choice:
        """A sampled member with the k that was asked for, else the k that the target needs, as far as it fits."""
        scores, classes = self.sample.scores, self.situation.num_classes
        needed = negatives_needed(member.name, scores, self.situation.target, log_q=log_q, maximum=classes)
        k = self.situation.num_negatives or self._largest_affordable(member, needed or classes)
        distance = float(deviation(member.name, scores, log_q=log_q, num_negatives=k).mean())
        return self._choice(member, self.situation.shape(num_negatives=k), distance, proposal, needed)

    def _batch_choice(self, member: Member, proposal: str, log_q: Tensor) -> Choice:
        """A sampled member with all other positives of the batch as negatives, which are drawn by their popularity."""
        k = self.situation.batch - 1
        distance = float(deviation(member.name, self.sample.scores, log_q=log_q, num_negatives=k).mean())
        return self._choice(member, self.situation.shape(num_negatives=k, shared=True), distance, proposal)

    def _hard_choice(self, member: Member, proposal: str) -> Choice:
        """A sampled member with the hardest negatives of a pool, which is a loss of its own: its cost is predicted."""
        k = min(self.situation.num_negatives or HARD_NEGATIVES, self.situation.num_classes)
        shape = self.situation.shape(num_negatives=k, num_candidates=min(POOL_SIZE * k, self.situation.num_classes))
        return replace(self._choice(member, shape, None, proposal), consistent=False)

    def _largest_affordable(self, member: Member, most: int) -> int:
        """The largest k up to `most` that fits the limits and takes no longer than softmax; 1 if none does."""
        time_limit = self._seconds(BASELINE, self.situation.shape())
        if self._seconds(member, self.situation.shape(num_negatives=1)) > time_limit:
            # The overhead of the calls alone is more than softmax takes, so no k is faster: time is no reason then.
            time_limit = math.inf

        def fits(k: int) -> bool:
            shape = self.situation.shape(num_negatives=k)
            return self._seconds(member, shape) <= time_limit and self._why_rejected(member, shape) is None

        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _choice(
        self,
        member: Member,
        shape: Shape,
        distance: float | None,
        proposal: str | None = None,
        needed: int | None = None,
    ) -> Choice:
        """A choice with everything that is predicted of it; `distance` is its deviation from the softmax loss."""
        seconds, steps = self._seconds(member, shape), self.situation.steps
        settings: dict[str, Any] = (
            {"multilabel": MULTILABEL_BY_METRIC[self.situation.metric]} if shape.positives != 1 else {}
        )
        if member.kind == "sampled":
            settings |= {"num_negatives": shape.num_negatives, "shared": shape.shared}
            settings |= {"pool": shape.num_candidates} if shape.num_candidates else {}
        has_probabilities = self._has_probabilities(member)
        return Choice(
            member=member.name,
            settings=settings,
            proposal=proposal,
            step_seconds=seconds,
            epoch_seconds=None if steps is None else steps * seconds,
            memory=self._memory(member, shape),
            deviation=distance,
            needed_negatives=needed,
            consistent=bool(member.facts.calibrated.value)
            and (self.situation.metric != "probabilities" or has_probabilities),
            gives_up=tuple(given_up(member, shape, has_probabilities)),
            why=reason(
                member,
                shape,
                time_ratio=seconds / self._seconds(BASELINE, shape),
                deviation=distance,
                target=self.situation.target,
                proposal=proposal,
                needed_negatives=needed,
            ),
            rejected=self._why_rejected(member, shape),
        )

    def _why_rejected(self, member: Member, shape: Shape) -> str | None:
        """Why a step does not fit the limits of memory and time; None if it does."""
        seconds_limit, memory_limit = self.situation.seconds_limit, self.situation.max_memory
        memory, seconds = self._memory(member, shape), self._seconds(member, shape)
        if memory_limit is not None and memory > memory_limit:
            return f"needs {memory / 1e9:.3g} GB of memory; the limit is {memory_limit / 1e9:.3g} GB"
        if seconds > seconds_limit:
            return f"a step takes {seconds:.3g} s; the limit is {seconds_limit:.3g} s"
        return None

    def _seconds(self, member: Member, shape: Shape) -> float:
        """Predicted seconds of a step on this machine."""
        return predict_seconds(member.name, shape, self.machine)

    def _memory(self, member: Member, shape: Shape) -> float:
        """Bytes of buffers and gradients, of the class vectors, and of the optimizer's copies of these."""
        return cost(member.name, shape, self.machine.way).memory + FLOAT * (1 + OPTIMIZER_COPIES) * shape.vectors

    def _probs(self, member: Member, scale: float = 1.0) -> Tensor:
        """The member's map of scale x the sample, (R, C); maps that need the label get the labels of the sample."""
        return member_map(member, self.sample.labels)(scale * self.sample.scores)

    def _has_probabilities(self, member: Member) -> bool:
        """Whether the scores alone give probabilities that are never negative.

        A sampled member has no map of its own: its probabilities are softmax(s), or exp(s) for NCE.
        """
        if member.kind in ("sampled", "tree"):
            return True
        return member.map is not None and not member.needs_label and bool((self._probs(member) >= 0).all())
