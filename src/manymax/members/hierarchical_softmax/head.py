"""Hierarchical softmax with the calls of the other heads; its vectors belong to the nodes of a tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from manymax.engine.head import LinearHead
from manymax.engine.options import Options, read_options
from manymax.engine.target import Target
from manymax.errors import ArgumentError
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    check_tree,
    hierarchical_softmax_loss,
)
from manymax.ops.arguments import checked
from manymax.ops.tree import ClassTree, HuffmanTree

# The options that have an effect on this head, and the reason that the error for all others gives.
HONOURS = frozenset({"sparse_grad", "retain_graph"})
WHY = "it has no blocks of scores, only those of the nodes on paths"


# Why the other shared keywords have no meaning here, for the error.
PATHS = "a class has a path of decisions, and no score of its own"
BY_HAND = 'take `reduction="none"`, and weigh, sum or shift the rows yourself'
REFUSED_BY_TREES = {
    **dict.fromkeys(("normalize", "temperature", "softcap", "exclude", "decoupled", "bound", "z_loss", "stats"), PATHS),
    "negatives": "it draws none",
    **dict.fromkeys(("row_weight", "num_items", "shift"), BY_HAND),
}


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which refuses the keywords of other heads with a reason."""

    @wraps(function)
    def checked(*arguments: Any, **given: Any) -> Any:
        for name in given:
            if name in REFUSED_BY_TREES:
                raise ArgumentError(f"`{name}` has no meaning for hierarchical_softmax: {REFUSED_BY_TREES[name]}.")
        return function(*arguments, **given)

    return checked


@_refusing
@checked
def linear_hierarchical_softmax_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | Target,
    *,
    tree: ClassTree | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    options: Options = None,
) -> Tensor:
    """Hierarchical softmax loss with the arguments of the other heads; see `hierarchical_softmax_loss`.

    Args:
        input: (..., d) queries.
        linear_weight: (M, d) vectors of the inner nodes; a binary tree over C classes has M = C - 1 of them.
        target: as in `linear_softmax_loss`.
        tree: a tree over the classes; None for a balanced binary one over M + 1 classes.
        linear_bias: (M,) biases of the nodes.
        weight, reduction, ignore_index, label_smoothing, multilabel: as in `linear_softmax_loss`.
        options: `HeadOptions` or a mapping of its fields, of which only `sparse_grad` has an effect.

    Returns:
        A scalar, or (...) for `reduction="none"`.

    Example: a path to one of four classes has two decisions, and with all scores 0 each of them costs log 2.
        >>> import torch, manymax
        >>> manymax.linear_hierarchical_softmax_loss(torch.zeros(2, 5), torch.zeros(3, 5), torch.tensor([0, 3]))
        tensor(1.3863)
    """
    read = read_options(options, HONOURS, WHY)
    return hierarchical_softmax_loss(
        input,
        linear_weight,
        target,
        balanced_tree(linear_weight.shape[0] + 1) if tree is None else tree,
        node_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        multilabel=multilabel,
        sparse_grad=read.sparse_grad,
    )


def balanced_tree(num_classes: int) -> ClassTree:
    """Huffman's tree of equal counts: the lengths of any two paths differ by 1 at most."""
    return HuffmanTree(torch.ones(num_classes))


class LinearHierarchicalSoftmaxLoss(LinearHead, HierarchicalSoftmaxLoss):
    """Hierarchical softmax of a linear layer over the nodes of a tree; see `linear_hierarchical_softmax_loss`.

    It is called like every head. Its vectors belong to the nodes of the tree, not to the classes, so a call cannot
    pass class vectors that are kept elsewhere.

    Args:
        in_features: d.
        num_classes: C.
        tree: a tree over the C classes, `HuffmanTree(counts)` or `ClassTree.from_paths(paths)`; None for a balanced
            binary one.
        bias: whether each node vector has a bias.
        device, dtype: of the node vectors.
        weight, reduction, ignore_index, label_smoothing, multilabel, options: as in the function.

    Example:
        >>> import torch, manymax
        >>> head = manymax.LinearHierarchicalSoftmaxLoss(4, 4, manymax.HuffmanTree([5, 1, 1, 2]))
        >>> _ = torch.nn.init.zeros_(head.node_vectors)
        >>> values, ids = head.topk(torch.ones(4), 2)
        >>> values.exp(), ids
        (tensor([0.5000, 0.2500]), tensor([0, 3]))
    """

    honours = HONOURS
    takes_class_vectors = False

    @_refusing
    @checked(least={"in_features": 1, "num_classes": 1})
    def __init__(
        self,
        in_features: int | None,
        num_classes: int,
        tree: ClassTree | None = None,
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
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 1:
            raise ArgumentError(f"`num_classes` must be at least 1; got {num_classes}.")
        if in_features is None:
            raise ArgumentError(
                "`in_features` must be given: the node vectors belong to the head, which cannot take others."
            )
        tree = balanced_tree(num_classes) if tree is None else tree
        check_tree(tree)
        if tree.num_classes != num_classes:
            raise ArgumentError(f"`tree` must be over the {num_classes} classes; got one over {tree.num_classes}.")
        read = read_options(options, HONOURS, WHY)
        HierarchicalSoftmaxLoss.__init__(
            self,
            in_features,
            tree,
            bias=bias,
            sparse_grad=read.sparse_grad,
            weight=weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            multilabel=multilabel,
            device=device,
            dtype=dtype,
        )
        self.num_classes, self.linear = num_classes, None

    def sparse_parameters(self) -> list[nn.Parameter]:
        """The parameters of the head whose gradients are row-sparse: vectors and biases of nodes, if asked for."""
        return list(self.parameters()) if self.sparse_grad else []

    # `LinearHead`, the first base class, defines these methods for class vectors; here they must be those of the tree.
    forward = HierarchicalSoftmaxLoss.forward
    scores = HierarchicalSoftmaxLoss.scores  # type: ignore[assignment]
    topk = HierarchicalSoftmaxLoss.topk  # type: ignore[assignment]
    extra_repr = HierarchicalSoftmaxLoss.extra_repr
