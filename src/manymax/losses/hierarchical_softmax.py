"""Hierarchical softmax: the classes are the leaves of a tree, and a path of small decisions leads to each.

    node scores  s_n = <x, v_n> + b_n, one vector v_n per inner node of a binary tree
    map          P(c) = product over the path of c of sigmoid(+-s_n), + on branch 1 and - on branch 0
    loss         l(y, s) = -log P(y) = sum over the path of y of softplus(-+s_n)
    gradient     in the node scores of the path: sigmoid(s_n) - 1{branch 1}; 0 at all other nodes

With more than two branches a node has one vector per branch and a softmax over its branches. One step touches the
path alone: on Huffman's tree the mean length is within 1 of the entropy of the counts in bits. Classes are ranked by
log P; sums of node scores along a path ("implicit scores") are not a function of P and rank differently.

References: Morin and Bengio, "Hierarchical probabilistic neural network language model", AISTATS 2005; Mikolov,
Sutskever, Chen, Corrado, Dean, "Distributed representations of words and phrases", NeurIPS 2013, section 2.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, logsigmoid

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.losses.base import Target, check_options, read_target, row_losses
from manymax.losses.facts import Fact, Facts, Formulas, Member
from manymax.ops.checks import visible
from manymax.ops.divergences import kl
from manymax.ops.lookup import lookup
from manymax.ops.reduction import reduce
from manymax.ops.row_blocks import row_blocks
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_search import Excluded, best_leaves

# What one node vector costs when it is gathered for one row, in units of its cost in a product with all of them.
GATHER_COST = 16


@dataclass(frozen=True)
class _Nodes:
    """A tree with its node vectors: (M, d) for a binary tree, otherwise one per edge, (E, d)."""

    tree: ClassTree
    vectors: Tensor
    bias: Tensor | None
    sparse: bool

    def scores(self, input: Tensor, ids: Tensor) -> Tensor:
        """<x, v> + b of the vectors `ids` (T, R) for rows `input` (T, d), (T, R)."""
        vectors = embedding(ids, self.vectors, sparse=self.sparse).to(input.dtype)  # (T, R, d)
        scores = (vectors @ input.unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            scores = scores + embedding(ids, self.bias.unsqueeze(-1), sparse=self.sparse).squeeze(-1)
        _check_scores(scores)
        return scores

    def branch_log_probs(self, input: Tensor, nodes: Tensor) -> Tensor:
        """log P(branch | node) of every branch of the nodes (T, R), (T, R, arity); -inf where there is none."""
        if self.tree.arity == 2:
            scores = self.scores(input, nodes)
            return torch.stack([logsigmoid(-scores), logsigmoid(scores)], -1)
        first, stop = lookup(self.tree.first_edge, nodes), lookup(self.tree.first_edge, nodes + 1)
        edges = first.unsqueeze(-1) + torch.arange(self.tree.arity, device=nodes.device)
        exists = edges < stop.unsqueeze(-1)
        scores = self.scores(input, torch.where(exists, edges, 0).flatten(1)).view(edges.shape)
        return torch.where(exists, scores, -torch.inf).log_softmax(-1)

    def edge_log_probs(self, input: Tensor) -> Tensor:
        """log P(edge | the node above it) of all edges for rows `input` (N, d), (E, N)."""
        scores = self.vectors.to(input.dtype) @ input.T
        if self.bias is not None:
            scores = scores + self.bias.unsqueeze(-1)
        _check_scores(scores)
        if self.tree.arity == 2:
            return torch.stack([logsigmoid(-scores), logsigmoid(scores)], 1).flatten(0, 1)
        node = self.tree.edge_node[:-1]
        return scores - lookup(_group_logsumexp(scores, node, self.tree.num_nodes), node)

    def path_log_probs(self, input: Tensor, ids: Tensor) -> Tensor:
        """log P of one class `ids` (T,) for each row `input` (T, d), (T,)."""
        lengths = lookup(self.tree.lengths, ids)
        length = int(lengths.max()) if visible(ids) and len(ids) else self.tree.depth
        if visible(ids) and length * len(ids) > 4 * int(lengths.sum()):  # a few very long paths among short ones
            return self._path_log_probs_by_length(input, ids, lengths)
        edges = self.tree.paths(ids, length)  # (T, L)
        real = edges < self.tree.num_edges
        nodes = lookup(self.tree.edge_node, edges)
        branch = torch.where(real, edges - lookup(self.tree.first_edge, nodes), 0)
        chosen = self.branch_log_probs(input, nodes).gather(-1, branch.unsqueeze(-1)).squeeze(-1)
        return torch.where(real, chosen, 0).sum(-1)

    def _path_log_probs_by_length(self, input: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """The same in groups of like length, so that padding never doubles the work."""
        group = lengths.double().log2().ceil()
        log_probs = input.new_zeros(len(ids))
        for value in group.unique():
            rows = (group == value).nonzero().squeeze(-1)
            log_probs = log_probs.index_copy(0, rows, self.path_log_probs(input[rows], ids[rows]))
        return log_probs

    def all_log_probs(self, input: Tensor) -> Tensor:
        """log P of all classes for rows `input` (N, d), (N, C)."""
        return self.tree.accumulate(self.edge_log_probs(input)).T

    def all_log_probs_in_blocks(self, input: Tensor) -> Tensor:
        """`all_log_probs`, with memory for the result and one block where no graph has to be kept."""
        if not visible(input) or (torch.is_grad_enabled() and (input.requires_grad or self.vectors.requires_grad)):
            return self.all_log_probs(input)
        log_probs = input.new_empty(len(input), self.tree.num_classes)
        for rows in row_blocks(len(input), self.tree.num_edges * input.element_size()):
            log_probs[rows] = self.all_log_probs(input[rows])
        return log_probs

    def target_losses(self, input: Tensor, target: Target) -> Tensor:
        """sum_i t_i (-log P(i)) along the paths of the positives alone, (N,); `target` has one batch dimension."""
        if target.ids is not None and (target.ids.shape[-1] == 1 or not visible(target.ids)):
            repeated = input.unsqueeze(1).expand(-1, target.ids.shape[-1], -1).flatten(0, 1)
            log_probs = self.path_log_probs(repeated, target.ids.flatten()).view(target.ids.shape)
            return -(target.weights * log_probs).sum(-1)
        rows, column = target.weights.nonzero(as_tuple=True)
        ids = column if target.ids is None else target.ids[rows, column]
        log_probs = self.path_log_probs(lookup(input, rows), ids)
        return input.new_zeros(len(input)).index_add(0, rows, -target.weights[rows, column] * log_probs)

    def prefers_all(self, target: Target) -> bool:
        """Whether the loss is cheaper from all log-probabilities than from the paths of the positives."""
        if not visible(target.weights):
            return target.ids is None
        touched = int(target.weights.count_nonzero()) * self.tree.mean_length()
        return touched * GATHER_COST > len(target.weights) * self.tree.num_nodes and target.weights.shape[-1] > 1

    @property
    def vectors_per_node(self) -> int:
        """How many vectors the decision at a node reads."""
        return 1 if self.tree.arity == 2 else self.tree.arity

    def topk(self, input: Tensor, k: int, exclude: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and ids of the k best classes that are not in `exclude` (N, X), (N, k) each."""
        width = min(2 * k + 6, self.tree.num_classes)
        beam = width * self.tree.mean_length() * self.vectors_per_node
        if beam * GATHER_COST > len(self.vectors):
            return self._topk_of_all(input, k, exclude, fill)
        values, ids = input.new_empty(len(input), k), exclude.new_empty(len(input), k)
        for rows in row_blocks(len(input), width * self.vectors_per_node * input[0].nbytes, SEARCH_BYTES):
            values[rows], ids[rows] = self._topk_by_search(input[rows], k, exclude[rows], fill, width)
        return values, ids

    def _topk_by_search(
        self, input: Tensor, k: int, exclude: Tensor, fill: int, width: int
    ) -> tuple[Tensor, Tensor]:
        def branch_log_probs(rows: Tensor, nodes: Tensor) -> Tensor:
            size = nodes.shape[1] * self.vectors_per_node * input[0].nbytes
            blocks = row_blocks(len(rows), size)
            return torch.cat([self.branch_log_probs(lookup(input, rows[b]), nodes[b]) for b in blocks])

        best = best_leaves(
            self.tree,
            branch_log_probs,
            input.new_zeros(len(input)),
            k,
            width=width,
            budget=len(self.vectors) // (GATHER_COST * self.vectors_per_node),
            excluded=Excluded(exclude, self.tree.num_classes),
        )
        given_up = (~best.complete).nonzero().squeeze(-1)
        values, ids = self._topk_of_all(lookup(input, given_up), k, lookup(exclude, given_up), fill)
        return best.values.index_copy(0, given_up, values), best.ids.index_copy(0, given_up, ids)

    def _topk_of_all(self, input: Tensor, k: int, exclude: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        values, ids = input.new_empty(len(input), k), exclude.new_empty(len(input), k)
        for rows in row_blocks(len(input), self.tree.num_edges * input.element_size()):
            log_probs = self.all_log_probs(input[rows]).contiguous()
            mask_excluded
            values[rows], ids[rows] = log_probs.topk(k)
        return values, torch.where(values > -torch.inf, ids, fill)
