"""Trees over the classes, Huffman's construction, and the exact search for the best leaves."""

from __future__ import annotations

import copy
import heapq
import math
import pickle
from fractions import Fraction
from functools import cache
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manymax.errors import ArgumentError, ManymaxError
from manymax.ops.tree import ClassTree, HuffmanTree
from manymax.ops.tree_search import Best, Excluded, best_leaves

FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]

integers = st.lists(st.integers(0, 20), min_size=1, max_size=60)
floats = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
arities = st.integers(2, 5)


def codes(tree: ClassTree) -> list[list[int]]:
    """The branches from the root to every class, by walking down."""
    found: dict[int, list[int]] = {}

    def walk(vertex: int, code: list[int]) -> None:
        if vertex < tree.num_classes:
            found[vertex] = code
            return
        node = vertex - tree.num_classes
        edges = range(int(tree.first_edge[node]), int(tree.first_edge[node + 1]))
        for branch, edge in enumerate(edges):
            walk(int(tree.leads_to[edge]), [*code, branch])

    walk(tree.num_classes if tree.num_nodes else 0, [])
    return [found[c] for c in range(tree.num_classes)]


def heap_lengths(counts: list[float], arity: int) -> list[int]:
    """Code lengths by the textbook: a heap of (weight, time of insertion)."""
    heap = [(count, i, (i,)) for i, count in enumerate(counts)]
    heapq.heapify(heap)
    lengths, time = [0] * len(counts), len(counts)
    size = 2 + (len(counts) - 2) % (arity - 1)
    while len(heap) > 1:
        joined = [heapq.heappop(heap) for _ in range(size)]
        leaves = tuple(leaf for _, _, below in joined for leaf in below)
        for leaf in leaves:
            lengths[leaf] += 1
        heapq.heappush(heap, (sum(weight for weight, _, _ in joined), time, leaves))
        time, size = time + 1, arity
    return lengths


@cache
def least_cost(weights: tuple[int, ...], arity: int) -> int:
    """The smallest sum of count x length over all trees, by trying every first join."""
    if len(weights) == 1:
        return 0
    costs = []
    for size in range(2, arity + 1):
        for chosen in combinations(range(len(weights)), min(size, len(weights))):
            total = sum(weights[i] for i in chosen)
            rest = [w for i, w in enumerate(weights) if i not in chosen]
            costs.append(total + least_cost(tuple(sorted([*rest, total])), arity))
    return min(costs)


def cost(tree: ClassTree, counts: list[int]) -> int:
    return sum(c * n for c, n in zip(counts, tree.lengths.tolist(), strict=True))


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), arity=st.integers(2, 3))
def test_no_tree_is_cheaper(counts: list[int], arity: int) -> None:
    assert cost(HuffmanTree(counts, arity=arity), counts) == least_cost(tuple(sorted(counts)), arity)


@given(counts=integers | floats, arity=arities)
def test_same_lengths_as_with_a_heap(counts: list[float], arity: int) -> None:
    # the same tie rule gives the same lengths, not only the same cost
    assert HuffmanTree(counts, arity=arity).lengths.tolist() == heap_lengths(counts, arity)


@pytest.mark.parametrize("arity", [2, 7])
def test_same_lengths_as_with_a_heap_for_many_classes(arity: int, seed: int) -> None:
    counts = (1e6 / torch.arange(1, 3001)).long()[torch.randperm(3000)].tolist()
    assert HuffmanTree(counts, arity=arity).lengths.tolist() == heap_lengths(counts, arity)


def test_integers_are_added_exactly() -> None:
    # in float64, 2^53 + 1 would be 2^53, a tie with the last class
    counts = [2**53 + 1, 1, 2**53]
    assert HuffmanTree(counts).lengths.tolist() == heap_lengths(counts, 2) == [1, 2, 2]
    assert HuffmanTree([2**62] * 4).lengths.tolist() == [2] * 4  # the sum does not fit into int64


@given(counts=integers, arity=arities)
def test_kraft_sum_is_one(counts: list[int], arity: int) -> None:
    tree = HuffmanTree(counts, arity=arity)
    widths = tree.first_edge.diff()
    share = -widths.double()[tree.edge_node[:-1]].log()
    assert tree.accumulate(share).exp().sum().item() == pytest.approx(1, abs=1e-12)
    if arity == 2:
        assert sum(Fraction(1, 2**n) for n in tree.lengths.tolist()) == 1


@given(counts=integers, arity=arities)
def test_shape_and_numbering(counts: list[int], arity: int) -> None:
    tree = HuffmanTree(counts, arity=arity)
    num_classes = len(counts)
    assert tree.num_classes == num_classes
    assert tree.num_edges == max(0, tree.num_nodes + num_classes - 1)
    assert tree.num_nodes == math.ceil((num_classes - 1) / (arity - 1))
    widths = tree.first_edge.diff().tolist()
    assert all(width == arity for width in widths[:-1])  # only one node, of the last level, may have fewer
    assert all(2 <= width <= arity for width in widths)
    inner = tree.leads_to[tree.leads_to >= num_classes] - num_classes
    assert inner.tolist() == list(range(1, tree.num_nodes))  # level by level, in the order of the edges
    assert sorted(tree.leads_to[tree.leads_to < num_classes].tolist()) == list(range(num_classes if widths else 0))


@given(counts=integers, arity=arities)
def test_paths_climb_the_tree(counts: list[int], arity: int) -> None:
    tree = HuffmanTree(counts, arity=arity)
    paths = tree.paths(torch.arange(len(counts)))
    assert paths.shape == (len(counts), tree.depth)
    for c, code in enumerate(codes(tree)):
        edges = [e for e in paths[c].tolist() if e < tree.num_edges]
        assert [e - int(tree.first_edge[tree.edge_node[e]]) for e in reversed(edges)] == code
        assert len(code) == int(tree.lengths[c])


@given(counts=integers, arity=arities, columns=st.sampled_from([(), (3,), (2, 2)]))
def test_accumulate_sums_along_paths(counts: list[int], arity: int, columns: tuple[int, ...]) -> None:
    tree = HuffmanTree(counts, arity=arity)
    values = torch.randn(tree.num_edges, *columns, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    padded = torch.cat([values, torch.zeros(1, *columns, dtype=torch.double)])
    expected = padded[tree.paths(torch.arange(len(counts)))].sum(1)
    torch.testing.assert_close(tree.accumulate(values), expected, rtol=0, atol=1e-12)


def test_ties_are_broken_by_order_of_insertion() -> None:
    # 0 and 1 are joined (weight 2); then class 2 comes before that node, because it was there first
    assert codes(HuffmanTree([1, 1, 2])) == [[1, 0], [1, 1], [0]]
    assert codes(HuffmanTree([2, 1, 1])) == [[0], [1, 0], [1, 1]]
    assert codes(HuffmanTree([1, 1, 1, 1])) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_one_class_needs_no_node() -> None:
    for tree in (HuffmanTree([7]), HuffmanTree([0]), ClassTree.from_paths([[]])):
        assert (tree.num_classes, tree.num_nodes, tree.num_edges, tree.depth) == (1, 0, 0, 0)
        assert tree.paths(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 0)
        assert tree.mean_length() == 0


def test_classes_that_never_occur_have_a_leaf_too() -> None:
    assert HuffmanTree([0, 0, 0, 0]).lengths.tolist() == [2, 2, 2, 2]
    assert HuffmanTree([0, 9, 0, 9, 0]).lengths.tolist() == heap_lengths([0, 9, 0, 9, 0], 2)
    assert HuffmanTree(torch.zeros(1000)).depth == 10  # balanced, not a chain


@pytest.mark.parametrize("counts", [FIBONACCI, [2.0**-i for i in range(500)]], ids=["fibonacci", "halves"])
def test_a_chain_takes_no_more_memory_than_any_tree(counts: list[float]) -> None:
    tree = HuffmanTree(counts)
    assert tree.depth == len(counts) - 1
    assert sum(buffer.numel() for buffer in tree.buffers()) <= 11 * len(counts)
    assert sorted(tree.lengths.tolist()) == [*range(1, len(counts)), len(counts) - 1]


def test_mean_length_is_within_one_bit_of_the_entropy(seed: int) -> None:
    for counts in (torch.rand(500), 1 / torch.arange(1, 1025), torch.rand(40) ** 20):
        probs = counts.double() / counts.double().sum()
        entropy = torch.special.entr(probs).sum().item() / math.log(2)
        assert entropy - 1e-9 <= HuffmanTree(counts).mean_length(counts) < entropy + 1
    assert HuffmanTree(counts).mean_length() == pytest.approx(HuffmanTree(counts).lengths.double().mean().item())


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.bool])
def test_counts_of_any_real_dtype(dtype: torch.dtype) -> None:
    counts = torch.tensor([1, 0, 0, 0]).to(dtype)
    assert HuffmanTree(counts).lengths.tolist() == heap_lengths([1, 0, 0, 0], 2) == [1, 3, 3, 2]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([], "at least 1 class"),
        (torch.ones(2, 2), r"shape \(2, 2\)"),
        (torch.tensor(3), r"shape \(\)"),
        ([1, -2, 3], "-2 for class 1"),
        ([1.0, math.nan], "nan for class 1"),
        ([math.inf, 1.0], "inf for class 0"),
        ([1e308, 1e308], "finite sum"),
        (["a", "b"], "`counts`"),
        ([2**70, 1], "`counts`"),
        (None, "`counts`"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
    ],
)
def test_bad_counts(counts: object, message: str) -> None:
    with pytest.raises(ManymaxError, match=message) as caught:
        HuffmanTree(counts)
    assert "`counts`" in str(caught.value)
    assert isinstance(caught.value, ValueError | TypeError)


@pytest.mark.parametrize("arity", [1, 0, -3, 2.0, "2", True])
def test_bad_arity(arity: object) -> None:
    with pytest.raises(ArgumentError, match="`arity` must be an integer of at least 2"):
        HuffmanTree([1, 2, 3], arity=arity)


@given(counts=integers, arity=arities)
def test_paths_build_the_same_tree(counts: list[int], arity: int) -> None:
    tree = HuffmanTree(counts, arity=arity)
    again = ClassTree.from_paths(codes(tree))
    for name, buffer in tree.named_buffers():
        assert torch.equal(buffer, again.get_buffer(name)), name
    assert (again.node_levels, again.edge_levels) == (tree.node_levels, tree.edge_levels)


def test_paths_of_any_shape() -> None:
    paths = [[2], [0, 1], [1], [0, 0, 0], [0, 0, 1]]
    tree = ClassTree.from_paths(paths)
    assert codes(tree) == paths
    assert (tree.arity, tree.depth, tree.num_nodes) == (3, 3, 3)
    assert codes(ClassTree.from_paths(torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))) == [
        [0, 0],
        [0, 1],
        [1, 0],
        [1, 1],
    ]
    assert codes(HuffmanTree.from_paths([[0], [1]])) == [[0], [1]]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "at least 1 path"),
        ([[0], [1], []], "path of class 2 is empty"),
        ([[0], [0, 1], [1]], "class 0 is the beginning"),
        ([[0], [1], [1]], "class 1 is the beginning or the whole"),
        ([[0, 0], [0, 1]], r"class 0 has the branches \[0\]"),
        ([[0], [2]], r"branches \[0, 2\]"),
        ([[1], [2]], r"branches \[1, 2\]"),
        ([[0]], r"branches \[0\]"),
        ([[0], [-1]], "integers from 0 on"),
        ([[0.5], [1]], "integers from 0 on"),
        ([0, 1], "one list of branch numbers per class"),
        ([["a"], [1]], "one list of branch numbers per class"),
        (None, "one list of branch numbers per class"),
    ],
)
def test_bad_paths(paths: object, message: str) -> None:
    with pytest.raises(ManymaxError, match=message) as caught:
        ClassTree.from_paths(paths)
    assert "`paths`" in str(caught.value)


def test_a_loaded_tree_is_the_saved_one() -> None:
    saved, tree = HuffmanTree(FIBONACCI), HuffmanTree([1] * len(FIBONACCI))
    assert set(saved.state_dict()) == {"leads_to", "first_edge"}
    tree.load_state_dict(saved.state_dict())
    for other in (tree, copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        for name, buffer in saved.named_buffers():
            assert torch.equal(buffer, other.get_buffer(name)), name
        assert (other.depth, other.edge_levels, other.mean_length()) == (11, saved.edge_levels, saved.mean_length())
    with pytest.raises(RuntimeError, match="size mismatch"):
        HuffmanTree([1, 2]).load_state_dict(saved.state_dict())


# ---- search


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
