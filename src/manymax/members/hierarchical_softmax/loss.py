"""Hierarchical softmax: the classes are the leaves of a tree, and a path of decisions leads from the root to each.

    scores    s_n = <x, v_n> + a_n at the inner nodes n of a binary tree, each with a vector v_n and a bias a_n
    map       P(c) = product over the nodes n on the path of c of sigmoid(b_n s_n), b_n = 1 for branch 1, else -1
    loss      l(y, s) = -log P(y) = sum over the nodes n on the path of y of softplus(-b_n s_n)
    gradient  sigmoid(s_n) - 1{the path takes branch 1 at n} at the nodes n of the path of y, 0 at all others

In a tree with more than two branches at a node, each branch has a vector, and a softmax over the branches of a node
takes the place of the sigmoid. A step touches the vectors on the paths of its positives only; on Huffman's tree the
mean length of a path is within 1 of the entropy of the counts, in bits. Classes must be ranked by log P. The sum of
scores along a path, which the paper calls the "implicit score", is not a function of P and ranks classes differently.

Citations: Morin and Bengio, "Hierarchical probabilistic neural network language model", AISTATS 2005; Mikolov,
Sutskever, Chen, Corrado, Dean, "Distributed representations of words and phrases", NeurIPS 2013, section 2.1.
"""

from __future__ import annotations

import copy
import math
import warnings

import torch
from torch import Tensor, nn

from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, Target, check_options, read_target, row_losses
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.arguments import checked
from manymax.ops.checks import check_scores, full_precision, learned, visible, working
from manymax.ops.lookup import lookup
from manymax.ops.reduction import reduce
from manymax.ops.tree import ClassTree
from manymax.ops.tree_model import TreeModel, num_vectors

# How much longer a vector takes that is looked up on a path than one in a product with all vectors, with gradients.
PATH_COST = 4


@checked
def hierarchical_softmax_loss(
    input: Tensor,
    node_vectors: Tensor,
    target: Tensor | Target,
    tree: ClassTree,
    *,
    node_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    multilabel: str = "sum",
    sparse_grad: bool = False,
    sparse: bool | None = None,
) -> Tensor:
    """Hierarchical softmax loss, -log P(y) = sum over the nodes n on the path of y of softplus(-b_n s_n).

    The node scores are s_n = <x, v_n> + a_n; b_n is 1 where the path takes branch 1 and -1 where it takes branch 0.

    Args:
        input: (..., d) queries x.
        node_vectors: v, (M, d), one per inner node, if the tree is binary; otherwise (E, d), one per edge.
        target: ids, padded ids, bool rows or float rows, as in `softmax_loss`. Only the vectors on the paths of the
            positives are touched, unless smoothing or rows with very many positives make all classes cheaper.
        tree: a tree over the C classes, see `HuffmanTree` and `ClassTree.from_paths`.
        node_bias: a, (M,) or (E,).
        weight, ignore_index, reduction, label_smoothing: as in `softmax_loss`.
        multilabel: "sum" adds up the losses of the positives; "normalized" divides that sum by |t|.
        sparse_grad: make the gradients of `node_vectors` and `node_bias` row-sparse, for optimizers that take such
            gradients. It excludes smoothing and second derivatives. The old name `sparse` still works, with a warning.
        sparse: the old name of `sparse_grad`.

    Returns:
        A scalar, or (...) for `reduction="none"`, in the dtype of the arguments (float32 under autocast).

    Raises:
        ArgumentError: for wrong shapes always; for ids out of range, nan and infinite scores only in eager CPU use.

    Example: with all scores 0 every decision on a path costs log 2.

        >>> import torch, manymax
        >>> tree = manymax.HuffmanTree([1, 1, 2])
        >>> input, node_vectors, target = torch.zeros(3, 4), torch.zeros(2, 4), torch.arange(3)
        >>> manymax.hierarchical_softmax_loss(input, node_vectors, target, tree, reduction="none")
        tensor([1.3863, 1.3863, 0.6931])
    """
    check_options(reduction, label_smoothing, multilabel)
    sparse_grad = _read_sparse_grad(sparse_grad, sparse)
    if sparse_grad and label_smoothing > 0:
        raise ArgumentError(
            f"`label_smoothing` must be 0 with `sparse_grad=True`; got {label_smoothing}. Smoothing touches all"
            " classes, so that no row of the gradient is zero."
        )
    rows, model, dtype = _read_arguments(input, node_vectors, tree, node_bias, sparse_grad)
    with full_precision(rows):
        batch = input.shape[:-1]
        read = read_target(
            Form((*batch, tree.num_classes), rows.dtype, rows.device), target, weight, ignore_index, multilabel
        )
        total = read.weights.sum(-1)
        # All classes at once, (N, C), where every class has a weight (smoothing), where that is cheaper, or where the
        # weights of all classes want a gradient. Otherwise the paths of the positives alone.
        if label_smoothing > 0 or _all_classes_are_cheaper(model, read) or (read.ids is None and learned(read.weights)):
            values = model.log_probs(rows).view(*batch, tree.num_classes)  # normalised: their log partition is 0
            losses, total = row_losses(torch.zeros_like(total), values, read, weight, label_smoothing)
        else:
            losses = _path_losses(model, rows, read).view(batch)
        if multilabel == "normalized":
            losses = losses / torch.where(total > 0, total, 1)
        return reduce(losses, read.divisor, reduction).to(dtype)


@checked
def hierarchical_softmax_log_prob(
    input: Tensor,
    node_vectors: Tensor,
    tree: ClassTree,
    target: Tensor | None = None,
    *,
    node_bias: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Log-probabilities of all classes, or of given ones: the sum of log sigmoid(b_n s_n) along the path of a class.

    Args:
        input, node_vectors, tree, node_bias: as in `hierarchical_softmax_loss`.
        target: None for all classes; or ids, (...) or (..., P).
        ignore_index: the id that stands for no class; its log-probability is 0.

    Returns:
        log P, (..., C), or of the shape of `target`.

    Example:
        >>> import torch, manymax
        >>> tree = manymax.HuffmanTree([1, 1, 2])
        >>> manymax.hierarchical_softmax_log_prob(torch.zeros(4), torch.zeros(2, 4), tree).exp()
        tensor([0.2500, 0.2500, 0.5000])
    """
    rows, model, dtype = _read_arguments(input, node_vectors, tree, node_bias, sparse=False)
    with full_precision(rows):
        batch = input.shape[:-1]
        if target is None:
            return model.log_probs(rows).view(*batch, tree.num_classes).to(dtype)
        _check_ids("target", target, tree.num_classes, ignore_index)
        if target.shape != batch and target.shape[:-1] != batch:
            raise ArgumentError(
                f"`target` must have shape {tuple(batch)} or {(*batch, 'P')}; got shape {tuple(target.shape)}."
            )
        # `ignore_index` is no class: class 0 is looked up in its place, and the result is replaced below.
        ids = target.reshape(len(rows), 1 if target.shape == batch else target.shape[-1]).long()
        real = ids != ignore_index
        log_probs = _listed_log_probs(model, rows, torch.where(real, ids, 0))
        return torch.where(real, log_probs, 0).view(target.shape).to(dtype)


def _read_arguments(
    input: Tensor, node_vectors: Tensor, tree: ClassTree, node_bias: Tensor | None, sparse: bool
) -> tuple[Tensor, TreeModel, torch.dtype]:
    """Check the arguments; returns the input as rows (N, d), the tree with its vectors, and the dtype of the result."""
    check_scores(input, "input")
    check_tree(tree)
    shape = (num_vectors(tree), input.shape[-1])
    if node_vectors.shape != shape:
        raise ArgumentError(
            f"`node_vectors` must be {shape} for this tree and `input` of shape {tuple(input.shape)};"
            f" got shape {tuple(node_vectors.shape)}."
        )
    if node_bias is not None and node_bias.shape != shape[:1]:
        raise ArgumentError(f"`node_bias` must have shape {shape[:1]}; got {tuple(node_bias.shape)}.")
    rows, dtype = working(input.to(torch.promote_types(input.dtype, node_vectors.dtype)).reshape(-1, shape[1]))
    # In half precision a dense gradient is a sum over many rows: it is taken in float32 and rounded once, at the end. A
    # row-sparse gradient is summed later, when it is coalesced, and converting the table would touch every vector.
    if not sparse:
        node_vectors = node_vectors.to(rows.dtype)
        node_bias = None if node_bias is None else node_bias.to(rows.dtype)
    return rows, TreeModel(tree, node_vectors, node_bias, sparse), dtype


def _read_sparse_grad(sparse_grad: bool, sparse: bool | None) -> bool:
    """`sparse_grad`, or, with a warning, the value given under its old name `sparse`."""
    if sparse is None:
        return sparse_grad
    warnings.warn("`sparse` is called `sparse_grad` now.", DeprecationWarning, stacklevel=3)
    return sparse


def check_tree(tree: object) -> None:
    """Raise unless `tree` is a `ClassTree`."""
    if not isinstance(tree, ClassTree):
        raise ArgumentTypeError(
            f"`tree` must be a tree over the classes; got {type(tree).__name__}. Pass `HuffmanTree(counts)`."
        )


def _check_ids(argument: str, ids: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise unless `ids` are integers that name a class or equal `ignore_index`."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`{argument}` must hold integer ids; got {kind}.")
    if visible(ids) and (outside := (ids != ignore_index) & ((ids < 0) | (ids >= num_classes))).any():
        raise ArgumentError(
            f"`{argument}` ids must be in [0, {num_classes}) or equal `ignore_index` ({ignore_index});"
            f" got {ids[outside][0].item()}."
        )


def _all_classes_are_cheaper(model: TreeModel, target: Target) -> bool:
    """Whether log P of all classes costs less than the paths of the positives."""
    # While a graph is traced, values cannot be looked at: the positives of bool rows and float rows cannot be listed.
    if not visible(target.weights):
        return target.ids is None
    if model.sparse or target.weights.shape[-1] == 1:  # a sparse gradient must not touch all vectors
        return False
    touched = int(target.weights.count_nonzero()) * model.tree.mean_length() * model.vectors_per_node
    return touched * PATH_COST > target.count.numel() * len(model.vectors)


def _path_losses(model: TreeModel, rows: Tensor, target: Target) -> Tensor:
    """sum_i t_i (-log P(i)) over the positives i of each row, (N,), from their paths alone."""
    weights = target.weights.reshape(len(rows), target.weights.shape[-1])
    ids = None if target.ids is None else target.ids.reshape(weights.shape)
    # All listed ids, padding with weight 0 included: where there is none, where values cannot be looked at, and where
    # the weights want a gradient, which a weight of 0 has too.
    if ids is not None and (ids.shape[-1] == 1 or not visible(ids) or learned(weights)):
        return -(weights * _listed_log_probs(model, rows, ids)).sum(-1)
    # Otherwise one row per positive: rows with few positives are not padded to the row with the most.
    row, column = weights.nonzero(as_tuple=True)
    log_probs = model.path_log_probs(lookup(rows, row), column if ids is None else ids[row, column])
    return rows.new_zeros(len(rows)).index_add(0, row, -weights[row, column] * log_probs)


def _listed_log_probs(model: TreeModel, rows: Tensor, ids: Tensor) -> Tensor:
    """log P of the classes `ids` (N, P) of each row, (N, P)."""
    repeated = rows.unsqueeze(1).expand(-1, ids.shape[-1], -1).flatten(0, 1)
    return model.path_log_probs(repeated, ids.flatten()).view(ids.shape)


class HierarchicalSoftmaxLoss(ExactLoss):
    """Hierarchical softmax with node vectors of its own: loss, log-probabilities and exact top-k.

    The score of a class is its log-probability, log P. Node vectors are initialised like the rows of
    `torch.nn.Linear`. The tree is a part of the state, so loading a checkpoint also loads its tree.

    Args:
        in_features: d.
        tree: a tree over the C classes, `HuffmanTree(counts)` or `ClassTree.from_paths(paths)`.
        bias: whether each node vector has a bias.
        sparse_grad: make gradients row-sparse, for `torch.optim.SparseAdam` and SGD: the cost of a step then depends
            on the lengths of the paths and not on the number of classes. The old name `sparse` still works, with a
            warning.
        sparse: the old name of `sparse_grad`.
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `hierarchical_softmax_loss`.
        device, dtype: of the node vectors.

    Example:
        >>> import torch, manymax
        >>> loss = manymax.HierarchicalSoftmaxLoss(4, manymax.HuffmanTree([5, 1, 1, 2]))
        >>> _ = torch.nn.init.zeros_(loss.node_vectors)
        >>> loss(torch.ones(2, 4), torch.tensor([0, 3]))
        tensor(1.0397, grad_fn=<DivBackward0>)
        >>> values, ids = loss.topk(torch.ones(4), 2)
        >>> values.exp(), ids
        (tensor([0.5000, 0.2500]), tensor([0, 3]))
    """

    @checked
    def __init__(
        self,
        in_features: int,
        tree: ClassTree,
        *,
        bias: bool = False,
        sparse_grad: bool = False,
        sparse: bool | None = None,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        multilabel: str = "sum",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            multilabel=multilabel,
        )
        check_tree(tree)
        if not isinstance(in_features, int) or in_features < 1:
            raise ArgumentError(f"`in_features` must be a positive integer; got {in_features!r}.")
        # On another device it is a copy: to move the caller's own would take it away from whoever uses it there.
        self.tree = tree if device is None else copy.deepcopy(tree)
        self.in_features, self.sparse_grad = in_features, _read_sparse_grad(sparse_grad, sparse)
        shape = (num_vectors(tree), in_features)
        self.node_vectors = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.node_bias = nn.Parameter(torch.empty(shape[:1], device=device, dtype=dtype)) if bias else None
        self.to(device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new node vectors and biases, uniformly within 1 / sqrt(d) of 0, as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)

    def forward(self, input: Tensor, target: Tensor, linear_weight: None = None) -> Tensor:
        """The loss of `input` (..., d) for `target`; see `hierarchical_softmax_loss`. `linear_weight` must be None."""
        _refuse_class_vectors(linear_weight)
        return hierarchical_softmax_loss(
            input,
            self.node_vectors,
            target,
            self.tree,
            node_bias=self.node_bias,
            sparse_grad=self.sparse_grad,
            **self.options(),
        )

    def log_prob(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """log P of all classes (..., C), or of the ids in `target`; see `hierarchical_softmax_log_prob`."""
        return hierarchical_softmax_log_prob(
            input, self.node_vectors, self.tree, target, node_bias=self.node_bias, ignore_index=self.ignore_index
        )

    def scores(self, input: Tensor, linear_weight: None = None) -> Tensor:
        """The scores by which classes are ranked: log P, (..., C)."""
        _refuse_class_vectors(linear_weight)
        return self.log_prob(input)

    @torch.no_grad()
    def topk(
        self, input: Tensor, k: int, linear_weight: None = None, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each query, exactly.

        The tree is searched from its most probable nodes; a node is skipped only if no class below it can be among
        the k best.

        Args:
            input: (..., d) queries.
            k: at most C.
            linear_weight: must be None; the head has no class vectors.
            exclude: (..., X) ids that must not be found, padded with `ignore_index`.

        Returns:
            log P and ids, (..., k) each, best first, ties in any order. Where fewer than k classes are left, log P is
            -inf and the id is `ignore_index`.
        """
        _refuse_class_vectors(linear_weight)
        rows, model, dtype = _read_arguments(input, self.node_vectors, self.tree, self.node_bias, sparse=False)
        num_classes, batch = self.tree.num_classes, input.shape[:-1]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_classes:
            raise ArgumentError(f"`k` must be an integer in [1, {num_classes}], the number of classes; got {k!r}.")
        if exclude is None:
            exclude = torch.empty(*batch, 0, dtype=torch.long, device=input.device)
        _check_ids("exclude", exclude, num_classes, self.ignore_index)
        if exclude.shape[:-1] != batch:
            raise ArgumentError(f"`exclude` must have shape {(*batch, 'X')}; got {tuple(exclude.shape)}.")
        excluded = exclude.reshape(len(rows), exclude.shape[-1]).long()
        # `ignore_index` may be the id of a class; -1 is never one.
        excluded = torch.where(excluded == self.ignore_index, -1, excluded)
        with full_precision(rows):
            values, ids = model.topk(rows, k, excluded, self.ignore_index)
        return values.view(*batch, k).to(dtype), ids.view(*batch, k)

    def extra_repr(self) -> str:
        """Settings shown when the module is printed."""
        bias = f", bias={self.node_bias is not None}, sparse_grad={self.sparse_grad}, "
        return f"in_features={self.in_features}{bias}{super().extra_repr()}"


def _refuse_class_vectors(linear_weight: object) -> None:
    """Raise if the class vectors that other heads take are given."""
    if linear_weight is not None:
        raise ArgumentError(
            "`linear_weight` must be None: hierarchical softmax has vectors at the nodes of its tree and none for the"
            " classes, so it cannot use class vectors that are kept elsewhere."
        )
