"""The situation that advice is asked for: sizes, the metric that matters, and limits of memory and time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from manymax.engine.cost import Shape
from manymax.errors import ArgumentError, check_choice

# {metric: the multi-label form of the loss whose minimiser ranks classes by what the metric rewards}.
MULTILABEL_BY_METRIC = {
    "precision": "sum",
    "dcg": "sum",
    "recall": "normalized",
    "ndcg": "sum",
    "probabilities": "sum",
}


@dataclass(frozen=True)
class Situation:
    """The question that is put to `advise`; its arguments of the same names describe the fields."""

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
        shape = self.shape()  # a Shape checks the sizes when it is made
        if not 0 < self.positives <= self.num_classes:
            raise ArgumentError(f"`positives` must be above 0 and at most {self.num_classes}; got {self.positives!r}.")
        if self.num_negatives is not None and shape.num_negatives > self.num_classes:
            raise ArgumentError(
                f"`num_negatives` must be at most the number of classes, {self.num_classes}; got {self.num_negatives}."
                " Drawing more classes than there are costs more than scoring all of them."
            )

    def shape(self, **sizes: Any) -> Shape:
        """The sizes of a training step.

        Args:
            sizes: sizes that the situation leaves open, such as `support`, or that replace its own.
        """
        negatives = {} if self.num_negatives is None else {"num_negatives": self.num_negatives}
        own = {"positives": self.positives, "shared": self.shared} | negatives
        return Shape(self.batch, self.num_classes, self.dim, **(own | sizes))

    @property
    def steps(self) -> int | None:
        """Steps per epoch, the last one possibly smaller; None where the number of examples is unknown."""
        return None if self.examples is None else -(-self.examples // self.batch)

    @property
    def seconds_limit(self) -> float:
        """Seconds that a step may take: the stricter of the limits per step and per epoch; inf without limits."""
        per_epoch = math.inf if self.max_epoch_seconds is None else self.max_epoch_seconds / (self.steps or 1)
        return min(math.inf if self.max_step_seconds is None else self.max_step_seconds, per_epoch)
