"""The module of hierarchical softmax: state, row-sparse gradients and exact top-k."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manymax.errors import ArgumentError
from manymax.members.hierarchical_softmax.head import LinearHierarchicalSoftmaxLoss
from manymax.members.hierarchical_softmax.loss import (
    HierarchicalSoftmaxLoss,
    hierarchical_softmax_loss,
)
from manymax.ops import tree_model
from manymax.ops.tree import ClassTree, HuffmanTree
from tests.losses.hierarchical_softmax.trees import DIM, TREES, make, problem, walks


def test_a_device_does_not_move_the_tree_of_the_caller() -> None:
    tree = HuffmanTree([5, 1, 1, 2])
    for made in (
        HierarchicalSoftmaxLoss(4, tree, device="meta"),
        LinearHierarchicalSoftmaxLoss(4, 4, tree, device="meta"),
    ):
        assert made.tree.leads_to.is_meta
    assert not any(buffer.is_meta for buffer in tree.buffers())
    assert HierarchicalSoftmaxLoss(4, tree).tree is tree  # no copy without need


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


@pytest.fixture(params=["by cost", "search", "all"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the best classes are found: whichever way costs less, by search in the tree, or from log P of all."""
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
