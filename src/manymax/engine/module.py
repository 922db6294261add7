"""The `nn.Module` form of a loss: settings and a call, nothing more."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from manymax.engine.target import check_options


class ExactLoss(nn.Module):
    """Holds the options that every loss on all scores takes, under torch's names.

    A subclass calls its function in `forward` with `**self.options()`.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        multilabel: str = "sum",
    ) -> None:
        super().__init__()
        check_options(reduction, label_smoothing, multilabel)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.multilabel = multilabel

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "multilabel": self.multilabel,
        }

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, multilabel={self.multilabel!r}"
