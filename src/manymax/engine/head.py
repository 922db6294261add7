"""The interface of every head as a module: `head(input, target, linear_weight=None)`, `scores` and `topk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manymax.engine.linear import HeadCall
from manymax.engine.member import Member
from manymax.engine.options import ALL_OPTIONS
from manymax.engine.ranking import linear_scores, linear_topk
from manymax.engine.ranks import Shards
from manymax.engine.target import SoftTarget, Target
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked


class LinearHead(nn.Module):
    """Base class of all heads, so that a training loop need not know which loss it has.

    A head that is built from a member's kernel splits a call in two: `read` checks the arguments of one rank without
    any exchange, and `compute` computes the loss together with the other ranks. `ShardedHead` puts an agreement of the
    ranks between the two; on one process they follow each other.

    Args:
        in_features: d, or None for a head without class vectors of its own, which then gets them in every call.
        num_classes: C.
        bias: whether the head's own class vectors have a bias.
        device, dtype: of the class vectors.
    """

    member: ClassVar[Member]  # the member of the family whose loss this is
    honours: ClassVar[frozenset[str]] = ALL_OPTIONS  # the options that have an effect on it; others are refused
    takes_class_vectors: ClassVar[bool] = True  # whether it can use class vectors that are kept elsewhere

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_classes < 1:
            raise ArgumentError(f"`num_classes` must be at least 1; got {num_classes}.")
        if in_features is None and bias:  # there would be nothing for the bias to be added to
            raise ArgumentError("`bias` needs class vectors of the head's own: give `in_features`, or `bias=False`.")
        self.num_classes = num_classes
        # torch's own layer, for its initialisation and its names in the state dict, `linear.weight` and `linear.bias`;
        # its forward is never called.
        self.linear = (
            None if in_features is None else nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        )

    def vectors(self, linear_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The class vectors (C, d) and bias (C,) to use: the given ones, or the head's own."""
        if linear_weight is not None:
            if not isinstance(linear_weight, Tensor):
                raise ArgumentTypeError(f"`linear_weight` must be a tensor; got {type(linear_weight).__name__}.")
            # The number of classes belongs to the head: class weights, samplers and trees were made for it.
            if linear_weight.shape[:1] != (self.num_classes,):
                raise ArgumentError(
                    f"`linear_weight` must have {self.num_classes} rows; got shape {tuple(linear_weight.shape)}."
                )
            return linear_weight, None  # not the head's own bias, which belongs to its own class vectors
        if self.linear is None:
            raise ArgumentError("this head was built without class vectors (`in_features=None`): pass `linear_weight`.")
        return self.linear.weight, self.linear.bias

    def read(
        self,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor | Target | SoftTarget,
        shards: Shards,
        **per_call: Any,
    ) -> HeadCall:
        """Read and check a call with the class vectors of one rank, without any exchange.

        `per_call` are the shared keywords that hold something about each row.
        """
        raise ArgumentError(f"{type(self).__name__} has no class vectors to be split over ranks.")

    def compute(self, call: HeadCall) -> Tensor:
        """The loss of a call that was read, the same on every rank."""
        raise ArgumentError(f"{type(self).__name__} has no class vectors to be split over ranks.")

    @checked
    def scores(self, input: Tensor, linear_weight: Tensor | None = None) -> Tensor:
        """The scores of all classes, (..., C), without gradients."""
        weight, bias = self.vectors(linear_weight)
        return linear_scores(input, weight, bias, **self.scoring())

    @checked
    def topk(
        self, input: Tensor, k: int, linear_weight: Tensor | None = None, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the k best classes of each query, (..., k) each; see `linear_topk`.

        A member whose probabilities p do not keep the order of the scores ranks by p, and returns log p up to a
        constant in place of the scores.
        """
        weight, bias = self.vectors(linear_weight)
        given: dict[str, Any] = {"linear_bias": bias, "exclude": exclude, "key": self.ranking_key, **self.scoring()}
        return linear_topk(input, weight, k, **given)

    def sparse_parameters(self) -> list[nn.Parameter]:
        """The parameters of the head whose gradients are row-sparse."""
        return []

    def fused(self, optimizer: str = "adam", lr: float = 1e-3, **more: Any) -> nn.Module:
        """A module whose backward is also the step for the class vectors; exact heads have it."""
        raise ArgumentError(
            f"{type(self).__name__} has no `fused`, which is for heads that see all scores. A head that draws touches"
            " few class vectors: take `sparse_grad=True` and `manymax.optim.SparseAdam`."
        )

    def settings(self) -> dict[str, Any]:
        """The member's own settings, as keyword arguments of its kernel."""
        return {}

    def scoring(self) -> dict[str, Any]:
        """The keywords of how scores follow from queries and class vectors, for `linear_scores` and `linear_topk`."""
        return {}

    @property
    def ranking_key(self) -> Callable[[Tensor], Tensor] | None:
        """A function from scores to the numbers that classes are ranked by; None where those are the scores."""
        return None

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return f"num_classes={self.num_classes}"
