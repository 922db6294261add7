"""Trees whose leaves are the classes, stored as flat tensors.

A tree over C classes has M inner nodes ("nodes" from here on) and E = M + C - 1 edges. Nodes and edges are numbered
level by level from the root, which is node 0, and the edges of a node are neighbours, so that each level is one slice
of the nodes and one of the edges. The path of a class is found by climbing from its edge to the edge above, up to the
root. So vectors of length O(C) hold the whole tree, however deep it is; a table of all paths would be (C, depth), and
the depth can reach C - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from manymax.errors import ArgumentError
from manymax.ops.arguments import checked
from manymax.ops.lookup import lookup
from manymax.ops.tree_building import huffman_children, path_children, read_counts, renumbered_by_level

# Buffers that follow from `leads_to` and `first_edge`. They are not saved: a state dict holds the tree once, and cannot
# contradict itself.
DERIVED = ("edge_node", "parent_edge", "class_edge", "node_edge", "lengths")


class ClassTree(nn.Module):
    """A tree over the classes; build one with `HuffmanTree(counts)` or `ClassTree.from_paths(paths)`.

    Its buffers are the following. The first two are its state; the others are computed from them, also after
    `load_state_dict`:

        leads_to     (E,)     where an edge leads: class c as c, node n as C + n
        first_edge   (M + 1,) node n has the edges first_edge[n] .. first_edge[n + 1] - 1, its branches 0, 1, ...
        edge_node    (E + 1,) the node above an edge
        parent_edge  (E + 1,) the edge above that node; at the root it is E, which is no edge and its own parent,
                              so that a path may be climbed past its end
        class_edge   (C,)     the edge to a class
        node_edge    (M,)     the edge to a node; E for the root
        lengths      (C,)     number of edges from the root to a class: the length of its code

    Args:
        leads_to: (E,) as above, level by level.
        first_edge: (M + 1,) as above.
    """

    in_words = "a tree over the classes, `HuffmanTree(counts)` or `ClassTree.from_paths(paths)`"
    leads_to: Tensor
    first_edge: Tensor
    edge_node: Tensor
    parent_edge: Tensor
    class_edge: Tensor
    node_edge: Tensor
    lengths: Tensor

    @checked
    def __init__(self, leads_to: Tensor, first_edge: Tensor) -> None:
        super().__init__()
        self.register_buffer("leads_to", leads_to)
        self.register_buffer("first_edge", first_edge)
        for name in DERIVED:
            self.register_buffer(name, None, persistent=False)
        self._derive()

    @staticmethod
    def from_paths(paths: Tensor | Sequence[Sequence[int]]) -> ClassTree:
        """The tree in which each class has the given path from the root.

        Args:
            paths: for each class the branches 0, 1, ... to take from the root. No path may be the beginning of another
                one, and every node on a path must have all of its branches 0 .. m - 1 in use, with m >= 2. If all
                nodes have two branches, the tree is binary.

        Returns:
            The tree over `len(paths)` classes.

        Example: two groups, of two classes and of three.

            >>> ClassTree.from_paths([[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
            ClassTree(num_classes=5, num_nodes=3, arity=3, depth=2)
        """
        return ClassTree(*path_children(paths))

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

    @checked
    def mean_length(self, counts: Tensor | None = None) -> float:
        """The mean length of a path, sum_c counts_c lengths_c / sum_c counts_c.

        Args:
            counts: (C,) the weight of each class; by default 1.
        """
        if counts is None:
            return self._mean_length  # `TreeModel.topk` asks for it in every call
        weights = counts.to(self.lengths.device, torch.double)
        return (weights @ self.lengths.double() / weights.sum()).item()

    @checked
    def paths(self, ids: Tensor, length: int | None = None) -> Tensor:
        """The edges on the way from classes up to the root.

        Args:
            ids: (...) classes.
            length: how many edges to climb; by default the length of the longest of these paths.

        Returns:
            (..., length) edges, from the class upward; filled up with E where a path is shorter.

        Example:
            >>> import torch
            >>> HuffmanTree([1, 1, 2]).paths(torch.arange(3))
            tensor([[2, 1],
                    [3, 1],
                    [0, 4]])
        """
        if length is None:
            length = int(lookup(self.lengths, ids).max()) if ids.numel() else 0
        # climbing past the root is harmless, because E is its own parent: no path has to be looked at alone
        edges = [lookup(self.class_edge, ids)]
        for _ in range(length - 1):
            edges.append(lookup(self.parent_edge, edges[-1]))
        return torch.stack(edges, -1)[..., :length]

    @checked
    def accumulate(self, edge_values: Tensor) -> Tensor:
        """The sum of values along the path of every class, with one addition per edge.

        Args:
            edge_values: (E, ...), one row per edge.

        Returns:
            (C, ...), one row per class.

        Example:
            >>> import torch
            >>> HuffmanTree([1, 1, 2]).accumulate(torch.tensor([1.0, 10.0, 0.2, 0.3]))
            tensor([10.2000, 10.3000,  1.0000])
        """
        # Level by level from the root, so that a sum that many classes share is computed once: O(E) additions, not as
        # many as all paths together have edges.
        # reached: the sums from the root down to each node of one level, (nodes of the level, ...)
        reached, sums = edge_values.new_zeros(1, *edge_values.shape[1:]), []
        if not self.num_nodes:
            return reached + edge_values.sum(0)  # a single class: 0, but connected to `edge_values` for autograd
        for level in range(self.depth):
            start, stop = self.edge_levels[level], self.edge_levels[level + 1]
            above = self.edge_node[start:stop] - self.node_levels[level]  # counted within the level
            sums.append(edge_values[start:stop] + lookup(reached, above))
            below = self.node_edge[self.node_levels[level + 1] : self.node_levels[level + 2]]
            reached = lookup(sums[-1], below - start)
        return lookup(torch.cat(sums), self.class_edge)

    def _derive(self) -> None:
        """Set all buffers and numbers that follow from `leads_to` and `first_edge`."""
        num_edges, num_classes, device = self.num_edges, self.num_classes, self.leads_to.device
        edges = torch.arange(num_edges + 1, device=device)
        widths = self.first_edge.diff()
        self.arity = int(widths.max()) if self.num_nodes else 2
        # the edge E, which stands for "past the root", gets the root as its node
        self.edge_node = torch.cat([edges[: self.num_nodes].repeat_interleave(widths), edges[:1]])
        # the edge to each class and node, numbered as in `leads_to`; nothing leads to the root, which keeps E
        edge_to = torch.full((num_classes + self.num_nodes,), num_edges, device=device)
        edge_to[self.leads_to] = edges[:-1]
        self.class_edge, self.node_edge = edge_to[:num_classes], edge_to[num_classes:]
        self.parent_edge = torch.cat([lookup(self.node_edge, self.edge_node[:-1]), edges[-1:]])
        self.node_levels, self.edge_levels = self._levels()
        sizes = torch.tensor(self.edge_levels, device=device).diff()
        depths = torch.arange(1, self.depth + 1, device=device).repeat_interleave(sizes)
        self.lengths = lookup(depths, self.class_edge) if self.num_nodes else torch.zeros_like(self.class_edge)
        self._mean_length = self.lengths.double().mean().item()

    def _levels(self) -> tuple[list[int], list[int]]:
        """Where each level begins among the nodes and among the edges; the list of nodes ends with an empty level."""
        # plain lists, made once: they are bounds of slices, and reading them from a GPU would make the host wait
        inner_before = torch.cat([self.leads_to.new_zeros(1), (self.leads_to >= self.num_classes).cumsum(0)])
        nodes, edges = [0, min(1, self.num_nodes)], [0]
        while nodes[-1] > nodes[-2]:
            edges.append(int(self.first_edge[nodes[-1]]))
            # nodes are numbered in the order of the edges to them: the root, and one for each such edge so far
            nodes.append(1 + int(inner_before[edges[-1]]))
        return nodes, edges

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # the loaded tree may have other paths than this one, so that everything derived is computed anew
        super()._load_from_state_dict(*args, **kwargs)
        self._derive()

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, num_nodes={self.num_nodes}, arity={self.arity}, depth={self.depth}"


class HuffmanTree(ClassTree):
    """The tree with the smallest sum of count x path length over the classes.

    The `arity` lightest classes or nodes are joined under a new node, until one is left. Of equal weights the one that
    came first is taken: classes in the order of their ids, then nodes in the order in which they were made. So the
    result is always the same, and among the trees of the smallest sum it is one of least depth.

    Args:
        counts: (C,) how often each class occurs, a tensor or a list of numbers that are not negative. Integers are
            added exactly.
        arity: branches of each node; only one of the deepest nodes may have fewer.

    Example:
        >>> HuffmanTree([5, 1, 1, 2]).lengths
        tensor([1, 3, 3, 2])
    """

    @checked
    def __init__(self, counts: Tensor | Sequence[float], *, arity: int = 2) -> None:
        if isinstance(arity, bool) or not isinstance(arity, int) or arity < 2:
            raise ArgumentError(f"`arity` must be an integer of at least 2; got {arity!r}.")
        # a stable sort keeps classes of equal counts in the order of their ids
        weights, sorted_ids = read_counts(counts).sort(stable=True)
        joined, first_edge = huffman_children(weights.tolist(), arity)
        num_classes = len(sorted_ids)
        # `huffman_children` numbers leaves by weight: back to the ids of the classes
        leaf = joined < num_classes
        children = torch.where(leaf, sorted_ids[torch.where(leaf, joined, 0)], joined)
        super().__init__(*renumbered_by_level(children, first_edge, num_classes))
