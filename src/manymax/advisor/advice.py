"""The answer of the advisor: each way to train with what is predicted of it, ranked or rejected."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from manymax.advisor.situation import Situation
from manymax.engine.cost import Machine


@dataclass(frozen=True)
class Choice:
    """One way to train, with what is predicted of it.

    member: name of the member.
    settings: keyword arguments of the member's loss or head.
    proposal: what a sampled member draws from: "given", or the name of a sampler, such as "uniform" or "popularity".
    step_seconds, epoch_seconds: time of loss and gradients, without the optimizer.
    memory: bytes of class vectors, Adam's two copies of them, gradients and buffers.
    deviation: bias^2 + variance against the softmax loss, mean over rows; None where scores cannot tell it.
    needed_negatives: the smallest k whose deviation is at most the target; None where the member draws nothing or no k
        up to the number of classes is enough.
    consistent: whether the minimiser of the loss ranks best under the metric. No member is consistent for NDCG with
        several labels: there it is the consistency of its multi-label form (see `Advice.assumptions`).
    gives_up: properties that softmax has and this member has not.
    why: the reason for its place, in one sentence.
    rejected: why it does not fit the limits; None if it does.
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
    """The members that fit a situation, the best first, and those that do not.

    situation, machine: what was asked, and the speeds that predictions were made with.
    assumptions: what was assumed because nothing was given, and caveats, one sentence each.
    warnings: what would take very long, one sentence each.
    ranked_by: what the ranking is by, in a sentence or two; the quality of a trained model is no part of it.
    ranked: the choices that fit the limits, the best first.
    rejected: the choices that do not.
    """

    situation: Situation
    machine: Machine
    assumptions: tuple[str, ...]
    ranked: tuple[Choice, ...]
    rejected: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()
    ranked_by: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The advice as nested dictionaries and lists of types that JSON knows."""
        return asdict(self)
