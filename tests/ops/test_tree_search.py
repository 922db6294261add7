"""The exact search for the best leaves of a tree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_search import Best, Excluded, best_leaves


class Model:
    """Branch log-probabilities that are given, not computed; counts the nodes that are opened."""

    def __init__(self, tree: ClassTree, rows: int, spread: float, generator: torch.Generator) -> None:
        self.tree = tree
        scores = spread * torch.randn(rows, tree.num_nodes, tree.arity, dtype=torch.double, generator=generator)
        exists = torch.arange(tree.arity) < tree.first_edge.diff().unsqueeze(-1)
        self.table = torch.where(exists, scores, -torch.inf).log_softmax(-1)
        self.log_probs = tree.accumulate(self.table[:, exists].T).T  # (N, C)
        self.opened = 0

    def __call__(self, rows: Tensor, nodes: Tensor) -> Tensor:
        self.opened += nodes.numel()
        return self.table[rows.unsqueeze(-1), nodes]


def search(model: Model, k: int, *, width: int, budget: int = 10**9, exclude: Tensor | None = None) -> Best:
    rows = len(model.log_probs)
    exclude = torch.empty(rows, 0, dtype=torch.long) if exclude is None else exclude
    excluded = Excluded(exclude, model.tree.num_classes)
    start = torch.zeros(rows, dtype=torch.double)
    return best_leaves(model.tree, model, start, k, width=width, budget=budget, excluded=excluded)


@given(
    counts=st.lists(st.integers(0, 100), min_size=2, max_size=50) | st.just([2.0**-i for i in range(40)]),
    arity=st.integers(2, 4),
    k=st.integers(1, 6),
    extra=st.integers(0, 4),
    spread=st.sampled_from([0.0, 0.3, 2.0, 10.0]),
    excluded=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_search_finds_the_best_leaves(
    counts: list[float], arity: int, k: int, extra: int, spread: float, excluded: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = HuffmanTree(counts, arity=arity)
    model = Model(tree, 5, spread, generator)
    exclude = torch.randint(-1, tree.num_classes, (5, excluded), generator=generator)
    k = min(k, tree.num_classes)
    best = search(model, k, width=k + extra, exclude=exclude)
    allowed = model.log_probs.clone()
    for row, ids in enumerate(exclude.tolist()):
        allowed[row, [i for i in ids if i >= 0]] = -torch.inf
    expected = allowed.topk(k).values
    done = best.complete
    torch.testing.assert_close(best.values[done], expected[done], rtol=0, atol=1e-12)
    torch.testing.assert_close(allowed.gather(-1, best.ids)[done], expected[done], rtol=0, atol=1e-12)
    assert all(len(set(ids)) == k for ids in best.ids[done].tolist())
    if not excluded:
        assert done.all()


def test_search_is_not_greedy() -> None:
    # P = (.3, .3, .4) on ((a, b), c): the way down begins with the branch of .6, which is the wrong one
    tree = ClassTree.from_paths([[0, 0], [0, 1], [1]])
    model = Model(tree, 1, 0.0, torch.Generator())
    model.table = torch.tensor([[[0.6, 0.4], [0.5, 0.5]]], dtype=torch.double).log()
    model.log_probs = torch.tensor([[0.3, 0.3, 0.4]], dtype=torch.double).log()
    for width in (1, 2):
        best = search(model, 1, width=width)
        assert best.ids.tolist() == [[2]]
        assert best.values.exp().item() == pytest.approx(0.4)


def test_search_is_exact_where_a_beam_is_misled() -> None:
    # seven nodes of .13 lead to fifty poor leaves each; the eighth has only .09, but nearly all of it in one leaf
    decoys = [[branch, leaf] for branch in range(7) for leaf in range(50)]
    tree = ClassTree.from_paths([*decoys, [7, 0, 0], [7, 0, 1], [7, 1]])
    model = Model(tree, 1, 0.0, torch.Generator())
    model.table[0, 0, :8] = torch.tensor([0.13] * 7 + [0.09], dtype=torch.double).log()
    for node in (8, 9):
        model.table[0, node, :2] = torch.tensor([0.99, 0.01], dtype=torch.double).log()
    for width in (1, 4, 7, 8):
        best = search(model, 1, width=width)
        assert best.complete.all()
        assert best.ids.tolist() == [[350]]
        assert best.values.exp().item() == pytest.approx(0.09 * 0.99**2)


def test_search_leaves_most_nodes_closed(seed: int) -> None:
    tree = HuffmanTree(torch.rand(4096))
    model = Model(tree, 4, 4.0, torch.Generator().manual_seed(seed))
    search(model, 5, width=10)
    assert model.opened < 4 * tree.num_nodes / 5


def test_search_gives_up_beyond_its_budget() -> None:
    tree = HuffmanTree(torch.ones(256))
    model = Model(tree, 2, 0.0, torch.Generator())
    model.table[0, :, 0], model.table[0, :, 1] = math.log(0.99), math.log(0.01)
    model.log_probs = tree.accumulate(model.table.flatten(1).T).T
    best = search(model, 1, width=1, budget=20)
    assert best.complete.tolist() == [True, False]  # all leaves of the second row are alike, so all nodes are opened
    assert best.ids[0].item() == model.log_probs[0].argmax().item()


def test_search_gives_up_where_too_few_leaves_are_left() -> None:
    model = Model(HuffmanTree([1, 2, 3, 4]), 2, 1.0, torch.Generator().manual_seed(0))
    best = search(model, 2, width=4, exclude=torch.tensor([[0, 1, 3], [int(model.log_probs[1].argmax()), -1, 9]]))
    assert best.complete.tolist() == [False, True]  # excluded leaves do not raise the floor
    assert best.ids[1].tolist() == model.log_probs[1].argsort(descending=True)[1:3].tolist()


def test_search_gives_up_where_the_two_passes_disagree() -> None:
    # the second pass opens one node at a time; if its numbers came out lower, the leaves of the first would be missing
    model = Model(HuffmanTree([1, 1, 1, 1]), 2, 1.0, torch.Generator().manual_seed(0))

    def lower(rows: Tensor, nodes: Tensor) -> Tensor:
        return model(rows, nodes) - 1e-3 * ((nodes.shape[1] == 1) & (nodes > 0)).unsqueeze(-1)

    excluded = Excluded(torch.empty(2, 0, dtype=torch.long), 4)
    best = best_leaves(model.tree, lower, torch.zeros(2).double(), 4, width=4, budget=99, excluded=excluded)
    assert not best.complete.any()


def test_excluded_pairs() -> None:
    excluded = Excluded(torch.tensor([[2, 5], [0, -100], [7, -1]]), num_classes=4)  # only 2 and 0 are classes
    table = excluded(torch.arange(3).unsqueeze(-1), torch.arange(4))
    assert table.int().tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert not Excluded(torch.empty(3, 0, dtype=torch.long), 4)(torch.arange(3), torch.arange(3)).any()
