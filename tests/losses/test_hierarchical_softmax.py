"""Hierarchical softmax against walks down the tree, in loops and with 50 digits."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from mpmath import mp
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from manymax.errors import ArgumentError, ArgumentTypeError, ManymaxError
from manymax.members.hierarchical_softmax import MEMBER
from manymax.members.hierarchical_softmax import loss as module
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_log_prob,
    hierarchical_softmax_loss,
    mean_code_length,
)
from manymax.ops import tree_model
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_model import num_vectors

mp.dps = 50

TREES: dict[str, ClassTree] = {
    "huffman": HuffmanTree([5, 1, 1, 2, 0, 0, 7, 3]),
    "chain": HuffmanTree([2.0**-i for i in range(7)]),
    "two": HuffmanTree([1, 1]),
    "one": HuffmanTree([3]),
    "ternary": HuffmanTree([5, 1, 1, 2, 0, 0, 7, 3], arity=3),
    "ragged": ClassTree.from_paths([[0], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [2, 3, 0], [2, 3, 1]]),
    "flat": ClassTree.from_paths([[i] for i in range(5)]),
}
DIM = 3

Walk = list[tuple[int, int, range]]  # for each step down: node, branch, the edges of the node


def walks(tree: ClassTree) -> list[Walk]:
    """How to get to every class, by walking down from the root."""
    found: dict[int, Walk] = {}

    def descend(vertex: int, walk: Walk) -> None:
        if vertex < tree.num_classes:
            found[vertex] = walk
            return
        node = vertex - tree.num_classes
        edges = range(int(tree.first_edge[node]), int(tree.first_edge[node + 1]))
        for branch, edge in enumerate(edges):
            descend(int(tree.leads_to[edge]), [*walk, (node, branch, edges)])

    descend(tree.num_classes if tree.num_nodes else 0, [])
    return [found[c] for c in range(tree.num_classes)]


def reference_log_prob(tree: ClassTree, row: Tensor, vectors: Tensor, bias: Tensor, walk: Walk) -> mp.mpf:
    """log P of one class for one row, with 50 digits."""

    def score(i: int) -> mp.mpf:
        terms = [mp.mpf(x) * mp.mpf(v) for x, v in zip(row.tolist(), vectors[i].tolist(), strict=True)]
        return mp.fsum(terms) + mp.mpf(bias[i].item())

    total = mp.mpf(0)
    for node, branch, edges in walk:
        if tree.arity == 2:
            sign = 1 if branch == 1 else -1
            total -= mp.log(1 + mp.exp(-sign * score(node)))
        else:
            total += score(edges[branch]) - mp.log(mp.fsum(mp.exp(score(e)) for e in edges))
    return total


def reference_gradient(tree: ClassTree, row: Tensor, vectors: Tensor, bias: Tensor, walk: Walk) -> Tensor:
    """The gradient of -log P in the scores of all vectors, (V,), from the formulas."""
    scores = vectors @ row + bias
    gradient = torch.zeros_like(scores)
    for node, branch, edges in walk:
        if tree.arity == 2:
            gradient[node] = torch.sigmoid(scores[node]) - branch
        else:
            gradient[edges.start : edges.stop] = torch.softmax(scores[edges.start : edges.stop], 0)
            gradient[edges[branch]] -= 1
    return gradient


def problem(tree: ClassTree, rows: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """input (rows, DIM), node vectors and bias, float64."""
    generator = torch.Generator().manual_seed(tree.num_classes)

    def draw(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, dtype=torch.double, generator=generator)

    return draw(rows, DIM), draw(num_vectors(tree), DIM), draw(num_vectors(tree))


@cache
def table(tree: ClassTree, scale: float = 1.0) -> Tensor:
    """log P of all classes by the reference, (N, C), for the arguments of `problem`."""
    input, vectors, bias = problem(tree, scale=scale)
    values = [[float(reference_log_prob(tree, row, vectors, bias, walk)) for walk in walks(tree)] for row in input]
    return torch.tensor(values, dtype=torch.double)


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest) -> ClassTree:
    return TREES[request.param]


@pytest.fixture(params=["paths", "all"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Follow the paths of the positives, or compute all classes: the loss must not depend on it."""
    monkeypatch.setattr(module, "PATH_COST", {"paths": 0.0, "all": math.inf}[request.param])
    return request.param


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
        in_scores = reference_gradient(tree, input[0].detach(), vectors.detach(), bias.detach(), walks(tree)[target])
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


# ---- the module


def make(tree: ClassTree, **options: object) -> HierarchicalSoftmaxLoss:
    torch.manual_seed(0)
    return HierarchicalSoftmaxLoss(DIM, tree, **{"dtype": torch.double, "bias": True} | options)


def test_module_is_the_function(tree: ClassTree) -> None:
    input = problem(tree)[0]
    weight = torch.rand(tree.num_classes, dtype=torch.double)
    options = {
        "weight": weight,
        "ignore_index": 1,
        "reduction": "sum",
        "label_smoothing": 0.1,
        "multilabel": "normalized",
    }
    loss = make(tree, **options)
    target = torch.zeros(4, dtype=torch.long)
    expected = hierarchical_softmax_loss(input, loss.node_vectors, target, tree, node_bias=loss.node_bias, **options)
    assert torch.equal(loss(input, target), expected)
    assert torch.equal(loss.log_prob(input), loss.scores(input))
    assert (loss.node_vectors.abs() <= 1 / math.sqrt(DIM)).all()
    assert make(tree, bias=False).node_bias is None
    assert f"in_features={DIM}" in repr(loss)


def test_class_vectors_kept_elsewhere_are_refused() -> None:
    loss, input = make(TREES["huffman"]), torch.zeros(1, DIM, dtype=torch.double)
    vectors = torch.zeros(8, DIM, dtype=torch.double)
    calls: list[Callable[[], object]] = [
        lambda: loss(input, torch.tensor([0]), vectors),
        lambda: loss.scores(input, vectors),
        lambda: loss.topk(input, 2, vectors),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="`linear_weight` must be None: hierarchical softmax has vectors at"):
            call()
    assert loss(input, torch.tensor([0]), None).ndim == 0


def test_a_checkpoint_brings_its_tree() -> None:
    saved, loss = make(TREES["huffman"]), make(HuffmanTree([1] * 8))
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    loss.load_state_dict(torch.load(file))
    input, ids = problem(saved.tree)[0], torch.tensor([0, 2, 4, 6])
    for other in (loss, copy.deepcopy(saved)):
        assert torch.equal(other(input, ids), saved(input, ids))
        assert torch.equal(other.log_prob(input), saved.log_prob(input))
        assert torch.equal(other.topk(input, 3)[1], saved.topk(input, 3)[1])


def test_blocks_do_not_change_log_probs(tree: ClassTree, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, input = make(tree), problem(tree, rows=7)[0]
    whole = loss.log_prob(input)
    assert whole.requires_grad
    monkeypatch.setattr(tree_model, "TABLE_BYTES", 1)
    monkeypatch.setattr(tree_model, "TABLE_ROWS", 2)
    with torch.no_grad():
        torch.testing.assert_close(loss.log_prob(input), whole.detach(), rtol=0, atol=1e-14)


# ---- row-sparse gradients


def test_sparse_gradients_are_the_same(tree: ClassTree) -> None:
    dense, sparse = make(tree), make(tree, sparse_grad=True)
    input = problem(tree)[0]
    for target in (torch.tensor([0, 0, -100, tree.num_classes - 1]), torch.ones(4, tree.num_classes, dtype=torch.bool)):
        for loss in (dense, sparse):
            loss.zero_grad()
            loss(input, target).backward()
        for name, parameter in sparse.named_parameters():
            assert parameter.grad.is_sparse
            expected = dense.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.to_dense(), expected, rtol=0, atol=1e-14)


def test_a_sparse_step_touches_the_path_alone() -> None:
    tree = HuffmanTree(torch.arange(1, 201))
    loss = make(tree, sparse_grad=True)
    optimizer = torch.optim.SparseAdam(list(loss.parameters()), lr=0.1)
    before = loss.node_vectors.detach().clone()
    target = torch.tensor([17])
    value = loss(torch.ones(1, DIM, dtype=torch.double), target)
    value.backward()
    assert loss.node_vectors.grad._nnz() == tree.lengths[17]
    optimizer.step()
    changed = (loss.node_vectors != before).any(-1).nonzero().squeeze(-1).tolist()
    assert changed == sorted(node for node, _, _ in walks(tree)[17])
    assert loss(torch.ones(1, DIM, dtype=torch.double), target) < value


def test_sparse_refuses_smoothing() -> None:
    loss = make(TREES["huffman"], sparse_grad=True, label_smoothing=0.1)
    with pytest.raises(ArgumentError, match="`label_smoothing` must be 0 with `sparse_grad=True`; got 0"):
        loss(torch.zeros(1, DIM, dtype=torch.double), torch.tensor([0]))


# ---- top-k


@pytest.fixture(params=["as it likes", "search", "all"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way to the best classes: found by search, or picked from all."""
    if request.param == "search":
        monkeypatch.setattr(tree_model, "GATHER_COST", 1e-9)
    if request.param == "all":
        monkeypatch.setattr(tree_model, "GATHER_COST", 1e30)
    return request.param


def by_hand(log_probs: Tensor, k: int, exclude: Tensor) -> tuple[Tensor, Tensor]:
    """The k best by a full sort of each row, without the excluded ids."""
    left = log_probs.clone()
    for row, ids in zip(left, exclude.tolist(), strict=True):
        row[[i for i in ids if i != -100]] = -torch.inf
    values, ids = left.sort(-1, descending=True)
    return values[:, :k], torch.where(values > -torch.inf, ids, -100)[:, :k]


@pytest.mark.parametrize("excluded", [0, 1, 3])
def test_topk_is_exact(tree: ClassTree, way: str, excluded: int) -> None:
    loss, input = make(tree), problem(tree, rows=9, scale=2.0)[0]
    exclude = torch.randint(tree.num_classes, (9, excluded))
    exclude[::2, :1] = -100
    log_probs = loss.log_prob(input).detach()
    for k in {1, min(3, tree.num_classes), tree.num_classes}:
        values, ids = loss.topk(input, k, exclude=exclude)
        expected, expected_ids = by_hand(log_probs, k, exclude)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
        assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("arity", [2, 5])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_topk_among_many_classes(arity: int, spread: float, way: str, seed: int) -> None:
    tree = HuffmanTree(1 / torch.arange(1, 3001), arity=arity)
    loss = HierarchicalSoftmaxLoss(16, tree)
    with torch.no_grad():
        loss.node_vectors.normal_(std=spread / 4)
    input = torch.randn(20, 16)
    exclude = loss.log_prob(input).topk(7).indices[:, :6]  # what a recommender has seen is what it scores best
    log_probs = loss.log_prob(input).detach()
    for k in (1, 10):
        values, ids = loss.topk(input, k, exclude=exclude)
        expected, _ = by_hand(log_probs, k, exclude)
        torch.testing.assert_close(values, expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(log_probs.gather(-1, ids), values, rtol=0, atol=2e-5)
        assert not (ids.unsqueeze(-1) == exclude.unsqueeze(1)).any()
        assert all(len(set(row)) == k for row in ids.tolist())


def test_topk_is_not_greedy(way: str) -> None:
    tree = ClassTree.from_paths([[0, 0], [0, 1], [1]])
    loss = make(tree, bias=True)
    with torch.no_grad():
        loss.node_vectors.zero_()
        loss.node_bias.copy_(torch.tensor([math.log(0.4 / 0.6), 0.0]))  # P = (.3, .3, .4)
    values, ids = loss.topk(torch.zeros(DIM, dtype=torch.double), 1)
    assert ids.tolist() == [2]
    assert values.exp().item() == pytest.approx(0.4)


def test_topk_shapes_and_rows_without_enough_classes(way: str) -> None:
    loss = make(TREES["huffman"])
    input = torch.randn(2, 3, DIM, dtype=torch.double)
    values, ids = loss.topk(input, 4)
    assert values.shape == ids.shape == (2, 3, 4)
    assert not values.requires_grad
    assert loss.topk(input[0, 0], 2)[1].shape == (2,)
    assert loss.topk(input[:, :0], 2)[1].shape == (2, 0, 2)
    values, ids = loss.topk(input[0, 0], 4, exclude=torch.tensor([0, 1, 2, 3, 4, 5, -100]))
    assert sorted(ids[:2].tolist()) == [6, 7]
    assert ids[2:].tolist() == [-100, -100]
    assert values[2:].tolist() == [-math.inf, -math.inf]


def test_topk_with_a_class_as_padding(way: str) -> None:
    loss = make(TREES["huffman"], ignore_index=3)
    values, ids = loss.topk(torch.zeros(DIM, dtype=torch.double), 7, exclude=torch.tensor([3, 6, 3]))
    assert values.isfinite().all()
    assert sorted(ids.tolist()) == [0, 1, 2, 3, 4, 5, 7]


def test_topk_in_blocks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = HuffmanTree(1 / torch.arange(1, 301))
    loss, input = make(tree), torch.randn(11, DIM, dtype=torch.double)
    exclude = torch.randint(300, (11, 4))
    whole = loss.topk(input, 5, exclude=exclude)
    for name, value in {"SEARCH_BYTES": 3000, "SEARCH_NODES": 2**15, "TABLE_BYTES": 1, "TABLE_ROWS": 2}.items():
        monkeypatch.setattr(tree_model, name, value)
    blocks = loss.topk(input, 5, exclude=exclude)
    torch.testing.assert_close(blocks[0], whole[0], rtol=0, atol=1e-13)
    assert torch.equal(blocks[1], whole[1])


def test_rows_that_the_search_gives_up_are_still_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "GATHER_COST", 1e-9)
    monkeypatch.setattr(tree_model, "SEARCH_NODES_PER_ROW", 12)
    tree = HuffmanTree(torch.ones(200))
    loss, input = make(tree, bias=False), torch.randn(12, DIM, dtype=torch.double)
    with torch.no_grad():
        loss.node_vectors.mul_(10)
    input[::2] *= 1e-3  # nearly uniform: no node can be left closed
    values, ids = loss.topk(input, 2)
    expected = loss.log_prob(input).detach().topk(2)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=1e-12)
    assert torch.equal(ids, expected.indices)


# ---- edges


def test_one_class_costs_nothing() -> None:
    loss = make(TREES["one"])
    input = torch.randn(3, DIM, dtype=torch.double, requires_grad=True)
    value = loss(input, torch.zeros(3, dtype=torch.long))
    value.backward()
    assert value.item() == 0
    assert not input.grad.any()
    assert loss.node_vectors.grad.shape == (0, DIM)
    values, ids = loss.topk(input, 1)
    assert not values.any()
    assert not ids.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_scores_stay_finite(tree: ClassTree, dtype: torch.dtype) -> None:
    input, vectors, _ = (t.to(dtype).requires_grad_() for t in problem(tree, scale=100.0))
    for target in (torch.zeros(4, dtype=torch.long), torch.ones(4, tree.num_classes, dtype=torch.bool)):
        loss = hierarchical_softmax_loss(input, vectors, target, tree)
        for gradient in torch.autograd.grad(loss, (input, vectors)):
            assert gradient.isfinite().all()
        assert loss.isfinite()
    log_probs = hierarchical_softmax_log_prob(input, vectors, tree)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4, dtype=dtype), rtol=0, atol=1e-5)


def test_rows_without_a_positive_cost_nothing(tree: ClassTree, route: str) -> None:
    input, vectors, bias = (t.requires_grad_() for t in problem(tree))
    targets = [torch.full((4,), -100), torch.full((4, 2), -100), torch.zeros(4, tree.num_classes, dtype=torch.bool)]
    for target, reduction in product(targets, ("mean", "sum")):
        loss = hierarchical_softmax_loss(input, vectors, target, tree, node_bias=bias, reduction=reduction)
        assert loss.item() == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, (input, vectors, bias)))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_float32_inside(tree: ClassTree, half: torch.dtype) -> None:
    input, vectors, bias = (t.to(half) for t in problem(tree))
    ids = torch.arange(4) % tree.num_classes
    expected = hierarchical_softmax_loss(input.double(), vectors.double(), ids, tree, node_bias=bias.double())
    loss = hierarchical_softmax_loss(input, vectors, ids, tree, node_bias=bias)
    assert loss.dtype == half
    torch.testing.assert_close(loss, expected.to(half), rtol=torch.finfo(half).eps, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        loss = hierarchical_softmax_loss(input, vectors.float(), ids, tree, node_bias=bias.float())
        log_probs = hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias)
    assert loss.dtype == log_probs.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)


def test_gradients_of_half_vectors_are_summed_in_float32() -> None:
    input, ids = torch.ones(3000, 1, dtype=torch.bfloat16), torch.ones(3000, dtype=torch.long)
    for value in torch.linspace(-3, 3, 40).bfloat16():
        vectors = value.view(1, 1).requires_grad_()
        loss = hierarchical_softmax_loss(input, vectors, ids, TREES["two"], reduction="sum")
        gradient = torch.autograd.grad(loss, vectors)[0].item()
        # rounded once, not row by row
        assert gradient == (-3000 * torch.sigmoid(-value.double())).bfloat16().item()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_numbers_are_refused(tree: ClassTree, bad: float) -> None:
    if tree.num_nodes == 0:
        return
    loss, input = make(tree), problem(tree)[0]
    input[2, 0] = bad
    ids = torch.zeros(4, dtype=torch.long)
    calls: list[Callable[[], object]] = [
        lambda: loss(input, ids),
        lambda: loss.log_prob(input),
        lambda: loss.log_prob(input, ids),
        lambda: loss.topk(input, 1),
    ]
    for call in calls:
        with pytest.raises(ArgumentError, match="`input` and the node vectors must be finite; got a node score"):
            call()


def call(**changes: object) -> Callable[[], object]:
    arguments = {
        "input": torch.zeros(4, DIM),
        "node_vectors": torch.zeros(7, DIM),
        "target": torch.zeros(4, dtype=torch.long),
        "tree": TREES["huffman"],
    }
    return lambda: hierarchical_softmax_loss(**arguments | changes)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (call(input=torch.zeros(4, 5)), ArgumentError, r"`node_vectors` must be \(7, 5\).*got shape \(7, 3\)"),
        (call(node_vectors=torch.zeros(8, DIM)), ArgumentError, r"`node_vectors` must be \(7, 3\).*got shape \(8, 3\)"),
        (call(node_bias=torch.zeros(8)), ArgumentError, r"`node_bias` must have shape \(7,\); got \(8,\)"),
        (call(input=torch.zeros(4, DIM, dtype=torch.long)), ArgumentTypeError, "`input` must be a float tensor"),
        (call(input=[1.0]), ArgumentTypeError, "`input` must be a tensor; got list"),
        (call(tree=[1, 2, 3]), ArgumentTypeError, r"`tree` must be.*got list. Pass `HuffmanTree\(counts\)`"),
        (call(target=torch.full((4,), 8)), ArgumentError, r"`target` ids must be in \[0, 8\).*got 8"),
        (call(target=torch.zeros(5, dtype=torch.long)), ArgumentError, r"`target`.*got shape \(5,\)"),
        (
            call(target=torch.full((4, 8), 0.2)),
            ArgumentError,
            "`target` as float rows must be non-negative and sum to 1",
        ),
        (call(weight=torch.ones(7)), ArgumentError, r"`weight` must have shape \(8,\)"),
        (call(reduction="avg"), ArgumentError, "`reduction` must be one of"),
        (call(multilabel="max"), ArgumentError, "`multilabel` must be one of"),
        (call(label_smoothing=2.0), ArgumentError, r"`label_smoothing` must be in \[0, 1\]; got 2.0"),
        (lambda: make([1, 2]), ArgumentTypeError, "`tree` must be a tree over the classes; got list"),
        (lambda: HierarchicalSoftmaxLoss(0, TREES["two"]), ArgumentError, "`in_features` must be a positive integer"),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(DIM), 3),
            ArgumentError,
            r"`k` must be an integer in \[1, 2\].*got 3",
        ),
        (lambda: make(TREES["two"]).topk(torch.zeros(DIM), 0), ArgumentError, "got 0"),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(2, DIM), 1, exclude=torch.zeros(3, 1, dtype=torch.long)),
            ArgumentError,
            r"`exclude` must have shape \(2, 'X'\); got \(3, 1\)",
        ),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(DIM), 1, exclude=torch.tensor([5])),
            ArgumentError,
            r"`exclude` ids must be in \[0, 2\) or equal `ignore_index` \(-100\); got 5",
        ),
        (
            lambda: make(TREES["two"]).topk(torch.zeros(DIM), 1, exclude=torch.tensor([True, False])),
            ArgumentTypeError,
            "`exclude` must hold integer ids; got torch.bool",
        ),
        (
            lambda: make(TREES["two"]).log_prob(torch.zeros(2, DIM), torch.tensor([0, 1, 0])),
            ArgumentError,
            r"`target` must have shape \(2,\) or \(2, 'P'\); got shape \(3,\)",
        ),
        (
            lambda: make(TREES["two"]).log_prob(torch.zeros(2, DIM), torch.tensor([0, 2])),
            ArgumentError,
            r"`target` ids must be in \[0, 2\)",
        ),
    ],
)
def test_bad_arguments(act: Callable[[], object], kind: type[ManymaxError], message: str) -> None:
    with pytest.raises(kind, match=message):
        act()


# ---- transforms


def test_gradients_of_single_rows(tree: ClassTree) -> None:
    input, vectors, bias = problem(tree)
    ids = torch.arange(4) % tree.num_classes
    targets = {
        "ids": ids,
        "padded": torch.stack([ids, ids.flip(0)], -1),
        "rows": torch.ones(4, tree.num_classes).bool(),
    }
    for target in targets.values():

        def loss(vectors: Tensor, row: Tensor, target: Tensor) -> Tensor:
            return hierarchical_softmax_loss(row, vectors, target, tree, node_bias=bias, reduction="sum")

        single = vmap(grad(loss), in_dims=(None, 0, 0))(vectors, input, target)
        looped = torch.stack([grad(loss)(vectors, *pair) for pair in zip(input, target, strict=True)])
        torch.testing.assert_close(single, looped, rtol=0, atol=1e-12)
    log_probs = vmap(lambda row: hierarchical_softmax_log_prob(row, vectors, tree, node_bias=bias))(input)
    torch.testing.assert_close(log_probs, hierarchical_softmax_log_prob(input, vectors, tree, node_bias=bias))


def test_compiles_into_one_graph() -> None:
    tree = TREES["huffman"]
    loss, input = make(tree), problem(tree)[0]
    ids = torch.arange(4)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    value = compiled(input, ids)
    torch.testing.assert_close(value, loss(input, ids), rtol=0, atol=1e-14)
    gradients = (torch.autograd.grad(v, loss.node_vectors)[0] for v in (value, loss(input, ids)))
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_functional_call() -> None:
    loss, input = make(TREES["huffman"]), problem(TREES["huffman"])[0]
    zeros = {name: torch.zeros_like(p) for name, p in loss.named_parameters()}
    value = functional_call(loss, zeros, (input, torch.tensor([0, 1, 2, 6])))
    assert value.item() == pytest.approx(math.log(2) * loss.tree.lengths[[0, 1, 2, 6]].double().mean().item())


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
