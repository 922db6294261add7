"""Trees of many shapes, log P and gradients by walking down a tree in a loop, and arguments to try them on."""

from __future__ import annotations

from functools import cache

import torch
from mpmath import mp
from torch import Tensor

from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
)
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_model import num_vectors

mp.dps = 50
TREES: dict[str, ClassTree] = {
    "huffman": HuffmanTree([5, 1, 1, 2, 0, 0, 7, 3]),
    "chain": HuffmanTree([2.0**-i for i in range(7)]),
    "two": HuffmanTree([1, 1]),
    "one": HuffmanTree([3]),
    "ternary": HuffmanTree([5, 1, 1, 2, 0, 0, 7, 3], arity=3),
    "ragged": ClassTree.from_paths([[0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [2, 3, 0], [2, 3, 1]]),
    "flat": ClassTree.from_paths([[i] for i in range(5)]),
}
DIM = 3
Walk = list[tuple[int, int, range]]  # for each step down: node, branch, the edges of the node


def walks(tree: ClassTree) -> list[Walk]:
    """The walk from the root to every class, class by class."""
    found: dict[int, Walk] = {}

    def descend(vertex: int, walk: Walk) -> None:
        if vertex < tree.num_classes:
            found[vertex] = walk
            return
        node = vertex - tree.num_classes
        edges = range(int(tree.first_edge[node]), int(tree.first_edge[node + 1]))
        for branch, edge in enumerate(edges):
            descend(int(tree.leads_to[edge]), [*walk, (node, branch, edges)])

    descend(tree.num_classes if tree.num_nodes else 0, [])
    return [found[c] for c in range(tree.num_classes)]


def high_precision_log_prob(tree: ClassTree, row: Tensor, vectors: Tensor, bias: Tensor, walk: Walk) -> mp.mpf:
    """log P of one class for one row, with 50 digits."""

    def score(i: int) -> mp.mpf:
        terms = [mp.mpf(x) * mp.mpf(v) for x, v in zip(row.tolist(), vectors[i].tolist(), strict=True)]
        return mp.fsum(terms) + mp.mpf(bias[i].item())

    total = mp.mpf(0)
    for node, branch, edges in walk:
        if tree.arity == 2:
            sign = 1 if branch == 1 else -1
            total -= mp.log(1 + mp.exp(-sign * score(node)))
        else:
            total += score(edges[branch]) - mp.log(mp.fsum(mp.exp(score(e)) for e in edges))
    return total


def expected_gradient(tree: ClassTree, row: Tensor, vectors: Tensor, bias: Tensor, walk: Walk) -> Tensor:
    """The gradient of -log P in the scores of all vectors, (V,), from the formulas."""
    scores = vectors @ row + bias
    gradient = torch.zeros_like(scores)
    for node, branch, edges in walk:
        if tree.arity == 2:
            gradient[node] = torch.sigmoid(scores[node]) - branch
        else:
            gradient[edges.start : edges.stop] = torch.softmax(scores[edges.start : edges.stop], 0)
            gradient[edges[branch]] -= 1
    return gradient


def problem(tree: ClassTree, rows: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """input (rows, DIM), node vectors and bias, float64."""
    generator = torch.Generator().manual_seed(tree.num_classes)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, dtype=torch.double, generator=generator)

    return draw(rows, DIM), draw(num_vectors(tree), DIM), draw(num_vectors(tree))


@cache
def table(tree: ClassTree, scale: float = 1.0) -> Tensor:
    """log P of all classes with 50 digits, rounded at the end, (N, C), for the arguments that `problem` returns."""
    input, vectors, bias = problem(tree, scale=scale)
    values = [[float(high_precision_log_prob(tree, row, vectors, bias, walk)) for walk in walks(tree)] for row in input]
    return torch.tensor(values, dtype=torch.double)


# ---- the module


def make(tree: ClassTree, **options: object) -> HierarchicalSoftmaxLoss:
    torch.manual_seed(0)
    return HierarchicalSoftmaxLoss(DIM, tree, **{"dtype": torch.double, "bias": True} | options)
