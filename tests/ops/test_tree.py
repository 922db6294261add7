"""Trees over the classes: Huffman's construction, trees from paths, and what a tree computes."""

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

from manymax.errors import ManymaxError
from manymax.ops.tree import ClassTree, HuffmanTree

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
    with pytest.raises(ManymaxError, match="`arity` must be an integer"):
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
