"""A tree with vectors at its nodes: the log-probabilities of its branches and of its leaves, which are the classes.

    binary tree  P(branch 1 | n) = sigmoid(s_n), P(branch 0 | n) = sigmoid(-s_n), s_n = <x, v_n> + b_n
    otherwise    P(branch | n) = softmax over the branches of n of s_e = <x, v_e> + b_e
    class        log P(c) = sum over the path of c of log P(branch | n)

The log-probabilities of some classes are computed from the vectors on their paths, which are gathered; those of all
classes by one product with all vectors and one addition per edge.
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

# Opening one node for one row in a search takes about as long as 16 nodes in a product with all vectors.
GATHER_COST = 16

# Vectors that a search gathers at once: enough rows that the calls of the loop over the levels do not matter.
SEARCH_BYTES = 32 * 2**20
SEARCH_NODES = 2**23  # nodes that the rows of one search may open together, which bounds its memory
# Nodes that one row may open. Few rows need more, and these few are computed by the product with all vectors.
SEARCH_NODES_PER_ROW = 2**14
TABLE_BYTES = 16 * 2**20  # of the log-probabilities of all edges, for a block of rows
TABLE_ROWS = 8  # smallest block, also where it takes more memory: all vectors are read once for each block


def num_vectors(tree: ClassTree) -> int:
    """How many vectors the model of a tree has: one per node if the tree is binary, otherwise one per edge."""
    return tree.num_nodes if tree.arity == 2 else tree.num_edges


@dataclass(frozen=True)
class TreeModel:
    """A tree and its vectors: log-probabilities of the classes for inputs of dimension d.

    tree: over C classes.
    vectors: (V, d), with V = `num_vectors(tree)`.
    bias: (V,) or None.
    sparse: whether `vectors` and `bias` get sparse gradients where their rows are gathered.
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
        """The scores <x, v> + b, (T, R), of rows `input` (T, d) with the vectors `ids` (T, R) of each row."""
        # `embedding` has a sparse gradient, one entry per gathered row; `lookup` is faster, with a dense one
        vectors = embedding(ids, self.vectors, sparse=True) if self.sparse else lookup(self.vectors, ids)  # (T, R, d)
        scores = (vectors.to(input.dtype) @ input.unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            bias = self.bias.gather(0, ids.flatten(), sparse_grad=self.sparse).view(ids.shape)
            scores = scores + bias.to(input.dtype)
        return _finite(scores)

    def branch_log_probs(self, input: Tensor, nodes: Tensor) -> Tensor:
        """log P(branch | n), (T, R, arity), of all branches of `nodes` (T, R) for rows `input` (T, d).

        It is -inf where a node has fewer branches.
        """
        if self.tree.arity == 2:
            # logsigmoid(-s), not log(1 - sigmoid(s)): exact for scores of any size
            scores = self.scores(input, nodes)
            return torch.stack([logsigmoid(-scores), logsigmoid(scores)], -1)
        edges = lookup(self.tree.first_edge, nodes).unsqueeze(-1) + torch.arange(self.tree.arity, device=nodes.device)
        exists = edges < lookup(self.tree.first_edge, nodes + 1).unsqueeze(-1)
        scores = self.scores(input, torch.where(exists, edges, 0).flatten(1)).view(edges.shape)
        return torch.where(exists, scores, -torch.inf).log_softmax(-1)

    def edge_log_probs(self, input: Tensor) -> Tensor:
        """log P(edge | the node above it), (E, N), of all edges for rows `input` (N, d).

        Edges come first, because `ClassTree.accumulate` takes slices of edges.
        """
        scores = self.vectors.to(input.dtype) @ input.T
        if self.bias is not None:
            scores = scores + self.bias.to(input.dtype).unsqueeze(-1)
        scores = _finite(scores)
        if self.tree.arity == 2:
            # (M, 2, N) to (E, N): the edges of a node are neighbours, branch 0 first
            return torch.stack([logsigmoid(-scores), logsigmoid(scores)], 1).flatten(0, 1)
        node = self.tree.edge_node[:-1]
        return scores - lookup(_group_logsumexp(scores, node, self.tree.num_nodes), node)

    def log_probs(self, input: Tensor) -> Tensor:
        """log P of all classes, (N, C), for rows `input` (N, d)."""
        # In blocks of rows the (E, N) tables of edges stay small. Where autograd keeps a graph all of them are kept
        # anyway, and under torch.compile and the transforms of torch.func nothing may be written into.
        tensors = [t for t in (input, self.vectors, self.bias) if t is not None]
        needed = any(t.requires_grad for t in tensors)
        if not visible(*tensors) or (needed and torch.is_grad_enabled()):
            return self.tree.accumulate(self.edge_log_probs(input)).T
        log_probs = input.new_empty(len(input), self.tree.num_classes)
        for rows in self._table_blocks(input):
            log_probs[rows] = self.tree.accumulate(self.edge_log_probs(input[rows])).T
        return log_probs

    def path_log_probs(self, input: Tensor, ids: Tensor) -> Tensor:
        """log P, (T,), of one class `ids` (T,) for each row `input` (T, d)."""
        lengths = lookup(self.tree.lengths, ids)
        length = int(lengths.max()) if visible(ids) and len(ids) else self.tree.depth
        # All paths are padded to the longest one. A few very long paths among short ones, as rare classes have, would
        # make this many times the work.
        if visible(ids) and length * len(ids) > 4 * int(lengths.sum()):
            return self._path_log_probs_by_length(input, ids, lengths)
        edges = self.tree.paths(ids, length)  # (T, L)
        on_path = edges < self.tree.num_edges  # the padding is E; its node is the root, whose value is then dropped
        nodes = lookup(self.tree.edge_node, edges)
        branch = torch.where(on_path, edges - lookup(self.tree.first_edge, nodes), 0)
        chosen = self.branch_log_probs(input, nodes).gather(-1, branch.unsqueeze(-1)).squeeze(-1)
        return torch.where(on_path, chosen, 0).sum(-1)

    def _path_log_probs_by_length(self, input: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        """`path_log_probs` in groups of paths whose lengths differ by a factor of at most 2.

        So padding never doubles the work, and there are at most log2(depth) + 1 groups.
        """
        # a length of 0 does not come here: it is that of a tree with a single class, in which nothing is padded
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
            fill: the id, with log-probability -inf, where fewer than k classes are left.

        Returns:
            Log-probabilities and ids, (N, k) each, best first.
        """
        # of the beam: a wider one costs more than its higher floor saves afterwards
        width = min(2 * k + 6, self.tree.num_classes)
        # the beam search alone opens about `width` nodes on each of `mean_length` levels; where this costs as much as
        # all vectors, there is nothing to gain
        cost = GATHER_COST * self.vectors_per_node
        if width * self.tree.mean_length() * cost >= len(self.vectors):
            return self._topk_of_all(input, k, exclude, fill)
        # a row that opens more nodes than this had better been computed with all vectors
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
        """The k best classes by `best_leaves`; rows that it gives up are computed with all vectors."""

        def branch_log_probs(rows: Tensor, nodes: Tensor) -> Tensor:
            # the second pass of the search lists any number of nodes: gathered in blocks that stay in cache
            blocks = row_blocks(len(rows), nodes.shape[1] * self.vectors_per_node * _row_bytes(input))
            return torch.cat([self.branch_log_probs(lookup(input, rows[b]), nodes[b]) for b in blocks])

        start, excluded = input.new_zeros(len(input)), Excluded(exclude, self.tree.num_classes)
        best = best_leaves(self.tree, branch_log_probs, start, k, width=width, budget=budget, excluded=excluded)
        given_up = (~best.complete).nonzero().squeeze(-1)
        values, ids = self._topk_of_all(lookup(input, given_up), k, lookup(exclude, given_up), fill)
        return best.values.index_copy(0, given_up, values), best.ids.index_copy(0, given_up, ids)

    def _topk_of_all(self, input: Tensor, k: int, exclude: Tensor, fill: int) -> tuple[Tensor, Tensor]:
        """The k best classes by the log-probabilities of all classes, some rows at a time."""
        values, ids = input.new_empty(len(input), k), exclude.new_empty(len(input), k)
        row, column = ((exclude >= 0) & (exclude < self.tree.num_classes)).nonzero(as_tuple=True)
        for rows in self._table_blocks(input):
            log_probs = self.log_probs(input[rows])
            in_block = (row >= rows.start) & (row < rows.stop)
            log_probs[row[in_block] - rows.start, exclude[row[in_block], column[in_block]]] = -torch.inf
            values[rows], ids[rows] = log_probs.topk(k)
        return values, torch.where(values > -torch.inf, ids, fill)

    def _table_blocks(self, input: Tensor) -> list[slice]:
        """Blocks of rows for which the log-probabilities of all edges are computed at a time."""
        row_bytes = self.tree.num_edges * input.element_size()
        return row_blocks(len(input), row_bytes, max(TABLE_BYTES, TABLE_ROWS * row_bytes))


def _row_bytes(input: Tensor) -> int:
    """Bytes of one row of `input`, and of one gathered vector."""
    return input.shape[-1] * input.element_size()


def _finite(scores: Tensor) -> Tensor:
    """`scores` as they are; raises where they can be read and are nan or infinite."""
    # The sum is one cheap pass and is not finite if a score is not. It can also overflow: the second look decides.
    if visible(scores) and not scores.detach().sum().isfinite() and not scores.isfinite().all():
        raise ArgumentError("`input` and the node vectors must be finite; got a node score that is nan or infinite.")
    return scores


def _group_logsumexp(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """log sum exp over the rows of each group, (num_groups, ...), for values (E, ...) and their groups (E,)."""
    # The maximum of each group is subtracted first, so that nothing overflows. It is detached: the derivative of
    # max + log sum exp(values - max) with respect to max is 0.
    lowest = values.new_full((num_groups, *values.shape[1:]), -torch.inf)
    index = group.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
    maximum = lowest.scatter_reduce(0, index, values.detach(), "amax")
    exps = (values - lookup(maximum, group)).exp()
    return maximum + torch.zeros_like(maximum).index_add(0, group, exps).log()
