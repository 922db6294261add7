"""The members that approximate the baseline loss, and what a tree can make of given scores."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.member import Approximation, Member
from manymax.errors import ArgumentError
from manymax.members import BASELINE, FAMILY
from manymax.ops.tree import ClassTree
from manymax.ops.tree_model import TreeModel
from manymax.theory.cases import check_count, read_cases


def approximations(*, drawing: bool = False) -> dict[str, Approximation]:
    """{member's name: how it approximates the baseline loss}; of those alone that draw negatives, if `drawing`."""
    known = {name: member.theory.approximation for name, member in FAMILY.items()}
    return {name: each for name, each in known.items() if each is not None and (each.draws is not None or not drawing)}


def approximating(name: str, *, drawing: bool = False) -> tuple[Member, Approximation]:
    """A member by one of its names, and how it approximates the baseline loss; an error if it does not, or not so."""
    member, known = FAMILY[name], approximations(drawing=drawing)
    if member.name in known:
        return member, known[member.name]
    if member.theory.approximation is None:
        what = f"is a loss of its own, no approximation of {BASELINE.name}: its record leaves out"
        field = "theory.approximation"
    else:
        what, field = "draws no negatives: its record leaves out", "theory.approximation.draws"
    raise ArgumentError(f"`member` must be one of {', '.join(known)}; got {member.name!r}, which {what} `{field}`.")


def variant_names() -> tuple[str, ...]:
    """The settings by which the variants of an approximation differ; each is a column, None for other members."""
    variants = [variant for each in approximations().values() for variant in each.variants]
    return tuple(dict.fromkeys(name for variant in variants for name in variant.settings))


def tree_log_probs(scores: Tensor, tree: ClassTree, dim: int) -> Tensor:
    """log P of a tree whose node scores come near to softmax(scores), as far as vectors of `dim` let them.

    Free node scores, the log-odds of the branches under P, make P itself. Of inner products <x, v_n> of vectors in d
    dimensions their table, rows by nodes, can have rank d only: it is cut to that rank by its largest singular values.
    That is nearest in the squares of log-odds; a training, which lowers KL, can come nearer in P.

    Args:
        scores: (N, C), more than `dim` rows of them, or nothing is lost.
        tree: over the C classes.
        dim: d.

    Returns:
        (N, C) log-probabilities, in float64.

    Example:
        >>> from manymax import HuffmanTree
        >>> scores = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 1.0], [-1.0, 0.5, 0.0]])
        >>> tree_log_probs(scores, HuffmanTree([1, 1, 2]), dim=1)[0].exp()
        tensor([0.6698, 0.2391, 0.0911], dtype=torch.float64)
    """
    check_count("dim", dim)
    cases = read_cases(None, scores, None, None)
    table = _log_odds(torch.cat([case.probs for case in cases]), tree)  # (N, V)
    left, sizes, right = torch.linalg.svd(table, full_matrices=False)
    return TreeModel(tree, right[:dim].T.contiguous()).log_probs(left[:, :dim] * sizes[:dim])


def _log_odds(probs: Tensor, tree: ClassTree) -> Tensor:
    """The node scores, of a binary tree, or edge scores that make P of the tree's leaves, (N, V)."""
    if probs.shape[-1] != tree.num_classes:
        raise ArgumentError(f"`tree` must be over the {probs.shape[-1]} classes of `scores`; got {tree.num_classes}.")
    mass = probs.new_zeros(tree.num_classes + tree.num_nodes, len(probs))
    mass[: tree.num_classes] = probs.T.clamp(min=torch.finfo(probs.dtype).tiny)
    for start, stop in reversed(list(zip(tree.edge_levels, tree.edge_levels[1:], strict=False))):
        nodes, below = tree.edge_node[start:stop], tree.leads_to[start:stop]
        mass.index_add_(0, tree.num_classes + nodes, mass[below])
    edges = mass[tree.leads_to].log().T  # (N, E)
    return edges[:, 1::2] - edges[:, ::2] if tree.arity == 2 else edges
