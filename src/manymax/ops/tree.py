"""Trees whose leaves are the classes, as flat tensors, and Huffman's construction.

A tree over C classes has M inner nodes and E = M + C - 1 edges. Nodes and edges are numbered level by level from the
root, which is node 0, and the edges of a node are neighbours, so that each level is one slice of the nodes and one of
the edges. A path is climbed along the edges above each other. So vectors of length O(C) hold the whole tree, however
deep it is: the depth can reach C - 1, and a table of all paths would grow with it.

References: Huffman, "A method for the construction of minimum-redundancy codes", Proc. IRE 1952; with two queues
instead of a heap: van Leeuwen, "On the construction of Huffman trees", ICALP 1976.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError, ArgumentTypeError
from manymax.ops.lookup import lookup

DERIVED = ("edge_node", "parent_edge", "class_edge", "node_edge", "lengths")


class ClassTree(nn.Module):
    """A tree over the classes; build one with `HuffmanTree(counts)` or `ClassTree.from_paths(paths)`.

    Its buffers; the first two are its state, the others follow from them, also after `load_state_dict`:

        leads_to     (E,)     where an edge leads: class c as c, node n as C + n
        first_edge   (M + 1,) node n has the edges first_edge[n] .. first_edge[n + 1] - 1, its branches 0, 1, ...
        edge_node    (E + 1,) the node above an edge
        parent_edge  (E + 1,) the edge above that node; at the root it is E, which is no edge and its own parent
        class_edge   (C,)     the edge to a class
        node_edge    (M,)     the edge to a node; E for the root
        lengths      (C,)     number of edges from the root to a class: the length of its code

    Args:
        leads_to: (E,) as above, level by level.
        first_edge: (M + 1,) as above.
    """

    leads_to: Tensor
    first_edge: Tensor
    edge_node: Tensor
    parent_edge: Tensor
    class_edge: Tensor
    node_edge: Tensor
    lengths: Tensor

    def __init__(self, leads_to: Tensor, first_edge: Tensor) -> None:
        super().__init__()
        self.register_buffer("leads_to", leads_to)
        self.register_buffer("first_edge", first_edge)
        for name in DERIVED:
            self.register_buffer(name, None, persistent=False)
        self._derive()

    @staticmethod
    def from_paths(paths: Tensor | Sequence[Sequence[int]]) -> ClassTree:
        """The tree with the given codes.

        Args:
            paths: for each class the branches 0, 1, ... to take from the root. No path may begin with another one,
                and every node on a path must have all of its branches 0 .. m - 1 in use, with m >= 2. If all nodes
                have two branches the tree is binary.

        Returns:
            The tree over `len(paths)` classes.

        Example: two groups, of two classes and of three.

            >>> ClassTree.from_paths([[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
            ClassTree(num_classes=5, num_nodes=3, arity=3, depth=2)
        """
        return ClassTree(*_children_of_paths(paths))

    @property
    def num_nodes(self) -> int:
        """M, the number of inner nodes."""
        return len(self.first_edge) - 1

    @property
    def num_edges(self) -> int:
        """E, the number of edges."""
        return len(self.leads_to)

    @property
    def num_classes(self) -> int:
        """C, the number of leaves."""
        return self.num_edges - self.num_nodes + 1

    @property
    def depth(self) -> int:
        """The length of the longest path."""
        return len(self.edge_levels) - 1

    def mean_length(self, counts: Tensor | None = None) -> float:
        """sum_c counts_c lengths_c / sum_c counts_c; without `counts` every class counts once."""
        if counts is None:
            return self._mean_length
        weights = counts.to(self.lengths.device, torch.double)
        return (weights @ self.lengths.double() / weights.sum()).item()

    def paths(self, ids: Tensor, length: int | None = None) -> Tensor:
        """The edges from classes up to the root.

        Args:
            ids: (...) classes.
            length: how many edges to climb; by default as many as the longest of these paths has.

        Returns:
            (..., length) edges, beginning at the class; E after the end of a path.

        Example:
            >>> import torch
            >>> HuffmanTree([1, 1, 2]).paths(torch.arange(3))
            tensor([[2, 1],
                    [3, 1],
                    [0, 4]])
        """
        if length is None:
            length = int(lookup(self.lengths, ids).max()) if ids.numel() else 0
        edges = [lookup(self.class_edge, ids)]
        for _ in range(length - 1):
            edges.append(lookup(self.parent_edge, edges[-1]))
        return torch.stack(edges, -1)[..., :length]

    def accumulate(self, edge_values: Tensor) -> Tensor:
        """The sum of the values along the path of every class, with one addition per edge.

        Args:
            edge_values: (E, ...), one row per edge.

        Returns:
            (C, ...), one row per class.

        Example:
            >>> import torch
            >>> HuffmanTree([1, 1, 2]).accumulate(torch.tensor([1.0, 10.0, 0.2, 0.3]))
            tensor([10.2000, 10.3000,  1.0000])
        """
        reached, sums = edge_values.new_zeros(1, *edge_values.shape[1:]), []  # reached: the nodes of one level
        if not self.num_nodes:
            return reached + edge_values.sum(0)  # no edge: 0, but part of the graph
        for level in range(self.depth):
            start, stop = self.edge_levels[level], self.edge_levels[level + 1]
            above = self.edge_node[start:stop] - self.node_levels[level]
            sums.append(edge_values[start:stop] + lookup(reached, above))
            below = self.node_edge[self.node_levels[level + 1] : self.node_levels[level + 2]]
            reached = lookup(sums[-1], below - start)
        return lookup(torch.cat(sums), self.class_edge)

    def _derive(self) -> None:
        """Everything that follows from `leads_to` and `first_edge`."""
        num_edges, num_classes, device = self.num_edges, self.num_classes, self.leads_to.device
        edges = torch.arange(num_edges + 1, device=device)
        widths = self.first_edge.diff()
        self.arity = int(widths.max()) if self.num_nodes else 2
        self.edge_node = torch.cat([edges[: self.num_nodes].repeat_interleave(widths), edges[:1]])
        above = torch.full((num_classes + self.num_nodes,), num_edges, device=device)  # by vertex, as in `leads_to`
        above[self.leads_to] = edges[:-1]
        self.class_edge, self.node_edge = above[:num_classes], above[num_classes:]
        self.parent_edge = torch.cat([lookup(self.node_edge, self.edge_node[:-1]), edges[-1:]])
        self.node_levels, self.edge_levels = self._levels()
        sizes = torch.tensor(self.edge_levels, device=device).diff()
        depths = torch.arange(1, self.depth + 1, device=device).repeat_interleave(sizes)
        self.lengths = lookup(depths, self.class_edge) if self.num_nodes else torch.zeros_like(self.class_edge)
        self._mean_length = self.lengths.double().mean().item()

    def _levels(self) -> tuple[list[int], list[int]]:
        """Where each level begins among the nodes and the edges; the nodes' list ends with an empty level."""
        inner_before = torch.cat([self.leads_to.new_zeros(1), (self.leads_to >= self.num_classes).cumsum(0)])
        nodes, edges = [0, min(1, self.num_nodes)], [0]
        while nodes[-1] > nodes[-2]:
            edges.append(int(self.first_edge[nodes[-1]]))
            nodes.append(1 + int(inner_before[edges[-1]]))  # all nodes but the root are below some edge so far
        return nodes, edges

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._derive()

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, num_nodes={self.num_nodes}, arity={self.arity}, depth={self.depth}"


class HuffmanTree(ClassTree):
    """The tree with the smallest sum of count x length over the classes.

    The `arity` lightest vertices are joined under a new node until one is left. Of equal weights the one that came
    first is taken, classes in order of id before joined nodes; so the result is always the same, and of all optimal
    trees it is one of the least depth.

    Args:
        counts: (C,) non-negative numbers of the classes' occurrences, a tensor or a list. Integers are added exactly.
        arity: branches of each node; only the deepest node may have fewer.

    Example:
        >>> HuffmanTree([5, 1, 1, 2]).lengths
        tensor([1, 3, 3, 2])
    """

    def __init__(self, counts: Tensor | Sequence[float], *, arity: int = 2) -> None:
        if isinstance(arity, bool) or not isinstance(arity, int) or arity < 2:
            raise ArgumentError(f"`arity` must be an integer of at least 2; got {arity!r}.")
        weights, order = _read_counts(counts).sort(stable=True)
        merged, first_edge = _join_lightest(weights.tolist(), arity)
        num_classes = len(order)
        leaf = merged < num_classes
        children = torch.where(leaf, order[torch.where(leaf, merged, 0)], merged)
        super().__init__(*_by_level(children, first_edge, num_classes))


def _read_counts(counts: Tensor | Sequence[float]) -> Tensor:
    """The counts as int64 or float64 on the CPU, checked."""
    try:
        values = torch.as_tensor(counts).detach().cpu()
        if values.is_floating_point():
            values = torch.as_tensor(counts, dtype=torch.double).detach().cpu()  # a list would be read as float32
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentTypeError(f"`counts` must be a tensor or a list of numbers (C,); {error}.") from error
    if values.is_complex():
        raise ArgumentTypeError(f"`counts` must be real numbers; got dtype {values.dtype}.")
    if values.ndim != 1 or not len(values):
        raise ArgumentError(
            f"`counts` must be (C,) with at least 1 class; got shape {tuple(values.shape)}. A tree needs a class."
        )
    values = values if values.is_floating_point() else values.long()
    wrong = ~(values >= 0) | (values == math.inf)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ArgumentError(f"`counts` must be finite and not negative; got {values[at].item()} for class {at}.")
    if values.sum() == math.inf:
        raise ArgumentError("`counts` must have a finite sum; got counts whose sum is inf. Divide them by the largest.")
    return values


def _join_lightest(weights: list[float], arity: int) -> tuple[Tensor, Tensor]:
    """Huffman's merges of sorted weights, linear in their number.

    Joined nodes come out in order of weight, because sums of heavier vertices are not lighter (also rounded ones),
    so the lightest vertex is always at the head of one of two queues.

    Returns:
        (E,) children, node after node, the i-th lightest leaf as i and the j-th joined node as C + j; (M + 1,) where
        each node's children begin.
    """
    num_classes = len(weights)
    # all nodes are full but perhaps the first, which is the deepest
    first = 2 + (num_classes - 2) % (arity - 1) if num_classes > 1 else 0
    num_nodes = 1 + (num_classes - first) // (arity - 1) if first else 0
    leaves, joined = [*weights, math.inf], [math.inf] * (num_nodes + 1)
    children: list[int] = []
    leaf = node = 0
    for new in range(num_nodes):
        total: float = 0
        for _ in range(arity if new else first):
            if leaves[leaf] <= joined[node]:
                total += leaves[leaf]
                children.append(leaf)
                leaf += 1
            else:
                total += joined[node]
                children.append(num_classes + node)
                node += 1
        joined[new] = total
    starts = torch.arange(num_nodes + 1) * arity - (arity - first if first else 0)
    return torch.tensor(children, dtype=torch.long), starts.clamp(min=0)


def _by_level(children: Tensor, first_edge: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """A tree whose root is its last node, renumbered level by level from the root."""
    widths = first_edge.diff()
    level, nodes, edges = torch.arange(len(widths))[-1:], [], []
    while len(level):
        nodes.append(level)
        edges.append(_ranges(first_edge[level], widths[level]))
        below = lookup(children, edges[-1])
        level = below[below >= num_classes] - num_classes
    if not nodes:
        return children, first_edge
    order = torch.cat(nodes)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    children = lookup(children, torch.cat(edges))
    inner = children >= num_classes
    children = torch.where(inner, num_classes + rank[torch.where(inner, children - num_classes, 0)], children)
    return children, torch.cat([first_edge.new_zeros(1), widths[order].cumsum(0)])


def _ranges(starts: Tensor, widths: Tensor) -> Tensor:
    """start, start + 1, ..., start + width - 1 for each pair, one after the other."""
    offsets = starts - (widths.cumsum(0) - widths)
    return offsets.repeat_interleave(widths) + torch.arange(int(widths.sum()), device=starts.device)


def _children_of_paths(paths: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """The tree of the given codes, read level by level: (E,) children and (M + 1,) first edges."""
    branches, lengths = _read_paths(paths)
    num_classes, num_nodes = len(lengths), 1
    starts = lengths.cumsum(0) - lengths
    classes = torch.arange(num_classes)
    node = torch.zeros_like(classes)  # of each class, counted within the level
    base = int(branches.max()) + 1 if len(branches) else 1
    children, widths = [torch.empty(0, dtype=torch.long)], [torch.empty(0, dtype=torch.long)]
    for level in range(int(lengths.max())):
        edge, edge_of, users = (node * base + branches[starts[classes] + level]).unique(
            return_inverse=True, return_counts=True
        )
        ends = lengths[classes] == level + 1
        _check_prefix_free(classes, ends, users[edge_of])
        widths.append(_check_branches(edge, base, classes, edge_of))
        inner = torch.ones_like(edge, dtype=torch.bool).index_fill(0, edge_of[ends], False)
        number = inner.cumsum(0) - 1
        children.append((num_classes + num_nodes + number).index_copy(0, edge_of[ends], classes[ends]))
        num_nodes += int(inner.sum())
        classes, node = classes[~ends], number[edge_of[~ends]]
    return torch.cat(children), torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(widths).cumsum(0)])


def _read_paths(paths: Tensor | Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """All branches one after the other, and the length of each path (C,)."""
    rows = paths.tolist() if isinstance(paths, Tensor) else paths
    try:
        lengths = torch.tensor([len(path) for path in rows], dtype=torch.long)
        branches = torch.tensor(list(chain.from_iterable(rows)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"`paths` must hold one list of branch numbers per class; {error}.") from error
    if not len(lengths):
        raise ArgumentError("`paths` must hold at least 1 path, one per class; got none. A tree needs a class.")
    if len(branches) and (branches.is_floating_point() or int(branches.min()) < 0):
        raise ArgumentError("`paths` must hold branch numbers, integers from 0 on; got a negative or broken number.")
    if len(lengths) > 1 and not lengths.all():
        raise ArgumentError(
            f"`paths` must lead to leaves: the path of class {int((lengths == 0).nonzero()[0])} is empty, which is the"
            " root. Only a single class may have an empty path."
        )
    return branches.long(), lengths


def _check_prefix_free(classes: Tensor, ends: Tensor, users: Tensor) -> None:
    """Raise if a class ends on an edge that other classes use too."""
    shared = ends & (users > 1)
    if shared.any():
        raise ArgumentError(
            f"`paths` must be prefix-free: the path of class {int(classes[shared][0])} is the beginning or the whole of"
            " the path of another class."
        )


def _check_branches(edge: Tensor, base: int, classes: Tensor, edge_of: Tensor) -> Tensor:
    """The number of branches of each node of a level; raise unless each node has the branches 0 .. m - 1, m >= 2."""
    node, branch = edge // base, edge % base
    widths = node.bincount()
    wrong = (branch >= widths[node]) | (widths[node] < 2)
    if wrong.any():
        at = int(node[wrong][0])
        user = int(classes[node[edge_of] == at][0])
        raise ArgumentError(
            "`paths` must use the branches 0 .. m - 1 of every node, with m at least 2: a node on the path of class"
            f" {user} has the branches {branch[node == at].tolist()}. Unused branches would take probability away."
        )
    return widths
