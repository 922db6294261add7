"""The `nn.Module` form of a loss on given scores: it keeps the keywords and calls the function."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from manymax.engine.member import Takes
from manymax.engine.target import check_options, check_weight
from manymax.ops.arguments import checked


class ExactLoss(nn.Module):
    """Base class of modules of losses on all scores: keeps the keywords of the loss, under torch's names.

    A subclass calls its function in `forward` with `**self.options()`. Arguments are those of `softmax_loss`. What the
    loss does not take is refused when the module is built: `loss_name` and `takes` are what the error says.
    """

    loss_name: ClassVar[str] = ""
    takes: ClassVar[Takes] = Takes()
    weight: Tensor | None

    @checked
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
        # At construction, so that a typing error shows before the first batch.
        check_options(reduction, label_smoothing, multilabel)
        self.takes.check(self.loss_name, None, label_smoothing)
        check_weight(weight, None)  # the number of classes is not known yet
        # A buffer, as in torch's losses: it moves with `.to(device)` and is in the state dict; None is neither.
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.multilabel = multilabel

    def options(self) -> dict[str, Any]:
        """The keyword arguments for the loss function; attributes may have been changed since construction."""
        return {
            "weight": self.weight,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
            "multilabel": self.multilabel,
        }

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, multilabel={self.multilabel!r}"
