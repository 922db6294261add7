"""Formulas, facts and cost of hierarchical softmax, and the mean length of the codes that its cost depends on."""

from __future__ import annotations

from torch import Tensor

from manymax.engine.cost import FLOAT, PER_STEP, Cost, Shape, Way, Work, gather, written
from manymax.engine.member import Fact, Facts, Formulas
from manymax.ops.divergences import kl
from manymax.ops.tree import HuffmanTree


def mean_code_length(num_classes: int, counts: Tensor | None = None) -> float:
    """Mean number of decisions on the path to a class in Huffman's tree, weighted by the counts.

    Args:
        num_classes: C.
        counts: (C,) how often each class occurs; None if all occur equally often.

    Example: equal counts, and counts by Zipf's law.
        >>> import torch
        >>> mean_code_length(1024), round(mean_code_length(1024, 1 / torch.arange(1, 1025)), 2)
        (10.0, 7.54)
    """
    if counts is not None:
        return HuffmanTree(counts).mean_length(counts)
    # Equal counts make a balanced tree, whose mean needs no construction: with f = floor(log2 C) full levels,
    # 2^(f+1) - C classes have paths of length f and the other 2 C - 2^(f+1) have f + 1.
    full = num_classes.bit_length() - 1
    return full + 2 - 2 ** (full + 1) / num_classes


def cost(shape: Shape, way: Way, **settings: object) -> Cost:
    """Cost of a step that touches the L vectors on the path of each positive, and no others."""
    length = mean_code_length(shape.num_classes) if shape.path is None else shape.path
    nodes = shape.pairs * length
    rows = min(float(shape.num_classes), nodes)
    # Autograd goes over the gathered vectors some dozen times: products, sums, their gradients, and adding these up.
    work = gather(shape.num_classes, shape.dim, nodes) + Work(streamed=24 * nodes * shape.dim, passes=40 * nodes)
    work += Work(flops=6 * nodes * shape.dim, calls=PER_STEP + 200)
    gradient = rows * shape.dim
    if not shape.sparse_grad:  # it has a row for every node of the tree, of which there are as many as classes but one
        gradient = shape.vectors
        work += written(gradient)
    memory = FLOAT * (3 * nodes * shape.dim + gradient + shape.queries)
    return Cost(work, 3 * nodes * shape.dim, rows * shape.dim, memory)


FORMULAS = Formulas(
    map="P(c) = product over the nodes n on the path of c of sigmoid(b_n s_n), b_n = 1 for branch 1, -1 for branch 0",
    loss="-log P(y) = sum over the nodes n on the path of y of softplus(-b_n s_n)",
    gradient="sigmoid(s_n) - 1{the path takes branch 1 at n} at the nodes n of the path of y, 0 at all others",
)

FACTS = Facts(
    order_preservation=None,
    fenchel_young=Fact(
        False,
        "the Hessian in the node scores depends on the label, which that of a Fenchel-Young loss does not",
        "derived",
        "derived",
    ),
    convex=Fact(True, "it is a sum of logistic losses in the node scores", "derived", "derived"),
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
        "adding a constant to all node scores changes P; in a tree with a softmax at each node it does not",
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
