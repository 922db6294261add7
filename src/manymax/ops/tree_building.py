"""Construction of trees over the classes: Huffman's algorithm, and trees from given paths.

References:
    Huffman, "A method for the construction of minimum-redundancy codes", Proc. IRE 1952.
    van Leeuwen, "On the construction of Huffman trees", ICALP 1976: two queues instead of a heap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.lookup import lookup


def read_counts(counts: Tensor | Sequence[float]) -> Tensor:
    """The counts of the classes as int64 or float64 on the CPU, (C,); raises where they are no counts."""
    try:
        values = torch.as_tensor(counts).detach().cpu()
        if values.is_floating_point():
            # read again: a list of floats becomes float32 unless the dtype is given
            values = torch.as_tensor(counts, dtype=torch.double).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(f"`counts` must be a tensor or a list of numbers (C,); {error}.") from error
    if values.is_complex():
        raise ArgumentTypeError(f"`counts` must be real numbers; got dtype {values.dtype}.")
    if values.ndim != 1 or not len(values):
        raise ArgumentError(
            f"`counts` must be (C,) with at least 1 class; got shape {tuple(values.shape)}. A tree needs a class."
        )
    values = values if values.is_floating_point() else values.long()
    wrong = ~(values >= 0) | (values == math.inf)  # "not >=" is true of nan as well
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise ArgumentError(f"`counts` must be finite and not negative; got {values[first].item()} for class {first}.")
    # joined weights of inf could not be told from the end of a queue in `huffman_children`
    if values.sum() == math.inf:
        raise ArgumentError("`counts` must have a finite sum; got counts whose sum is inf. Divide them by the largest.")
    return values


def huffman_children(weights: list[float], arity: int) -> tuple[Tensor, Tensor]:
    """Huffman's construction for sorted weights, in time linear in their number.

    Args:
        weights: of the C leaves, lightest first, as Python numbers: integers are added exactly, of any size.
        arity: how many are joined at a time.

    Returns:
        (E,) children, node after node, the i-th lightest leaf as i and the j-th new node as C + j; and (M + 1,) where
        the children of each node begin. The root is the last node.
    """
    # New nodes come out in the order of their weights, because a sum of heavier parts is not lighter, also after
    # rounding. So the lightest leaf or node is always at the front of one of two queues, one of leaves and one of new
    # nodes, and no heap is needed.
    num_classes = len(weights)
    # Each join removes arity - 1 of what is left to join. For the last one, the root, to be full, the first, which is
    # the deepest, takes what is left over; a gap at the root would cost every class.
    first = 2 + (num_classes - 2) % (arity - 1) if num_classes > 1 else 0
    num_nodes = 1 + (num_classes - first) // (arity - 1) if first else 0
    # both queues end with inf, which is never taken before anything else
    leaves, joined = [*weights, math.inf], [math.inf] * (num_nodes + 1)
    children: list[int] = []
    leaf = node = 0
    for new in range(num_nodes):
        total: float = 0
        for _ in range(arity if new else first):
            if leaves[leaf] <= joined[node]:  # of equal weights the leaf: this keeps the tree flat
                total += leaves[leaf]
                children.append(leaf)
                leaf += 1
            else:
                total += joined[node]
                children.append(num_classes + node)
                node += 1
        joined[new] = total
    # every node but the first has `arity` children
    starts = torch.arange(num_nodes + 1) * arity - (arity - first if first else 0)
    return torch.tensor(children, dtype=torch.long), starts.clamp(min=0)


def renumbered_by_level(children: Tensor, first_edge: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """A tree with its nodes and edges numbered level by level from the root.

    Args:
        children: (E,) of the nodes, one node after the other, class c as c and node n as C + n.
        first_edge: (M + 1,) where the children of each node begin. The last node is the root.
        num_classes: C.

    Returns:
        `leads_to` (E,) and `first_edge` (M + 1,) of a `ClassTree`.
    """
    widths = first_edge.diff()
    # one level at a time from the root, which is the last node; a loop over levels, not over nodes
    level, nodes, edges = torch.arange(len(widths))[-1:], [], []
    while len(level):
        nodes.append(level)
        edges.append(_ranges(first_edge[level], widths[level]))
        below = lookup(children, edges[-1])
        level = below[below >= num_classes] - num_classes
    if not nodes:
        return children, first_edge
    old_numbers = torch.cat(nodes)
    new_numbers = torch.empty_like(old_numbers).scatter_(0, old_numbers, torch.arange(len(old_numbers)))
    children = lookup(children, torch.cat(edges))
    inner = children >= num_classes
    children = torch.where(inner, num_classes + new_numbers[torch.where(inner, children - num_classes, 0)], children)
    return children, torch.cat([first_edge.new_zeros(1), widths[old_numbers].cumsum(0)])


def _ranges(starts: Tensor, widths: Tensor) -> Tensor:
    """start, start + 1, ..., start + width - 1 for each pair of starts and widths (n,), one after the other."""
    # the running number of each entry, moved to where its range begins: no loop over the ranges
    offsets = starts - (widths.cumsum(0) - widths)
    return offsets.repeat_interleave(widths) + torch.arange(int(widths.sum()), device=starts.device)


def path_children(paths: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """`leads_to` (E,) and `first_edge` (M + 1,) of the tree with the given paths, one per class."""
    # All paths are read together, level by level. On each level every class that has not reached its end stands at a
    # node, and each pair of a node and a branch that some of them take is an edge.
    branches, lengths = _read_paths(paths)
    num_classes, num_nodes = len(lengths), 1
    starts = lengths.cumsum(0) - lengths
    classes = torch.arange(num_classes)
    node = torch.zeros_like(classes)  # where each class stands, counted within the level
    # an edge is the number node * base + branch: sorted, they come node by node and branch by branch
    base = int(branches.max()) + 1 if len(branches) else 1
    children, widths = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
    for level in range(int(lengths.max())):
        edge, edge_of, num_on_edge = (node * base + branches[starts[classes] + level]).unique(
            return_inverse=True, return_counts=True
        )
        ends = lengths[classes] == level + 1
        _check_prefix_free(classes, ends, num_on_edge[edge_of])
        widths.append(_check_branches(edge, base, classes, edge_of))
        # an edge on which no class ends leads to a node; these are numbered in the order of the edges
        inner = torch.ones_like(edge, dtype=torch.bool).index_fill(0, edge_of[ends], False)
        number = inner.cumsum(0) - 1
        children.append((num_classes + num_nodes + number).index_copy(0, edge_of[ends], classes[ends]))
        num_nodes += int(inner.sum())
        classes, node = classes[~ends], number[edge_of[~ends]]
    return torch.cat(children), torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(widths).cumsum(0)])


def _read_paths(paths: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The branches of all paths one after the other, and the length of each path (C,); raises where they are none."""
    rows = paths.tolist() if isinstance(paths, Tensor) else paths
    try:
        lengths = torch.tensor([len(path) for path in rows], dtype=torch.long)
        branches = torch.tensor(list(chain.from_iterable(rows)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"`paths` must hold one list of branch numbers per class; {error}.") from error
    if not len(lengths):
        raise ArgumentError("`paths` must hold at least 1 path, one per class; got none. A tree needs a class.")
    if len(branches) and (branches.is_floating_point() or int(branches.min()) < 0):
        raise ArgumentError("`paths` must hold branch numbers, integers from 0 on; got a negative one or a fraction.")
    if len(lengths) > 1 and not lengths.all():
        raise ArgumentError(
            f"`paths` must lead to leaves: the path of class {int((lengths == 0).nonzero()[0])} is empty, which is the"
            " root. Only a single class may have an empty path."
        )
    return branches.long(), lengths


def _check_prefix_free(classes: Tensor, ends: Tensor, num_on_edge: Tensor) -> None:
    """Raise if a class ends on an edge that other classes take too."""
    shared = ends & (num_on_edge > 1)
    if shared.any():
        raise ArgumentError(
            f"`paths` must be prefix-free: the path of class {int(classes[shared][0])} is the beginning or the whole of"
            " the path of another class."
        )


def _check_branches(edge: Tensor, base: int, classes: Tensor, edge_of: Tensor) -> Tensor:
    """The number of branches of each node of a level; raises unless each node has the branches 0 .. m - 1, m >= 2."""
    node, branch = edge // base, edge % base
    widths = node.bincount()
    # m distinct branches are 0 .. m - 1 if and only if none of them is m or more
    wrong = (branch >= widths[node]) | (widths[node] < 2)
    if wrong.any():
        wrong_node = int(node[wrong][0])
        example = int(classes[node[edge_of] == wrong_node][0])
        raise ArgumentError(
            "`paths` must use the branches 0 .. m - 1 of every node, with m at least 2: a node on the path of class"
            f" {example} has the branches {branch[node == wrong_node].tolist()}. Unused branches would take probability"
            " away."
        )
    return widths
