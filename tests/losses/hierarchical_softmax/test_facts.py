"""What hierarchical softmax states about itself: curvature, minimiser, bias and cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from manymax.errors import ManymaxError
from manymax.members.hierarchical_softmax import MEMBER
from manymax.members.hierarchical_softmax.facts import mean_code_length
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
)
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_model import num_vectors
from tests.losses.hierarchical_softmax.trees import DIM, TREES, make, problem

# ---- facts


def score_loss(scores: Tensor, target: Tensor, tree: ClassTree) -> Tensor:
    """The loss as a function of the node scores: one dimension, with input 1."""
    return hierarchical_softmax_loss(scores.new_ones(1), scores.unsqueeze(-1), target, tree, reduction="sum")


def hessian(scores: Tensor, target: Tensor, tree: ClassTree) -> Tensor:
    return jacrev(jacrev(score_loss))(scores, target, tree)


def curvature(tree: ClassTree, scores: Tensor, target: int) -> float:
    matrix = hessian(scores, torch.tensor(target), tree)
    return torch.linalg.matrix_norm(matrix, 2).item()


def check_smoothness(fact: object, tree: ClassTree, claimed: float) -> None:
    assert claimed == fact.fn(num_classes=tree.num_classes, arity=tree.arity)
    norms = [
        curvature(tree, scale * torch.randn(num_vectors(tree), dtype=torch.double), target)
        for scale in (0.0, 0.1, 1.0, 5.0)
        for target in range(tree.num_classes)
    ]
    assert max(norms) <= claimed + 1e-12
    assert max(norms) == pytest.approx(claimed)


def test_smoothness(seed: int) -> None:
    fact = MEMBER.facts.smoothness
    assert fact.value == 0.25
    assert fact.fn(num_classes=1) == 0
    check_smoothness(fact, TREES["huffman"], 0.25)
    # a node with two branches reaches 1/2 at scores 0 with one logit per branch, three branches alone do not
    check_smoothness(fact, TREES["ragged"], 0.5)
    false = replace(fact, fn=lambda num_classes, arity: 0.5)
    with pytest.raises(AssertionError):
        check_smoothness(false, TREES["huffman"], 0.5)


def test_smoothness_grows_with_the_positives() -> None:
    tree = TREES["huffman"]
    every = torch.ones(tree.num_classes, dtype=torch.bool)
    matrix = hessian(torch.zeros(7, dtype=torch.double), every, tree)
    assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(tree.num_classes / 4)  # at the root


def test_convex_in_the_node_scores(tree: ClassTree, seed: int) -> None:
    assert MEMBER.facts.convex.value is True
    for target in range(tree.num_classes):
        matrix = hessian(torch.randn(num_vectors(tree), dtype=torch.double), torch.tensor(target), tree)
        assert (torch.linalg.eigvalsh(matrix) >= -1e-12).all()


def test_not_fenchel_young() -> None:
    # Omega* alone makes the Hessian of a Fenchel-Young loss, so that it cannot depend on the label
    assert MEMBER.facts.fenchel_young.value is False
    tree, scores = TREES["huffman"], torch.zeros(7, dtype=torch.double)
    one, other = (hessian(scores, torch.tensor(target), tree) for target in (0, 2))
    assert (one - other).abs().max() > 0.2
    with pytest.raises(ManymaxError, match="not a Fenchel-Young loss"):
        MEMBER.fenchel_young()


def test_not_shift_invariant() -> None:
    assert MEMBER.facts.shift_invariant.value is False
    for name, changes in (("huffman", True), ("ternary", False)):
        tree = TREES[name]
        scores = torch.zeros(num_vectors(tree), dtype=torch.double)
        losses = [score_loss(scores + shift, torch.tensor(2), tree).item() for shift in (0.0, 1.0)]
        assert (abs(losses[0] - losses[1]) > 1e-3) == changes


def minimise(tree: ClassTree, sets: Tensor, chances: Tensor, multilabel: str) -> Tensor:
    """P at the node scores that minimise the expected loss over random sets of positives."""
    scores = torch.zeros(num_vectors(tree), dtype=torch.double, requires_grad=True)
    ones = torch.ones(len(sets), 1, dtype=torch.double)
    optimizer = torch.optim.LBFGS(
        [scores], max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def risk() -> Tensor:
        optimizer.zero_grad()
        rows = hierarchical_softmax_loss(
            ones, scores.unsqueeze(-1), sets, tree, reduction="none", multilabel=multilabel
        )
        value = (chances * rows).sum()
        value.backward()
        return value

    optimizer.step(risk)
    vectors = scores.detach().unsqueeze(-1)
    return hierarchical_softmax_log_prob(torch.ones(1, dtype=torch.double), vectors, tree).exp()


@pytest.mark.parametrize("name", ["huffman", "ternary", "flat"])
def test_calibrated_for_the_sum_over_positives(name: str, seed: int) -> None:
    assert MEMBER.facts.calibrated.value is True
    assert MEMBER.facts.calibrated.status == "contradicted"
    tree = TREES[name]
    sets = torch.rand(30, tree.num_classes) < 0.4
    sets[:, 0] |= ~sets.any(-1)
    chances = torch.rand(30, dtype=torch.double).softmax(0)
    expected = (chances.unsqueeze(-1) * sets).sum(0)
    probs = minimise(tree, sets, chances, "sum")
    torch.testing.assert_close(probs, expected / expected.sum(), rtol=0, atol=1e-6)
    shares = (chances.unsqueeze(-1) * sets / sets.sum(-1, keepdim=True)).sum(0)
    torch.testing.assert_close(minimise(tree, sets, chances, "normalized"), shares, rtol=0, atol=1e-6)


def test_implicit_scores_are_no_function_of_the_probabilities() -> None:
    # ((a, b), c): the same P, and an order of the summed scores that depends on offsets which P does not see
    tree = ClassTree.from_paths([[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
    scores = torch.randn(7, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    shifted = scores + torch.tensor([0, 0, 9, 9, -9, -9, -9], dtype=torch.double)
    one = torch.ones(1, dtype=torch.double)
    probs = [hierarchical_softmax_log_prob(one, s.unsqueeze(-1), tree) for s in (scores, shifted)]
    torch.testing.assert_close(*probs, rtol=0, atol=1e-12)
    implicit = [tree.accumulate(s) for s in (scores, shifted)]
    assert implicit[0].argsort().tolist() != implicit[1].argsort().tolist()


def test_bias_has_the_right_sign() -> None:
    fact = MEMBER.facts.bias
    assert fact.status == "contradicted"
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.double)
    tree_probs = torch.tensor([0.25, 0.25, 0.5], dtype=torch.double)
    right = (probs * (probs.log() - tree_probs.log())).sum().item()
    printed = (probs * (-probs.log() - tree_probs.log())).sum().item()
    assert fact.fn(probs=probs, tree_probs=tree_probs) == pytest.approx(right)
    assert right > 0
    assert abs(printed - right) > 1
    assert fact.fn(probs=probs, tree_probs=probs) == pytest.approx(0)


def test_nothing_is_drawn() -> None:
    assert MEMBER.facts.variance.value == 0
    loss, input = make(TREES["huffman"]), problem(TREES["huffman"])[0]
    ids = torch.arange(4)
    assert len({loss(input, ids).item() for _ in range(5)}) == 1


@pytest.mark.parametrize("num_classes", [1, 2, 3, 5, 64, 100, 1000])
def test_cost_is_the_mean_code_length(num_classes: int) -> None:
    fact = MEMBER.facts.cost
    tree = HuffmanTree(torch.ones(num_classes))
    assert fact.fn(batch=7, num_classes=num_classes) == pytest.approx(7 * tree.mean_length())
    # the rows of the gradient are the vectors that a step has touched; one row at a time, so that nothing is padded
    loss, touched = make(tree, sparse_grad=True), 0
    ids = torch.arange(0, num_classes, max(1, num_classes // 50))
    for c in ids.tolist():
        loss.zero_grad()
        loss(torch.ones(1, DIM, dtype=torch.double), torch.tensor([c])).backward()
        touched += loss.node_vectors.grad._nnz()
    assert touched == tree.lengths[ids].sum().item()


def test_cost_follows_the_counts() -> None:
    zipf = 1 / torch.arange(1, 1025)
    assert mean_code_length(1024) == 10
    assert MEMBER.facts.cost.fn(batch=1, num_classes=1024, counts=zipf) == pytest.approx(7.54, abs=0.005)


def test_member() -> None:
    assert (MEMBER.name, MEMBER.kind, MEMBER.aliases) == ("hierarchical_softmax", "tree", ("hsm",))
    assert MEMBER.module is HierarchicalSoftmaxLoss
    assert MEMBER.facts.order_preservation is None
    for name, fact in MEMBER.facts.items():
        assert (fact.printed is not None) == (fact.status == "contradicted"), name
