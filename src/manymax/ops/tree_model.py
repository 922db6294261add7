"""A tree with vectors at its nodes: log-probabilities of its branches and of its leaves, the classes.

    binary tree  P(branch 1 | n) = sigmoid(s_n), P(branch 0 | n) = sigmoid(-s_n), s_n = <x, v_n> + b_n
    otherwise    P(branch | n) = softmax over the branches of n of s_e = <x, v_e> + b_e
    class        log P(c) = sum over the path of c of log P(branch | n)

Some classes are reached by gathering the vectors of their paths, all classes by a product with all vectors and one
addition per edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, logsigmoid

from manymax.errors import ArgumentError
from manymax.ops.checks import visible
from manymax.ops.lookup import lookup
from manymax.ops.row_blocks import row_blocks
from manymax.ops.tree import ClassTree
from manymax.ops.tree_search import Excluded, best_leaves

# Opening a node for one row in a search takes about as long as this many in a product with all vectors.
GATHER_COST = 16

SEARCH_BYTES = 32 * 2**20  # vectors that a search gathers at once: enough rows to hide the loop over the levels
SEARCH_NODES = 2**23  # nodes that the rows of one search may open together, and
SEARCH_NODES_PER_ROW = 2**14  # each of them: few rows need more, and these few are cheap enough otherwise
TABLE_BYTES = 16 * 2**20  # log-probabilities of all edges at once, but
TABLE_ROWS = 8  # of at least so many rows, for which all vectors have to be read


def num_vectors(tree: ClassTree) -> int:
    """How many vectors the model of a tree has: one per node if it is binary, otherwise one per edge."""
    return tree.num_nodes if tree.arity == 2 else tree.num_edges


@dataclass(frozen=True)
class TreeModel:
    """The log-probabilities of a tree's classes for inputs of `dim` d.

    tree: over C classes.
    vectors: (V, d), V as `num_vectors` says.
    bias: (V,) or None.
    sparse: give `vectors` and `bias` row-sparse gradients where their rows are gathered.
    """

    tree: ClassTree
    vectors: Tensor
    bias: Tensor | None = None
    sparse: bool = False

    @property
    def vectors_per_node(self) -> int:
        """How many vectors the decision at a node reads."""
        return 1 if self.tree.arity == 2 else self.tree.arity

    def scores(self, input: Tensor, ids: Tensor) -> Tensor:
        """<x, v> + b for rows `input` (T, d) and the vectors `ids` (T, R) of each, (T, R)."""
        vectors = embedding(ids, self.vectors, sparse=True) if self.sparse else lookup(self.vectors, ids)  # (T, R, d)
        scores = (vectors.to(input.dtype) @ input.unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            bias = self.bias.gather(0, ids.flatten(), sparse_grad=self.sparse).view(ids.shape)
            scores = scores + bias.to(input.dtype)
        return _finite(scores)

    def branch_log_probs(self, input: Tensor, nodes: Tensor) -> Tensor:
        """log P(branch | n) of all branches of the nodes (T, R), (T, R, arity); -inf where there is no branch."""
        if self.tree.arity == 2:
            scores = self.scores(input, nodes)
            return torch.stack([logsigmoid(-scores), logsigmoid(scores)], -1)
        edges = lookup(self.tree.first_edge, nodes).unsqueeze(-1) + torch.arange(self.tree.arity, device=nodes.device)
        exists = edges < lookup(self.tree.first_edge, nodes + 1).unsqueeze(-1)
        scores = self.scores(input, torch.where(exists, edges, 0).flatten(1)).view(edges.shape)
        return torch.where(exists, scores, -torch.inf).log_softmax(-1)

    def edge_log_probs(self, input: Tensor) -> Tensor:
        """log P(edge | the node above it) of all edges for rows `input` (N, d), (E, N)."""
        scores = self.vectors.to(input.dtype) @ input.T
        if self.bias is not None:
            scores = scores + self.bias.to(input.dtype).unsqueeze(-1)
        scores = _finite(scores)
        if self.tree.arity == 2:
            return torch.stack([logsigmoid(-scores), logsigmoid(scores)], 1).flatten(0, 1)
        node = self.tree.edge_node[:-1]
        return scores - lookup(_group_logsumexp(scores, node, self.tree.num_nodes), node)

    def log_probs(self, input: Tensor) -> Tensor:
        """log P of all classes for rows `input` (N, d), (N, C); in blocks where no graph has to be kept."""
        needed = any(t is not None and t.requires_grad for t in (input, self.vectors, self.bias))
        if not visible(input) or (needed and torch.is_grad_enabled()):
            return self.tree.accumulate(self.edge_log_probs(input)).T
        log_probs = input.new_empty(len(input), self.tree.num_classes)
        for rows in self._table_blocks(input):
            log_probs[rows] = self.tree.accumulate(self.edge_log_probs(input[rows])).T
        return log_probs

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
            log_probs = log_probs.index_copy(0, rows, self.path_log_probs(lookup(input, rows), lookup(ids, rows)))
        return log_probs

    def topk(self, input: Tensor, k: int, exclude: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row, exactly.

        Args:
            input: (N, d).
            k: at most C.
            exclude: (N, X) classes that must not be found; ids outside of [0, C) are padding.
            fill: the id, at log-probability -inf, where fewer than k classes are left.

        Returns:
            Log-probabilities and ids, (N, k) each, best first.
        """
        width = min(2 * k + 6, self.tree.num_classes)  # of the beam; a wider one costs more than its floor gains
        cost = GATHER_COST * self.vectors_per_node
        if width * self.tree.mean_length() * cost >= len(self.vectors):
            return self._topk_of_all(input, k, exclude, fill)
        budget = min(len(self.vectors) // cost, SEARCH_NODES_PER_ROW)
        gathered = width * self.vectors_per_node * _row_bytes(input)
        num_rows = int(min(SEARCH_BYTES // gathered, SEARCH_NODES // budget))
        values, ids = input.new_empty(len(input), k), exclude.new_empty(len(input), k)
        for rows in row_blocks(len(input), 1, num_rows):
            values[rows], ids[rows] = self._topk_by_search(input[rows], k, exclude[rows], fill, width, budget)
        return values, ids

    def _topk_by_search(
        self, input: Tensor, k: int, exclude: Tensor, fill: int, width: int, budget: int
    ) -> tuple[Tensor, Tensor]:
        def branch_log_probs(rows: Tensor, nodes: Tensor) -> Tensor:
            blocks = row_blocks(len(rows), nodes.shape[1] * self.vectors_per_node * _row_bytes(input))
            return torch.cat([self.branch_log_probs(lookup(input, rows[b]), nodes[b]) for b in blocks])

        start, excluded = input.new_zeros(len(input)), Excluded(exclude, self.tree.num_classes)
        best = best_leaves(self.tree, branch_log_probs, start, k, width=width, budget=budget, excluded=excluded)
        given_up = (~best.complete).nonzero().squeeze(-1)
        values, ids = self._topk_of_all(lookup(input, given_up), k, lookup(exclude, given_up), fill)
        return best.values.index_copy(0, given_up, values), best.ids.index_copy(0, given_up, ids)

    def _topk_of_all(self, input: Tensor, k: int, exclude: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        values, ids = input.new_empty(len(input), k), exclude.new_empty(len(input), k)
        row, column = ((exclude >= 0) & (exclude < self.tree.num_classes)).nonzero(as_tuple=True)
        for rows in self._table_blocks(input):
            log_probs = self.log_probs(input[rows])
            here = (row >= rows.start) & (row < rows.stop)
            log_probs[row[here] - rows.start, exclude[row[here], column[here]]] = -torch.inf
            values[rows], ids[rows] = log_probs.topk(k)
        return values, torch.where(values > -torch.inf, ids, fill)

    def _table_blocks(self, input: Tensor) -> list[slice]:
        row_bytes = self.tree.num_edges * input.element_size()
        return row_blocks(len(input), row_bytes, max(TABLE_BYTES, TABLE_ROWS * row_bytes))


def _row_bytes(input: Tensor) -> int:
    return input.shape[-1] * input.element_size()


def _finite(scores: Tensor) -> Tensor:
    """`scores`, or an error where they can be looked at and are nan or infinite."""
    # one cheap pass; a sum can also overflow, so that only the second look decides
    if visible(scores) and not scores.detach().sum().isfinite() and not scores.isfinite().all():
        raise ArgumentError("`input` and the node vectors must be finite; got a node score that is nan or infinite.")
    return scores


def _group_logsumexp(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """log sum exp over the rows of each group, (num_groups, ...), for values (E, ...) and group (E,)."""
    lowest = values.new_full((num_groups, *values.shape[1:]), -torch.inf)
    index = group.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    maximum = lowest.scatter_reduce(0, index, values.detach(), "amax")
    exps = (values - lookup(maximum, group)).exp()
    return maximum + torch.zeros_like(maximum).index_add(0, group, exps).log()
