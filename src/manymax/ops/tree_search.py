"""The k most probable leaves of a tree, exactly, without looking at all of them.

The log-probability of a node bounds those of all leaves below it, because it only falls along a path. So:

    1. a beam, the best nodes of each level, finds k leaves; the worst of them is a floor under the k-th best leaf;
    2. every node at or above the floor is opened, level by level; the leaves found on the way hold the k best.

A beam alone would be wrong (it may close the node above the best leaf), the second pass corrects it. Nodes below the
floor are never opened: for confident rows these are nearly all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manymax.ops.lookup import lookup
from manymax.ops.tree import ClassTree

# (T,) rows and (T, R) nodes to (T, R, arity) log-probabilities of each node's branches, -inf where there is none
BranchLogProbs = Callable[[Tensor, Tensor], Tensor]


class Best(NamedTuple):
    """The best leaves of each row, best first.

    values: (N, k) log-probabilities.
    ids: (N, k) classes.
    complete: (N,) bool, False where the search gave up and the row's values mean nothing.
    """

    values: Tensor
    ids: Tensor
    complete: Tensor


class Excluded:
    """Pairs (row, class) that must not be found, from ids (N, X) of which those outside of [0, C) are padding."""

    def __init__(self, ids: Tensor, num_classes: int) -> None:
        self.num_classes = num_classes
        rows = torch.arange(len(ids), device=ids.device).unsqueeze(-1)
        valid = (ids >= 0) & (ids < num_classes)
        self.keys = (rows * num_classes + ids)[valid].sort().values

    def __call__(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Whether each pair is excluded, in the broadcast shape of `rows` and `ids`."""
        keys = rows * self.num_classes + ids
        if not len(self.keys):
            return torch.zeros_like(keys, dtype=torch.bool)
        at = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        return lookup(self.keys, at) == keys


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
        k: how many.
        width: of the beam, at least k; a wider one gives a better floor.
        budget: nodes that a row may open after the beam; beyond that it is given up.
        excluded: leaves that do not count.

    Returns:
        The leaves. Rows are given up if they exceed the budget or have too few leaves that count.
    """
    floor = _floor(tree, branch_log_probs, start, k, width, excluded)
    # the second pass may add the same numbers in another order; too low a floor only costs time
    floor = floor - 64 * torch.finfo(floor.dtype).eps * (1 + floor.abs())
    rows, ids, values, complete = _above(tree, branch_log_probs, floor, budget, excluded)
    return _select(rows, ids, values, complete, k)


def _floor(
    tree: ClassTree, branch_log_probs: BranchLogProbs, start: Tensor, k: int, width: int, excluded: Excluded
) -> Tensor:
    """The k-th best of the leaves that a beam finds, (N,); -inf where it finds fewer."""
    rows = torch.arange(len(start), device=start.device)
    nodes, reached = torch.zeros_like(rows).unsqueeze(-1), start.unsqueeze(-1)  # (N, R)
    best = start.new_full((len(start), k), -torch.inf)
    for _ in range(tree.depth):
        values = (reached.unsqueeze(-1) + branch_log_probs(rows, nodes)).flatten(1)  # (N, R * arity)
        to = _children(tree, nodes).flatten(1)
        leaf = to < tree.num_classes
        counts = leaf & (values > best[:, -1:])
        counts &= ~excluded(rows.unsqueeze(-1), to)
        best = torch.cat([best, torch.where(counts, values, -torch.inf)], -1).topk(k).values
        inner = torch.where(leaf | (values <= best[:, -1:]), -torch.inf, values)
        reached, at = inner.topk(min(width, inner.shape[-1]))
        live = int((reached > -torch.inf).sum(-1).max()) if len(rows) else 0
        if not live:
            break
        reached = reached[:, :live]
        nodes = (to.gather(-1, at[:, :live]) - tree.num_classes).clamp(min=0)
    return best[:, -1]


def _children(tree: ClassTree, nodes: Tensor) -> Tensor:
    """Where the branches of (...) nodes lead, (..., arity); anywhere where there is no such branch."""
    edges = lookup(tree.first_edge, nodes).unsqueeze(-1) + torch.arange(tree.arity, device=nodes.device)
    return lookup(tree.leads_to, edges.clamp(max=tree.num_edges - 1))


def _above(
    tree: ClassTree, branch_log_probs: BranchLogProbs, floor: Tensor, budget: int, excluded: Excluded
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All leaves at or above the floor, as flat rows, ids and values, and which rows were completed."""
    complete = floor > -torch.inf
    rows = complete.nonzero().squeeze(-1)
    nodes, reached = torch.zeros_like(rows), floor.new_zeros(len(rows))
    opened = torch.zeros_like(floor, dtype=torch.long)
    found = []
    while len(rows):
        opened += rows.bincount(minlength=len(floor))
        values = reached.unsqueeze(-1) + branch_log_probs(rows, nodes.unsqueeze(-1)).squeeze(1)  # (T, arity)
        above = values >= lookup(floor, rows).unsqueeze(-1)
        rows, to, reached = rows.unsqueeze(-1).expand_as(values)[above], _children(tree, nodes)[above], values[above]
        leaf = to < tree.num_classes
        wanted = leaf.clone()
        wanted[leaf] = ~excluded(rows[leaf], to[leaf])
        found.append((rows[wanted], to[wanted], reached[wanted]))
        complete &= opened <= budget
        inner = ~leaf & lookup(complete, rows)
        rows, nodes, reached = rows[inner], to[inner] - tree.num_classes, reached[inner]
    if not found:
        return rows, nodes, reached, complete
    found_rows, found_ids, found_values = (torch.cat(part) for part in zip(*found, strict=True))
    return found_rows, found_ids, found_values, complete


def _select(rows: Tensor, ids: Tensor, values: Tensor, complete: Tensor, k: int) -> Best:
    """The k best of the flat leaves of each row."""
    order = values.argsort(descending=True, stable=True)
    order = lookup(order, lookup(rows, order).argsort(stable=True))  # by row, then by value
    rows, ids, values = lookup(rows, order), lookup(ids, order), lookup(values, order)
    counts = rows.bincount(minlength=len(complete))
    rank = torch.arange(len(rows), device=rows.device) - lookup(counts.cumsum(0) - counts, rows)
    place = rows[rank < k], rank[rank < k]
    best = values.new_full((len(complete), k), -torch.inf).index_put(place, values[rank < k])
    classes = ids.new_zeros(len(complete), k).index_put(place, ids[rank < k])
    return Best(best, classes, complete & (counts >= k))
