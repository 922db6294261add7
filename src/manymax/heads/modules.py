"""One interface for all members: `head(input, target, linear_weight=None)`, `scores` and `topk`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manymax.engine.linear import Options
from manymax.engine.options import read_options
from manymax.engine.sample import HIT_POLICIES
from manymax.engine.target import Target, check_options, check_weight
from manymax.errors import ArgumentError, ArgumentTypeError, check_choice
from manymax.heads import linear, sampled
from manymax.heads.ranking import linear_scores, linear_topk
from manymax.members.entmax.loss import EntmaxLoss
from manymax.members.rg import kernel as moments
from manymax.members.sampled_softmax.loss import SampledSoftmaxLoss
from manymax.members.taylor_softmax.loss import check_order, taylor_exp
from manymax.samplers.base import Sampler
from manymax.samplers.uniform import UniformSampler


class LinearHead(nn.Module):
    """What a training loop calls without knowing which loss it has.

    Args:
        in_features: d, or None for a head without class vectors of its own, which then gets them in every call.
        num_classes: C.
        bias: whether the own class vectors have a bias.
        device, dtype: of the class vectors.
    """

    takes_class_vectors: bool = True
    honours: ClassVar[frozenset[str]] = frozenset()

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
        if in_features is None and bias:
            raise ArgumentError("`bias` needs class vectors of the head's own: give `in_features`, or `bias=False`.")
        self.num_classes = num_classes
        self.linear = (
            None if in_features is None else nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        )

    def vectors(self, linear_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The class vectors and bias to use: the given ones, or the head's own."""
        if linear_weight is not None:
            if not isinstance(linear_weight, Tensor):
                raise ArgumentTypeError(f"`linear_weight` must be a tensor; got {type(linear_weight).__name__}.")
            if linear_weight.shape[:1] != (self.num_classes,):
                raise ArgumentError(
                    f"`linear_weight` must have {self.num_classes} rows; got shape {tuple(linear_weight.shape)}."
                )
            return linear_weight, None
        if self.linear is None:
            raise ArgumentError("this head was built without class vectors (`in_features=None`): pass `linear_weight`.")
        return self.linear.weight, self.linear.bias

    def scores(self, input: Tensor, linear_weight: Tensor | None = None) -> Tensor:
        """The scores of all classes, (..., C), without gradients."""
        weight, bias = self.vectors(linear_weight)
        return linear_scores(input, weight, bias)

    def topk(
        self, input: Tensor, k: int, linear_weight: Tensor | None = None, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Scores and ids of the k best classes of each query, (..., k) each; see `linear_topk`.

        Instead of scores log p up to a constant, where p does not keep their order.
        """
        weight, bias = self.vectors(linear_weight)
        return linear_topk(input, weight, k, linear_bias=bias, exclude=exclude, key=self.ranking_key)

    @property
    def ranking_key(self) -> Callable[[Tensor], Tensor] | None:
        """From scores to what classes are ranked by; None where that is the scores."""
        return None

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return f"num_classes={self.num_classes}"


class _ExactHead(LinearHead):
    """A head whose loss takes the options of `linear_softmax_loss`."""

    function: Callable[..., Tensor]
    weight: Tensor | None

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        multilabel: str = "sum",
        options: Options = None,
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        check_options(reduction, label_smoothing, multilabel)
        self.register_buffer("weight", check_weight(weight, num_classes))
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.multilabel, self.options = multilabel, read_options(options)

    def settings(self) -> dict[str, Any]:
        """The member's own keyword arguments."""
        return {}

    def forward(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None = None) -> Tensor:
        """The loss of queries (..., d); `linear_weight` (C, d) replaces the head's own class vectors."""
        vectors, bias = self.vectors(linear_weight)
        return type(self).function(
            input,
            vectors,
            target,
            linear_bias=bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            multilabel=self.multilabel,
            options=self.options,
            **self.settings(),
        )


class LinearSoftmaxLoss(_ExactHead):
    """Softmax cross entropy of a linear layer, like `torch.nn.LinearCrossEntropyLoss`; see `linear_softmax_loss`."""

    function = staticmethod(linear.linear_softmax_loss)


class LinearSparsemaxLoss(_ExactHead):
    """The sparsemax loss of a linear layer; see `linear_sparsemax_loss`."""

    function = staticmethod(linear.linear_sparsemax_loss)


class LinearRankmaxLoss(_ExactHead):
    """The rankmax loss of a linear layer; see `linear_rankmax_loss`."""

    function = staticmethod(linear.linear_rankmax_loss)


class LinearRGLoss(_ExactHead):
    """The RG loss of a linear layer; see `linear_rg_loss`."""

    function = staticmethod(moments.linear_rg_loss)


class LinearEntmaxLoss(_ExactHead):
    """The entmax loss of a linear layer; see `linear_entmax_loss`. `alpha` and `learnable` as in `EntmaxLoss`."""

    function = staticmethod(linear.linear_entmax_loss)

    def __init__(
        self, in_features: int | None, num_classes: int, alpha: float = 1.5, *, learnable: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        self.order = EntmaxLoss(alpha, learnable=learnable)

    @property
    def alpha(self) -> float | Tensor:
        """The number, or the tensor that is learned."""
        return self.order.alpha

    def settings(self) -> dict[str, Any]:
        """alpha."""
        return {"alpha": self.alpha}


class LinearTaylorSoftmaxLoss(_ExactHead):
    """The Taylor-softmax loss of a linear layer; see `linear_taylor_softmax_loss`."""

    function = staticmethod(linear.linear_taylor_softmax_loss)

    def __init__(self, in_features: int | None, num_classes: int, order: int = 2, **options: Any) -> None:
        super().__init__(in_features, num_classes, **options)
        check_order(order)
        self.order = order

    @property
    def ranking_key(self) -> Callable[[Tensor], Tensor]:
        """log f(s), which falls and rises with the scores."""
        return lambda scores: taylor_exp(scores, self.order).log()

    def settings(self) -> dict[str, Any]:
        """The order."""
        return {"order": self.order}


class SampledHead(LinearHead):
    """A head whose loss draws negatives."""

    function: Callable[..., Tensor]
    weight: Tensor | None

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        sampler: Sampler | None = None,
        num_negatives: int | None = 100,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        shared: bool = False,
        sparse: bool = False,
        generator: torch.Generator | None = None,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        multilabel: str = "sum",
    ) -> None:
        super().__init__(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        check_options(reduction, 0.0, multilabel)
        self.sampler = UniformSampler(num_classes) if sampler is None else sampler
        sampled.check_sampler(self.sampler, num_classes, None)
        self.register_buffer("weight", check_weight(weight, num_classes))
        self.num_negatives, self.shared, self.sparse, self.generator = num_negatives, shared, sparse, generator
        self.reduction, self.ignore_index, self.multilabel = reduction, ignore_index, multilabel

    def settings(self) -> dict[str, Any]:
        """The member's own keyword arguments."""
        return {}

    def forward(self, input: Tensor, target: Tensor | Target, linear_weight: Tensor | None = None) -> Tensor:
        """The loss of queries (..., d) with fresh negatives; `linear_weight` replaces the own class vectors."""
        vectors, bias = self.vectors(linear_weight)
        return type(self).function(
            input,
            vectors,
            target,
            self.sampler,
            self.num_negatives,
            shared=self.shared,
            sparse=self.sparse,
            generator=self.generator,
            linear_bias=bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            multilabel=self.multilabel,
            **self.settings(),
        )


class LinearSampledSoftmaxLoss(SampledHead):
    """Sampled softmax of a linear layer; see `linear_sampled_softmax_loss`."""

    function = staticmethod(sampled.linear_sampled_softmax_loss)

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        sampler: Sampler | None = None,
        num_negatives: int | None = 100,
        *,
        correction: str = "logq",
        hit_policy: str | None = None,
        debias: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, sampler, num_negatives, **options)
        SampledSoftmaxLoss(correction=correction, hit_policy=hit_policy, debias=debias)  # raises where it would
        self.correction, self.hit_policy, self.debias = correction, hit_policy, debias

    def settings(self) -> dict[str, Any]:
        """Correction, hit policy and debiasing."""
        return {"correction": self.correction, "hit_policy": self.hit_policy, "debias": self.debias}


class LinearNCELoss(SampledHead):
    """NCE of a linear layer; see `linear_nce_loss`. `log_z` is a number, or a parameter if `learnable`."""

    function = staticmethod(sampled.linear_nce_loss)

    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        sampler: Sampler | None = None,
        num_negatives: int | None = 100,
        *,
        log_z: float = 0.0,
        learnable: bool = False,
        hit_policy: str = "keep",
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, sampler, num_negatives, **options)
        check_choice("hit_policy", hit_policy, HIT_POLICIES)
        self.hit_policy = hit_policy
        self.log_z = nn.Parameter(torch.tensor(float(log_z))) if learnable else float(log_z)

    def settings(self) -> dict[str, Any]:
        """log Z0 and the hit policy."""
        return {"log_z": self.log_z, "hit_policy": self.hit_policy}
