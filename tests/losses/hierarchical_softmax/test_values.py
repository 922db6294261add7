"""Values, gradients and targets of hierarchical softmax, against walks down the tree with 50 digits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from manymax.members.hierarchical_softmax.loss import (
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
)
from manymax.ops import tree_model
from manymax.ops.tree import ClassTree, HuffmanTree
from tests.losses.hierarchical_softmax.trees import DIM, TREES, expected_gradient, problem, table, walks

# ---- values and gradients


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_log_probs_have_all_their_digits(tree: ClassTree, scale: float) -> None:
    input, vectors, bias = problem(tree, scale=scale)
    expected = table(tree, scale)
    every = hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias)
    torch.testing.assert_close(every, expected, rtol=1e-12, atol=1e-12)
    ids = torch.arange(tree.num_classes).expand(4, -1)
    listed = hierarchical_softmax_log_prob(input, vectors, tree, ids, node_bias=bias)
    torch.testing.assert_close(listed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(4, dtype=torch.double), rtol=0, atol=1e-12)


def test_small_losses_keep_their_digits() -> None:
    tree, vectors = TREES["two"], torch.tensor([[40.0]], dtype=torch.double)
    loss = hierarchical_softmax_loss(torch.ones(1, 1, dtype=torch.double), vectors, torch.tensor([1]), tree)
    assert loss.item() == pytest.approx(math.exp(-40), rel=1e-12, abs=0)


def test_gradients_are_those_of_the_formulas(tree: ClassTree) -> None:
    for target in range(tree.num_classes):
        input, vectors, bias = (t.requires_grad_() for t in problem(tree, rows=1))
        loss = hierarchical_softmax_loss(input, vectors, torch.tensor([target]), tree, node_bias=bias)
        loss.backward()
        in_scores = expected_gradient(tree, input[0].detach(), vectors.detach(), bias.detach(), walks(tree)[target])
        torch.testing.assert_close(bias.grad, in_scores, rtol=0, atol=1e-12)
        torch.testing.assert_close(vectors.grad, in_scores.unsqueeze(-1) * input.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(input.grad[0], in_scores @ vectors.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_derivatives_to_second_order(tree: ClassTree, route: str, smoothing: float) -> None:
    arguments = tuple(t.requires_grad_() for t in problem(tree, rows=2))
    target = torch.tensor([[0, tree.num_classes - 1], [tree.num_classes // 2, -100]])

    def loss(input: Tensor, vectors: Tensor, bias: Tensor) -> Tensor:
        return hierarchical_softmax_loss(input, vectors, target, tree, node_bias=bias, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(loss, arguments)
    assert torch.autograd.gradgradcheck(loss, arguments)


def test_derivatives_of_log_probs(tree: ClassTree) -> None:
    arguments = tuple(t.requires_grad_() for t in problem(tree, rows=2))

    def log_probs(input: Tensor, vectors: Tensor, bias: Tensor) -> Tensor:
        return hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias)

    assert torch.autograd.gradcheck(log_probs, arguments)
    assert torch.autograd.gradgradcheck(log_probs, arguments)


def test_at_zero_the_loss_is_log_2_times_the_cost_of_the_code() -> None:
    counts = torch.tensor([5, 1, 1, 2, 0, 0, 7, 3])
    tree = HuffmanTree(counts)
    zeros = torch.zeros(8, DIM, dtype=torch.double), torch.zeros(7, DIM, dtype=torch.double)
    rows = hierarchical_softmax_loss(*zeros, torch.arange(8), tree, reduction="none")
    assert (counts * rows).sum().item() == pytest.approx(math.log(2) * (counts * tree.lengths).sum().item(), rel=1e-14)


# ---- targets


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("multilabel", ["sum", "normalized"])
@pytest.mark.parametrize("form", ["ids", "padded", "bool", "float"])
def test_every_form_of_target(tree: ClassTree, route: str, form: str, multilabel: str, weighted: bool) -> None:
    input, vectors, bias = problem(tree)
    num_classes = tree.num_classes
    rows = torch.zeros(4, num_classes, dtype=torch.double)  # t
    rows[0, 0] = rows[1, num_classes - 1] = rows[3, num_classes // 2] = 1
    target = torch.tensor([0, num_classes - 1, -100, num_classes // 2])
    if form == "padded":
        rows[0, num_classes // 2] = 1
        target = torch.tensor(
            [[0, num_classes // 2, 0], [-100, num_classes - 1, -100], [-100] * 3, [num_classes // 2] * 3]
        )
    if form == "bool":
        rows[0] = 1
        target = rows.bool()
    if form == "float":
        rows[0] = 1 / num_classes
        target = rows
    weight = (
        torch.rand(num_classes, dtype=torch.double, generator=torch.Generator().manual_seed(1)) if weighted else None
    )
    weighed = rows if weight is None else rows * weight
    losses = -(weighed * table(tree)).sum(-1)
    total = weighed.sum(-1)
    present = (rows.sum(-1) > 0).double()
    divisor = present if multilabel == "normalized" or form == "float" else total
    if multilabel == "normalized":
        losses = losses / torch.where(total > 0, total, 1)
    expected = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / divisor.sum()}
    for reduction, value in expected.items():
        loss = hierarchical_softmax_loss(
            input, vectors, target, tree, node_bias=bias, weight=weight, multilabel=multilabel, reduction=reduction
        )
        torch.testing.assert_close(loss, value, rtol=1e-11, atol=1e-11)


def test_smoothing_gives_every_class_its_share(tree: ClassTree) -> None:
    input, vectors, bias = problem(tree)
    ids, weight = torch.zeros(4, dtype=torch.long), torch.rand(tree.num_classes, dtype=torch.double)
    loss = hierarchical_softmax_loss(
        input, vectors, ids, tree, node_bias=bias, label_smoothing=0.3, weight=weight, reduction="none"
    )
    values = weight * table(tree)
    torch.testing.assert_close(loss, -0.7 * values[:, 0] - 0.3 * values.mean(-1), rtol=1e-11, atol=1e-11)


def test_a_group_of_positives_is_a_batch_of_pairs(tree: ClassTree, route: str) -> None:
    input, vectors, bias = (t.requires_grad_() for t in problem(tree))
    padded = torch.tensor([[0, tree.num_classes - 1]] * 3 + [[-100, -100]])
    grouped = hierarchical_softmax_loss(input, vectors, padded, tree, node_bias=bias)
    pairs = [(row, c) for row in range(3) for c in sorted({0, tree.num_classes - 1})]
    rows, ids = (torch.tensor(part) for part in zip(*pairs, strict=True))
    paired = hierarchical_softmax_loss(input[rows], vectors, ids, tree, node_bias=bias)
    for one, other in zip(
        *(torch.autograd.grad(loss, (input, vectors, bias)) for loss in (grouped, paired)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(grouped, paired, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,), (2, 0)])
def test_any_batch_shape(tree: ClassTree, batch: tuple[int, ...]) -> None:
    _, vectors, bias = problem(tree)
    input = torch.randn(*batch, DIM, dtype=torch.double, requires_grad=True)
    ids = torch.randint(tree.num_classes, batch)
    rows = hierarchical_softmax_loss(input, vectors, ids, tree, node_bias=bias, reduction="none")
    assert rows.shape == batch
    log_probs = hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias)
    assert log_probs.shape == (*batch, tree.num_classes)
    torch.testing.assert_close(rows, -log_probs.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
    torch.testing.assert_close(rows, -hierarchical_softmax_log_prob(input, vectors, tree, ids, node_bias=bias))
    several = ids.unsqueeze(-1).expand(*batch, 2)
    assert hierarchical_softmax_log_prob(input, vectors, tree, several, node_bias=bias).shape == (*batch, 2)
    bool_rows = torch.zeros(*batch, tree.num_classes, dtype=torch.bool).scatter(-1, ids.unsqueeze(-1), True)
    torch.testing.assert_close(
        rows, hierarchical_softmax_loss(input, vectors, bool_rows, tree, node_bias=bias, reduction="none")
    )
    loss = hierarchical_softmax_loss(input, vectors, ids, tree, node_bias=bias)
    loss.backward()
    assert loss.shape == ()
    assert torch.isfinite(input.grad).all()


def test_a_few_long_paths_among_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = HuffmanTree([2.0**-i for i in range(200)])
    input, vectors, bias = (t.requires_grad_() for t in problem(tree, rows=60))
    ids = torch.tensor([0, 1, 2, 3, 4, 5] * 9 + [199, 198, 100, 50, 20, 150])
    widest = []
    scores = tree_model.TreeModel.scores

    def watched(self: tree_model.TreeModel, input: Tensor, ids: Tensor) -> Tensor:
        widest.append(ids.numel())
        return scores(self, input, ids)

    monkeypatch.setattr(tree_model.TreeModel, "scores", watched)
    rows = hierarchical_softmax_loss(input, vectors, ids, tree, node_bias=bias, reduction="none")
    assert sum(widest) < 2 * tree.lengths[ids].sum()
    every = hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias)
    expected = -every.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(loss.sum(), (input, vectors, bias)) for loss in (rows, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_ignored_ids_have_log_prob_zero() -> None:
    tree = TREES["huffman"]
    input, vectors, bias = problem(tree)
    log_probs = hierarchical_softmax_log_prob(input, vectors, tree, torch.tensor([0, -100, 7, 7]), node_bias=bias)
    assert log_probs[1] == 0
    assert (log_probs[[0, 2, 3]] < 0).all()
    other = hierarchical_softmax_log_prob(input, vectors, tree, torch.tensor([0, 3, 7, 7]), ignore_index=3)
    assert other[1] == 0


@pytest.mark.parametrize("num_classes", [8, 64])
def test_a_target_of_zero_has_a_gradient_too(num_classes: int) -> None:
    tree, random = HuffmanTree([1] * num_classes), torch.Generator().manual_seed(0)
    nodes, input = torch.randn(num_classes - 1, 3, generator=random), torch.randn(1, 3, generator=random)
    target = torch.eye(num_classes)[:1].requires_grad_()
    hierarchical_softmax_loss(input, nodes, target, tree, reduction="sum").backward()
    torch.testing.assert_close(target.grad, -hierarchical_softmax_log_prob(input, nodes, tree))


def test_a_class_weight_of_zero_has_a_gradient_too() -> None:
    tree, random = HuffmanTree([1] * 64), torch.Generator().manual_seed(0)
    nodes, input = torch.randn(63, 3, generator=random), torch.randn(1, 3, generator=random)
    weight = torch.zeros(64, requires_grad=True)
    hierarchical_softmax_loss(
        input, nodes, torch.tensor([[3, 9, -100]]), tree, weight=weight, reduction="sum"
    ).backward()
    expected = -hierarchical_softmax_log_prob(input, nodes, tree)[0]
    torch.testing.assert_close(
        weight.grad, torch.where(torch.isin(torch.arange(64), torch.tensor([3, 9])), expected, 0)
    )
