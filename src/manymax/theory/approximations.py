"""The members that approximate the baseline loss, and the probabilities that a tree can give to scores."""

from __future__ import annotations

import torch
from torch import Tensor

from manymax.engine.member import Approximation, Member
from manymax.errors import ArgumentError
from manymax.members import BASELINE, FAMILY
from manymax.ops.arguments import checked
from manymax.ops.tree import ClassTree
from manymax.ops.tree_model import TreeModel
from manymax.theory.inputs import check_count, read_inputs


@checked
def approximations(*, drawing: bool = False) -> dict[str, Approximation]:
    """{member's name: its approximation of the baseline loss}; if `drawing`, only of members that draw negatives."""
    known = {name: member.theory.approximation for name, member in FAMILY.items()}
    return {
        name: approximation
        for name, approximation in known.items()
        if approximation is not None and (approximation.draws is not None or not drawing)
    }


@checked
def approximating(name: str, *, drawing: bool = False) -> tuple[Member, Approximation]:
    """A member by one of its names, and its approximation of the baseline loss.

    Raises an error if the member approximates nothing, or, if `drawing`, draws no negatives.
    """
    member, known = FAMILY[name], approximations(drawing=drawing)
    if member.name in known:
        return member, known[member.name]
    if member.theory.approximation is None:
        problem = f"is a loss of its own and no approximation of {BASELINE.name}"
        field = "theory.approximation"
    else:
        problem, field = "draws no negatives", "theory.approximation.draws"
    raise ArgumentError(
        f"`member` must be one of {', '.join(known)}; got {member.name!r}, which {problem}: its entry has no `{field}`."
    )


def variant_names() -> tuple[str, ...]:
    """Names of the settings in which the variants of approximations differ, such as `correction`.

    A table of all variants has a column for each; it is None for a member that has no such setting.
    """
    variants = [variant for approximation in approximations().values() for variant in approximation.variants]
    return tuple(dict.fromkeys(name for variant in variants for name in variant.settings))


@checked
def tree_log_probs(scores: Tensor, tree: ClassTree, dim: int) -> Tensor:
    """log P of a tree with node vectors of size `dim` that comes close to softmax(scores).

    Node scores equal to the log-odds of the branches under P = softmax(scores) reproduce P. But node scores are inner
    products <x, v_n> of vectors of size d, so their table, rows by nodes, has rank d at most. Here the table of
    log-odds is cut to its d largest singular values. That is the nearest table in squared log-odds; training minimises
    KL and can come nearer in P.

    Args:
        scores: (N, C). With at most `dim` rows the table has rank d at most anyway, and P is reproduced.
        tree: over the C classes.
        dim: d, the size of the vectors.

    Returns:
        (N, C) log-probabilities of the leaves, in float64.

    Example:
        >>> from manymax import HuffmanTree
        >>> scores = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 1.0], [-1.0, 0.5, 0.0]])
        >>> tree_log_probs(scores, HuffmanTree([1, 1, 2]), dim=1)[0].exp()
        tensor([0.6698, 0.2391, 0.0911], dtype=torch.float64)
    """
    check_count("dim", dim)
    blocks = read_inputs(None, scores, None, None)
    table = _log_odds(torch.cat([block.probs for block in blocks]), tree)  # (N, V)
    left, sizes, right = torch.linalg.svd(table, full_matrices=False)
    return TreeModel(tree, right[:dim].T.contiguous()).log_probs(left[:, :dim] * sizes[:dim])


def _log_odds(probs: Tensor, tree: ClassTree) -> Tensor:
    """The scores (N, V) of nodes (binary tree) or of edges (other trees) with which the leaves have probabilities P."""
    if probs.shape[-1] != tree.num_classes:
        raise ArgumentError(f"`tree` must be over the {probs.shape[-1]} classes of `scores`; got {tree.num_classes}.")
    mass = probs.new_zeros(tree.num_classes + tree.num_nodes, len(probs))
    # A masked class has P = 0: the smallest float instead of 0 keeps the logarithms finite.
    mass[: tree.num_classes] = probs.T.clamp(min=torch.finfo(probs.dtype).tiny)
    # From the deepest level upward, each node gets the mass of its children.
    for start, stop in reversed(list(zip(tree.edge_levels, tree.edge_levels[1:], strict=False))):
        nodes, children = tree.edge_node[start:stop], tree.leads_to[start:stop]
        mass.index_add_(0, tree.num_classes + nodes, mass[children])
    edges = mass[tree.leads_to].log().T  # (N, E)
    # The edges of a node are neighbours; the score of a binary node is the log-odds of its second edge.
    return edges[:, 1::2] - edges[:, ::2] if tree.arity == 2 else edges
