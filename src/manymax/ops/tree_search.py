"""Exact search for the k most probable leaves of a tree, without looking at all of them.

Log-probabilities only fall along a path, so that the log-probability of a node is a bound for all leaves below it:

    1. A beam search, which keeps the best nodes of each level, finds k leaves. The k-th best leaf of all is at least as
       good as the worst of them: this is the floor.
    2. Every node at or above the floor is opened, level by level. The leaves that are found at or above the floor
       contain the k best.

The beam search alone would be wrong: it may drop the node above the best leaf. Nodes below the floor are never opened;
where a model is confident these are nearly all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.ops.lookup import lookup
from manymax.ops.tree import ClassTree

# The model: from rows (T,) and nodes (T, R) to the log-probabilities of the branches of each node, (T, R, arity), with
# -inf where a node has fewer branches. To open a node means to ask for these.
BranchLogProbs = Callable[[Tensor, Tensor], Tensor]


class Best(NamedTuple):
    """The best leaves of each row, best first.

    values: (N, k) log-probabilities.
    ids: (N, k) classes.
    complete: (N,) bool; False where the search gave up, and values and ids of the row mean nothing.
    """

    values: Tensor
    ids: Tensor
    complete: Tensor


class Excluded:
    """Pairs (row, class) that must not be found.

    Args:
        ids: (N, X) excluded classes of each row; ids outside of [0, C) are padding.
        num_classes: C.
    """

    def __init__(self, ids: Tensor, num_classes: int) -> None:
        self.num_classes = num_classes
        # Sorted numbers row * C + class, in which a pair is found by bisection. A table (N, C) of bools could take more
        # memory than the search itself.
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(-1)
        valid = (ids >= 0) & (ids < num_classes)
        self.keys = (rows * num_classes + ids)[valid].sort().values

    def __call__(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Whether each pair is excluded, in the broadcast shape of `rows` and `ids`."""
        keys = rows * self.num_classes + ids
        if not len(self.keys):
            return torch.zeros_like(keys, dtype=torch.bool)
        position = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return lookup(self.keys, position) == keys


def best_leaves(
    tree: ClassTree,
    branch_log_probs: BranchLogProbs,
    start: Tensor,
    k: int,
    *,
    width: int,
    budget: int,
    excluded: Excluded,
) -> Best:
    """The k leaves of largest log-probability for each row.

    Args:
        tree: over C >= k classes.
        branch_log_probs: the model.
        start: (N,) zeros in the dtype of the log-probabilities.
        k: how many leaves.
        width: of the beam, at least k; a wider one gives a higher floor.
        budget: how many nodes a row may open after the beam search; a row that needs more is given up.
        excluded: leaves that must not be found.

    Returns:
        The best leaves. A row is not complete if it exceeds the budget or has fewer than k leaves that are not
        excluded.
    """
    floor = _beam_floor(tree, branch_log_probs, start, k, width, excluded)
    # The second pass multiplies in other batches, and its sums may differ in the last digits: a leaf that made the
    # floor must not fall below it. Too low a floor only costs time.
    floor = floor - 64 * torch.finfo(floor.dtype).eps * (1 + floor.abs())
    rows, ids, values, complete = _leaves_above(tree, branch_log_probs, floor, budget, excluded)
    return _best_of_each_row(rows, ids, values, complete, k)


def _beam_floor(
    tree: ClassTree, branch_log_probs: BranchLogProbs, start: Tensor, k: int, width: int, excluded: Excluded
) -> Tensor:
    """The k-th best of the leaves that a beam search finds, (N,); -inf where it finds fewer."""
    rows = torch.arange(len(start), device=start.device)
    # the nodes of the beam and their log-probabilities, (N, R) each; R = 1 at the root
    nodes, reached = torch.zeros_like(rows).unsqueeze(-1), start.unsqueeze(-1)
    best = start.new_full((len(start), k), -torch.inf)
    for _ in range(tree.depth):
        values = (reached.unsqueeze(-1) + branch_log_probs(rows, nodes)).flatten(1)  # (N, R * arity)
        children = _children(tree, nodes).flatten(1)
        leaf = children < tree.num_classes
        # excluded leaves do not raise the floor: it would be higher than the k-th best of the allowed ones
        improves = leaf & (values > best[:, -1:])
        improves &= ~excluded(rows.unsqueeze(-1), children)
        best = torch.cat([best, torch.where(improves, values, -torch.inf)], -1).topk(k).values
        # nodes that cannot beat the k leaves found so far leave the beam
        inner = torch.where(leaf | (values <= best[:, -1:]), -torch.inf, values)
        reached, chosen = inner.topk(min(width, inner.shape[-1]))
        # topk is sorted: the beam shrinks to the most nodes that a row still has
        num_live = int((reached > -torch.inf).sum(-1).max()) if len(rows) else 0
        if not num_live:
            break
        reached = reached[:, :num_live]
        # Rows with fewer live nodes hold leaves in the rest, which have no node number. Any node will do, because their
        # log-probability is -inf.
        nodes = (children.gather(-1, chosen[:, :num_live]) - tree.num_classes).clamp(min=0)
    return best[:, -1]


def _children(tree: ClassTree, nodes: Tensor) -> Tensor:
    """Where the branches of nodes (...) lead, (..., arity); arbitrary where a node has fewer branches.

    The log-probability of a branch that does not exist is -inf, so that nothing follows it.
    """
    edges = lookup(tree.first_edge, nodes).unsqueeze(-1) + torch.arange(tree.arity, device=nodes.device)
    return lookup(tree.leads_to, edges.clamp(max=tree.num_edges - 1))


def _leaves_above(
    tree: ClassTree, branch_log_probs: BranchLogProbs, floor: Tensor, budget: int, excluded: Excluded
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All leaves at or above the floor: rows, ids and values, (T,) each, and which rows were completed, (N,).

    Rows have different numbers of nodes to open, so that nodes are listed one by one with their rows, not in a table.
    """
    complete = floor > -torch.inf  # without a floor every node would be opened
    rows = complete.nonzero().squeeze(-1)
    nodes, reached = torch.zeros_like(rows), floor.new_zeros(len(rows))
    opened = torch.zeros_like(floor, dtype=torch.long)
    found = []
    while len(rows):
        # one entry of `rows` per node that is opened now
        opened += rows.bincount(minlength=len(floor))
        values = reached.unsqueeze(-1) + branch_log_probs(rows, nodes.unsqueeze(-1)).squeeze(1)  # (T, arity)
        # >=, not >: the leaf that made the floor is one of the k best if no other is
        above = values >= lookup(floor, rows).unsqueeze(-1)
        rows = rows.unsqueeze(-1).expand_as(values)[above]
        children, reached = _children(tree, nodes)[above], values[above]
        leaf = children < tree.num_classes
        wanted = leaf.clone()
        wanted[leaf] = ~excluded(rows[leaf], children[leaf])
        found.append((rows[wanted], children[wanted], reached[wanted]))
        # a row over its budget goes no further; what it has found so far is not used
        complete &= opened <= budget
        inner = ~leaf & lookup(complete, rows)
        rows, nodes, reached = rows[inner], children[inner] - tree.num_classes, reached[inner]
    if not found:  # no row has a floor: `rows`, `nodes` and `reached` are empty
        return rows, nodes, reached, complete
    found_rows, found_ids, found_values = (torch.cat(part) for part in zip(*found, strict=True))
    return found_rows, found_ids, found_values, complete


def _best_of_each_row(rows: Tensor, ids: Tensor, values: Tensor, complete: Tensor, k: int) -> Best:
    """The k best leaves of each row, from the rows, ids and values (T,) of all leaves."""
    # Two stable sorts, the second of which keeps the order of the first within a row: by row, then best first.
    permutation = values.argsort(descending=True, stable=True)
    permutation = lookup(permutation, lookup(rows, permutation).argsort(stable=True))
    rows, ids, values = lookup(rows, permutation), lookup(ids, permutation), lookup(values, permutation)
    counts = rows.bincount(minlength=len(complete))
    # the position of each leaf among those of its row
    position = torch.arange(len(rows), device=rows.device) - lookup(counts.cumsum(0) - counts, rows)
    kept = position < k
    place = rows[kept], position[kept]
    best = values.new_full((len(complete), k), -torch.inf).index_put(place, values[kept])
    classes = ids.new_zeros(len(complete), k).index_put(place, ids[kept])
    return Best(best, classes, complete & (counts >= k))
