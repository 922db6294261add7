"""Hierarchical softmax: the classes are the leaves of a tree, and a path of small decisions leads to each.

    scores    s_n = <x, v_n> + b_n at the inner nodes n of a binary tree, each with a vector of its own
    map       P(c) = product over the path of c of sigmoid(b s_n), b = 1 where it takes branch 1, otherwise -1
    loss      l(y, s) = -log P(y) = sum over the path of y of softplus(-b s_n)
    gradient  sigmoid(s_n) - 1{branch 1} at the nodes of the path, 0 at all others

In a tree with more branches a node has one vector per branch and a softmax over its branches. A step touches the
vectors of a path alone: on Huffman's tree its mean length is within 1 of the entropy of the counts, in bits. Rank by
log P: the sum of scores along a path, the paper's "implicit score", is not a function of P and ranks otherwise.

References: Morin and Bengio, "Hierarchical probabilistic neural network language model", AISTATS 2005; Mikolov,
Sutskever, Chen, Corrado, Dean, "Distributed representations of words and phrases", NeurIPS 2013, section 2.1.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from manymax.engine.cost import FLOAT, PER_STEP, Cost, Shape, Work, gather
from manymax.engine.member import Fact, Facts, Formulas
from manymax.engine.module import ExactLoss
from manymax.engine.target import Form, Target, check_options, read_target, row_losses
from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.checks import check_scores, full_precision, learned, visible, working
from manymax.ops.divergences import kl
from manymax.ops.lookup import lookup
from manymax.ops.reduction import reduce
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_model import TreeModel, num_vectors

# With its gradients, a vector on a path costs about as much time as this many in a product with all vectors.
PATH_COST = 4


def hierarchical_softmax_loss(
    input: Tensor,
    node_vectors: Tensor,
    target: Tensor,
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
    """Hierarchical softmax, -log P(y) = sum over the path of y of softplus(-b s_n), s_n = <x, v_n> + b_n.

    Args:
        input: (..., d).
        node_vectors: (M, d), one per inner node of a binary tree; otherwise (E, d), one per edge.
        target: ids, padded ids, bool rows or float rows, as in `softmax_loss`. The paths of the positives are
            followed; only smoothing and very full rows make it touch all vectors.
        tree: over C classes, see `HuffmanTree` and `ClassTree.from_paths`.
        node_bias: (M,) or (E,), b.
        weight, ignore_index, reduction, label_smoothing: as in `softmax_loss`.
        multilabel: "sum" over positives, or "normalized", that divided by |t|.
        sparse_grad: row-sparse gradients of `node_vectors` and `node_bias`, for optimizers that take them; without
            smoothing, and not differentiable twice. Its old name, `sparse`, still works, with a warning.

    Returns:
        A scalar, or (...) for `reduction="none"`, in the dtype of the arguments (float32 under autocast).

    Raises:
        ArgumentError: wrong shapes always; ids out of range, nan and infinite scores in eager CPU use.

    Example: at zero every decision costs log 2.

        >>> import torch
        >>> tree = HuffmanTree([1, 1, 2])
        >>> input, node_vectors, target = torch.zeros(3, 4), torch.zeros(2, 4), torch.arange(3)
        >>> hierarchical_softmax_loss(input, node_vectors, target, tree, reduction="none")
        tensor([1.3863, 1.3863, 0.6931])
    """
    check_options(reduction, label_smoothing, multilabel)
    sparse_grad = _renamed(sparse_grad, sparse)
    if sparse_grad and label_smoothing > 0:
        raise ArgumentError(
            f"`label_smoothing` must be 0 with `sparse_grad=True`; got {label_smoothing}. Smoothing touches all"
            " classes, so that no row of the gradient is zero."
        )
    rows, model, dtype = _read(input, node_vectors, tree, node_bias, sparse_grad)
    with full_precision(rows):
        batch = input.shape[:-1]
        read = read_target(
            Form((*batch, tree.num_classes), rows.dtype, rows.device), target, weight, ignore_index, multilabel
        )
        total = read.weights.sum(-1)
        if label_smoothing > 0 or _fuller_than_paths(model, read) or (read.ids is None and learned(read.weights)):
            values = model.log_probs(rows).view(*batch, tree.num_classes)
            losses, total = row_losses(torch.zeros_like(total), values, read, weight, label_smoothing)
        else:
            losses = _path_losses(model, rows, read).view(batch)
        if multilabel == "normalized":
            losses = losses / torch.where(total > 0, total, 1)
        return reduce(losses, read.divisor, reduction).to(dtype)


def hierarchical_softmax_log_prob(
    input: Tensor,
    node_vectors: Tensor,
    tree: ClassTree,
    target: Tensor | None = None,
    *,
    node_bias: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """log P of all classes, or of the given ones.

    Args:
        input, node_vectors, tree, node_bias: as in `hierarchical_softmax_loss`.
        target: None for all classes; or ids (...) or (..., P), where `ignore_index` has log-probability 0.

    Returns:
        (..., C), or the shape of `target`.

    Example:
        >>> import torch
        >>> tree = HuffmanTree([1, 1, 2])
        >>> hierarchical_softmax_log_prob(torch.zeros(4), torch.zeros(2, 4), tree).exp()
        tensor([0.2500, 0.2500, 0.5000])
    """
    rows, model, dtype = _read(input, node_vectors, tree, node_bias, sparse=False)
    with full_precision(rows):
        batch = input.shape[:-1]
        if target is None:
            return model.log_probs(rows).view(*batch, tree.num_classes).to(dtype)
        _check_ids("target", target, tree.num_classes, ignore_index)
        if target.shape != batch and target.shape[:-1] != batch:
            raise ArgumentError(
                f"`target` must have shape {tuple(batch)} or {(*batch, 'P')}; got shape {tuple(target.shape)}."
            )
        ids = target.reshape(len(rows), 1 if target.shape == batch else target.shape[-1]).long()
        real = ids != ignore_index
        log_probs = _listed_log_probs(model, rows, torch.where(real, ids, 0))
        return torch.where(real, log_probs, 0).view(target.shape).to(dtype)


def _read(
    input: Tensor, node_vectors: Tensor, tree: ClassTree, node_bias: Tensor | None, sparse: bool
) -> tuple[Tensor, TreeModel, torch.dtype]:
    """The input as rows (N, d), the model, and the dtype of the result."""
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
    if not sparse:  # sums of gradients over many rows need the wider dtype; a row-sparse gradient is summed elsewhere
        node_vectors = node_vectors.to(rows.dtype)
        node_bias = None if node_bias is None else node_bias.to(rows.dtype)
    return rows, TreeModel(tree, node_vectors, node_bias, sparse), dtype


def _renamed(sparse_grad: bool, sparse: bool | None) -> bool:
    """`sparse_grad`, or what was given under its old name."""
    if sparse is None:
        return sparse_grad
    warnings.warn("`sparse` is called `sparse_grad` now.", DeprecationWarning, stacklevel=3)
    return sparse


def check_tree(tree: object) -> None:
    """Raise unless `tree` is a tree."""
    if not isinstance(tree, ClassTree):
        raise ArgumentTypeError(
            f"`tree` must be a tree over the classes; got {type(tree).__name__}. Pass `HuffmanTree(counts)`."
        )


def _check_ids(argument: str, ids: Tensor, num_classes: int, ignore_index: int) -> None:
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentTypeError(f"`{argument}` must hold integer ids; got {kind}.")
    if visible(ids) and (outside := (ids != ignore_index) & ((ids < 0) | (ids >= num_classes))).any():
        raise ArgumentError(
            f"`{argument}` ids must be in [0, {num_classes}) or equal `ignore_index` ({ignore_index});"
            f" got {ids[outside][0].item()}."
        )


def _fuller_than_paths(model: TreeModel, target: Target) -> bool:
    """Whether all log-probabilities together are cheaper than the paths of the positives."""
    if not visible(target.weights):
        return target.ids is None  # the positives of a row cannot be listed
    if model.sparse or target.weights.shape[-1] == 1:
        return False
    touched = int(target.weights.count_nonzero()) * model.tree.mean_length() * model.vectors_per_node
    return touched * PATH_COST > target.count.numel() * len(model.vectors)


def _path_losses(model: TreeModel, rows: Tensor, target: Target) -> Tensor:
    """sum_i t_i (-log P(i)) from the paths of the positives, (N,)."""
    weights = target.weights.reshape(len(rows), target.weights.shape[-1])
    ids = None if target.ids is None else target.ids.reshape(weights.shape)
    if ids is not None and (ids.shape[-1] == 1 or not visible(ids) or learned(weights)):
        return -(weights * _listed_log_probs(model, rows, ids)).sum(-1)
    row, column = weights.nonzero(as_tuple=True)  # padding is left out
    log_probs = model.path_log_probs(lookup(rows, row), column if ids is None else ids[row, column])
    return rows.new_zeros(len(rows)).index_add(0, row, -weights[row, column] * log_probs)


def _listed_log_probs(model: TreeModel, rows: Tensor, ids: Tensor) -> Tensor:
    """log P of the classes `ids` (N, P), (N, P)."""
    repeated = rows.unsqueeze(1).expand(-1, ids.shape[-1], -1).flatten(0, 1)
    return model.path_log_probs(repeated, ids.flatten()).view(ids.shape)


class HierarchicalSoftmaxLoss(ExactLoss):
    """Hierarchical softmax with its own node vectors: loss, log-probabilities and exact top-k.

    Its class scores are the log-probabilities log P. Node vectors begin like the rows of `torch.nn.Linear`. The tree
    is in its state, so a checkpoint brings its tree along.

    Args:
        in_features: d.
        tree: over C classes, `HuffmanTree(counts)` or `ClassTree.from_paths(paths)`.
        bias: give each node vector a bias.
        sparse_grad: row-sparse gradients, for `torch.optim.SparseAdam` and SGD: a step then costs what the paths cost,
            whatever the number of classes. Its old name, `sparse`, still works, with a warning.
        weight, ignore_index, reduction, label_smoothing, multilabel: as in `hierarchical_softmax_loss`.
        device, dtype: of the node vectors.

    Example:
        >>> import torch
        >>> loss = HierarchicalSoftmaxLoss(4, HuffmanTree([5, 1, 1, 2]))
        >>> _ = torch.nn.init.zeros_(loss.node_vectors)
        >>> loss(torch.ones(2, 4), torch.tensor([0, 3]))
        tensor(1.0397, grad_fn=<WhereBackward0>)
        >>> values, ids = loss.topk(torch.ones(4), 2)
        >>> values.exp(), ids
        (tensor([0.5000, 0.2500]), tensor([0, 3]))
    """

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
        self.tree, self.in_features, self.sparse_grad = tree, in_features, _renamed(sparse_grad, sparse)
        shape = (num_vectors(tree), in_features)
        self.node_vectors = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.node_bias = nn.Parameter(torch.empty(shape[:1], device=device, dtype=dtype)) if bias else None
        self.to(device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the node vectors and biases anew, uniformly within 1 / sqrt(d), as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)

    def forward(self, input: Tensor, target: Tensor, linear_weight: None = None) -> Tensor:
        """The loss of `input` (..., d) at `target`; see `hierarchical_softmax_loss`."""
        _refuse(linear_weight)
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
        """log P of all classes (..., C), or of `target` ids; see `hierarchical_softmax_log_prob`."""
        return hierarchical_softmax_log_prob(
            input, self.node_vectors, self.tree, target, node_bias=self.node_bias, ignore_index=self.ignore_index
        )

    def scores(self, input: Tensor, linear_weight: None = None) -> Tensor:
        """The scores by which classes are ranked, log P, (..., C)."""
        _refuse(linear_weight)
        return self.log_prob(input)

    @torch.no_grad()
    def topk(
        self, input: Tensor, k: int, linear_weight: None = None, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes, exactly: best nodes first, and none is left out that could hold a better class.

        Args:
            input: (..., d).
            k: at most C.
            linear_weight: must be None.
            exclude: (..., X) ids that must not be found, padded with `ignore_index`.

        Returns:
            log P and ids, (..., k) each, best first, ties in any order. Where fewer than k classes are left, log P is
            -inf and the id is `ignore_index`.
        """
        _refuse(linear_weight)
        rows, model, dtype = _read(input, self.node_vectors, self.tree, self.node_bias, sparse=False)
        num_classes, batch = self.tree.num_classes, input.shape[:-1]
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_classes:
            raise ArgumentError(f"`k` must be an integer in [1, {num_classes}], the number of classes; got {k!r}.")
        if exclude is None:
            exclude = torch.empty(*batch, 0, dtype=torch.long, device=input.device)
        _check_ids("exclude", exclude, num_classes, self.ignore_index)
        if exclude.shape[:-1] != batch:
            raise ArgumentError(f"`exclude` must have shape {(*batch, 'X')}; got {tuple(exclude.shape)}.")
        listed = exclude.reshape(len(rows), exclude.shape[-1]).long()
        listed = torch.where(listed == self.ignore_index, -1, listed)
        with full_precision(rows):
            values, ids = model.topk(rows, k, listed, self.ignore_index)
        return values.view(*batch, k).to(dtype), ids.view(*batch, k)

    def extra_repr(self) -> str:
        bias = f", bias={self.node_bias is not None}, sparse_grad={self.sparse_grad}, "
        return f"in_features={self.in_features}{bias}{super().extra_repr()}"


def _refuse(linear_weight: object) -> None:
    if linear_weight is not None:
        raise ArgumentError(
            "`linear_weight` must be None: hierarchical softmax has vectors at the nodes of its tree and none for the"
            " classes, so it cannot use class vectors that are kept elsewhere."
        )


def mean_code_length(num_classes: int, counts: Tensor | None = None) -> float:
    """Mean length of Huffman's codes under the counts; without them all classes are alike.

    >>> mean_code_length(1024), round(mean_code_length(1024, 1 / torch.arange(1, 1025)), 2)
    (10.0, 7.54)
    """
    if counts is not None:
        return HuffmanTree(counts).mean_length(counts)
    full = num_classes.bit_length() - 1  # levels that are full
    return full + 2 - 2 ** (full + 1) / num_classes


def cost(shape: Shape, plain: bool) -> Cost:
    """The vectors on the paths of the positives: L of them for each."""
    length = mean_code_length(shape.num_classes) if shape.path is None else shape.path
    nodes = shape.pairs * length
    work = gather(shape.num_classes, shape.dim, nodes) + Work(
        flops=6 * nodes * shape.dim, fresh=3 * nodes * shape.dim, passes=40 * nodes, calls=PER_STEP + 600
    )
    rows = min(float(shape.num_classes), nodes)
    return Cost(work, 3 * nodes * shape.dim, rows * shape.dim, FLOAT * (3 * nodes * shape.dim + shape.queries))


FORMULAS = Formulas(
    map="P(c) = product over the path of c of sigmoid(b_n s_n), b_n = 1 on branch 1 and -1 on branch 0",
    loss="-log P(y) = sum over the path of y of softplus(-b_n s_n)",
    gradient="sigmoid(s_n) - 1{branch 1} at the nodes of the path, 0 elsewhere",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(
        False,
        "in the node scores: the Hessian differs between labels, that of a Fenchel-Young loss does not",
        "derived",
        "derived",
    ),
    convex=Fact(True, "a sum of logistic losses in the node scores", "derived", "derived"),
    calibrated=Fact(
        True,
        "with free node scores the minimiser is P proportional to E[y] for the sum over positives, so ranking by P"
        " is right; greedy search, ranking by implicit scores and too small a model can still fail",
        "derived",
        "contradicted",
        printed="not consistent",
    ),
    shift_invariant=Fact(
        False,
        "a constant added to all node scores changes P; with a softmax at each node it does not",
        "derived",
        "derived",
    ),
    smoothness=Fact(
        0.25,
        "1/4 per positive, at the scores 0 of a path; 1/2 with a softmax at each node",
        "Table 2, section B.4",
        "contradicted",
        printed="1/2",
        fn=lambda num_classes, arity=2: 0.0 if num_classes == 1 else 0.25 if arity == 2 else 0.5,
    ),
    cost=Fact(
        "logarithmic",
        "batch x mean code length, which is the entropy of the counts in bits or up to 1 more: about log2(classes)"
        " if all are alike, less the more they differ",
        "Table 4",
        "confirmed",
        fn=lambda batch, num_classes, counts=None: batch * mean_code_length(num_classes, counts),
    ),
    bias=Fact(
        None,
        "against a given flat P_s: log P_s(y) - log P_HSM(y), whose mean over y ~ P_s is KL(P_s || P_HSM); no"
        " property of the tree alone, because implicit scores are not a function of P_HSM",
        "section B.5.2",
        "contradicted",
        printed="-log P_HSM(y) - log P_s(y)",
        fn=lambda probs, tree_probs: float(kl(probs, tree_probs)),
    ),
    variance=Fact(0.0, "nothing is drawn", "Table 2", "confirmed"),
)
